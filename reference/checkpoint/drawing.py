"""Compiled loops of the procedural store: counter-based random words turned into stored elements through tables.

The unit is a word of 64 bits: 2 float32, 4 bfloat16, 8 E4M3 or 16 E2M1 elements of one row. Word g of row r comes from
`mix(key + r * STRIDE + g * STEP)`: it depends on the tensor's key and its own place, on nothing else.
Source: docs/checkpoint.md §5. Imported on first use: it needs numba.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit, prange

Array = np.ndarray[Any, Any]
TABLE_WORDS = 2048

STEP = np.uint64(0x9E3779B97F4A7C15)
STRIDE = np.uint64(0xD1342543DE82EF95)
_PICK = np.uint64(0xD6E8FEB86659FD93)
_PICK_SHIFT = np.uint64(53)  # leaves 11 bits, an index below TABLE_WORDS
_M1 = np.uint64(0xBF58476D1CE4E5B9)
_M2 = np.uint64(0x94D049BB133111EB)
_S30, _S27, _S31 = np.uint64(30), np.uint64(27), np.uint64(31)


@njit(inline="always")
def mix(x):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
    """Finaliser of splitmix64: a bijection of 64-bit words in which every output bit depends on every input bit."""
    x = (x ^ (x >> _S30)) * _M1
    x = (x ^ (x >> _S27)) * _M2
    return x ^ (x >> _S31)


@njit(parallel=True, cache=True, nogil=True)
def fill(
    key: np.uint64, start: int, table: Array, kinds: Array, free: np.uint64, columns: Array, element: int, out: Array
) -> None:
    """Draw rows [start, start + len(out)) of a tensor into out [rows, words] (uint64).

    table [5, 2048] (uint64) holds magnitudes by kind of row, kind 4 for the outlier `columns`; kinds [16] is the kind
    for 4 random bits; `free` marks the bits of a word that are random whatever the table holds; `element` is the number
    of bits of an element.
    """
    per_word = 64 // element
    ones = np.uint64((1 << element) - 1)
    for r in prange(out.shape[0]):
        base = key + np.uint64(start + r) * STRIDE
        row, outliers, drawn = table[kinds[mix(base ^ STEP) & np.uint64(15)]], table[4], out[r]
        for g in range(drawn.shape[0]):
            word = mix(base + np.uint64(g) * STEP)
            drawn[g] = row[(word * _PICK) >> _PICK_SHIFT] ^ (word & free)
        for c in columns:
            g = c // per_word
            word = mix(base + np.uint64(g) * STEP)
            here = ones << np.uint64((c % per_word) * element)
            drawn[g] = (drawn[g] & ~here) | ((outliers[(word * _PICK) >> _PICK_SHIFT] ^ (word & free)) & here)


@njit(parallel=True, cache=True, nogil=True)
def fill_scales(key: np.uint64, start: int, base: int, steps: Array, kinds: Array, out: Array) -> None:
    """Draw rows of an E8M0 scale into out [rows, n] (uint8): base + steps[random byte] + kind + parity of row + column.

    `steps` [256] and `kinds` [16], of which a row has one, are even, hence horizontally and vertically adjacent blocks
    never share an exponent.
    """
    for r in prange(out.shape[0]):
        row = key + np.uint64(start + r) * STRIDE
        level = base + kinds[mix(row ^ STEP) & np.uint64(15)]
        for c in range(out.shape[1]):
            word = mix(row + np.uint64(c // 8) * STEP) >> np.uint64(c % 8 * 8)
            out[r, c] = level + steps[word & np.uint64(255)] + ((start + r + c) & 1)


@njit(parallel=True, cache=True, nogil=True)
def fill_distinct(key: np.uint64, start: int, experts: int, out: Array) -> None:
    """Draw rows [start, ...) of tid2eid into out [rows, k] (int64): k different numbers below `experts` in each row."""
    for r in prange(out.shape[0]):
        row = key + np.uint64(start + r) * STRIDE
        for k in range(out.shape[1]):
            expert = np.int64(mix(row + np.uint64(k) * STEP) % np.uint64(experts))
            while np.any(out[r, :k] == expert):
                expert = (expert + 1) % experts
            out[r, k] = expert


def order(n: int) -> Array:
    """A fixed shuffle of range(n)."""
    with np.errstate(over="ignore"):
        words = np.arange(n, dtype=np.uint64) * STEP
        words = (words ^ (words >> _S30)) * _M1
        words = (words ^ (words >> _S27)) * _M2
    return np.argsort(words ^ (words >> _S31), kind="stable")
