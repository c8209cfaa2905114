"""One step of one layer, as a judge sees it: what the twin had and said, and what the candidate stored.

Source: docs/judge.md §7.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from optimized.engine import FORMS, Form
from optimized.rope import rope_table
from reference.block import Block
from reference.config import Config, Kind
from reference.hyper_connection import HyperHead
from reference.linear import Linear
from reference.mtp import MTP
from reference.rounding import Sites
from reference.state import Batch, LayerState

from .budget.bounded import Arithmetic, Bounded, exact
from .cases import MAX_DRAFT
from .judge import Places, Stored
from .pour import PouredKeys, PouredPool, pour, pour_keys
from .taps import Capture


@dataclass
class Step:
    """`streams` [t, s, D] is what the layer was given, `capture` holds the twin's payloads of this step; `before` and
    `after` its states, one a sequence; `sites` its profile at the block, without a listener. `embed` looks up rows of the
    embedding; `head` is the last mix, norm and output matrix where the layer is the last of the model or of a drafter.

    `stored` collects what the candidate's ops put out: a later op of the chain is fed from it, and from the twin's payload
    where no candidate made one. `quantised` holds codes by the payload they come from: an engine quantises a payload
    once, whatever reads it. `earlier` holds what the candidate stored for the last token of each sequence in the step before.
    """

    config: Config
    layer: int
    phase: str
    block: Block
    mtp: MTP | None
    batch: Batch
    streams: Tensor
    embed: Callable[[Tensor], Tensor]
    head: tuple[HyperHead, Tensor, Linear] | None
    capture: Capture
    before: list[LayerState]
    after: list[LayerState]
    sites: Sites
    how: Arithmetic
    seed: int
    stored: dict[str, Stored] = field(default_factory=dict)
    quantised: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    earlier: dict[str, Stored] = field(default_factory=dict)

    @property
    def kind(self) -> Kind:
        return self.config.kind(self.layer)

    @property
    def form(self) -> Form:
        """How the build of this profile stores rows and index keys."""
        return FORMS[self.sites.profile.name]

    def linear(self, name: str) -> Linear:
        """The weight behind an op's name, `attn.wq_a`, `ffn.shared_experts.w2`, `e_proj`."""
        part: object = self.mtp if name in ("e_proj", "h_proj") else self.block
        for attribute in name.replace("shared_experts", "shared").split("."):
            part = getattr(part, attribute)
        assert isinstance(part, Linear)
        return part

    def block_streams(self, part: str) -> Tensor:
        """Streams [t, s, D] before a sub-layer, `hc_attn` or `hc_ffn`."""
        if part == "hc_ffn":
            return self.capture["hc_attn.streams"]
        return self.capture["streams"] if self.mtp else self.streams

    @cached_property
    def places(self) -> Places:
        """Sequence and position of every token."""
        sequence = torch.cat([torch.full((s.stop - s.start,), b) for b, s in enumerate(self.batch.sequences())])
        return Places({"sequence": sequence, "position": self.batch.positions})

    @property
    def starts(self) -> list[int]:
        """Position of each sequence's first token of this step."""
        return [int(self.batch.positions[s.start]) for s in self.batch.sequences()]

    @property
    def ends(self) -> list[int]:
        """Tokens each sequence has after this step."""
        return [int(self.batch.positions[s.stop - 1]) + 1 for s in self.batch.sequences()]

    def table(self, positions: Tensor) -> tuple[Bounded, Bounded]:
        """cos and sin [t, n] that rows at these positions are turned by: the candidate's own, a payload."""
        cos, sin = rope_table(self.config, self.layer, positions)
        return exact(cos), exact(sin)

    @property
    def direct(self) -> bool:
        """Whether every sequence grows by so little that no token needs a window row that another one overwrites: then rows
        go into the pool before attention."""
        return max(s.stop - s.start for s in self.batch.sequences()) <= MAX_DRAFT + 1

    @property
    def every_token(self) -> bool:
        """Whether attention is judged of every token, and not of some of a long step."""
        return self.direct

    def raw_rows(self) -> list[tuple[int, Tensor]]:
        """Per sequence, the raw rows that this step's tokens may see: position of the first, and rows [n, d]."""
        new = self.capture["attn.kv"]
        parts = zip(self.before, self.batch.sequences(), self.starts, strict=True)
        return [(start - len(s.window), torch.cat([s.window, new[where]])) for s, where, start in parts]

    @cached_property
    def pool_before(self) -> PouredPool:
        """A pool as the step finds it, with nothing in the windows. An op works on a copy."""
        empty = [(0, state.window[:0]) for state in self.before]
        return pour(self.config, self.layer, self.before, empty, self.starts, self.ends, self.seed, self.form)

    @cached_property
    def pool_to_attend(self) -> PouredPool:
        """A pool as attention finds it: this step's rows are in."""
        return pour(self.config, self.layer, self.after, self.raw_rows(), self.ends, self.ends, self.seed, self.form)

    @cached_property
    def pool_to_extend(self) -> PouredPool:
        """A pool as attention finds it in a long step: finished rows are in, windows are as they were before."""
        windows = [(start - len(s.window), s.window) for s, start in zip(self.before, self.starts, strict=True)]
        return pour(self.config, self.layer, self.after, windows, self.ends, self.ends, self.seed, self.form)

    @cached_property
    def keys_before(self) -> PouredKeys:
        """Pages of index keys as the step finds them."""
        return pour_keys(self.pool_before, self.before, self.form.keys)

    @cached_property
    def keys_after(self) -> PouredKeys:
        """Pages of index keys as queries find them: the keys that this step completes are in."""
        return pour_keys(self.pool_before, self.after, self.form.keys)
