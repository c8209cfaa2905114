"""Sparse decode attention over rows of the pool: one key-value head, a sink per head, split along the rows.

Contract (docs/pool.md §6.5)
    q                     bfloat16 [t, h, head_dim], contiguous, rotated
    main_rows, rope_rows  uint8 [r, head_dim], bfloat16 [r, 64]: 2buff planes from the layer's base, any row stride; or
                          bfloat16 [r, head_dim] and None: the bf16 build
    indices, indptr       int32 [n], int32 [t + 1]: token t attends to rows indices[indptr[t]:indptr[t+1]], all valid;
                          an empty slice (a padded token) gives exact zeros
    sink                  float32 [h]
    cos, sin              float32 [t, 32] of each token's own position, or None: without them nothing is rotated back
    out                   bfloat16 [t, h, head_dim], written whole. Rows that no list names are never read
    out[t,h] = sum_j e^(s_j - M) row_j / (sum_j e^(s_j - M) + e^(sink_h - M)),  s_j = scale <q, row_j>,  M = max_j s_j,
    then the inverse RoPE of its last 64 channels
    rounding  code times scale is exact in bfloat16; products accumulate in float32; the numerator uses e^(s - m) rounded
              to bfloat16 (m: running maximum), the denominator sums it unrounded; one division, the inverse rotation in
              float32, and one rounding to bfloat16 at the end.
Every token's list is cut in parts of SPLIT rows from its start, a part in tiles of ROWS: constants of the variant, so
the bits depend neither on the other tokens nor on their number. Parts meet in ascending order. Address products are
64 bit.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import ceil_div, power_of_two, require, tiles_for_mode
from .numeric import bf16_rn, e4m3_up, e8m0_up, mma_bf16
from .qk_norm_rope import require_rows
from .row_tiles import rotate_tail

ROPE = 64


@dataclass(frozen=True)
class Tiles:
    """HEADS heads by ROWS rows a step, SPLIT rows a program, JOIN heads where parts meet; powers of two.

    HEADS and ROWS are at least 16.
    """

    HEADS: int
    ROWS: int
    SPLIT: int
    JOIN: int = 4
    num_warps: int = 8
    num_stages: int = 1


@triton.jit
def load_rows(main, rope, live, BF16: tl.constexpr, HEAD_DIM: tl.constexpr, LANES: tl.constexpr):
    """Pointers to rows [n, 1] in both planes -> bfloat16 [n, LANES], exact; lanes past HEAD_DIM and dead rows are 0."""
    NOPE: tl.constexpr = HEAD_DIM - 64
    GROUPS: tl.constexpr = LANES // 64
    d = tl.arange(0, LANES)[None, :]
    tile = tl.arange(0, GROUPS)[None, :]
    if BF16:
        rows = tl.load(main + d, mask=live[:, None] & (d < HEAD_DIM), other=0.0)
    else:
        code = tl.load(main + d, mask=live[:, None] & (d < NOPE), other=0)
        scale = tl.load(main + NOPE + 2 * tile, mask=live[:, None] & (tile < NOPE // 64), other=0)
        values = e4m3_up(code).reshape(live.shape[0], GROUPS, 64) * e8m0_up(scale)[:, :, None]
        rotated = tl.load(rope + (d - NOPE), mask=live[:, None] & (d >= NOPE) & (d < HEAD_DIM), other=0.0)
        rows = tl.where(d < NOPE, bf16_rn(values.reshape(live.shape[0], LANES)), rotated)
    return rows


@triton.jit
def attend_kernel(
    q, main_rows, rope_rows, main_stride, rope_stride, step_main, step_rope, step_main_stride, step_rope_stride,
    indices, indptr, scale, part_acc, part_max, part_sum, H, BF16: tl.constexpr, TWO_SOURCES: tl.constexpr,
    HEAD_DIM: tl.constexpr, LANES: tl.constexpr, HEADS: tl.constexpr, ROWS: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """One part of one token's list for HEADS heads: numerator, maximum and denominator, all float32.

    With two sources, index -1 - r names row r of this step's payload.
    """
    t, part, parts = tl.program_id(0).to(tl.int64), tl.program_id(2), tl.num_programs(2)
    start = tl.load(indptr + t) + part * SPLIT
    end = tl.load(indptr + t + 1)
    if start < end:
        h = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
        d = tl.arange(0, LANES)
        whole = (h < H)[:, None] & (d < HEAD_DIM)[None, :]
        query = tl.load(q + (t * H + h)[:, None] * HEAD_DIM + d[None, :], mask=whole, other=0.0)
        peak = tl.full((HEADS,), float("-inf"), tl.float32)
        total = tl.zeros((HEADS,), tl.float32)
        acc = tl.zeros((HEADS, LANES), tl.float32)
        for first in range(start, tl.minimum(end, start + SPLIT), ROWS):
            j = first + tl.arange(0, ROWS)
            live = j < tl.minimum(end, start + SPLIT)
            row = tl.load(indices + j, mask=live, other=0).to(tl.int64)
            main, rope = main_rows + row[:, None] * main_stride, rope_rows + row[:, None] * rope_stride
            if TWO_SOURCES:
                fresh, step_row = (row < 0)[:, None], (-1 - row)[:, None]
                main = tl.where(fresh, step_main + step_row * step_main_stride, main)
                rope = tl.where(fresh, step_rope + step_row * step_rope_stride, rope)
            rows = load_rows(main, rope, live, BF16, HEAD_DIM, LANES)
            s = mma_bf16(query, tl.trans(rows), tl.zeros((HEADS, ROWS), tl.float32)) * scale
            s = tl.where(live[None, :], s, float("-inf"))
            new_peak = tl.maximum(peak, tl.max(s, 1))
            p = tl.exp(s - new_peak[:, None])
            carry = tl.exp(peak - new_peak)
            total = total * carry + tl.sum(p, 1)
            acc = mma_bf16(bf16_rn(p), rows, acc * carry[:, None])
            peak = new_peak
        at = (t * parts + part) * H + h
        tl.store(part_acc + at[:, None] * HEAD_DIM + d[None, :], acc, mask=whole)
        tl.store(part_max + at, peak, mask=h < H)
        tl.store(part_sum + at, total, mask=h < H)


@triton.jit
def combine_kernel(
    part_acc, part_max, part_sum, indptr, sink, cos, sin, out, parts, H, TURN: tl.constexpr,
    HEAD_DIM: tl.constexpr, LANES: tl.constexpr, JOIN: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Join the parts of one token for JOIN heads, add the sink to the denominator, divide, rotate back."""
    t = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * JOIN + tl.arange(0, JOIN)
    d = tl.arange(0, LANES)
    head = h < H
    whole = head[:, None] & (d < HEAD_DIM)[None, :]
    used = tl.cdiv(tl.load(indptr + t + 1) - tl.load(indptr + t), SPLIT)
    peak = tl.full((JOIN,), float("-inf"), tl.float32)
    for part in range(0, tl.minimum(used, parts)):
        peak = tl.maximum(peak, tl.load(part_max + (t * parts + part) * H + h, mask=head, other=0.0))
    total = tl.exp(tl.load(sink + h, mask=head, other=0.0) - peak)
    acc = tl.zeros((JOIN, LANES), tl.float32)
    for part in range(0, tl.minimum(used, parts)):
        at = (t * parts + part) * H + h
        share = tl.exp(tl.load(part_max + at, mask=head, other=0.0) - peak)
        total += tl.load(part_sum + at, mask=head, other=0.0) * share
        acc += tl.load(part_acc + at[:, None] * HEAD_DIM + d[None, :], mask=whole, other=0.0) * share[:, None]
    result = tl.where(used > 0, tl.div_rn(acc, tl.broadcast_to(total[:, None], (JOIN, LANES))), 0.0)
    result = tl.where(used > parts, float("nan"), result)  # `longest` was too small: rows are missing
    if TURN:
        token = t + tl.zeros((JOIN,), tl.int64)
        result = rotate_tail(result, cos, sin, token, head, -1.0, HEAD_DIM, LANES)
    tl.store(out + (t * H + h)[:, None] * HEAD_DIM + d[None, :], bf16_rn(result), mask=whole)


