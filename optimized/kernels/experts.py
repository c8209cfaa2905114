"""Routed experts: grouped products of w1 and w3 with SwiGLU and quantiser behind them, then of w2; FP4 or FP8 weights.

Contract (docs/pool.md §9.5)
    x_codes, x_scales  uint8 [t, d], uint8 [t, ceil(d/128)], any row stride: the input of the layer, quantised once
    w1, w3, w2         FP4: uint8 [e, i, d/2], [e, i, d/2], [e, d, i/2], packed E2M1, low nibble first, with scales uint8
                       [e, i, ceil(d/32)] and [e, d, ceil(i/32)]; d and i are even. FP8: E4M3 codes uint8 [e, i, d],
                       [e, i, d], [e, d, i], with a scale per 128 x 128. Any expert stride, rows dense
    weights            float32 [t, k], routing weights; plan: expert_plan.py, with blocks of Tiles.ROWS
    h_codes, h_scales  uint8 [t*k, i], uint8 [t*k, ceil(i/128)], a row a pair (token, slot)
    y                  float32 [t*k, d]
    Outputs are contiguous and alias nothing; rows of padding pairs are not written and not read.
    rounding  code * scale is exact in bfloat16 on both sides (FP8: for scale bytes 10 to 245), so scales are multiplied in
              before the product and round nothing; sums are float32, in ascending steps of STEP channels. w1 and w3
              products to bfloat16; SwiGLU times the routing weight in float32, straight into E4M3 per 128. w2 products
              stay float32.
A pair's bits depend on its row alone: blocks, tiles and orders are constants of the variant.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from .expert_plan import ExpertPlan
from .launch import ceil_div, power_of_two, require, tiles_for_mode
from .numeric import bf16_rn, bf16_up, e2m1_up, e4m3_up, e8m0_up, mma_bf16
from .quantize import quantize_tile
from .swiglu import clamped_swiglu


@dataclass(frozen=True)
class Tiles:
    """ROWS pairs of an expert by COLS outputs a program (at least 16; for w1 and w3 COLS is at least 128), STEP channels a
    product, 32 to 128. Powers of two."""

    ROWS: int
    COLS: int
    STEP: int
    num_warps: int = 4
    num_stages: int = 3


GPU_UP = Tiles(ROWS=64, COLS=128, STEP=64, num_warps=8)
GPU_DOWN = Tiles(ROWS=64, COLS=128, STEP=64, num_warps=4)
GPU_DOWN_FP8 = Tiles(ROWS=64, COLS=128, STEP=64, num_warps=8)  # four warps would spill on sm_90
INTERPRETER_ROWS = 16


@triton.jit
def load_fp8(x, x_scale, row, live, x_stride, x_scale_stride, first, K, STEP: tl.constexpr):
    """STEP channels of the rows, scaled, bfloat16 [rows, STEP]: exact."""
    d = first + tl.arange(0, STEP)
    code = tl.load(x + row[:, None] * x_stride + d[None, :], mask=live[:, None] & (d < K)[None, :], other=0)
    scale = e8m0_up(tl.load(x_scale + row * x_scale_stride + first // 128, mask=live, other=0))
    return bf16_rn(e4m3_up(code) * scale[:, None])


@triton.jit
def load_fp4(w, w_scale, n, N, first, K, COLS: tl.constexpr, STEP: tl.constexpr):
    """STEP channels of COLS rows of a weight, scaled, bfloat16 [STEP, COLS]: exact."""
    byte_at = first // 2 + tl.arange(0, STEP // 2)
    byte = tl.load(w + n[:, None] * (K // 2) + byte_at[None, :], mask=(n < N)[:, None] & (byte_at < K // 2)[None, :], other=0)
    scales = (K + 31) // 32
    scale_at = first // 32 + tl.arange(0, STEP // 32)
    stored = (n < N)[:, None] & (scale_at < scales)[None, :]
    scale = e8m0_up(tl.load(w_scale + n[:, None] * scales + scale_at[None, :], mask=stored, other=0))
    code = tl.join(byte & 0xF, byte >> 4).reshape(COLS, STEP)
    value = e2m1_up(code).reshape(COLS, STEP // 32, 32) * scale[:, :, None]
    return tl.trans(bf16_rn(value.reshape(COLS, STEP)))


@triton.jit
def load_blocks(w, w_scale, n, N, first, K, STEP: tl.constexpr):
    """As `load_fp4`, of an E4M3 weight with a scale per 128 x 128."""
    d = first + tl.arange(0, STEP)
    code = tl.load(w + n[:, None] * K + d[None, :], mask=(n < N)[:, None] & (d < K)[None, :], other=0)
    scale = e8m0_up(tl.load(w_scale + n // 128 * ((K + 127) // 128) + first // 128, mask=n < N, other=0))
    return tl.trans(bf16_rn(e4m3_up(code) * scale[:, None]))


@triton.jit
def load_weight(w, w_scale, n, N, first, K, FP4: tl.constexpr, COLS: tl.constexpr, STEP: tl.constexpr):
    if FP4:
        return load_fp4(w, w_scale, n, N, first, K, COLS, STEP)
    else:
        return load_blocks(w, w_scale, n, N, first, K, STEP)


@triton.jit
def gate_up_kernel(
    x, x_scale, w1, w1_scale, w3, w3_scale, rows, block_expert, weights, h, h_scale, N, K,
    x_stride, x_scale_stride, w1_stride, w1_scale_stride, w3_stride, w3_scale_stride, limit,
    TOP_K: tl.constexpr, FP4: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    expert = tl.load(block_expert + tl.program_id(0)).to(tl.int64)
    if expert >= 0:
        pair = tl.load(rows + tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        live = pair >= 0
        pair = tl.where(live, pair, 0)
        n = (tl.program_id(1) * COLS + tl.arange(0, COLS)).to(tl.int64)
        token = pair // TOP_K
        w1 += expert * w1_stride
        w3 += expert * w3_stride
        w1_scale += expert * w1_scale_stride
        w3_scale += expert * w3_scale_stride
        gate = tl.zeros((ROWS, COLS), tl.float32)
        up = tl.zeros((ROWS, COLS), tl.float32)
        for first in range(0, K, STEP):
            a = load_fp8(x, x_scale, token, live, x_stride, x_scale_stride, first, K, STEP)
            gate = mma_bf16(a, load_weight(w1, w1_scale, n, N, first, K, FP4, COLS, STEP), gate)
            up = mma_bf16(a, load_weight(w3, w3_scale, n, N, first, K, FP4, COLS, STEP), up)
        weight = tl.load(weights + pair, mask=live, other=0.0)
        product = clamped_swiglu(bf16_up(bf16_rn(gate)), bf16_up(bf16_rn(up)), limit) * weight[:, None]
        code, scale = quantize_tile(product, ROWS, COLS // 128)
        tl.store(h + pair[:, None] * N + n[None, :], code, mask=live[:, None] & (n < N)[None, :])
        blocks = (N + 127) // 128
        g = tl.program_id(1) * (COLS // 128) + tl.arange(0, COLS // 128)
        tl.store(h_scale + pair[:, None] * blocks + g[None, :], scale, mask=live[:, None] & (g < blocks)[None, :])


@triton.jit
def down_kernel(
    h, h_scale, w2, w2_scale, rows, block_expert, y, N, K, h_stride, h_scale_stride, w2_stride, w2_scale_stride,
    FP4: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    expert = tl.load(block_expert + tl.program_id(0)).to(tl.int64)
    if expert >= 0:
        pair = tl.load(rows + tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        live = pair >= 0
        pair = tl.where(live, pair, 0)
        n = (tl.program_id(1) * COLS + tl.arange(0, COLS)).to(tl.int64)
        w2 += expert * w2_stride
        w2_scale += expert * w2_scale_stride
        acc = tl.zeros((ROWS, COLS), tl.float32)
        for first in range(0, K, STEP):
            a = load_fp8(h, h_scale, pair, live, h_stride, h_scale_stride, first, K, STEP)
            acc = mma_bf16(a, load_weight(w2, w2_scale, n, N, first, K, FP4, COLS, STEP), acc)
        tl.store(y + pair[:, None] * N + n[None, :], acc, mask=live[:, None] & (n < N)[None, :])


def block_height() -> int:
    """Rows of a block in this mode, for `plan_experts`."""
    return tiles_for_mode(GPU_UP.ROWS, INTERPRETER_ROWS)


def tiles_for_width(gpu: Tiles, outputs: int) -> Tiles:
    """Tiles of this mode for weights with this many rows."""
    return tiles_for_mode(gpu, Tiles(ROWS=INTERPRETER_ROWS, COLS=min(max(power_of_two(outputs), 128), 1024), STEP=128))


def expert_gate_up(
    x_codes: Tensor, x_scales: Tensor, w1: Tensor, w1_scales: Tensor, w3: Tensor, w3_scales: Tensor,
    weights: Tensor, plan: ExpertPlan, limit: float, tiles: Tiles | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Quantised x [t, d] through w1, w3 [e, i, d] and SwiGLU, times weights [t, k] -> codes [t*k, i] and scales
    [t*k, ceil(i/128)] of w2's input. Raises ValueError."""
    tiles = tiles or tiles_for_width(GPU_UP, w1.shape[1])
    (tokens, depth), (count, outputs) = x_codes.shape, w1.shape[:2]
    require(x_codes, "x_codes", torch.uint8, (None, None))
    require(x_scales, "x_scales", torch.uint8, (tokens, ceil_div(depth, 128)))
    require(weights, "weights", torch.float32, (tokens, None), dense=2)
    fp4 = _is_fp4("w1", w1, w1_scales, count, outputs, depth)
    if _is_fp4("w3", w3, w3_scales, count, outputs, depth) != fp4:
        raise ValueError("w1 and w3 are stored in different forms")
    _check_plan(plan, weights.shape, tiles)
    h = torch.empty(weights.numel(), outputs, dtype=torch.uint8, device=x_codes.device)
    h_scales = torch.empty(weights.numel(), ceil_div(outputs, 128), dtype=torch.uint8, device=x_codes.device)
    if h.numel():
        gate_up_kernel[(plan.rows.shape[0], ceil_div(outputs, tiles.COLS))](
            x_codes, x_scales, w1, w1_scales, w3, w3_scales, plan.rows, plan.block_expert, weights, h, h_scales,
            outputs, depth, x_codes.stride(0), x_scales.stride(0), w1.stride(0), w1_scales.stride(0),
            w3.stride(0), w3_scales.stride(0), limit, TOP_K=weights.shape[1], FP4=fp4, **asdict(tiles),
        )  # fmt: skip
    return h, h_scales


