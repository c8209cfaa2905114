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


def _picked(geometry: Geometry, kind: Kind, seen: Ints, picks: Ints | None) -> tuple[Ints, Ints, Ints]:
    """Compressed entries that each token attends to, ascending: count per token, then token and entry of each."""
    if kind == "csa" and picks is None and seen.max(initial=0) > geometry.config.index_topk:
        raise ValueError(f"{seen.max()} visible CSA rows, more than top-{geometry.config.index_topk}, and no picks")
    if picks is None:
        token, entry = _runs(seen)
        return seen, token, entry
    count = np.minimum(seen, min(geometry.config.index_topk, picks.shape[1]))
    token, j = _runs(count)
    valid = np.arange(picks.shape[1]) < count[:, None]  # what lies past the count is undefined
    ascending = np.sort(np.where(valid, picks, np.iinfo(np.int32).max), axis=1)
    return count, token, ascending[token, j]


def attention_lists(
    geometry: Geometry,
    kind: Kind,
    positions: Ints,
    batch_ids: Ints,
    slots: Ints,
    block_table: Ints,
    picks: Ints | None = None,
    step: tuple[Ints, Ints] | None = None,
) -> tuple[Ints, Ints]:
    """Rows each token attends to, as CSR: indices int32, relative to the base of any layer of the kind, and indptr
    int32 [t+1]. One token's slice is [compressed rows ascending | window rows ascending].

    positions, batch_ids [t] (-1 = padding, an empty slice); slots [b] slot positions; block_table [b, blocks]; picks
    [t, k] chosen CSA entries in any order, of which the first min(visible, top-k) count. Every token sees
    (position+1)//ratio compressed rows, also inside a verify step.

    step: number of the first token of each sequence in this step, and its position, both [b]. With it, a window row that
    this step brings is no row of the pool: row r of the step's payload stands as -1 - r.
    """
    positions, batch_ids = np.asarray(positions, np.int64), np.asarray(batch_ids, np.int64)
    live = batch_ids >= 0
    windows = np.where(live, np.minimum(positions + 1, geometry.config.sliding_window), 0)
    ratio = RATIO[kind]
    seen = np.where(live, visible(positions, ratio), 0) if ratio else np.zeros_like(windows)
    count, c_token, entry = _picked(geometry, kind, seen, picks)
    indptr = np.concatenate([[0], np.cumsum(count + windows)])
    indices = np.empty(indptr[-1], np.int32)

    if ratio:
        per_block = BLOCK_TOKENS // ratio
        block = np.asarray(block_table)[batch_ids[c_token], entry // per_block]
        place = _runs(count)[1] + indptr[c_token]
        indices[place] = geometry.compress_index(block.astype(np.int64), entry % per_block)
    token, j = _runs(windows)
    window_position = positions[token] - windows[token] + 1 + j
    rows = geometry.window_index(kind, np.asarray(slots, np.int64)[batch_ids[token]], window_position)
    if step is not None:
        first, start = (np.asarray(x, np.int64)[batch_ids[token]] for x in step)
        rows = np.where(window_position >= start, -1 - (first + window_position - start), rows)
    indices[indptr[token] + count[token] + j] = rows
    return indices, indptr.astype(np.int32)
