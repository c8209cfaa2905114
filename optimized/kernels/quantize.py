"""Activation quantiser: bfloat16 rows to E4M3 codes with one power-of-two scale per 128 channels.

Contract (docs/pool.md §6.1)
    x        bfloat16 [t, d], any row stride, last dimension dense
    codes    uint8    [t, d], contiguous, written whole
    scales   uint8    [t, ceil(d/128)], contiguous, written whole; byte = exponent + 127
    rounding one: x / scale to E4M3, nearest even. The scale is 2^ceil(log2(max(amax, 1e-4) * fl32(1/448))), the
             exponent read from the bits. A short last block takes the amax of what it has. A block holding NaN or
             infinity gets scale byte 255 and NaN codes. x is read only; outputs alias nothing.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import ceil_div, power_of_two, require, tiles_for_mode
from .numeric import bf16_up, e4m3_rn, e4m3_scale, e8m0_inverse, magnitude_bits

BLOCK = 128


@dataclass(frozen=True)
class Tiles:
    """ROWS tokens and GROUPS blocks of 128 channels a program; powers of two."""

    ROWS: int
    GROUPS: int
    num_warps: int = 4


GPU = Tiles(ROWS=16, GROUPS=1)


@triton.jit
def quantize_tile(value, ROWS: tl.constexpr, GROUPS: tl.constexpr):
    """float32 [ROWS, GROUPS * 128] -> codes of the same shape and scale bytes [ROWS, GROUPS]."""
    value = value.reshape(ROWS, GROUPS, 128)
    scale = e4m3_scale(tl.max(magnitude_bits(value), 2))
    return e4m3_rn(value * e8m0_inverse(scale)[:, :, None]).reshape(ROWS, GROUPS * 128), scale


@triton.jit
def quantize_kernel(x, codes, scales, T, D, x_stride, ROWS: tl.constexpr, GROUPS: tl.constexpr):
    t = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    d = tl.program_id(1) * GROUPS * 128 + tl.arange(0, GROUPS * 128)
    inside = (t < T)[:, None] & (d < D)[None, :]
    value = bf16_up(tl.load(x + t[:, None] * x_stride + d[None, :], mask=inside, other=0.0))
    code, scale = quantize_tile(value, ROWS, GROUPS)
    tl.store(codes + t[:, None] * D + d[None, :], code, mask=inside)
    blocks = (D + 127) // 128
    g = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    tl.store(scales + t[:, None] * blocks + g[None, :], scale, mask=(t < T)[:, None] & (g < blocks)[None, :])


def tiles_for_width(width: int) -> Tiles:
    """Tiles of this mode for rows of this many channels."""
    return tiles_for_mode(GPU, Tiles(ROWS=16, GROUPS=min(power_of_two(ceil_div(max(width, 1), BLOCK)), 64)))


def quantize_activation(x: Tensor, tiles: Tiles | None = None) -> tuple[Tensor, Tensor]:
    """bfloat16 [t, d] -> E4M3 codes uint8 [t, d] and scale bytes uint8 [t, ceil(d/128)]. Raises ValueError."""
    require(x, "x", torch.bfloat16, (None, None))
    tokens, width = x.shape
    tiles = tiles or tiles_for_width(width)
    codes = torch.empty(tokens, width, dtype=torch.uint8, device=x.device)
    scales = torch.empty(tokens, ceil_div(width, BLOCK), dtype=torch.uint8, device=x.device)
    grid = (ceil_div(tokens, tiles.ROWS), ceil_div(width, BLOCK * tiles.GROUPS))
    if tokens and width:
        quantize_kernel[grid](x, codes, scales, tokens, width, x.stride(0), **asdict(tiles))
    return codes, scales
