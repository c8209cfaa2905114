"""Exact top-k of each row: the k largest of its first `visible` columns, as ascending column numbers.

Contract (docs/pool.md §8.8)
    logits    float32 [t, n], any row stride
    visible   int32 [t]; columns at and past min(visible, n) are never read. 0: a padded token
    picks     int32 [t, k], contiguous, written whole: min(visible, n, k) column numbers ascending, then -1
Among equal values the lower column wins; -0 equals +0. NaN counts as +infinity, so that it shows. Nothing rounds.
A program takes one row. Four passes over it find the k-th largest value, a byte of its bit pattern at a time, from counts
of each byte value; a fifth writes. Counts are integers, so their order does not matter; no bits depend on other rows.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import power_of_two, require, tiles_for_mode


@dataclass(frozen=True)
class Tiles:
    """COLS columns at a time, a power of two."""

    COLS: int
    num_warps: int = 8


GPU = Tiles(COLS=2048)
INTERPRETER = Tiles(COLS=32768)


@triton.jit
def ordered(logits, c, live):
    """Values at columns c -> uint32 that order like them: equal exactly where the values are; 0 for none."""
    x = tl.load(logits + c, mask=live, other=0.0)
    x = tl.where(x != x, float("inf"), tl.where(x == 0, 0.0, x))
    u = x.to(tl.uint32, bitcast=True)
    return tl.where((u >> 31) == 1, u ^ 0xFFFFFFFF, u | 0x80000000)


@triton.jit
def topk_kernel(logits, visible, picks, n, row_stride, K: tl.constexpr, LANES: tl.constexpr, COLS: tl.constexpr):
    t = tl.program_id(0).to(tl.int64)
    row = logits + t * row_stride
    limit = tl.minimum(tl.load(visible + t), n)
    threshold = tl.zeros((1,), tl.uint32)  # every value is above it
    ties = tl.zeros((1,), tl.int32)  # how many that equal the threshold are taken
    if limit > K:
        byte = tl.arange(0, 256)
        ties += K
        for shift in tl.static_range(24, -8, -8):
            counts = tl.zeros((256,), tl.int32)
            for first in range(0, limit, COLS):
                c = first + tl.arange(0, COLS)
                key = ordered(row, c, c < limit)
                same = (c < limit) & ((key.to(tl.uint64) >> (shift + 8)) == threshold.to(tl.uint64))
                counts += tl.histogram(((key >> shift) & 255).to(tl.int32), 256, mask=same)
            at_least = tl.sum(counts, 0) - tl.cumsum(counts, 0) + counts  # how many have this byte or a larger one
            chosen = tl.sum((at_least >= ties).to(tl.int32), 0) - 1
            ties -= tl.sum(tl.where(byte > chosen, counts, 0), 0)
            threshold = (threshold << 8) | chosen.to(tl.uint32)
    taken, tied = 0, 0
    for first in range(0, limit, COLS):
        c = first + tl.arange(0, COLS)
        key = ordered(row, c, c < limit)
        equal = ((c < limit) & (key == threshold)).to(tl.int32)
        take = ((c < limit) & (key > threshold)) | ((equal == 1) & (tied + tl.cumsum(equal, 0) <= ties))
        count = take.to(tl.int32)
        tl.store(picks + t * K + taken + tl.cumsum(count, 0) - 1, c, mask=take)
        taken += tl.sum(count, 0)
        tied += tl.sum(equal, 0)
    k = tl.arange(0, LANES)
    tl.store(picks + t * K + k, tl.full((LANES,), -1, tl.int32), mask=(k >= tl.minimum(limit, K)) & (k < K))


def topk(logits: Tensor, visible: Tensor, k: int, *, tiles: Tiles | None = None) -> Tensor:
    """Picks int32 [t, k]; shapes and dtypes in the file's contract. Raises ValueError."""
    tokens, n = logits.shape
    require(logits, "logits", torch.float32, (None, None))
    require(visible, "visible", torch.int32, (tokens,))
    if k < 1:
        raise ValueError(f"top-{k}")
    picks = torch.empty(tokens, k, dtype=torch.int32, device=logits.device)
    tiles = tiles or tiles_for_mode(GPU, INTERPRETER)
    if tokens:
        topk_kernel[(tokens,)](
            logits, visible, picks, n, logits.stride(0), K=k, LANES=power_of_two(k), **asdict(tiles)
        )  # fmt: skip
    return picks
