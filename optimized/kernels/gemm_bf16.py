"""Products of bfloat16 rows: with a bfloat16 weight, and group by group with an FP8 weight widened on the way (wo_a).

Contract (docs/pool.md §9.3)
    gemm_bf16     x bfloat16 [t, k], w bfloat16 [n, k], any row stride -> y [t, n], bfloat16 or float32
    grouped_gemm  x bfloat16 [t, g, k], any token and group stride; codes uint8 [g*r, k], scales uint8
                  [ceil(g*r/128), ceil(k/128)], any row stride -> y bfloat16 [t, g*r], where group i meets rows
                  i*r ... (i+1)*r - 1. A block of 128 rows may span groups; last blocks may be short
    Outputs are contiguous and written whole; inputs are read only.
    rounding  products are exact, sums float32 in ascending steps of STEP channels, within a step in the hardware's
              order; y float32 as summed, or one rounding to bfloat16. code * scale is exact in bfloat16 for every
              scale byte 10 ... 245: x is not quantised for an FP8 weight here.
Tiles are constants of the variant: a token's bits do not depend on the other tokens.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import ceil_div, power_of_two, require, tiles_for_mode
from .numeric import bf16_rn, e4m3_up, e8m0_up, mma_bf16

BLOCK = 128


@dataclass(frozen=True)
class Tiles:
    """ROWS tokens by COLS outputs a program, STEP channels at a time; powers of two, at least 16. For the grouped product
    STEP divides 128."""

    ROWS: int
    COLS: int
    STEP: int
    num_warps: int = 4
    num_stages: int = 3


GPU = Tiles(ROWS=64, COLS=128, STEP=64)


@triton.jit
def gemm_bf16_kernel(
    x, w, y, T, N, K, x_stride, w_stride, ROWS: tl.constexpr, COLS: tl.constexpr, STEP: tl.constexpr
):  # fmt: skip
    t = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    n = (tl.program_id(1) * COLS + tl.arange(0, COLS)).to(tl.int64)
    acc = tl.zeros((ROWS, COLS), tl.float32)
    for first in range(0, K, STEP):
        d = first + tl.arange(0, STEP)
        a = tl.load(x + t[:, None] * x_stride + d[None, :], mask=(t < T)[:, None] & (d < K)[None, :], other=0.0)
        b = tl.load(w + n[:, None] * w_stride + d[None, :], mask=(n < N)[:, None] & (d < K)[None, :], other=0.0)
        acc = mma_bf16(a, tl.trans(b), acc)
    if y.dtype.element_ty == tl.bfloat16:
        acc = bf16_rn(acc)
    tl.store(y + t[:, None] * N + n[None, :], acc, mask=(t < T)[:, None] & (n < N)[None, :])


@triton.jit
def grouped_gemm_kernel(
    x, w, w_scale, y, T, R, K, x_stride, x_group_stride, w_stride, w_scale_stride,
    ROWS: tl.constexpr, COLS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    t = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    r = tl.program_id(1) * COLS + tl.arange(0, COLS)
    group = tl.program_id(2).to(tl.int64)
    n = group * R + r  # row of the weight
    acc = tl.zeros((ROWS, COLS), tl.float32)
    for first in range(0, K, STEP):
        d = first + tl.arange(0, STEP)
        at = t[:, None] * x_stride + group * x_group_stride + d[None, :]
        a = tl.load(x + at, mask=(t < T)[:, None] & (d < K)[None, :], other=0.0)
        code = tl.load(w + n[:, None] * w_stride + d[None, :], mask=(r < R)[:, None] & (d < K)[None, :], other=0)
        scale = e8m0_up(tl.load(w_scale + (n // 128) * w_scale_stride + first // 128, mask=r < R, other=0))
        acc = mma_bf16(a, tl.trans(bf16_rn(e4m3_up(code) * scale[:, None])), acc)
    outputs = R * tl.num_programs(2)
    tl.store(y + t[:, None] * outputs + n[None, :], bf16_rn(acc), mask=(t < T)[:, None] & (r < R)[None, :])


def tiles_for_width(outputs: int, step: int) -> Tiles:
    """Tiles of this mode for a weight, or a group of one, with this many rows."""
    return tiles_for_mode(GPU, Tiles(ROWS=64, COLS=min(max(power_of_two(outputs), 16), 2048), STEP=step))


def gemm_bf16(x: Tensor, w: Tensor, dtype: torch.dtype = torch.float32, tiles: Tiles | None = None) -> Tensor:
    """x [t, k] times w [n, k] transposed -> [t, n] in float32 or bfloat16. Raises ValueError."""
    require(x, "x", torch.bfloat16, (None, None))
    (tokens, depth), outputs = x.shape, w.shape[0]
    require(w, "w", torch.bfloat16, (None, depth))
    if dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"y cannot be {dtype}, only float32 or bfloat16")
    tiles = tiles or tiles_for_width(outputs, step=min(max(power_of_two(depth), 16), 512))
    y = torch.empty(tokens, outputs, dtype=dtype, device=x.device)
    if y.numel():
        gemm_bf16_kernel[(ceil_div(tokens, tiles.ROWS), ceil_div(outputs, tiles.COLS))](
            x, w, y, tokens, outputs, depth, x.stride(0), w.stride(0), **asdict(tiles)
        )
    return y


def grouped_gemm(x: Tensor, codes: Tensor, scales: Tensor, tiles: Tiles | None = None) -> Tensor:
    """x [t, g, k] times its group's rows of the quantised W [g*r, k] -> bfloat16 [t, g*r]. Raises ValueError."""
    require(x, "x", torch.bfloat16, (None, None, None))
    (tokens, groups, depth), outputs = x.shape, codes.shape[0]
    require(codes, "codes", torch.uint8, (None, depth))
    require(scales, "scales", torch.uint8, (ceil_div(outputs, BLOCK), ceil_div(depth, BLOCK)))
    if outputs % groups:
        raise ValueError(f"codes has {outputs} rows, which {groups} groups cannot share")
    rank = outputs // groups
    tiles = tiles or tiles_for_width(rank, step=BLOCK)
    y = torch.empty(tokens, outputs, dtype=torch.bfloat16, device=x.device)
    if y.numel():
        grouped_gemm_kernel[(ceil_div(tokens, tiles.ROWS), ceil_div(rank, tiles.COLS), groups)](
            x, codes, scales, y, tokens, rank, depth,
            x.stride(0), x.stride(1), codes.stride(0), scales.stride(0), **asdict(tiles),
        )  # fmt: skip
    return y
