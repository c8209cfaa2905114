"""Compressed rows: blocks of tokens pooled into one, with an independent softmax for every channel.

HCA pools blocks of 128 tokens. CSA pools blocks of 4 with overlap: a block's own four tokens in the role "newer" and
the four before it in the role "older", each role with its own half of the projection. Source: docs/model.md §5.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .hadamard import hadamard
from .linear import Linear, apply_all
from .norm import rms_norm
from .rope import Rope, rotate
from .rounding import Sites
from .state import CompressorState


def pool(values: Tensor, gates: Tensor) -> Tensor:
    """[c, k, dh] -> [c, dh]: each channel's own softmax over the k slots of its gates, weighting its values."""
    return (torch.softmax(gates, dim=1) * values).sum(1)


def overlap(blocks: Tensor) -> Tensor:
    """Blocks [c+1, r, 2*dh] -> windows [c, 2r, dh]: block j-1 in its first half (older), block j in its second (newer)."""
    dh = blocks.shape[-1] // 2
    return torch.cat([blocks[:-1, :, :dh], blocks[1:, :, dh:]], dim=1)


@dataclass(frozen=True)
class Compressor:
    """Weights of a compressor: wkv, wgate [c*dh, D], ape [r, c*dh], norm [dh]; c = 2 with overlap (ratio 4), else 1.

    `index_keys`: rows are index keys, turned by a Hadamard matrix, instead of attention rows.
    """

    wkv: Linear
    wgate: Linear
    ape: Tensor
    norm: Tensor
    ratio: int
    rope: Rope
    eps: float
    index_keys: bool

    @property
    def overlapping(self) -> bool:
        return self.ratio == 4

    def initial_state(self) -> CompressorState:
        """No rows yet. An overlapping window of block 0 finds an empty block -1: values 0, gates -inf, weight exactly 0."""
        before = self.ratio if self.overlapping else 0
        values = self.ape.new_zeros(before, self.ape.shape[1])
        return CompressorState(values, torch.full_like(values, -torch.inf), self.norm.new_empty(0, self.norm.shape[0]))

    def project(self, x: Tensor, positions: Tensor, sites: Sites) -> tuple[Tensor, Tensor]:
        """Inputs x [t, D] at positions [t] -> values and gates [t, c*dh]; the position bias goes to the gate only."""
        values, gates = apply_all([self.wkv, self.wgate], [x, x])
        return sites("values", values), sites("gates", gates + self.ape[positions % self.ratio])

    def extend(self, values: Tensor, gates: Tensor, state: CompressorState, sites: Sites) -> CompressorState:
        """The state after one sequence's next tokens, whose values and gates [t, c*dh] are given.

        Row j depends only on the tokens of its window, so any way of cutting a prompt gives the same rows.
        """
        values = torch.cat([state.values, values])
        gates = torch.cat([state.gates, gates])
        done = len(values) // self.ratio * self.ratio
        value_blocks = values[:done].unflatten(0, (-1, self.ratio))  # [blocks, r, c*dh]
        gate_blocks = gates[:done].unflatten(0, (-1, self.ratio))
        if self.overlapping:
            value_blocks, gate_blocks = overlap(value_blocks), overlap(gate_blocks)  # [new rows, 2r, dh]
            done -= self.ratio
        if not len(value_blocks):
            return CompressorState(values, gates, state.rows)
        rows = self.finish(pool(value_blocks, gate_blocks), len(state.rows), sites)
        return CompressorState(values[done:].clone(), gates[done:].clone(), torch.cat([state.rows, rows]))

    def finish(self, pooled: Tensor, first: int, sites: Sites) -> Tensor:
        """Pooled rows [c, dh], numbers `first`..., -> norm, RoPE at the block's first token, Hadamard for index keys."""
        rows = sites("norm", rms_norm(sites("pooled", pooled), self.norm, self.eps))
        positions = self.ratio * torch.arange(first, first + len(rows), device=rows.device)
        rows = rotate(rows, self.rope.table(positions, rows.dtype, sites))
        if self.index_keys:
            return sites("row", sites("hadamard", hadamard(sites("rotated", rows))))
        return sites("row", rows, spare=self.rope.dim)
