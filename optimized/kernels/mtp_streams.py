"""Streams that the MTP block starts from: the projection of the embedded next token added to that of every stream.

Contract (docs/pool.md §9.7)
    e        bfloat16 [t, d], any row stride
    h        bfloat16 [t, s, d], contiguous
    streams  bfloat16 [t, s, d], contiguous, written whole; aliases neither input
    rounding e + h in float32, one rounding to bfloat16
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import ceil_div, power_of_two, require, tiles_for_mode
from .numeric import bf16_rn, bf16_up


@dataclass(frozen=True)
class Tiles:
    """ROWS tokens by COLS channels a program; powers of two."""

    ROWS: int
    COLS: int
    num_warps: int = 4


GPU = Tiles(ROWS=1, COLS=1024)
INTERPRETER = Tiles(ROWS=16, COLS=8192)


@triton.jit
def mtp_streams_kernel(e, h, streams, T, D, e_stride, STREAMS: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):
    t = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    d = tl.program_id(1) * COLS + tl.arange(0, COLS)[None, :]
    inside = (t < T) & (d < D)
    token = bf16_up(tl.load(e + t * e_stride + d, mask=inside, other=0.0))
    for s in tl.static_range(STREAMS):
        at = (t * STREAMS + s) * D + d
        tl.store(streams + at, bf16_rn(token + bf16_up(tl.load(h + at, mask=inside, other=0.0))), mask=inside)


def mtp_streams(e: Tensor, h: Tensor, tiles: Tiles | None = None) -> Tensor:
    """bfloat16 [t, d] and [t, s, d] -> bfloat16 [t, s, d]. Raises ValueError."""
    require(h, "h", torch.bfloat16, (None, None, None), dense=3)
    tokens, count, width = h.shape
    require(e, "e", torch.bfloat16, (tokens, width))
    tiles = tiles or tiles_for_mode(GPU, replace(INTERPRETER, COLS=min(INTERPRETER.COLS, power_of_two(max(width, 1)))))
    out = torch.empty_like(h)
    if out.numel():
        mtp_streams_kernel[(ceil_div(tokens, tiles.ROWS), ceil_div(width, tiles.COLS))](
            e, h, out, tokens, width, e.stride(0), STREAMS=count, **asdict(tiles)
        )
    return out