def tiles_for_heads(heads: int) -> Tiles:
    """Tiles of this mode for a model with this many heads."""
    rounded = max(power_of_two(heads), 16)
    gpu = Tiles(HEADS=min(rounded, 32), ROWS=16, SPLIT=256)
    whole = min(rounded, 128)
    return tiles_for_mode(gpu, Tiles(HEADS=whole, ROWS=128, SPLIT=256, JOIN=whole))


@dataclass(frozen=True)
class Lists:
    """What tokens attend to: `indices` int32 [n] and `indptr` int32 [t + 1] as CSR, and a bound on the slices' lengths."""

    indices: Tensor
    indptr: Tensor
    longest: int


def list_of(tokens: int, indices: Tensor, indptr: Tensor, longest: int | None) -> Lists:
    """The lists, checked; without `longest` they are asked. Raises ValueError."""
    require(indices, "indices", torch.int32, (None,))
    require(indptr, "indptr", torch.int32, (tokens + 1,))
    if longest is None:
        longest = int(indptr.diff().max()) if tokens else 0
    return Lists(indices, indptr, longest)


def check_attention(q: Tensor, sink: Tensor, cos: Tensor | None, sin: Tensor | None) -> None:
    """Raise ValueError unless these fit together as the contract says."""
    tokens, heads, head_dim = q.shape
    require(q, "q", torch.bfloat16, (None, None, None), dense=3)
    require(sink, "sink", torch.float32, (heads,))
    if head_dim % 64 or (cos is None) != (sin is None):
        raise ValueError(f"head_dim {head_dim} is no multiple of 64, or only one of cos and sin is given")
    for name, tensor in (("cos", cos), ("sin", sin)):
        if tensor is not None:
            require(tensor, name, torch.float32, (tokens, ROPE // 2), dense=2)


def attend(
    q: Tensor,
    pool: tuple[Tensor, Tensor | None],
    step: tuple[Tensor, Tensor | None] | None,
    lists: Lists,
    sink: Tensor,
    turn: tuple[Tensor, Tensor] | None,
    out: Tensor,
    scale: float,
    tiles: Tiles,
) -> None:
    """Both kernels over checked arguments. `pool` and `step`: main and rope rows of each source; `turn`: cos and sin."""
    tokens, heads, head_dim = q.shape
    parts = max(1, ceil_div(lists.longest, tiles.SPLIT))
    part_acc = torch.empty(tokens, parts, heads, head_dim, dtype=torch.float32, device=q.device)
    part_max, part_sum = torch.empty(2, tokens, parts, heads, dtype=torch.float32, device=q.device)
    planes = [main if rope is None else rope for main, rope in (pool, step or pool)]
    mains = [pool[0], (step or pool)[0]]
    if tokens:
        lanes = power_of_two(head_dim)
        attend_kernel[(tokens, ceil_div(heads, tiles.HEADS), parts)](
            q, mains[0], planes[0], mains[0].stride(0), planes[0].stride(0),
            mains[1], planes[1], mains[1].stride(0), planes[1].stride(0), lists.indices, lists.indptr, scale,
            part_acc, part_max, part_sum, heads, BF16=pool[1] is None, TWO_SOURCES=step is not None,
            HEAD_DIM=head_dim, LANES=lanes, HEADS=tiles.HEADS, ROWS=tiles.ROWS,
            SPLIT=tiles.SPLIT, num_warps=tiles.num_warps, num_stages=tiles.num_stages,
        )  # fmt: skip
        cos, sin = turn or (sink, sink)
        combine_kernel[(tokens, ceil_div(heads, tiles.JOIN))](
            part_acc, part_max, part_sum, lists.indptr, sink, cos, sin, out, parts, heads, TURN=turn is not None,
            HEAD_DIM=head_dim, LANES=lanes, JOIN=tiles.JOIN, SPLIT=tiles.SPLIT,
        )  # fmt: skip


def decode_attention(
    q: Tensor,
    main_rows: Tensor,
    rope_rows: Tensor | None,
    indices: Tensor,
    indptr: Tensor,
    sink: Tensor,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    *,
    scale: float,
    longest: int | None = None,
    tiles: Tiles | None = None,
) -> Tensor:
    """Attention output bfloat16 [t, h, head_dim]; shapes and dtypes in the file's contract. Raises ValueError.

    `longest` is the largest slice length, or any number above it; without it the lists are asked. If it is too small,
    the tokens it cuts come out as NaN.
    """
    check_attention(q, sink, cos, sin)
    require_rows(main_rows, rope_rows, q.shape[2])
    lists = list_of(q.shape[0], indices, indptr, longest)
    turn = None if cos is None or sin is None else (cos, sin)
    out = torch.empty_like(q)
    tiles = tiles or tiles_for_heads(q.shape[1])
    attend(q, (main_rows, rope_rows), None, lists, sink, turn, out, scale, tiles)
    return out
