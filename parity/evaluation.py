"""The reference's evaluation of one layer under a rounding profile: truth, twin, and what is nudged to measure growth.

Source: docs/drift.md §1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from reference.block import Block
from reference.checkpoint.loader import Loader
from reference.config import Config
from reference.errors import BadInput
from reference.hyper_connection import HyperHead
from reference.linear import Linear
from reference.mtp import MTP
from reference.norm import rms_norm
from reference.rounding import Profile, Sites
from reference.state import Batch, CompressorState, LayerState

from . import cases
from .drift import CHOICES, Side
from .taps import Capture

Head = tuple[HyperHead, Tensor, Linear]


@dataclass(frozen=True)
class Weights:
    """One layer, and what stands before and behind it: embedding, and head where it is the last one."""

    config: Config
    loader: Loader
    layer: int
    block: Block
    mtp: MTP | None

    @classmethod
    def load(cls, loader: Loader, config: Config, layer: int) -> Weights:
        drafter = layer - config.num_hidden_layers
        mtp = loader.mtp(drafter) if drafter >= 0 else None
        return cls(config, loader, layer, mtp.block if mtp else loader.block(layer), mtp)

    @property
    def has_head(self) -> bool:
        """Whether logits come out behind this layer."""
        return "head" in cases.layer_kinds(self.config, self.layer)

    @property
    def head(self) -> Head | None:
        """The model's last mix, norm and output matrix, or the drafter's, which shares the matrix."""
        if not self.has_head:
            return None
        head = self.loader.head()
        return (self.mtp.hc_head, self.mtp.norm, head[2]) if self.mtp else head

    def capture(self, taps: set[str]) -> Capture:
        """For the taps of this layer."""
        name = cases.layer_name(self.config, self.layer)
        return Capture([f"{name}.", f"{name.removesuffix('block')}"], taps)


def in_single(state: LayerState) -> LayerState:
    """A state in float32."""

    def compressor(c: CompressorState | None) -> CompressorState | None:
        return None if c is None else CompressorState(c.values.float(), c.gates.float(), c.rows.float())

    return LayerState(state.window.float(), compressor(state.compressor), compressor(state.indexer))


@dataclass
class Evaluation:
    """`states` of all sequences between steps."""

    weights: Weights
    profile: Profile
    states: list[LayerState]

    def fork(self, profile: Profile) -> Evaluation:
        """Another evaluation that starts from the same states."""
        return replace(self, profile=profile, states=list(self.states))

    def of(self, members: Sequence[int]) -> list[LayerState]:
        return [self.states[i] for i in members]

    def streams(self, x: Tensor, batch: Batch, members: Sequence[int], sites: Sites | None = None) -> Tensor:
        """The next tokens of some sequences: [t, s, D] -> [t, s, D]; MTP puts out what its head sees, [t, 1, D]. `sites`
        are those of the profile, unless given."""
        w, sites = self.weights, sites or Sites(self.profile)
        if w.mtp is None:
            y, after = w.block(x, batch, self.of(members), sites.block(cases.layer_name(w.config, w.layer)))
        else:
            embedded = sites("embed", w.loader.embed(batch.ids))
            name = f"mtp.{w.layer - w.config.num_hidden_layers}"
            y, after = w.mtp(x, embedded, batch, self.of(members), name, sites)
            y = y[:, None]
        for i, state in zip(members, after, strict=True):
            self.states[i] = state
        return y

    def left(self, member: int, tokens: int, end: int) -> dict[str, Tensor]:
        """What the last tokens of a sequence, now of length `end`, left for later ones: rows [n, d] of the window, and
        compressed."""
        state, ratio = self.states[member], self.weights.config.ratio(self.weights.layer)
        found = {"window": state.window[-tokens:]}
        if state.compressor:
            found["compressed"] = state.compressor.rows[(end - tokens) // ratio : end // ratio]
        return found

    def run(self, x: Tensor, batch: Batch, members: Sequence[int], capture: Capture) -> Side:
        """The same with its choices, which `capture` must want, and logits."""
        y = self.streams(x, batch, members, Sites(self.profile, capture))
        experts, picks = (_chosen(capture, tap) for tap in CHOICES)
        return Side(y, experts, picks, self.logits(y, batch))

    def logits(self, y: Tensor, batch: Batch) -> Tensor | None:
        """Of each sequence's last token [b, v], where there is a head, from what the layer puts out."""
        head, sites, y = self.weights.head, Sites(self.profile), y[torch.tensor(batch.bounds[1:]) - 1]
        if head is None:
            return None
        if self.weights.mtp is None:
            y = sites("norm", rms_norm(head[0](y, sites), head[1], self.weights.config.rms_norm_eps))[:, None]
        return sites("head.logits", head[2].apply(y[:, 0]))


def _chosen(capture: Capture, tap: str) -> Tensor | None:
    """Choices of all tokens [t, k], -1 where there are fewer; None where nobody chooses."""
    try:
        return capture.table(tap)
    except BadInput:
        return None
