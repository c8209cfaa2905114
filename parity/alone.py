"""The candidate's whole layer, alone: kernel after kernel as the engine runs it, on a pool that stays from phase to phase.

Source: docs/drift.md §1.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from optimized.attention import Memory
from optimized.block import block
from optimized.engine import FORMS
from optimized.kernels.embed import embed
from optimized.kernels.gemm_bf16 import gemm_bf16
from optimized.kernels.hyper_connection import hc_head
from optimized.kernels.launch import power_of_two
from optimized.kernels.norm import rms_norm
from optimized.mtp import enter_mtp
from optimized.pool.allocator import Sequence
from optimized.pool.geometry import BLOCK_TOKENS, RATIO, visible
from optimized.step import StepPlan, plan_step
from optimized.tiles import ModelTiles, tiles_for_model
from optimized.weights import HeadWeights, LayerWeights, MTPWeights, Weights
from reference.checkpoint.store import WeightStore
from reference.config import Config
from reference.errors import BadInput
from reference.state import Batch, LayerState

from .candidates import DEVICE
from .drift import Side
from .pour import PouredPool, pour, pour_keys

MOST_KEYS = 4096  # index keys of a tile
Past = Mapping[int, tuple[LayerState, int, int]]  # of each sequence: its state, its length, and what that will grow to


class Listening(Weights):  # type: ignore[misc]  # the engine is not type-checked here
    """Weights that remember which experts were last asked for."""

    def __init__(self, store: WeightStore, memory: int) -> None:
        super().__init__(store, DEVICE, memory)
        self.chosen = torch.empty(0, 0, dtype=torch.int32)

    def pieces(self, layer: str, chosen: Tensor) -> list[Tensor]:
        self.chosen = chosen.cpu()
        return super().pieces(layer, chosen)


def _tiles(config: Config, end: int) -> ModelTiles:
    """Tiles of the model, where kernels are interpreted as wide over index keys as sequences that end there ask for: each
    key's score is the same in any tile, and an interpreter pays by the tile."""
    tiles = tiles_for_model(config)
    if tiles.index_logits is None or tiles.topk is None:
        return tiles
    keys = max(256, min(MOST_KEYS, power_of_two(visible(end, RATIO["csa"]))))
    return replace(tiles, index_logits=replace(tiles.index_logits, COLS=keys), topk=replace(tiles.topk, COLS=keys))