def expert_down(
    h_codes: Tensor, h_scales: Tensor, w2: Tensor, w2_scales: Tensor, plan: ExpertPlan, tiles: Tiles | None = None
) -> Tensor:
    """Quantised h [t*k, i] through w2 [e, d, i] -> float32 [t*k, d]. Raises ValueError."""
    (pairs, depth), (count, outputs) = h_codes.shape, w2.shape[:2]
    require(h_codes, "h_codes", torch.uint8, (plan.summands.numel(), None))
    require(h_scales, "h_scales", torch.uint8, (pairs, ceil_div(depth, 128)))
    fp4 = _is_fp4("w2", w2, w2_scales, count, outputs, depth)
    tiles = tiles or tiles_for_width(GPU_DOWN if fp4 else GPU_DOWN_FP8, outputs)
    _check_plan(plan, plan.summands.shape, tiles)
    y = torch.empty(pairs, outputs, dtype=torch.float32, device=h_codes.device)
    if y.numel():
        down_kernel[(plan.rows.shape[0], ceil_div(outputs, tiles.COLS))](
            h_codes, h_scales, w2, w2_scales, plan.rows, plan.block_expert, y, outputs, depth,
            h_codes.stride(0), h_scales.stride(0), w2.stride(0), w2_scales.stride(0), FP4=fp4, **asdict(tiles),
        )  # fmt: skip
    return y


def _is_fp4(name: str, w: Tensor, scales: Tensor, count: int, outputs: int, depth: int) -> bool:
    """Whether a weight is FP4: FP8 has a byte a channel. Raises ValueError where it is neither."""
    fp4 = w.shape[-1] != depth
    if fp4 and depth % 2:
        raise ValueError(f"{name} packs two channels a byte, and {depth} is odd")
    require(w, name, torch.uint8, (count, outputs, depth // 2 if fp4 else depth), dense=2)
    blocks = (outputs, ceil_div(depth, 32)) if fp4 else (ceil_div(outputs, 128), ceil_div(depth, 128))
    require(scales, f"{name}_scales", torch.uint8, (count, *blocks), dense=2)
    return fp4


def _check_plan(plan: ExpertPlan, shape: torch.Size, tiles: Tiles) -> None:
    require(plan.summands, "plan.summands", torch.int32, tuple(shape), dense=2)
    require(plan.rows, "plan.rows", torch.int32, (plan.block_expert.shape[0], tiles.ROWS), dense=2)
