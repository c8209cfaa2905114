"""Clamped SwiGLU and its quantiser: w1 and w3 products in, E4M3 codes per 128 out. For the shared expert.

Contract (docs/pool.md §9.5)
    gate, up  bfloat16 [t, i], any row stride
    codes     uint8 [t, i], scales uint8 [t, ceil(i/128)], contiguous, written whole
    rounding  silu(min(gate, limit)) * clamp(up, -limit, limit) in float32, straight into E4M3 as §6.1
Inputs are read only. What is not a number stays so, and makes its block one of NaN codes.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import ceil_div, power_of_two, require, tiles_for_mode
from .numeric import bf16_up
from .quantize import BLOCK, quantize_tile


@dataclass(frozen=True)
class Tiles:
    """ROWS tokens and GROUPS blocks of 128 channels a program; powers of two."""

    ROWS: int
    GROUPS: int
    num_warps: int = 4


GPU = Tiles(ROWS=16, GROUPS=1)


@triton.jit
def clamped_swiglu(gate, up, limit):
    """The gate is clamped from above only, up on both sides; comparisons let NaN through."""
    gate = tl.where(gate > limit, limit, gate)
    up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
    return gate / (1.0 + tl.exp(-gate)) * up


@triton.jit
def swiglu_kernel(
    gate, up, codes, scales, T, N, gate_stride, up_stride, limit, ROWS: tl.constexpr, GROUPS: tl.constexpr
):  # fmt: skip
    t = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    n = tl.program_id(1) * GROUPS * 128 + tl.arange(0, GROUPS * 128)
    inside = (t < T)[:, None] & (n < N)[None, :]
    a = bf16_up(tl.load(gate + t[:, None] * gate_stride + n[None, :], mask=inside, other=0.0))
    b = bf16_up(tl.load(up + t[:, None] * up_stride + n[None, :], mask=inside, other=0.0))
    code, scale = quantize_tile(clamped_swiglu(a, b, limit), ROWS, GROUPS)
    tl.store(codes + t[:, None] * N + n[None, :], code, mask=inside)
    blocks = (N + 127) // 128
    g = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    tl.store(scales + t[:, None] * blocks + g[None, :], scale, mask=(t < T)[:, None] & (g < blocks)[None, :])


def swiglu_quantize(gate: Tensor, up: Tensor, limit: float, tiles: Tiles | None = None) -> tuple[Tensor, Tensor]:
    """bfloat16 [t, i] twice -> codes uint8 [t, i] and scale bytes uint8 [t, ceil(i/128)]. Raises ValueError."""
    require(gate, "gate", torch.bfloat16, (None, None))
    require(up, "up", torch.bfloat16, tuple(gate.shape))
    tokens, width = gate.shape
    tiles = tiles or tiles_for_mode(GPU, Tiles(ROWS=16, GROUPS=min(power_of_two(ceil_div(max(width, 1), BLOCK)), 64)))
    codes = torch.empty(tokens, width, dtype=torch.uint8, device=gate.device)
    scales = torch.empty(tokens, ceil_div(width, BLOCK), dtype=torch.uint8, device=gate.device)
    if codes.numel():
        swiglu_kernel[(ceil_div(tokens, tiles.ROWS), ceil_div(width, BLOCK * tiles.GROUPS))](
            gate, up, codes, scales, tokens, width, gate.stride(0), up.stride(0), limit, **asdict(tiles)
        )
    return codes, scales
