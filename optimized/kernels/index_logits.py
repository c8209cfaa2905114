"""Scores of the indexer over paged keys: per head ReLU of the product, times the head's weight, summed over heads.

Contract (docs/pool.md §8.7)
    codes, scales  index queries as indexer.py leaves them: uint8 [t, h, d/2] and [t, h, d/32] (FP4), or [t, h, d] and
                   [t, h, 1] (FP8); contiguous; d 64 or 128
    weights        float32 [t, h], contiguous; any sign
    keys, key_scales  pages of one layer (`IndexPool.pages`): uint8 [blocks, ...] and uint8 (FP4) or float32 (FP8)
                   [blocks, ...], any block stride; `order` says where the bytes of a key lie in its page
    block_table    int32 [b, n], any row stride; key c of a sequence is row c % 64 of page block_table[b, c // 64]
    batch_ids      int32 [t], sequence of each token
    visible        int32 [t], keys that a token may see; 0 for a padded token, whose batch id is then never used
    out            float32 [t, columns]. Column c of token t is written if c < visible[t], else left as it was: who reads
                   out needs `visible` too. A token with visible > columns gets NaN everywhere instead of losing keys
    out[t,c] = sum_h weights[t,h] * max(<q[t,h], k[c]>, 0)
    rounding  code times scale is exact in bfloat16 (FP4); products accumulate in float32, in FP8 before both scales, which
              are powers of two; then ReLU, weight, and the sum over heads in float32. NaN passes the ReLU.
A program takes one token and COLS keys, all heads at once: tiles do not depend on the batch. Address products are 64 bit.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from .index_layout import ORDERS, PAGE_ROWS, key_at, require_pages, scale_at
from .launch import ceil_div, power_of_two, require, tiles_for_mode
from .numeric import bf16_rn, e2m1_up, e8m0_up, mma_bf16, mma_fp8


@dataclass(frozen=True)
class Tiles:
    """COLS keys a program; a power of two, at least 16."""

    COLS: int
    num_warps: int = 4


GPU = Tiles(COLS=64)
INTERPRETER = Tiles(COLS=1024)


@triton.jit
def dequantize_fp4(packed, scale, LANES: tl.constexpr):
    """Packed codes [n, LANES / 2] and scale bytes [n, LANES / 32] -> bfloat16 [n, LANES], exact."""
    value = e2m1_up(tl.join(packed & 15, packed >> 4)).reshape(packed.shape[0], LANES // 32, 32)
    return bf16_rn(value * e8m0_up(scale)[:, :, None]).reshape(packed.shape[0], LANES)


@triton.jit
def index_logits_kernel(
    codes, scales, weights, keys, key_scales, keys_stride, scales_stride, block_table, table_stride, batch_ids, visible,
    out, H, columns, FP4: tl.constexpr, ORDER: tl.constexpr, LANES: tl.constexpr, HEADS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    BYTES: tl.constexpr = LANES // 2 if FP4 else LANES
    GROUPS: tl.constexpr = LANES // 32 if FP4 else 1
    t = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * COLS + tl.arange(0, COLS)
    limit = tl.load(visible + t)
    live = c < tl.minimum(limit, columns)
    if tl.program_id(1) * COLS < limit:
        sequence = tl.load(batch_ids + t).to(tl.int64)
        block = tl.load(block_table + sequence * table_stride + c // 64, mask=live, other=0).to(tl.int64)
        r = (c % 64)[:, None]
        j, g, h = tl.arange(0, BYTES)[None, :], tl.arange(0, GROUPS)[None, :], tl.arange(0, HEADS)
        head = (t * H + h)[:, None]
        query = tl.load(codes + head * BYTES + j, mask=(h < H)[:, None], other=0)
        query_scale = tl.load(scales + head * GROUPS + g, mask=(h < H)[:, None], other=0)
        key = tl.load(keys + block[:, None] * keys_stride + key_at(r, j, BYTES, ORDER), mask=live[:, None], other=0)
        at = block[:, None] * scales_stride + scale_at(r, g, GROUPS, ORDER)
        key_scale = tl.load(key_scales + at, mask=live[:, None], other=0)
        zeros = tl.zeros((HEADS, COLS), tl.float32)
        if FP4:
            q, k = dequantize_fp4(query, query_scale, LANES), dequantize_fp4(key, key_scale, LANES)
            dot = mma_bf16(q, tl.trans(k), zeros)
        else:
            dot = mma_fp8(query, tl.trans(key), zeros) * (e8m0_up(query_scale) * tl.trans(key_scale))
        weight = tl.load(weights + t * H + h, mask=h < H, other=0.0)
        score = tl.sum(tl.where(dot < 0, 0.0, dot) * weight[:, None], 0)
        score = tl.where(limit > columns, float("nan"), score)
        tl.store(out + t * columns + c, score, mask=live)


def index_logits(
    codes: Tensor,
    scales: Tensor,
    weights: Tensor,
    keys: Tensor,
    key_scales: Tensor,
    block_table: Tensor,
    batch_ids: Tensor,
    visible: Tensor,
    *,
    columns: int,
    order: str = "natural",
    tiles: Tiles | None = None,
) -> Tensor:
    """Scores float32 [t, columns], valid where visible; shapes and dtypes in the file's contract. Raises ValueError.

    `columns` is the largest number of visible keys, or any number above it.
    """
    tokens, heads = weights.shape
    width = codes.shape[2] * (2 if key_scales.dtype == torch.uint8 else 1)
    fp4 = require_pages(keys, key_scales, order, width)
    require(codes, "codes", torch.uint8, (tokens, heads, width // 2 if fp4 else width), dense=3)
    require(scales, "scales", torch.uint8, (tokens, heads, width // 32 if fp4 else 1), dense=3)
    require(weights, "weights", torch.float32, (tokens, heads), dense=2)
    require(block_table, "block_table", torch.int32, (None, None))
    require(batch_ids, "batch_ids", torch.int32, (tokens,))
    require(visible, "visible", torch.int32, (tokens,))
    if columns > block_table.shape[1] * PAGE_ROWS:
        raise ValueError(f"{columns} columns, but {block_table.shape[1]} pages a sequence")
    out = torch.empty(tokens, columns, dtype=torch.float32, device=codes.device)
    tiles = tiles or tiles_for_mode(GPU, INTERPRETER)
    if tokens and columns:
        index_logits_kernel[(tokens, ceil_div(columns, tiles.COLS))](
            codes, scales, weights, keys, key_scales, keys.stride(0), key_scales.stride(0),
            block_table, block_table.stride(0), batch_ids, visible, out, heads, columns,
            FP4=fp4, ORDER=ORDERS[order], LANES=width, HEADS=max(16, power_of_two(heads)), **asdict(tiles),
        )  # fmt: skip
    return out
