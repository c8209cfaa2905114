"""Compressor: pool a group of tokens, RMSNorm, RoPE, round, write one row of the pool in either build. HCA and CSA.

Contract (docs/pool.md §6.3)
    kv, score              float32 [n, w], this step's projections of its n tokens, any row stride; w = 2*head_dim if
                           the groups overlap (ratio 4), else head_dim. `score` does not hold ape yet
    kv_state, score_state  float32 [slots, ring, w], ring of token positions, any slot stride, row stride w; the end
                           of the step before. `score_state` holds ape
    plan                   int32 [rows, 4]: (ragged_id, batch_id, position, window_len); position -1: skipped. The first
                           window_len of the pooled tokens come from the state, the others from kv and score
    slots                  int32 [b], slot position of each sequence
    ape, norm_weight       float32 [ratio, w], float32 [head_dim]
    cos, sin               float32 [rows, 32], for the group's first position (position // ratio * ratio) of a plan row
    main_rows, rope_rows   uint8 [r, head_dim], bfloat16 [r, 64]: 2buff planes from the layer's base, any row stride; or
                           bfloat16 [r, head_dim] and None: the bf16 build
    block_table            int32 [b, blocks], any row stride
Writes one row of both planes a plan row, every byte of it; reads everything else. Must run before the states are
written. Address products are 64 bit.
    rounding  float32 from projection to the row, which never leaves registers before. 2buff: the channels without rotation
              go from float32 to E4M3 per 64, amax floor 1e-4; the rotated ones take one bfloat16 rounding. bf16: one
              bfloat16 rounding. Index keys: compress_index.py.
Group c = position // ratio pools per channel: sum_k softmax_k(score_k) kv_k over its `ratio` tokens or, overlapping,
over the left halves of the `ratio` tokens before it and the right halves of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from .index_layout import store_key
from .launch import power_of_two, require, tiles_for_mode
from .qk_norm_rope import require_rows
from .row_tiles import hadamard, inverse_rms, rotate_tail, store_2buff_tile, store_bf16_tile

ROPE = 64


@dataclass(frozen=True)
class Tiles:
    """SLOTS pooled tokens at a time (a power of two; fewer where a group pools fewer)."""

    SLOTS: int
    num_warps: int = 4


GPU = Tiles(SLOTS=8)
INTERPRETER = Tiles(SLOTS=128)


@triton.jit
def pool(
    kv, score, kv_stride, score_stride, kv_state, score_state, kv_slot_stride, score_slot_stride, ring, ape,
    ragged, slot, position, window_len,
    RATIO: tl.constexpr, POOLED: tl.constexpr, HEAD_DIM: tl.constexpr, LANES: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """Weighted mean over the pooled tokens, float32 [LANES]; lanes past HEAD_DIM are 0."""
    d = tl.arange(0, LANES)
    inside = (d < HEAD_DIM)[None, :]
    WIDTH: tl.constexpr = HEAD_DIM * (POOLED // RATIO)
    peak = tl.full((LANES,), float("-inf"), tl.float32)
    weight = tl.zeros((LANES,), tl.float32)
    total = tl.zeros((LANES,), tl.float32)
    for first in range(0, POOLED, SLOTS):
        k = first + tl.arange(0, SLOTS)
        source = position - POOLED + 1 + k
        at = tl.where(k >= RATIO, HEAD_DIM, 0)[:, None] + d[None, :]  # the newer group uses the right half
        fresh = (k >= window_len)[:, None] & inside
        stored = ((k < window_len) & (source >= 0))[:, None] & inside
        ring_row = (tl.where(source >= 0, source, 0) % ring).to(tl.int64) * WIDTH
        state_at = ring_row[:, None] + at
        value = tl.load(kv_state + slot * kv_slot_stride + state_at, mask=stored, other=0.0)
        gate = tl.load(score_state + slot * score_slot_stride + state_at, mask=stored, other=float("-inf"))
        token = (ragged - (POOLED - 1) + k)[:, None]
        new_gate = tl.load(score + token * score_stride + at, mask=fresh, other=0.0)
        new_gate += tl.load(ape + (k % RATIO)[:, None] * WIDTH + at, mask=fresh, other=0.0)
        value = tl.where(fresh, tl.load(kv + token * kv_stride + at, mask=fresh, other=0.0), value)
        gate = tl.where(fresh, new_gate, gate)
        new_peak = tl.maximum(peak, tl.max(gate, 0))
        shift = tl.where(new_peak == float("-inf"), 0.0, new_peak)  # no token yet: exp(-inf - 0), not exp(nan)
        e = tl.exp(gate - shift[None, :])
        carry = tl.exp(peak - shift)
        weight = weight * carry + tl.sum(e, 0)
        total = total * carry + tl.sum(e * value, 0)
        peak = new_peak
    return tl.where(d < HEAD_DIM, tl.div_rn(total, weight), 0.0)


@triton.jit
def compress_kernel(
    kv, score, kv_stride, score_stride, kv_state, score_state, kv_slot_stride, score_slot_stride, ring,
    plan, slots, ape, norm_weight, eps, cos, sin, main_rows, rope_rows, main_stride, rope_stride,
    block_table, table_stride, envelope, FORM: tl.constexpr, ORDER: tl.constexpr, STEPS: tl.constexpr,
    RATIO: tl.constexpr, POOLED: tl.constexpr, BLOCK_ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr, LANES: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    ragged = tl.load(plan + 4 * row).to(tl.int64)
    batch = tl.load(plan + 4 * row + 1).to(tl.int64)
    position = tl.load(plan + 4 * row + 2)
    window_len = tl.load(plan + 4 * row + 3)
    if position >= 0:
        slot = tl.load(slots + batch).to(tl.int64)
        pooled = pool(
            kv, score, kv_stride, score_stride, kv_state, score_state, kv_slot_stride, score_slot_stride, ring, ape,
            ragged, slot, position, window_len, RATIO, POOLED, HEAD_DIM, LANES, SLOTS,
        )  # fmt: skip
        d, live = tl.arange(0, LANES), tl.full((1,), 1, tl.int1)
        weight = tl.load(norm_weight + d, mask=d < HEAD_DIM, other=0.0)
        x = pooled.reshape(1, LANES)
        y = weight[None, :] * (x * inverse_rms(x, eps, HEAD_DIM))
        y = rotate_tail(y, cos, sin, row + tl.zeros((1,), tl.int32), live, 1.0, HEAD_DIM, LANES)
        entry = position // RATIO
        block = tl.load(block_table + batch * table_stride + entry // BLOCK_ROWS).to(tl.int64)
        if FORM == "2buff" or FORM == "bf16":
            target = block * envelope + entry % BLOCK_ROWS + tl.zeros((1,), tl.int32)
            if FORM == "bf16":
                store_bf16_tile(main_rows, target * main_stride, live, y, HEAD_DIM, LANES)
            else:
                store_2buff_tile(main_rows, rope_rows, target * main_stride, target * rope_stride, live, y, HEAD_DIM, LANES)
        else:
            y = hadamard(y, LANES, STEPS)
            keys, scales = main_rows + block * main_stride, rope_rows + block * rope_stride
            store_key(y, keys, scales, entry % BLOCK_ROWS, FORM == "fp4", ORDER, LANES)


@dataclass(frozen=True)
class Group:
    """What every compressor is handed besides its target; names and shapes in the file's contract."""

    kv: Tensor
    score: Tensor
    kv_state: Tensor
    score_state: Tensor
    plan: Tensor
    slots: Tensor
    ape: Tensor
    norm_weight: Tensor
    eps: float
    cos: Tensor
    sin: Tensor
    block_table: Tensor
    ratio: int

    @property
    def pooled(self) -> int:
        """Tokens that a group pools."""
        return self.ratio * (self.ape.shape[1] // self.norm_weight.shape[0])

    def check(self) -> None:
        """Raise ValueError unless all of this fits together."""
        head_dim, width, rows = self.norm_weight.shape[0], self.ape.shape[1], self.plan.shape[0]
        for name, tensor in (("kv", self.kv), ("score", self.score)):
            require(tensor, name, torch.float32, (self.kv.shape[0], width))
        for name, tensor in (("kv_state", self.kv_state), ("score_state", self.score_state)):
            require(tensor, name, torch.float32, (None, self.kv_state.shape[1], width), dense=2)
        for name, tensor in (("cos", self.cos), ("sin", self.sin)):
            require(tensor, name, torch.float32, (rows, ROPE // 2), dense=2)
        require(self.ape, "ape", torch.float32, (self.ratio, width), dense=2)
        require(self.norm_weight, "norm_weight", torch.float32, (head_dim,))
        require(self.plan, "plan", torch.int32, (rows, 4), dense=2)
        require(self.slots, "slots", torch.int32, (None,))
        require(self.block_table, "block_table", torch.int32, (self.slots.shape[0], None))
        if head_dim % 64 or self.kv_state.shape[1] < self.pooled:
            raise ValueError(f"head_dim {head_dim} is no multiple of 64, or the ring is shorter than {self.pooled} tokens")


def launch_compress(
    group: Group, main: Tensor, second: Tensor, form: str, order: int, envelope: int, block_rows: int, tiles: Tiles
) -> None:
    """One program a plan row, writing in this form to the two targets (rows and planes, or pages of keys and scales)."""
    g, head_dim, rows = group, group.norm_weight.shape[0], group.plan.shape[0]
    lanes = power_of_two(head_dim)
    if rows:
        compress_kernel[(rows,)](
            g.kv, g.score, g.kv.stride(0), g.score.stride(0), g.kv_state, g.score_state,
            g.kv_state.stride(0), g.score_state.stride(0), g.kv_state.shape[1], g.plan, g.slots, g.ape, g.norm_weight,
            g.eps, g.cos, g.sin, main, second, main.stride(0), second.stride(0), g.block_table, g.block_table.stride(0),
            envelope, FORM=form, ORDER=order, STEPS=lanes.bit_length() - 1, RATIO=g.ratio, POOLED=g.pooled,
            BLOCK_ROWS=block_rows, HEAD_DIM=head_dim, LANES=lanes, SLOTS=min(tiles.SLOTS, g.pooled),
            num_warps=tiles.num_warps,
        )  # fmt: skip


def compress(
    kv: Tensor,
    score: Tensor,
    kv_state: Tensor,
    score_state: Tensor,
    plan: Tensor,
    slots: Tensor,
    ape: Tensor,
    norm_weight: Tensor,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    main_rows: Tensor,
    rope_rows: Tensor | None,
    block_table: Tensor,
    *,
    ratio: int,
    envelope: int,
    block_rows: int,
    tiles: Tiles | None = None,
) -> None:
    """Write the row of every group that the plan completes; shapes and dtypes in the file's contract.

    `envelope` is the rows of a block over all layers, `block_rows` those of one layer. Raises ValueError.
    """
    group = Group(
        kv, score, kv_state, score_state, plan, slots, ape, norm_weight, eps, cos, sin, block_table, ratio
    )
    group.check()
    require_rows(main_rows, rope_rows, norm_weight.shape[0])
    second, form = (main_rows, "bf16") if rope_rows is None else (rope_rows, "2buff")
    launch_compress(group, main_rows, second, form, 0, envelope, block_rows, tiles or tiles_for_mode(GPU, INTERPRETER))
