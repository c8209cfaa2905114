"""Compiled loops of the procedural store: counter-based random words turned into stored elements through tables.

Word g of row r is `mix(key + r * STRIDE + g * STEP)`, so every element depends only on the tensor's key and its own
place. Source: docs/checkpoint.md §5. Imported on first use: it needs numba.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit, prange

STEP = np.uint64(0x9E3779B97F4A7C15)
STRIDE = np.uint64(0xD1342543DE82EF95)
_M1 = np.uint64(0xBF58476D1CE4E5B9)
_M2 = np.uint64(0x94D049BB133111EB)
_S30, _S27, _S31 = np.uint64(30), np.uint64(27), np.uint64(31)
Array = np.ndarray[Any, Any]


@njit(inline="always")
def mix(x):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
    """Finaliser of splitmix64: a bijection of 64-bit words whose output bits all depend on all input bits."""
    x = (x ^ (x >> _S30)) * _M1
    x = (x ^ (x >> _S27)) * _M2
    return x ^ (x >> _S31)


@njit(parallel=True, cache=True, nogil=True)
def fill(key: np.uint64, start: int, table: Array, row_kinds: Array, jitter: int, columns: Array, out: Array) -> None:
    """Draw rows [start, start + len(out)) of a tensor into out [rows, n] (uint8, uint16 or uint32).

    table [5, 256] holds element bits by kind of row and random byte, kind 4 for the outlier `columns`; `jitter` masks the
    low bits that further random bits may change; row_kinds [16] gives the kind for 4 random bits.
    """
    n = out.shape[1]
    size = out.itemsize
    per_word = 8 // size
    bits = np.uint64(8 * size)
    word_count = n // per_word
    mask, low, eight, fifteen = np.uint64(jitter), np.uint64(255), np.uint64(8), np.uint64(15)
    for r in prange(out.shape[0]):
        base = key + np.uint64(start + r) * STRIDE
        kind = row_kinds[mix(base ^ STEP) & fifteen]
        for g in range(word_count):
            word = mix(base + np.uint64(g) * STEP)
            for i in range(per_word):
                piece = word >> (np.uint64(i) * bits)
                out[r, g * per_word + i] = np.uint64(table[kind, piece & low]) ^ ((piece >> eight) & mask)
        for k in range(n - word_count * per_word):
            piece = mix(base + np.uint64(word_count) * STEP) >> (np.uint64(k) * bits)
            out[r, word_count * per_word + k] = np.uint64(table[kind, piece & low]) ^ ((piece >> eight) & mask)
        for c in columns:
            piece = mix(base + np.uint64(c // per_word) * STEP) >> (np.uint64(c % per_word) * bits)
            out[r, c] = np.uint64(table[4, piece & low]) ^ ((piece >> eight) & mask)


@njit(parallel=True, cache=True, nogil=True)
def fill_scales(key: np.uint64, start: int, base: int, steps: Array, out: Array) -> None:
    """Draw rows of an E8M0 scale into out [rows, n] (uint8): base + steps[byte] + parity, so that neighbours differ.

    `steps` [256] is even, hence horizontally and vertically adjacent blocks never share an exponent.
    """
    low, eight = np.uint64(255), np.uint64(8)
    for r in prange(out.shape[0]):
        row = key + np.uint64(start + r) * STRIDE
        for c in range(out.shape[1]):
            word = mix(row + np.uint64(c // 8) * STEP) >> (np.uint64(c % 8) * eight)
            out[r, c] = base + steps[word & low] + ((start + r + c) & 1)


@njit(parallel=True, cache=True, nogil=True)
def fill_distinct(key: np.uint64, start: int, experts: int, out: Array) -> None:
    """Draw rows [start, ...) of tid2eid into out [rows, k] (int64): k different numbers below `experts` in each row."""
    for r in prange(out.shape[0]):
        row = key + np.uint64(start + r) * STRIDE
        for k in range(out.shape[1]):
            rank = np.int64(mix(row + np.uint64(k) * STEP) % np.uint64(experts - k))
            # The rank-th number not taken yet: step over the taken ones in ascending order.
            taken = np.sort(out[r, :k])
            for e in taken:
                if rank >= e:
                    rank += 1
            out[r, k] = rank
