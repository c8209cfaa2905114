"""Index queries: RoPE, Hadamard rotation, FP4 or FP8; and the weights of the index heads.

Contract (docs/pool.md §8.5)
    q           bfloat16 [t, h, d], any token stride, head and channel dense; the output of the indexer's wq_b; d 64 or 128
    projected   float32 [t, h], any row stride; the output of weights_proj
    cos, sin    float32 [t, 32], of each token's own position
    codes       uint8 [t, h, d/2] packed E2M1, even channel in the low half, or [t, h, d] E4M3; contiguous, written whole
    scales      uint8 [t, h, d/32] or [t, h, 1]; byte = exponent + 127
    weights     float32 [t, h] = projected * (d^-0.5 * h^-0.5)
    rounding  float32 from q to the quantiser, one rounding there: per 32 to E2M1 with ties to the even code and amax floor
              6 * 2^-126, or per head to E4M3 with amax floor 1e-4. No norm. Weights: one float32 product with a float32
              factor.
A head that holds NaN or infinity gets scale byte 255 where it does.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import ceil_div, require, tiles_for_mode
from .row_tiles import encode_e2m1, encode_e4m3, hadamard, load_bf16_tile, rotate_tail

ROPE = 64


@dataclass(frozen=True)
class Tiles:
    """ROWS heads a program, a power of two."""

    ROWS: int
    num_warps: int = 4


GPU = Tiles(ROWS=32)
INTERPRETER = Tiles(ROWS=256)


@triton.jit
def index_query_kernel(
    q, projected, cos, sin, codes, scales, weights, T, H, q_stride, projected_stride, factor,
    FP4: tl.constexpr, LANES: tl.constexpr, STEPS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    live = row < T * H
    t, h = row // H, row % H
    weight = tl.load(projected + t * projected_stride + h, mask=live, other=0.0) * factor
    tl.store(weights + row, weight, mask=live)
    y = rotate_tail(load_bf16_tile(q, t * q_stride + h * LANES, live, LANES, LANES), cos, sin, t, live, 1.0, LANES, LANES)
    y = hadamard(y, LANES, STEPS)
    if FP4:
        code, scale = encode_e2m1(y, LANES)
        g = tl.arange(0, LANES // 32)[None, :]
        tl.store(codes + row[:, None] * (LANES // 2) + tl.arange(0, LANES // 2)[None, :], code, mask=live[:, None])
        tl.store(scales + row[:, None] * (LANES // 32) + g, scale, mask=live[:, None])
    else:
        code, scale = encode_e4m3(y, LANES)
        tl.store(codes + row[:, None] * LANES + tl.arange(0, LANES)[None, :], code, mask=live[:, None])
        tl.store(scales + row, scale, mask=live)


def index_query(
    q: Tensor, projected: Tensor, cos: Tensor, sin: Tensor, *, form: Literal["fp4", "fp8"], tiles: Tiles | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, scales and head weights of index queries; shapes and dtypes in the file's contract. Raises ValueError."""
    tokens, heads, width = q.shape
    require(q, "q", torch.bfloat16, (None, None, None), dense=2)
    require(projected, "projected", torch.float32, (tokens, heads))
    for name, tensor in (("cos", cos), ("sin", sin)):
        require(tensor, name, torch.float32, (tokens, ROPE // 2), dense=2)
    if width not in (64, 128):
        raise ValueError(f"index heads of {width} channels: 64 or 128 are possible")
    fp4 = form == "fp4"
    codes = torch.empty(tokens, heads, width // 2 if fp4 else width, dtype=torch.uint8, device=q.device)
    scales = torch.empty(tokens, heads, width // 32 if fp4 else 1, dtype=torch.uint8, device=q.device)
    weights = torch.empty(tokens, heads, dtype=torch.float32, device=q.device)
    tiles = tiles or tiles_for_mode(GPU, INTERPRETER)
    if tokens:
        index_query_kernel[(ceil_div(tokens * heads, tiles.ROWS),)](
            q, projected, cos, sin, codes, scales, weights, tokens, heads, q.stride(0), projected.stride(0),
            width**-0.5 * heads**-0.5, FP4=fp4, LANES=width, STEPS=width.bit_length() - 1, **asdict(tiles),
        )  # fmt: skip
    return codes, scales, weights
