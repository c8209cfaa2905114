"""Compressor states: put this step's projections into the rings of their sequences.

Contract (docs/pool.md §6.4)
    kv, score              float32 [n, w], this step's projections, any row stride; `score` without ape
    kv_state, score_state  float32 [slots, ring, w], written at ring row position mod ring; any slot stride
    plan                   int32 [rows, 4]: (ragged_id, batch_id, position, -); position -1: skipped. No two rows may
                           meet in one ring row: a step writes at most `ring` tokens a sequence
    slots                  int32 [b], slot position of each sequence
    ape                    float32 [ratio, w], added to the score at position mod ratio
Runs after the compressor, which reads the rings as the step before left them. One float32 addition is all that rounds.
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
    """ROWS plan rows by COLS channels a program; powers of two."""

    ROWS: int
    COLS: int
    num_warps: int = 4


GPU = Tiles(ROWS=4, COLS=512)
INTERPRETER = Tiles(ROWS=16, COLS=1024)


@triton.jit
def state_write_kernel(
    kv, score, kv_stride, score_stride, kv_state, score_state, kv_slot_stride, score_slot_stride, ring,
    plan, plan_rows, slots, ape, width, RATIO: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLS + tl.arange(0, COLS)[None, :]
    known = row < plan_rows
    ragged = tl.load(plan + 4 * row, mask=known, other=0).to(tl.int64)
    batch = tl.load(plan + 4 * row + 1, mask=known, other=0)
    position = tl.load(plan + 4 * row + 2, mask=known, other=-1)
    live = position >= 0
    slot = tl.load(slots + batch, mask=live, other=0).to(tl.int64)
    place = tl.where(live, position, 0)
    mask = live[:, None] & (column < width)
    value = tl.load(kv + ragged[:, None] * kv_stride + column, mask=mask)
    gate = tl.load(score + ragged[:, None] * score_stride + column, mask=mask)
    gate += tl.load(ape + (place % RATIO)[:, None] * width + column, mask=mask)
    ring_at = (place % ring).to(tl.int64)[:, None] * width + column
    tl.store(kv_state + slot[:, None] * kv_slot_stride + ring_at, value, mask=mask)
    tl.store(score_state + slot[:, None] * score_slot_stride + ring_at, gate, mask=mask)


def write_state(
    kv: Tensor,
    score: Tensor,
    kv_state: Tensor,
    score_state: Tensor,
    plan: Tensor,
    slots: Tensor,
    ape: Tensor,
    tiles: Tiles | None = None,
) -> None:
    """Write the ring rows that the plan names; shapes and dtypes in the file's contract. Raises ValueError."""
    ratio, width = ape.shape
    for name, tensor in (("kv", kv), ("score", score)):
        require(tensor, name, torch.float32, (kv.shape[0], width))
    for name, tensor in (("kv_state", kv_state), ("score_state", score_state)):
        require(tensor, name, torch.float32, (None, kv_state.shape[1], width), dense=2)
    require(ape, "ape", torch.float32, (None, None), dense=2)
    require(plan, "plan", torch.int32, (None, 4), dense=2)
    require(slots, "slots", torch.int32, (None,))
    tiles = tiles or tiles_for_mode(GPU, INTERPRETER)
    if plan.shape[0]:
        state_write_kernel[(ceil_div(plan.shape[0], tiles.ROWS), ceil_div(width, tiles.COLS))](
            kv, score, kv.stride(0), score.stride(0), kv_state, score_state, kv_state.stride(0), score_state.stride(0),
            kv_state.shape[1], plan, plan.shape[0], slots, ape, width, RATIO=ratio, **asdict(tiles),
        )  # fmt: skip
