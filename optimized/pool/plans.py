"""What a step tells its kernels: which rows to pool, which states to write, which rows each token attends to.

Host side, numpy, int32 tables. A step extends sequence b by `extend[b]` tokens to `context[b]`; tokens of all sequences
lie one after another (their number there is the ragged id). Source: docs/pool.md §5.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from reference.config import Kind

from .geometry import BLOCK_TOKENS, RATIO, Geometry, pooled_tokens, visible

Ints = NDArray[np.integer]


def _runs(counts: Ints) -> tuple[Ints, Ints]:
    """Counts [n] -> for every element of the concatenated runs: its run, and its place in the run."""
    run = np.repeat(np.arange(len(counts)), counts)
    start = np.cumsum(counts) - counts
    return run, np.arange(len(run)) - start[run]


def _plan(extend: Ints, context: Ints, ratio: int) -> tuple[Ints, Ints]:
    """All tokens as rows (ragged_id, batch_id, position, window_len), and each row's context."""
    batch, j = _runs(np.asarray(extend))
    position = np.asarray(context)[batch] - np.asarray(extend)[batch] + j
    window_len = np.maximum(0, pooled_tokens(ratio) - (j + 1))
    return np.stack([np.arange(len(j)), batch, position, window_len], 1).astype(np.int32), np.asarray(context)[batch]


def compress_plan(extend: Ints, context: Ints, ratio: int) -> Ints:
    """Rows int32 [n, 4] of the tokens that complete a group: (ragged_id, batch_id, position, window_len).

    The first `window_len` of the pooled tokens come from the state ring, the rest from this step's projections.
    """
    plan, _ = _plan(extend, context, ratio)
    return plan[(plan[:, 2] + 1) % ratio == 0]


def write_plan(extend: Ints, context: Ints, ratio: int, lookahead: int = 0) -> Ints:
    """Rows int32 [n, 4] of the tokens whose projections a later group may still need, also after `lookahead` tokens have
    been taken back; same columns."""
    plan, end = _plan(extend, context, ratio)
    return plan[plan[:, 2] >= np.maximum(0, end - pooled_tokens(ratio) - lookahead)]


def pad_plan(plan: Ints, rows: int) -> Ints:
    """The plan in a buffer of fixed length; unused rows are -1, which kernels skip. Raises ValueError if too long."""
    if len(plan) > rows:
        raise ValueError(f"{len(plan)} plan rows do not fit into {rows}")
    padded = np.full((rows, 4), -1, np.int32)
    padded[: len(plan)] = plan
    return padded


def _every_row(geometry: Geometry, kind: Kind, block_table: Ints, entries: int) -> Ints:
    """Rows int32 [b, entries] of the first compressed entries of each sequence, in order."""
    per_block, entry = BLOCK_TOKENS // RATIO[kind], np.arange(entries, dtype=np.int32)
    blocks = np.asarray(block_table, np.int32).take(entry // per_block, axis=1)
    return geometry.compress_index(blocks, entry % per_block)


def _picked_rows(geometry: Geometry, picks: Ints, count: Ints, batch_ids: Ints, block_table: Ints) -> Ints:
    """Rows int32 [t, k] of the first `count` picks of each token, ascending; what lies past the count is undefined."""
    last = np.iinfo(np.int32).max
    picks = np.sort(np.where(np.arange(picks.shape[1]) < count[:, None], picks, last), axis=1)
    per_block = BLOCK_TOKENS // RATIO["csa"]
    column = np.minimum(picks // per_block, block_table.shape[1] - 1)
    blocks = np.asarray(block_table, np.int32)[batch_ids[:, None], column]
    return geometry.compress_index(blocks, (picks % per_block).astype(np.int32))


def _compressed(
    geometry: Geometry, kind: Kind, seen: Ints, batch_ids: Ints, block_table: Ints, picks: Ints | int | None
) -> tuple[Ints, Ints, Ints]:
    """Rows int32 [n, k], and for each token which line of that holds its compressed rows, and how many they are."""
    room = picks if RATIO[kind] else 0
    if isinstance(room, int):
        return np.zeros((1, room), np.int32), np.zeros_like(batch_ids), np.minimum(seen, room)
    if picks is not None:
        count = np.minimum(seen, min(geometry.config.index_topk, picks.shape[1]))
        return _picked_rows(geometry, picks, count, batch_ids, block_table), np.arange(len(seen)), count
    if kind == "csa" and seen.max(initial=0) > geometry.config.index_topk:
        raise ValueError(f"{seen.max()} visible CSA rows, more than top-{geometry.config.index_topk}, and no picks")
    return _every_row(geometry, kind, block_table, int(seen.max(initial=0))), batch_ids, seen


def _window_rows(
    geometry: Geometry, kind: Kind, positions: Ints, batch_ids: Ints, slots: Ints, step: tuple[Ints, Ints] | None
) -> Ints:
    """Rows int32 [t, window] of the last positions of each token, its own at the end; before position 0 undefined."""
    at = positions[:, None] - np.arange(geometry.config.sliding_window)[::-1]
    rows = geometry.window_index(kind, np.asarray(slots, np.int64)[batch_ids, None], at)
    if step is not None:
        first, start = (np.asarray(x, np.int64)[batch_ids, None] for x in step)
        rows = np.where(at >= start, start - 1 - first - at, rows)
    return rows.astype(np.int32)


def attention_lists(
    geometry: Geometry,
    kind: Kind,
    positions: Ints,
    batch_ids: Ints,
    slots: Ints,
    block_table: Ints,
    picks: Ints | int | None = None,
    step: tuple[Ints, Ints] | None = None,
) -> tuple[Ints, Ints]:
    """Rows each token attends to, as CSR: indices int32, relative to the base of any layer of the kind, and indptr
    int32 [t+1]. One token's slice is [compressed rows ascending | window rows ascending].

    positions, batch_ids [t] (-1 = padding, an empty slice); slots [b] slot positions; block_table [b, blocks]; picks
    [t, k] chosen CSA entries in any order, of which the first min(visible, top-k) count, or only their number k: then
    zeros keep their place. Every token sees (position+1)//ratio compressed rows, also inside a verify step.

    step: number of the first token of each sequence in this step, and its position, both [b]. With it, a window row that
    this step brings is no row of the pool: row r of the step's payload stands as -1 - r.
    """
    positions, batch_ids = np.asarray(positions, np.int64), np.asarray(batch_ids, np.int64)
    live, ratio = batch_ids >= 0, RATIO[kind]
    windows = np.where(live, np.minimum(positions + 1, geometry.config.sliding_window), 0)
    seen = np.where(live, visible(positions, ratio), 0) if ratio else np.zeros_like(windows)
    rows, at, count = _compressed(geometry, kind, seen, batch_ids, block_table, picks)
    recent = _window_rows(geometry, kind, positions, batch_ids, slots, step)
    own = zip(at.tolist(), count.tolist(), recent, windows.tolist(), strict=True)
    slices = [part for line, n, last, w in own for part in (rows[line, :n], last[len(last) - w :])]
    indptr = np.concatenate([[0], np.cumsum(count + windows)]).astype(np.int32)
    return np.concatenate([np.empty(0, np.int32), *slices]), indptr
