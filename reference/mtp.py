"""Multi-token prediction: one more block that sees a position's final streams and the token after it.

Source: docs/model.md §8.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from .block import Block
from .hyper_connection import HyperHead
from .linear import Linear, project
from .norm import rms_norm
from .rounding import Sites
from .state import Batch, LayerState


@dataclass(frozen=True)
class MTP:
    """e_proj, h_proj [D, D], enorm, hnorm, norm [D], a whole block, and a head mix; embedding and head are the model's."""

    e_proj: Linear
    h_proj: Linear
    enorm: Tensor
    hnorm: Tensor
    block: Block
    hc_head: HyperHead
    norm: Tensor
    eps: float

    def __call__(self, x: Tensor, embedded: Tensor, batch: Batch, states: list[LayerState],
                 name: str, sites: Sites) -> tuple[Tensor, list[LayerState]]:  # fmt: skip
        """The model's last streams x [t, s, d] and the embedded next tokens [t, D] -> [t, D] for the head, and states.

        `batch.ids` are the next tokens; positions stay those of x. Row t predicts the token after next.
        """
        at = sites.block(name)
        e = project(self.e_proj, at("enorm", rms_norm(embedded, self.enorm, self.eps)), at, "e_proj")
        h = project(self.h_proj, at("hnorm", rms_norm(x, self.hnorm, self.eps)), at, "h_proj")  # each stream by itself
        x, states = self.block(at("streams", e[:, None] + h), batch, states, sites.block(f"{name}.block"))
        return at("norm", rms_norm(self.hc_head(x, at), self.norm, self.eps)), states
