"""Quantised output: which codes and scale bytes a right kernel may choose. Source: docs/judge.md §5.

A code is legal only if the twin's unrounded value lies within its bound of that code's bin, under the scale that the
candidate chose; a scale byte only if the block's amax lies within its bound of the byte's range.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from reference import formats

from .bounded import Bounded

_RECIPROCAL_SLACK = 2.0**-23  # the scale rule multiplies by fl32(1/largest): its edges are good to one float32 ulp


@dataclass(frozen=True)
class Grid:
    """A format of codes: `sign` bit; bins of each magnitude `below` ... `above`; `nan` is the magnitude that is no number
    (none: `sign`)."""

    name: str
    largest: float
    sign: int
    nan: int
    below: Tensor
    above: Tensor
    encode: Callable[[Tensor], Tensor]
    decode: Callable[[Tensor], Tensor]
    quantize: Callable[[Tensor, int, float], tuple[Tensor, Tensor]]


def _bins(values: Tensor) -> tuple[Tensor, Tensor]:
    """Magnitudes ascending -> lower and upper bin edges: midpoints; a zero's bin ends at zero, the last is open."""
    middle = (values[1:] + values[:-1]) / 2
    end = torch.tensor([torch.inf], dtype=torch.float64)
    return torch.cat([torch.zeros(1, dtype=torch.float64), middle]), torch.cat([middle, end])


E4M3 = Grid("e4m3", formats.E4M3_MAX, 128, 127, *_bins(formats.e4m3_decode(torch.arange(127, dtype=torch.uint8)).double()),
            formats.e4m3_encode, formats.e4m3_decode, formats.quantize_e4m3)  # fmt: skip
E2M1 = Grid("e2m1", formats.E2M1_MAX, 8, 8, *_bins(formats.e2m1_decode(torch.arange(8, dtype=torch.uint8)).double()),
            formats.e2m1_encode, formats.e2m1_decode, formats.quantize_e2m1)  # fmt: skip


def per_block(x: Tensor, block: int, fill: float = 0.0) -> Tensor:
    """[..., n] -> [..., ceil(n/block), block], a short last block filled up."""
    short = -x.shape[-1] % block
    return torch.nn.functional.pad(x, (0, short), value=fill).unflatten(-1, (-1, block))


def scale_used(scales: Tensor, t: Bounded, block: int, floor: float, grid: Grid = E4M3) -> Tensor:
    """Share of the bound that a scale byte [..., g] needs: 0 for the twin's own, infinite where no error excuses it."""
    value, bound = per_block(t.value, block).abs(), per_block(t.bound, block)
    amax, least, most = (x.amax(-1).clamp_min(floor) for x in (value, value - bound, value + bound))
    _, own = grid.quantize(t.value.float(), block, floor)
    upper = grid.largest * torch.ldexp(torch.ones_like(amax), scales.int() - 127)
    too_low, too_high = amax - upper, upper / 2 - amax
    slack = torch.where(too_low > 0, amax - least, most - amax)
    outside = (torch.maximum(too_low, too_high) - _RECIPROCAL_SLACK * amax).clamp_min(0)
    used = torch.where(slack > 0, outside / slack, torch.inf)
    used = torch.where(scales == 255, torch.inf, used)
    return torch.where(scales == own, 0.0, used)


def code_used(codes: Tensor, scales: Tensor, t: Bounded, block: int, grid: Grid = E4M3) -> Tensor:
    """Share of the bound that each code [..., n] needs: the distance from the twin's value to the code's bin over A.

    A zero's bin ends at zero: its sign is a bit like any other. Infinite for a NaN code, and for any but the twin's own
    code where A is 0 (there a value on a midpoint goes to the even code).
    """
    size = formats.e8m0_decode(scales).double().repeat_interleave(block, -1)[..., : codes.shape[-1]]
    x, bound = t.value / size, t.bound / size
    magnitude = codes.int() & (grid.sign - 1)
    known = magnitude.clamp_max(grid.nan - 1)
    signed = torch.where(codes >= grid.sign, -x, x)
    outside = torch.maximum(grid.below[known] - signed, signed - grid.above[known]).clamp_min(0)
    used = torch.where(outside > 0, outside / bound, 0.0)
    own = grid.encode(x.float())
    used = torch.where((bound == 0) & (codes != own), torch.inf, used)
    return torch.where(magnitude == grid.nan, torch.inf, used)


def bin_width(x: Tensor, block: int, floor: float, grid: Grid = E4M3) -> Tensor:
    """Width of the bin that each value [..., n] falls into under its block's own scale; the last bin counts as twice its
    inner half."""
    codes, scales = grid.quantize(x.float(), block, floor)
    magnitude = (codes.int() & (grid.sign - 1)).clamp_max(grid.nan - 1)
    inner = grid.decode(magnitude.to(torch.uint8)).double() - grid.below[magnitude]
    width = torch.where(grid.above[magnitude].isinf(), 2 * inner, grid.above[magnitude] - grid.below[magnitude])
    return width * formats.e8m0_decode(scales).double().repeat_interleave(block, -1)[..., : x.shape[-1]]


def dequantize(codes: Tensor, scales: Tensor, block: int, grid: Grid = E4M3) -> Tensor:
    """Codes [..., n] and scale bytes [..., ceil(n/block)] -> float64."""
    return formats.dequantize_blocks(grid.decode(codes.contiguous()), scales.contiguous(), block).double()