@dataclass(frozen=True)
class Alone:
    """One layer with its weights, and what its sequences, by number, have in the pool. `poured` says where, on the host;
    `there` is the same on the device, with what steps wrote."""

    weights: Listening
    layer: LayerWeights
    mtp: MTPWeights | None
    head: HeadWeights | None
    memory: Memory
    poured: PouredPool
    there: PouredPool
    sequences: dict[int, Sequence]

    @classmethod
    def start(cls, weights: Listening, layer: int, has_head: bool, past: Past, seed: int, profile: str) -> Alone:
        """Layer `layer` with these sequences poured in. Raises BadInput for weights that no kernel takes."""
        states, starts, ends = zip(*past.values(), strict=True)
        form, windows = FORMS[profile], [(start - len(s.window), s.window) for s, start in zip(states, starts, strict=True)]
        poured = pour(weights.config, layer, states, windows, starts, ends, seed, form)
        keys, there = pour_keys(poured, states, form.keys).copy(DEVICE), poured.copy(DEVICE)
        blocks = (
            array("i", row[: -(-end // BLOCK_TOKENS)].tolist()) for row, end in zip(poured.block_table, ends, strict=True)
        )
        placed = zip(past, poured.slots.tolist(), blocks, starts, strict=True)
        sequences = {i: Sequence(slot, mine, start) for i, slot, mine, start in placed}
        mtp = weights.mtp() if layer >= weights.config.num_hidden_layers else None
        head = mtp.head if mtp else weights.head() if has_head else None
        memory = Memory(there.pool, keys.pool, _tiles(weights.config, max(ends)))
        return cls(weights, mtp.layer if mtp else weights.layer(layer), mtp, head, memory, poured, there, sequences)

    def run(self, x: Tensor, batch: Batch, members: Many[int]) -> Side:
        """The next tokens of some sequences, streams x [t, s, D] in float64 -> what the layer puts out. Whatever a plan or
        kernel raises is its failure: then streams are NaN. Raises BadInput for weights that no kernel takes."""
        sequences, ids = [self.sequences[i] for i in members], [batch.ids[s] for s in batch.sequences()]
        kind, starts = self.poured.geometry.kinds[self.poured.layer], [s.length for s in sequences]
        for sequence, n in zip(sequences, ids, strict=True):
            sequence.length += len(n)
        if not bool(x.isfinite().all()):
            return self._nothing(x, "its streams are not finite")
        try:
            plan = plan_step(self.poured.geometry, {kind}, ids, sequences, starts, self.weights.device)
            return self._run(x.to(DEVICE, torch.bfloat16), plan, torch.tensor(batch.bounds[1:]) - 1, members)
        except BadInput:
            raise
        except Exception as error:
            return self._nothing(x, f"{type(error).__name__}: {error}".split("\n")[0][:200])

    def _nothing(self, x: Tensor, why: str) -> Side:
        return Side(torch.full_like(x[:, :1] if self.mtp else x, torch.nan), error=why)

    def _run(self, x: Tensor, plan: StepPlan, last: Tensor, members: Many[int]) -> Side:
        if self.mtp:
            embedded = embed(self.weights.embedding(), plan.ids, 1, self.memory.tiles.embed)[:, 0]
            x = enter_mtp(x, embedded, self.mtp, self.weights.config.rms_norm_eps)
        x = block(x, self.layer, self.poured.layer, plan, self.memory, self.weights)
        experts, logits = self.weights.chosen, None
        if self.head:
            h = self._normed(x if self.mtp else x[last], self.head)
            logits = gemm_bf16(h[last] if self.mtp else h, self.head.head).cpu().double()
            x = h[:, None] if self.mtp else x
        return Side(x.cpu().double(), experts, self._picks(plan, members), logits)

    def _normed(self, x: Tensor, head: HeadWeights) -> Tensor:
        mix, c = head.hc_head, self.weights.config
        h = hc_head(x.contiguous(), mix.fn, mix.base, mix.scale, c.hc_eps, c.rms_norm_eps, self.memory.tiles.streams)
        return rms_norm(h, head.norm, c.rms_norm_eps)

    def left(self, member: int, tokens: int) -> dict[str, Tensor]:
        """What the last tokens of a sequence left for later ones, as rows [n, d] in float64: of the window, and compressed."""
        line, end = list(self.sequences).index(member), self.sequences[member].length
        kind = self.poured.geometry.kinds[self.poured.layer]
        kept = min(tokens, self.weights.config.sliding_window - 1)
        found = {"window": self.there.window_at(line, torch.arange(end - kept, end))}
        if ratio := RATIO.get(kind):
            found["compressed"] = self.there.compressed_at(line, torch.arange((end - tokens) // ratio, end // ratio))
        return {name: self.there.read(rows).cpu() for name, rows in found.items()}

    def _picks(self, plan: StepPlan, members: Many[int]) -> Tensor | None:
        """Compressed entries that each token's list names, int64 [t, k], -1 behind them, -2 for a row that is none of its
        sequence's; None where nobody chooses."""
        if "csa" not in plan.kinds:
            return None
        indices, indptr = (x.cpu().long() for x in (plan.kinds["csa"].indices, plan.kinds["csa"].indptr))
        seen, slot = plan.visible.cpu()[:, None], torch.arange(self.weights.config.index_topk)
        rows = indices[(indptr[:-1, None] + slot).clamp_max(max(0, len(indices) - 1))]
        entry = torch.full_like(rows, -2)
        for b, member in enumerate(members):
            mine, line = plan.batch_ids.cpu() == b, list(self.sequences).index(member)
            known, number = self.poured.compressed_at(line, torch.arange(int(seen[mine].max()))).sort()
            if len(known):
                at = torch.searchsorted(known, rows[mine]).clamp_max(len(known) - 1)
                entry[mine] = torch.where(known[at] == rows[mine], number[at], -2)
        return torch.where(slot < seen, entry, -1)
