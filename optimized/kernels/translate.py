"""From picks to pool rows: write the compressed part of each token's attention list.

Contract (docs/pool.md §8.9)
    picks          int32 [t, k], compressed entries of the token's sequence, any row stride; what lies past a token's count
                   is never used and may hold anything
    positions, batch_ids  int32 [t]; batch id -1: a padded token, nothing is written
    block_table    int32 [b, n], any row stride
    indptr         int32 [t + 1]; token t's slice is [count compressed rows | min(position + 1, window) window rows], so
                   count = slice length - min(position + 1, window): the only guard
    indices        int32 [n], written in place, the compressed part of every slice alone:
                   indices[indptr[t] + j] = block_table[batch, picks[t, j] // block_rows] * envelope + picks[t, j] % block_rows
Row numbers count from the layer's base and fit 32 bits.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import ceil_div, require, tiles_for_mode


@dataclass(frozen=True)
class Tiles:
    """ROWS tokens by COLS picks a program, powers of two."""

    ROWS: int
    COLS: int
    num_warps: int = 4


GPU = Tiles(ROWS=16, COLS=64)
INTERPRETER = Tiles(ROWS=64, COLS=1024)


@triton.jit
def translate_kernel(
    picks, positions, batch_ids, block_table, indptr, indices, T, K, picks_stride, table_stride, window, envelope, block_rows,
    ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    t = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    j = tl.program_id(1) * COLS + tl.arange(0, COLS)[None, :]
    sequence = tl.load(batch_ids + t, mask=t < T, other=-1).to(tl.int64)
    live = sequence >= 0
    start = tl.load(indptr + t, mask=live, other=0)
    in_window = tl.minimum(tl.load(positions + t, mask=live, other=0) + 1, window)
    count = tl.load(indptr + t + 1, mask=live, other=0) - start - in_window
    mask = live[:, None] & (j < tl.minimum(count, K)[:, None])
    entry = tl.load(picks + t[:, None] * picks_stride + j, mask=mask, other=0)
    block = tl.load(block_table + sequence[:, None] * table_stride + entry // block_rows, mask=mask, other=0)
    tl.store(indices + start[:, None] + j, block * envelope + entry % block_rows, mask=mask)


def translate(
    picks: Tensor,
    positions: Tensor,
    batch_ids: Tensor,
    block_table: Tensor,
    indptr: Tensor,
    indices: Tensor,
    *,
    window: int,
    envelope: int,
    block_rows: int,
    tiles: Tiles | None = None,
) -> None:
    """Write the compressed part of the lists; shapes and dtypes in the file's contract. Raises ValueError.

    `envelope` is the rows of a block over all layers, `block_rows` those of one layer.
    """
    tokens, k = picks.shape
    require(picks, "picks", torch.int32, (None, None))
    for name, tensor in (("positions", positions), ("batch_ids", batch_ids)):
        require(tensor, name, torch.int32, (tokens,))
    require(block_table, "block_table", torch.int32, (None, None))
    require(indptr, "indptr", torch.int32, (tokens + 1,))
    require(indices, "indices", torch.int32, (None,))
    tiles = tiles or tiles_for_mode(GPU, INTERPRETER)
    if tokens and k:
        translate_kernel[(ceil_div(tokens, tiles.ROWS), ceil_div(k, tiles.COLS))](
            picks, positions, batch_ids, block_table, indptr, indices, tokens, k, picks.stride(0), block_table.stride(0),
            window, envelope, block_rows, **asdict(tiles),
        )  # fmt: skip
