"""RMSNorm of bfloat16 rows, and the same followed by the activation quantiser.

Contract (docs/pool.md §9.1)
    x        bfloat16 [t, d], any row stride, last dimension dense
    weight   float32 [d]
    y        bfloat16 [t, d], contiguous, written whole
    codes    uint8 [t, d], scales uint8 [t, ceil(d/128)], contiguous, written whole: what §6.1 makes of y
    rounding float32 inside: w * (x * rsqrt(mean(x^2) + eps)); one rounding to bfloat16. The quantiser starts from the
             rounded y, so that the fused kernel gives the bits of the two it replaces.
A row lies in one program, whose tile depends on d alone. x is read only; outputs alias nothing.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import ceil_div, power_of_two, require, tiles_for_mode
from .numeric import bf16_rn, bf16_up
from .quantize import BLOCK, quantize_tile


@dataclass(frozen=True)
class Tiles:
    """ROWS whole rows a program; a power of two."""

    ROWS: int
    num_warps: int = 8


GPU = Tiles(ROWS=1)
INTERPRETER = Tiles(ROWS=16)


@triton.jit
def norm_rows(x, x_stride, weight, eps, t, T, D, LANES: tl.constexpr):
    """bfloat16 [rows, LANES] of the rows t; 0 past the last channel."""
    d = tl.arange(0, LANES)
    inside = (t < T)[:, None] & (d < D)[None, :]
    value = bf16_up(tl.load(x + t[:, None] * x_stride + d[None, :], mask=inside, other=0.0))
    rstd = tl.rsqrt(tl.sum(value * value, 1) / D + eps)
    w = tl.load(weight + d, mask=d < D, other=0.0)
    return bf16_rn(w[None, :] * (value * rstd[:, None]))


@triton.jit
def norm_kernel(x, weight, y, T, D, x_stride, eps, LANES: tl.constexpr, ROWS: tl.constexpr):
    t = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    d = tl.arange(0, LANES)
    rows = norm_rows(x, x_stride, weight, eps, t, T, D, LANES)
    tl.store(y + t[:, None] * D + d[None, :], rows, mask=(t < T)[:, None] & (d < D)[None, :])


@triton.jit
def norm_quantize_kernel(x, weight, y, codes, scales, T, D, x_stride, eps, LANES: tl.constexpr, ROWS: tl.constexpr):
    t = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    d = tl.arange(0, LANES)
    rows = norm_rows(x, x_stride, weight, eps, t, T, D, LANES)
    inside = (t < T)[:, None] & (d < D)[None, :]
    at = t[:, None] * D + d[None, :]
    tl.store(y + at, rows, mask=inside)
    code, scale = quantize_tile(bf16_up(rows), ROWS, LANES // 128)
    tl.store(codes + at, code, mask=inside)
    blocks = (D + 127) // 128
    g = tl.arange(0, LANES // 128)
    tl.store(scales + t[:, None] * blocks + g[None, :], scale, mask=(t < T)[:, None] & (g < blocks)[None, :])


def rms_norm(x: Tensor, weight: Tensor, eps: float, tiles: Tiles | None = None) -> Tensor:
    """bfloat16 [t, d], float32 [d] -> bfloat16 [t, d]. Raises ValueError."""
    tokens, width = _shape(x, weight)
    tiles = tiles or tiles_for_mode(GPU, INTERPRETER)
    y = torch.empty(tokens, width, dtype=torch.bfloat16, device=x.device)
    if y.numel():
        norm_kernel[(ceil_div(tokens, tiles.ROWS),)](
            x, weight, y, tokens, width, x.stride(0), eps, LANES=_lanes(width), **asdict(tiles)
        )
    return y


def rms_norm_quantize(
    x: Tensor, weight: Tensor, eps: float, tiles: Tiles | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """bfloat16 [t, d], float32 [d] -> bfloat16 [t, d], its E4M3 codes uint8 [t, d] and scale bytes uint8
    [t, ceil(d/128)]. Raises ValueError."""
    tokens, width = _shape(x, weight)
    tiles = tiles or tiles_for_mode(GPU, INTERPRETER)
    y = torch.empty(tokens, width, dtype=torch.bfloat16, device=x.device)
    codes = torch.empty(tokens, width, dtype=torch.uint8, device=x.device)
    scales = torch.empty(tokens, ceil_div(width, BLOCK), dtype=torch.uint8, device=x.device)
    if y.numel():
        norm_quantize_kernel[(ceil_div(tokens, tiles.ROWS),)](
            x, weight, y, codes, scales, tokens, width, x.stride(0), eps, LANES=_lanes(width), **asdict(tiles)
        )
    return y, codes, scales


def _shape(x: Tensor, weight: Tensor) -> tuple[int, int]:
    require(x, "x", torch.bfloat16, (None, None))
    require(weight, "weight", torch.float32, (x.shape[1],))
    return x.shape[0], x.shape[1]


def _lanes(width: int) -> int:
    return max(power_of_two(width), BLOCK)
