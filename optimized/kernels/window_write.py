"""Window write: copy rows of a step into the window rings of their sequences, after attention has read the old ones.

Contract (docs/pool.md §8.2)
    main, rope            payload of a step, a row a token, as qk_norm_rope leaves it: uint8 [t, head_dim] and bfloat16
                          [t, 64] (2buff), or bfloat16 [t, head_dim] and None (bf16 build); any row stride
    main_rows, rope_rows  the same planes of the pool, [r, ...], from the layer's base, any row stride
    destination           int64 [t], pool row of each token; -1: the token is not written
Bytes are copied as they are; nothing rounds. No two tokens may name one row: of a sequence that grows by n tokens only the
last min(n, ring) have one (`last_writes`). Source and pool do not overlap. Address products are 64 bit.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import ceil_div, power_of_two, require, tiles_for_mode
from .qk_norm_rope import require_rows


@dataclass(frozen=True)
class Tiles:
    """ROWS tokens a program, a power of two."""

    ROWS: int
    num_warps: int = 4


GPU = Tiles(ROWS=16)
INTERPRETER = Tiles(ROWS=256)


@triton.jit
def copy_tile(source, target, t, row, live, source_stride, target_stride, WIDTH: tl.constexpr, LANES: tl.constexpr):
    d = tl.arange(0, LANES)[None, :]
    mask = live[:, None] & (d < WIDTH)
    value = tl.load(source + t[:, None] * source_stride + d, mask=mask)
    tl.store(target + row[:, None] * target_stride + d, value, mask=mask)


@triton.jit
def window_write_kernel(
    main, rope, main_rows, rope_rows, destination, T, main_stride, rope_stride, main_row_stride, rope_row_stride,
    BF16: tl.constexpr, HEAD_DIM: tl.constexpr, LANES: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    t = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    row = tl.load(destination + t, mask=t < T, other=-1)
    copy_tile(main, main_rows, t, row, row >= 0, main_stride, main_row_stride, HEAD_DIM, LANES)
    if not BF16:
        copy_tile(rope, rope_rows, t, row, row >= 0, rope_stride, rope_row_stride, 64, 64)


def last_writes(destination: Tensor, positions: Tensor, ends: Tensor, ring: int) -> Tensor:
    """Destinations int64 [t] with -1 where a later token of this step takes the same ring row.

    positions [t]; ends [t]: tokens of the token's sequence after the step.
    """
    return torch.where(positions + ring < ends, -1, destination)


def write_window(
    main: Tensor,
    rope: Tensor | None,
    main_rows: Tensor,
    rope_rows: Tensor | None,
    destination: Tensor,
    *,
    tiles: Tiles | None = None,
) -> None:
    """Copy payload rows to their pool rows; shapes and dtypes in the file's contract. Raises ValueError."""
    tokens, head_dim = main.shape
    require_rows(main, rope, head_dim, "payload")
    require_rows(main_rows, rope_rows, head_dim, "pool rows")
    if (rope is None) != (rope_rows is None):
        raise ValueError("payload and pool rows are of different builds")
    require(destination, "destination", torch.int64, (tokens,))
    tiles = tiles or tiles_for_mode(GPU, INTERPRETER)
    source = main if rope is None else rope
    target = main_rows if rope_rows is None else rope_rows
    if tokens:
        window_write_kernel[(ceil_div(tokens, tiles.ROWS),)](
            main, source, main_rows, target, destination, tokens, main.stride(0), source.stride(0),
            main_rows.stride(0), target.stride(0),
            BF16=rope is None, HEAD_DIM=head_dim, LANES=power_of_two(head_dim), **asdict(tiles),
        )  # fmt: skip
