"""FP8 block GEMM: y = x W^T for E4M3 codes with power-of-two scales, x per (token, 128), W per 128 x 128.

Contract (docs/pool.md §6.2)
    x_codes   uint8 [t, k], any row stride          x_scales uint8 [t, ceil(k/128)], any row stride
    w_codes   uint8 [n, k], any row stride          w_scales uint8 [ceil(n/128), ceil(k/128)], any row stride
    y         bfloat16 or float32 [t, n], contiguous, written whole; inputs are read only
    rounding  per block of 128 channels of k one float32 partial of the raw codes, times (s_x * s_w), added to a
              float32 accumulator in ascending k; y as summed, or one rounding to bfloat16. How the 128 products of a
              partial are summed is the hardware's business (Hopper keeps about 14 bits between its instructions).
Tiles are constants of the variant: a token's bits do not depend on the other tokens. ROWS is 64 because a smaller
tile loses the FP8 matrix instruction of sm_90.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import ceil_div, power_of_two, require, tiles_for_mode
from .numeric import bf16_rn, e8m0_up, mma_fp8

BLOCK = 128


@dataclass(frozen=True)
class Tiles:
    """ROWS tokens by COLS outputs a program; powers of two, at least 16. The step along k is always 128."""

    ROWS: int
    COLS: int
    num_warps: int = 4
    num_stages: int = 3


GPU = Tiles(ROWS=64, COLS=128)


@triton.jit
def gemm_fp8_kernel(
    x, x_scale, w, w_scale, y, T, N, K, x_stride, x_scale_stride, w_stride, w_scale_stride,
    ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    t = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    n = (tl.program_id(1) * COLS + tl.arange(0, COLS)).to(tl.int64)
    k = tl.arange(0, 128)
    row = (t < T)[:, None]
    col = (n < N)[:, None]
    acc = tl.zeros((ROWS, COLS), tl.float32)
    for block in range(0, (K + 127) // 128):
        d = block * 128 + k
        deep = (d < K)[None, :]
        a = tl.load(x + t[:, None] * x_stride + d[None, :], mask=row & deep, other=0)  # [ROWS, 128]
        b = tl.load(w + n[:, None] * w_stride + d[None, :], mask=col & deep, other=0)  # [COLS, 128]
        sx = e8m0_up(tl.load(x_scale + t * x_scale_stride + block, mask=t < T, other=0))
        sw = e8m0_up(tl.load(w_scale + (n // 128) * w_scale_stride + block, mask=n < N, other=0))
        acc += mma_fp8(a, tl.trans(b), tl.zeros((ROWS, COLS), tl.float32)) * (sx[:, None] * sw[None, :])
    if y.dtype.element_ty == tl.bfloat16:
        acc = bf16_rn(acc)
    tl.store(y + t[:, None] * N + n[None, :], acc, mask=row & (n < N)[None, :])


def tiles_for_width(outputs: int) -> Tiles:
    """Tiles of this mode for a weight with this many rows."""
    return tiles_for_mode(GPU, Tiles(ROWS=64, COLS=min(max(power_of_two(outputs), 16), 4096)))


def gemm_fp8(
    codes: Tensor, scales: Tensor, weight_codes: Tensor, weight_scales: Tensor, tiles: Tiles | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:  # fmt: skip
    """Quantised x [t, k] times quantised W [n, k] transposed -> [t, n] in bfloat16 or float32. Raises ValueError."""
    (tokens, depth), outputs = codes.shape, weight_codes.shape[0]
    require(codes, "codes", torch.uint8, (None, None))
    require(scales, "scales", torch.uint8, (tokens, ceil_div(depth, BLOCK)))
    require(weight_codes, "weight_codes", torch.uint8, (None, depth))
    require(weight_scales, "weight_scales", torch.uint8, (ceil_div(outputs, BLOCK), ceil_div(depth, BLOCK)))
    tiles = tiles or tiles_for_width(outputs)
    if dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"y cannot be {dtype}, only float32 or bfloat16")
    y = torch.empty(tokens, outputs, dtype=dtype, device=codes.device)
    grid = (ceil_div(tokens, tiles.ROWS), ceil_div(outputs, tiles.COLS))
    if tokens:
        gemm_fp8_kernel[grid](
            codes, scales, weight_codes, weight_scales, y, tokens, outputs, depth,
            codes.stride(0), scales.stride(0), weight_codes.stride(0), weight_scales.stride(0),
            **asdict(tiles),
        )  # fmt: skip
    return y
