"""Mistakes that do not crash: each moves the logits of `mini` far beyond what the comparison with transformers allows.

So agreement there rules all of them out. Clamps, selection, window and both compressors are at work in these 150 tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from bounds import FAR, PEER_FLOAT32, distance
from strategies import MemoryStore, run, tokens
from torch import Tensor
from torch.nn.functional import silu

from reference.attention import Attention
from reference.checkpoint.procedural import ProceduralStore
from reference.compressor import Compressor, pool
from reference.hyper_connection import HyperConnection
from reference.indexer import Indexer
from reference.model import Model
from reference.moe import Expert, MoE, choose_experts, routing_weights
from reference.rope import Rope, plain_frequencies, rotate, yarn_frequencies
from reference.rounding import Sites

Patches = list[tuple[str, Any]]
N = 150

right_post, right_select, right_core = HyperConnection.post, Indexer.select, Attention.core
right_expert, right_finish, right_table = Expert.__call__, Compressor.finish, Rope.table


def comb_untransposed(self, z: Tensor, x: Tensor, post: Tensor, comb: Tensor, sites: Sites) -> Tensor:
    return right_post(self, z, x, post, comb.mT, sites)


def without_inverse(x: Tensor, table: tuple[Tensor, Tensor], inverse: bool = False) -> Tensor:
    return x if inverse else rotate(x, table)


def half_split(x: Tensor, table: tuple[Tensor, Tensor], inverse: bool = False) -> Tensor:
    half = table[0].shape[-1]
    adjacent = torch.stack([x[..., -2 * half : -half], x[..., -half:]], dim=-1).flatten(-2)
    turned = rotate(adjacent, table, inverse)
    return torch.cat([x[..., : -2 * half], turned[..., ::2], turned[..., 1::2]], dim=-1)


def selects_among_p_over_r(self, q: Tensor, weights: Tensor, keys: Tensor, positions: Tensor, sites: Sites) -> Tensor:
    return right_select(self, q, weights, keys, positions - 1, sites)


def sees_p_over_r(self, q: Tensor, positions: Tensor, rows: Any, picks: Tensor | None, sites: Sites) -> Tensor:
    """A block is hidden from its own last token."""
    if picks is not None or self.compressor is None:
        return right_core(self, q, positions, rows, picks, sites)
    out = []
    for t, p in enumerate(positions.tolist()):
        fewer = replace(rows, compressed=rows.compressed[: p // self.compressor.ratio])
        out.append(right_core(self, q[t : t + 1], positions[t : t + 1], fewer, None, sites))
    return torch.cat(out)


def scores_without_relu(q: Tensor, weights: Tensor, keys: Tensor, sites: Sites) -> Tensor:
    return torch.einsum("th,thd,cd->tc", weights, q, keys)


def overlap_swapped(blocks: Tensor) -> Tensor:
    dh = blocks.shape[-1] // 2
    return torch.cat([blocks[:-1, :, dh:], blocks[1:, :, :dh]], dim=1)


def shared_unclamped(self, x: Tensor, weight: Tensor | None, limit: float, sites: Sites) -> Tensor:
    return right_expert(self, x, weight, math.inf if weight is None else limit, sites)


def gate_clamped_on_both_sides(gate: Tensor, up: Tensor, limit: float) -> Tensor:
    return silu(gate.clamp(-limit, limit)) * up.clamp(-limit, limit)


right_route = MoE.route


def bias_in_the_weights(self, x: Tensor, ids: Tensor, sites: Sites) -> tuple[Tensor, Tensor]:
    if self.bias is None:
        return right_route(self, x, ids, sites)
    seen: dict[str, Tensor] = {}
    right_route(self, x, ids, Sites(tap=lambda name, value: seen.update({name: value})))
    scores = seen["gate.scores"]
    experts = choose_experts(scores, self.bias, self.top_k)
    return experts, routing_weights(scores + self.bias, experts, self.scaling)


def at_the_last_token(self, pooled: Tensor, first: int, sites: Sites) -> Tensor:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Rope, "table", lambda rope, at, dtype, s: right_table(rope, at + self.ratio - 1, dtype, s))
        return right_finish(self, pooled, first, sites)


def yarn_everywhere(self, dtype: torch.dtype) -> Tensor:
    from reference.config import RopeScaling

    return yarn_frequencies(160000, self.dim, self.yarn or RopeScaling(), dtype)


def yarn_nowhere(self, dtype: torch.dtype) -> Tensor:
    return plain_frequencies(self.base, self.dim, dtype)


def one_gate_per_token(values: Tensor, gates: Tensor) -> Tensor:
    return pool(values, gates.mean(-1, keepdim=True).expand_as(gates))


def no_head_norm(q: Tensor, eps: float, sites: Sites) -> Tensor:
    return q


MUTATIONS: dict[str, Patches] = {
    "comb untransposed": [("hyper_connection.HyperConnection.post", comb_untransposed)],
    "no inverse rotation": [("attention.rotate", without_inverse)],
    "p // r visible in CSA": [("indexer.Indexer.select", selects_among_p_over_r)],
    "p // r visible in HCA": [("attention.Attention.core", sees_p_over_r)],
    "half-split rotation": [(f"{module}.rotate", half_split) for module in ("attention", "compressor", "indexer")],
    "no ReLU": [("indexer.index_scores", scores_without_relu)],
    "overlap halves swapped": [("compressor.overlap", overlap_swapped)],
    "shared expert unclamped": [("moe.Expert.__call__", shared_unclamped)],
    "gate clamped on both sides": [("moe.clamped_swiglu", gate_clamped_on_both_sides)],
    "bias in the routing weights": [("moe.MoE.route", bias_in_the_weights)],
    "rows at the last token": [("compressor.Compressor.finish", at_the_last_token)],
    "YaRN in window layers": [("rope.Rope.frequencies", yarn_everywhere)],
    "no YaRN": [("rope.Rope.frequencies", yarn_nowhere)],
    "one gate per token": [("compressor.pool", one_gate_per_token)],
    "no head norm": [("attention.head_norm", no_head_norm)],
}


@pytest.fixture(scope="module")
def mini() -> Iterator[tuple[Model, Tensor]]:
    """The model and its right logits."""
    source = ProceduralStore("mini")
    store = MemoryStore(source.config, {name: source.get(name) for name in source.tensors})
    model = Model(store, torch.float32)
    yield model, run(model, tokens(N, 0, source.config.vocab_size))


@pytest.mark.parametrize("name", list(MUTATIONS))
def test_mutation_is_seen(
    mini: tuple[Model, Tensor], name: str, monkeypatch: pytest.MonkeyPatch, record_property: Any
) -> None:
    model, right = mini
    for target, wrong in MUTATIONS[name]:
        monkeypatch.setattr(f"reference.{target}", wrong)
    moved = distance(run(model, tokens(N, 0, model.config.vocab_size)), right)
    record_property("bounds_moved", moved / PEER_FLOAT32)
    print(f"{name}: logits of size {float(right.abs().amax()):.1f} move by {moved:.2g}, {moved / PEER_FLOAT32:.0f} bounds")
    assert moved > FAR * PEER_FLOAT32


def test_nothing_else_moves_them(mini: tuple[Model, Tensor]) -> None:
    model, right = mini
    assert torch.equal(run(model, tokens(N, 0, model.config.vocab_size)), right)
