"""The engine: a pool, its owner, and steps of ragged batches through all layers. Source: docs/pool.md §11.

Bits depend neither on the schedule nor on the batch: a token's logits, and the bytes it leaves in the pool, are the same in
one step, in chunks, token by token, and beside any other sequences.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import dataclass

from torch import Tensor

from reference.checkpoint.store import WeightStore
from reference.errors import BadInput

from .attention import Memory
from .block import block
from .kernels.embed import embed
from .kernels.gemm_bf16 import gemm_bf16
from .kernels.hyper_connection import hc_head
from .kernels.launch import INTERPRETER
from .kernels.norm import rms_norm
from .mtp import enter_mtp
from .pool.allocator import Allocator, Sequence
from .pool.geometry import Build, Geometry
from .pool.index_rows import LAYOUTS, Layout
from .pool.pool import IndexPool, Pool
from .step import plan_step
from .tiles import tiles_for_model
from .weights import DEFAULT_MEMORY, HeadWeights, Weights


@dataclass(frozen=True)
class Form:
    """How a build stores rows and index keys."""

    rows: Build
    keys: Layout


# One build per rounding profile of these names: what the profile's table rounds is what the kernels of the build round.
FORMS = {"pool-fp8": Form("2buff", LAYOUTS["fp4_natural"]), "pool-bf16": Form("bf16", LAYOUTS["fp8_linear"])}


class Engine:
    """DeepSeek-V4 with its weights packed and its KV in a pool of `blocks` blocks of 256 tokens and `slots` requests.

    `lookahead`: tokens that may be taken back. `memory` bounds the bytes of weights kept between uses. Kernels run on the
    GPU where this process has one, else in the interpreter. Raises BadInput for a profile that no build follows, and for
    weights in a dtype that no kernel takes.
    """

    def __init__(
        self,
        store: WeightStore,
        profile: str = "pool-fp8",
        *,
        blocks: int = 8,
        slots: int = 4,
        lookahead: int = 0,
        memory: int = DEFAULT_MEMORY,
    ) -> None:
        if profile not in FORMS:
            raise BadInput(f"the engine follows the profiles {' and '.join(FORMS)}, not {profile}")
        device = "cpu" if INTERPRETER else "cuda"
        self.config = store.config
        self.weights = Weights(store, device, memory)
        self.geometry = Geometry(self.config, FORMS[profile].rows, lookahead, int(self.config.has_mtp))
        self.memory = Memory(
            Pool(self.geometry, blocks, slots, device),
            IndexPool(self.geometry, blocks, FORMS[profile].keys, device),
            tiles_for_model(self.config),
        )
        self.allocator = Allocator(self.memory.pool, self.memory.index, blocks, slots)

    def step(
        self, tokens: Many[Tensor], sequences: Many[Sequence], on_layer: Callable[[int, Tensor], None] | None = None
    ) -> Tensor:
        """The next tokens (ids [n]) of each sequence through all layers -> streams bfloat16 [t, s, D] before the head.

        Prefill chunks and single tokens mix freely. `on_layer(i, streams)` sees what each layer puts out. Raises BadInput
        for empty or unknown ids, PoolFull without room for them; then nothing has changed.
        """
        self._check(tokens, sequences)
        extend, starts = [len(ids) for ids in tokens], [s.length for s in sequences]
        self.allocator.reserve(sequences, extend)
        layers = self.config.num_hidden_layers
        kinds = set(self.geometry.kinds[:layers])
        plan = plan_step(self.geometry, kinds, tokens, sequences, starts, self.weights.device)
        x = embed(self.weights.embedding(), plan.ids, self.config.hc_mult, self.memory.tiles.embed)
        for i in range(layers):
            x = block(x, self.weights.layer(i), i, plan, self.memory, self.weights)
            if on_layer:
                on_layer(i, x)
        for sequence, n in zip(sequences, extend, strict=True):
            self.allocator.advance(sequence, n)
        return x

    def logits(self, x: Tensor) -> Tensor:
        """Streams [t, s, D] of any tokens -> float32 [t, vocab]."""
        return self._logits(x, self.weights.head())

    def draft(self, x: Tensor, next_tokens: Many[Tensor], sequences: Many[Sequence]) -> Tensor:
        """Streams [t, s, D] of `step` and the token after each through MTP -> its streams [t, s, D].

        The MTP block continues at position `drafted` of each sequence. Its own streams, with tokens that it drafted, take it
        `lookahead - 1` positions past what the model has seen. Raises BadInput as `step`, and for positions further on.
        """
        self._check(next_tokens, sequences)
        for b, (ids, s) in enumerate(zip(next_tokens, sequences, strict=True)):
            if s.drafted + len(ids) > s.length + max(0, self.geometry.lookahead - 1):
                raise BadInput(f"sequence {b} has {s.length} tokens; MTP cannot run to {s.drafted + len(ids)}")
        mtp, last = self.weights.mtp(), self.config.num_hidden_layers
        starts = [s.drafted for s in sequences]
        plan = plan_step(self.geometry, {"window"}, next_tokens, sequences, starts, self.weights.device)
        embedded = embed(self.weights.embedding(), plan.ids, 1, self.memory.tiles.embed)[:, 0]
        x = enter_mtp(x, embedded, mtp, self.config.rms_norm_eps)
        x = block(x, mtp.layer, last, plan, self.memory, self.weights)
        for ids, sequence in zip(next_tokens, sequences, strict=True):
            sequence.drafted += len(ids)
        return x

    def draft_logits(self, x: Tensor) -> Tensor:
        """Streams [t, s, D] of `draft` -> float32 [t, vocab], for the token after the next."""
        return self._logits(x, self.weights.mtp().head)

    def _logits(self, x: Tensor, w: HeadWeights) -> Tensor:
        eps = self.config.rms_norm_eps
        mix = w.hc_head
        h = hc_head(x, mix.fn, mix.base, mix.scale, self.config.hc_eps, eps, self.memory.tiles.streams)
        return gemm_bf16(rms_norm(h, w.norm, eps), w.head)

    def _check(self, tokens: Many[Tensor], sequences: Many[Sequence]) -> None:
        if not tokens or len({id(s) for s in sequences}) < len(tokens):
            raise BadInput("a step needs tokens, and each sequence once")
        for b, ids in enumerate(tokens):
            if len(ids) == 0:
                raise BadInput(f"sequence {b} has no tokens")
            bad = ids[(ids < 0) | (ids >= self.config.vocab_size)]
            if len(bad):
                raise BadInput(f"sequence {b} has token id {int(bad[0])}; the vocabulary has {self.config.vocab_size}")
