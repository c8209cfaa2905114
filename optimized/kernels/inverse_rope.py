"""Inverse RoPE on an attention output that is already bfloat16. `decode_attention` can do it before it rounds at all.

Contract (docs/pool.md §8.3)
    x           bfloat16 [t, h, head_dim], any token stride, head and channel dense
    cos, sin    float32 [t, 32], of each query's own position
    out         bfloat16 [t, h, head_dim], dense in head and channel, written whole; may be x itself
    rounding  float32 inside, one bfloat16. Channels without rotation pass as they are.
Address products are 64 bit.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import ceil_div, power_of_two, require, tiles_for_mode
from .row_tiles import load_bf16_tile, rotate_tail, store_bf16_tile

ROPE = 64


@dataclass(frozen=True)
class Tiles:
    """ROWS heads a program, a power of two."""

    ROWS: int
    num_warps: int = 4


GPU = Tiles(ROWS=16)
INTERPRETER = Tiles(ROWS=256)


@triton.jit
def inverse_rope_kernel(
    x, cos, sin, out, T, H, x_stride, out_stride, HEAD_DIM: tl.constexpr, LANES: tl.constexpr, ROWS: tl.constexpr
):
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    live = row < T * H
    t = row // H
    y = load_bf16_tile(x, t * x_stride + row % H * HEAD_DIM, live, HEAD_DIM, LANES)
    y = rotate_tail(y, cos, sin, t, live, -1.0, HEAD_DIM, LANES)
    store_bf16_tile(out, t * out_stride + row % H * HEAD_DIM, live, y, HEAD_DIM, LANES)


def inverse_rope(x: Tensor, cos: Tensor, sin: Tensor, out: Tensor | None = None, *, tiles: Tiles | None = None) -> Tensor:
    """Rotate back the last 64 channels of bfloat16 [t, h, head_dim] into `out` (may be x), or a new tensor.

    Raises ValueError.
    """
    tokens, heads, head_dim = x.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out
    require(x, "x", torch.bfloat16, (None, None, None), dense=2)
    require(out, "out", torch.bfloat16, (tokens, heads, head_dim), dense=2)
    for name, tensor in (("cos", cos), ("sin", sin)):
        require(tensor, name, torch.float32, (tokens, ROPE // 2), dense=2)
    tiles = tiles or tiles_for_mode(GPU, INTERPRETER)
    if tokens:
        inverse_rope_kernel[(ceil_div(tokens * heads, tiles.ROWS),)](
            x, cos, sin, out, tokens, heads, x.stride(0), out.stride(0),
            HEAD_DIM=head_dim, LANES=power_of_two(head_dim), **asdict(tiles),
        )  # fmt: skip
    return out
