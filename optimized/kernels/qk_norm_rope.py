"""Queries and window rows of a step: norms, RoPE and the one rounding of each, straight into the pool if wanted.

Contract (docs/pool.md §8.1)
    q           bfloat16 [t, h, head_dim], any token stride, head and channel dense; the output of wq_b
    kv          bfloat16 [t, head_dim], any row stride; the output of wkv
    kv_weight   float32 [head_dim]
    cos, sin    float32 [t, 32], of each token's own position
    q_out       bfloat16 [t, h, head_dim], contiguous, written whole
    main, rope  payload, a row a token, written whole: uint8 [t, head_dim] and bfloat16 [t, 64] (2buff), or bfloat16
                [t, head_dim] and None (bf16 build). May be views of the pool
    destination int64 [t]: payload row of token t; -1: the token writes none. None: row t
    rounding  float32 inside. q: norm of each head without weight, RoPE, one bfloat16. kv: norm with weight, RoPE, then 2buff
              (E4M3 per 64, amax floor 1e-4, rotated channels one bfloat16) or one bfloat16.
No two tokens may name one destination. Inputs are read only; outputs alias nothing. Address products are 64 bit.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import ceil_div, power_of_two, require, tiles_for_mode
from .row_tiles import inverse_rms, load_bf16_tile, rotate_tail, store_2buff_tile, store_bf16_tile

ROPE = 64


@dataclass(frozen=True)
class Tiles:
    """ROWS rows a program: heads of queries, or tokens of window rows. A power of two."""

    ROWS: int
    num_warps: int = 4


GPU = Tiles(ROWS=16)
INTERPRETER = Tiles(ROWS=256)


@triton.jit
def qk_norm_rope_kernel(
    q, kv, kv_weight, cos, sin, eps, q_out, main, rope, destination, T, H, q_stride, kv_stride, main_stride, rope_stride,
    BF16: tl.constexpr, HEAD_DIM: tl.constexpr, LANES: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """The first programs take ROWS query heads each, the others ROWS window rows each."""
    query_programs = tl.cdiv(T * H, ROWS)
    program = tl.program_id(0)
    if program < query_programs:
        row = (program * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        live = row < T * H
        t = row // H
        x = load_bf16_tile(q, t * q_stride + row % H * HEAD_DIM, live, HEAD_DIM, LANES)
        y = rotate_tail(x * inverse_rms(x, eps, HEAD_DIM), cos, sin, t, live, 1.0, HEAD_DIM, LANES)
        store_bf16_tile(q_out, row * HEAD_DIM, live, y, HEAD_DIM, LANES)
    else:
        t = ((program - query_programs) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        d = tl.arange(0, LANES)
        x = load_bf16_tile(kv, t * kv_stride, t < T, HEAD_DIM, LANES)
        weight = tl.load(kv_weight + d, mask=d < HEAD_DIM, other=0.0)
        y = weight[None, :] * (x * inverse_rms(x, eps, HEAD_DIM))
        y = rotate_tail(y, cos, sin, t, t < T, 1.0, HEAD_DIM, LANES)
        row = tl.load(destination + t, mask=t < T, other=-1)
        if BF16:
            store_bf16_tile(main, row * main_stride, row >= 0, y, HEAD_DIM, LANES)
        else:
            store_2buff_tile(main, rope, row * main_stride, row * rope_stride, row >= 0, y, HEAD_DIM, LANES)


def require_rows(main: Tensor, rope: Tensor | None, head_dim: int, name: str = "rows") -> None:
    """Raise ValueError unless these are planes of 2buff rows, or of bfloat16 rows if `rope` is None."""
    if rope is None:
        require(main, name, torch.bfloat16, (None, head_dim))
        return
    require(main, f"{name} (codes and scales)", torch.uint8, (None, head_dim))
    require(rope, f"{name} (rotated channels)", torch.bfloat16, (main.shape[0], ROPE))


def payload_like(kv: Tensor, build: str) -> tuple[Tensor, Tensor | None]:
    """Room for one row a token, [t, head_dim] as in the pool of this build."""
    tokens, head_dim = kv.shape
    if build == "bf16":
        return torch.empty(tokens, head_dim, dtype=torch.bfloat16, device=kv.device), None
    main = torch.empty(tokens, head_dim, dtype=torch.uint8, device=kv.device)
    return main, torch.empty(tokens, ROPE, dtype=torch.bfloat16, device=kv.device)


def qk_norm_rope(
    q: Tensor,
    kv: Tensor,
    kv_weight: Tensor,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    main: Tensor,
    rope: Tensor | None,
    destination: Tensor | None = None,
    *,
    tiles: Tiles | None = None,
) -> Tensor:
    """Rotated queries bfloat16 [t, h, head_dim]; window rows go to `main` and `rope`. Raises ValueError."""
    tokens, heads, head_dim = q.shape
    require(q, "q", torch.bfloat16, (None, None, None), dense=2)
    require(kv, "kv", torch.bfloat16, (tokens, head_dim))
    require(kv_weight, "kv_weight", torch.float32, (head_dim,))
    for name, tensor in (("cos", cos), ("sin", sin)):
        require(tensor, name, torch.float32, (tokens, ROPE // 2), dense=2)
    require_rows(main, rope, head_dim)
    if head_dim % 64 or (destination is None and main.shape[0] < tokens):
        raise ValueError(f"head_dim {head_dim} is no multiple of 64, or {main.shape[0]} rows do not hold {tokens} tokens")
    if destination is None:
        destination = torch.arange(tokens, device=q.device)
    require(destination, "destination", torch.int64, (tokens,))
    tiles = tiles or tiles_for_mode(GPU, INTERPRETER)
    q_out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    rope_plane = main if rope is None else rope
    if tokens:
        grid = (ceil_div(tokens * heads, tiles.ROWS) + ceil_div(tokens, tiles.ROWS),)
        qk_norm_rope_kernel[grid](
            q, kv, kv_weight, cos, sin, eps, q_out, main, rope_plane, destination, tokens, heads,
            q.stride(0), kv.stride(0), main.stride(0), rope_plane.stride(0),
            BF16=rope is None, HEAD_DIM=head_dim, LANES=power_of_two(head_dim), **asdict(tiles),
        )  # fmt: skip
    return q_out
