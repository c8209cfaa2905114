"""Embedding: rows of a table into the residual streams, each token's row into every stream.

Contract (docs/pool.md §9.6)
    table    bfloat16 [v, d], any row stride
    ids      int64 [t]; -1: padding, whose streams are 0. Ids are checked by whoever holds them: one past the table
             reads past it
    streams  bfloat16 [t, s, d], contiguous, written whole
    rounding none; bytes are moved
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import ceil_div, power_of_two, require, tiles_for_mode


@dataclass(frozen=True)
class Tiles:
    """ROWS tokens by COLS channels a program; powers of two."""

    ROWS: int
    COLS: int
    num_warps: int = 4


GPU = Tiles(ROWS=1, COLS=1024)
INTERPRETER = Tiles(ROWS=16, COLS=8192)


@triton.jit
def embed_kernel(table, ids, streams, T, D, table_stride, STREAMS: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):
    t = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    d = tl.program_id(1) * COLS + tl.arange(0, COLS)[None, :]
    token = tl.load(ids + t, mask=t < T, other=-1)[:, None]
    row = tl.load(table + token * table_stride + d, mask=(token >= 0) & (d < D), other=0.0)
    for s in tl.static_range(STREAMS):
        tl.store(streams + (t[:, None] * STREAMS + s) * D + d, row, mask=(t < T)[:, None] & (d < D))


def embed(table: Tensor, ids: Tensor, streams: int, tiles: Tiles | None = None) -> Tensor:
    """Rows of table [v, d] by ids [t] -> bfloat16 [t, streams, d]. Raises ValueError."""
    require(table, "table", torch.bfloat16, (None, None))
    require(ids, "ids", torch.int64, (None,))
    tokens, width = ids.shape[0], table.shape[1]
    tiles = tiles or tiles_for_mode(GPU, replace(INTERPRETER, COLS=min(INTERPRETER.COLS, power_of_two(max(width, 1)))))
    out = torch.empty(tokens, streams, width, dtype=torch.bfloat16, device=table.device)
    if out.numel():
        embed_kernel[(ceil_div(tokens, tiles.ROWS), ceil_div(width, tiles.COLS))](
            table, ids, out, tokens, width, table.stride(0), STREAMS=streams, **asdict(tiles)
        )
    return out
