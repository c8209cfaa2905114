"""One layer: attention and experts, each inside a mix of the residual streams. Wiring only. Source: docs/model.md §8."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from .attention import Attention
from .hyper_connection import HyperConnection
from .moe import MoE
from .norm import rms_norm
from .rounding import Sites
from .state import Batch, LayerState


@dataclass(frozen=True)
class Block:
    """The weights of one layer, or of the block inside MTP."""

    hc_attn: HyperConnection
    attn_norm: Tensor
    attn: Attention
    hc_ffn: HyperConnection
    ffn_norm: Tensor
    ffn: MoE
    eps: float

    def __call__(self, x: Tensor, batch: Batch, states: list[LayerState], sites: Sites) -> tuple[Tensor, list[LayerState]]:
        """Streams x [t, s, d] -> streams [t, s, d] and the states after the step."""
        u, post, comb = self.hc_attn.pre(x, sites.at("hc_attn"))
        u = sites("attn_norm", rms_norm(u, self.attn_norm, self.eps))
        z, states = self.attn(u, batch, states, sites.at("attn"))
        x = self.hc_attn.post(z, x, post, comb, sites.at("hc_attn"))

        u, post, comb = self.hc_ffn.pre(x, sites.at("hc_ffn"))
        u = sites("ffn_norm", rms_norm(u, self.ffn_norm, self.eps))
        z = self.ffn(u, batch.ids, sites.at("ffn"))
        return self.hc_ffn.post(z, x, post, comb, sites.at("hc_ffn")), states
