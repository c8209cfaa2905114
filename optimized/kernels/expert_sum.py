"""Sum of a token's experts: routed ones by ascending number, the shared one last.

Contract (docs/pool.md §9.5)
    y         float32 [t*k, d], a row a pair, any row stride; shared float32 [t, d], any row stride
    summands  int32 [t, k]: a token's rows of y in the order of the sum; -1: left out
    out       bfloat16 [t, d], contiguous, written whole
    rounding  float32 sum from 0, one rounding to bfloat16. Rows that are not named are not read.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import ceil_div, power_of_two, require, tiles_for_mode
from .numeric import bf16_rn


@dataclass(frozen=True)
class Tiles:
    """ROWS tokens by COLS channels a program; powers of two."""

    ROWS: int
    COLS: int
    num_warps: int = 4


GPU = Tiles(ROWS=1, COLS=1024)
INTERPRETER = Tiles(ROWS=16, COLS=8192)


@triton.jit
def sum_kernel(
    y, summands, shared, out, T, D, y_stride, shared_stride, K: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr
):  # fmt: skip
    t = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    d = tl.program_id(1) * COLS + tl.arange(0, COLS)[None, :]
    inside = (t < T)[:, None] & (d < D)
    total = tl.zeros((ROWS, COLS), tl.float32)
    for k in range(K):
        pair = tl.load(summands + t * K + k, mask=t < T, other=-1).to(tl.int64)[:, None]
        total += tl.load(y + pair * y_stride + d, mask=inside & (pair >= 0), other=0.0)
    total += tl.load(shared + t[:, None] * shared_stride + d, mask=inside, other=0.0)
    tl.store(out + t[:, None] * D + d, bf16_rn(total), mask=inside)


def sum_experts(y: Tensor, summands: Tensor, shared: Tensor, tiles: Tiles | None = None) -> Tensor:
    """float32 [t*k, d] by int32 [t, k], plus float32 [t, d] -> bfloat16 [t, d]. Raises ValueError."""
    require(shared, "shared", torch.float32, (None, None))
    tokens, width = shared.shape
    require(summands, "summands", torch.int32, (tokens, None), dense=2)
    require(y, "y", torch.float32, (summands.numel(), width))
    tiles = tiles or tiles_for_mode(GPU, replace(INTERPRETER, COLS=min(INTERPRETER.COLS, power_of_two(max(width, 1)))))
    out = torch.empty(tokens, width, dtype=torch.bfloat16, device=shared.device)
    if out.numel():
        sum_kernel[(ceil_div(tokens, tiles.ROWS), ceil_div(width, tiles.COLS))](
            y, summands, shared, out, tokens, width, y.stride(0), shared.stride(0), K=summands.shape[1], **asdict(tiles)
        )
    return out
