"""The whole model: tokens in, residual streams through every layer, logits out. Wiring only. Source: docs/model.md §8."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .checkpoint.loader import Loader
from .checkpoint.store import WeightStore
from .errors import BadInput
from .linear import Products
from .norm import rms_norm
from .rounding import EXACT, Profile, Sites, Tap
from .state import Batch, LayerState, SequenceState

DEFAULT_MEMORY = 8 << 30


class Model:
    """DeepSeek-V4 over a weight store, in float32 or float64, with a rounding profile.

    Ragged batches, one-shot, chunked anywhere or token by token: same rows, same logits. `memory` bounds the bytes of
    weights kept between uses; `products` multiply with stored weights in the reference's place. Bits may depend on the
    shape of a batch: the matrix products of the platform do.
    """

    def __init__(
        self,
        store: WeightStore,
        dtype: torch.dtype = torch.float32,
        profile: Profile = EXACT,
        memory: int = DEFAULT_MEMORY,
        tap: Tap | None = None,
        products: Products | None = None,
    ) -> None:
        self.config = store.config
        self.loader = Loader(store, dtype, memory, products)
        self.sites = Sites(profile, tap)

    def batch(self, tokens: Sequence[Tensor], states: Sequence[SequenceState]) -> Batch:
        """Flatten one id tensor per sequence; positions continue each state. Raises BadInput for empty or unknown ids."""
        if not tokens:
            raise BadInput("a batch needs a sequence")
        if len({id(state) for state in states}) < len(states):
            raise BadInput("one state serves two sequences of a batch")
        for b, ids in enumerate(tokens):
            if len(ids) == 0:
                raise BadInput(f"sequence {b} has no tokens")
            bad = ids[(ids < 0) | (ids >= self.config.vocab_size)]
            if len(bad):
                raise BadInput(f"sequence {b} has token id {int(bad[0])}; the vocabulary has {self.config.vocab_size}")
        positions = [s.length + torch.arange(len(t)) for t, s in zip(tokens, states, strict=True)]
        bounds = [0, *torch.tensor([len(t) for t in tokens]).cumsum(0).tolist()]
        return Batch(torch.cat(list(tokens)).long(), torch.cat(positions), bounds)

    def forward(
        self,
        tokens: Sequence[Tensor],
        states: Sequence[SequenceState],
        on_layer: Callable[[int, Tensor], None] | None = None,
    ) -> Tensor:
        """The next tokens of each sequence through all layers -> streams [t, s, D] before the head; states move on.

        `on_layer(i, streams)` sees what each layer puts out. A step that fails leaves the states as they were.
        """
        batch = self.batch(tokens, states)
        self.loader.begin(batch.ids)
        x = self.sites("embed", self.loader.embed(batch.ids))[:, None].repeat(1, self.config.hc_mult, 1)  # [t, s, D]
        after: list[list[LayerState]] = [[] for _ in states]
        for i in range(self.config.num_hidden_layers):
            block = self.loader.block(i)
            before = [s.layers[i] if s.layers else block.attn.initial_state() for s in states]
            x, moved = block(x, batch, before, self.sites.block(f"layers.{i}"))
            for layers, state in zip(after, moved, strict=True):
                layers.append(state)
            if on_layer:
                on_layer(i, x)
        _move_on(states, tokens, after)
        return x

    def logits(self, x: Tensor) -> Tensor:
        """Streams [t, s, D] of any tokens -> logits [t, vocab]."""
        hc_head, norm, head = self.loader.head()
        x = self.sites("norm", rms_norm(hc_head(x, self.sites), norm, self.config.rms_norm_eps))
        return self.sites("head.logits", head.apply(x))

    def mtp_logits(self, x: Tensor, next_tokens: Sequence[Tensor], states: Sequence[SequenceState], index: int = 0) -> Tensor:
        """Streams [t, s, D] of `forward` and the token after each -> logits [t, vocab] for the token after that.

        `states` are the MTP block's own: it keeps a window, and runs at the positions of x.
        """
        mtp = self.loader.mtp(index)
        if any(len(s.layers) > 1 for s in states):
            raise BadInput("MTP keeps states of its own; these are a model's")
        batch = self.batch(next_tokens, states)
        before = [s.layers[0] if s.layers else mtp.block.attn.initial_state() for s in states]
        embedded = self.sites("embed", self.loader.embed(batch.ids))
        h, moved = mtp(x, embedded, batch, before, f"mtp.{index}", self.sites)
        _move_on(states, next_tokens, [[state] for state in moved])
        return self.sites.block(f"mtp.{index}")("head.logits", self.loader.head()[2].apply(h))


def _move_on(states: Sequence[SequenceState], tokens: Sequence[Tensor], layers: list[list[LayerState]]) -> None:
    for state, ids, moved in zip(states, tokens, layers, strict=True):
        state.length += len(ids)
        state.layers = moved
