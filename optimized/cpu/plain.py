"""The same products in plain loops: any shape, any CPU that numba knows. And the scans for damage.

A row is decoded into float32 and multiplied with every token. Source: docs/cpu.md §3 and §4. Needs numba.
"""

from __future__ import annotations

import numpy as np
from numba import njit, prange

E4M3, E2M1, BF16 = 0, 1, 2
STRETCH = 1 << 16


@njit(nogil=True)
def _decode(kind, codes, scale, height, row, table, powers, out):
    """One row of stored bytes to float32 [in]; `table` holds the values of the codes, `powers` those of scale bytes."""
    for c in range(len(out)):
        if kind == E4M3:
            out[c] = table[codes[c]] * powers[scale[row // height, c // 128]]
        elif kind == E2M1:
            out[c] = table[(codes[c // 2] >> (c % 2 * 4)) & 15] * powers[scale[row // height, c // 32]]
        else:
            out[c] = np.uint32(np.uint32(codes[2 * c]) << 16 | np.uint32(codes[2 * c + 1]) << 24).view(np.float32)


@njit(nogil=True, fastmath={"reassoc", "contract"})
def _dot(row, x):
    """Sum in an order of the compiler's choice: one for every token and row of a width."""
    total = x[0] * 0
    for c in range(len(x)):
        total += row[c] * x[c]
    return total


@njit(parallel=True, nogil=True, cache=True)
def product(kind, codes, scale, height, table, powers, first, x, y):
    """Rows [first, first + y.shape[1]) of codes [rows, bytes] (uint8) times x [t, in] -> y [t, rows]; see `_decode`."""
    for r in prange(y.shape[1]):
        row = np.empty(x.shape[1], np.float32)
        _decode(kind, codes[first + r], scale, height, first + r, table, powers, row)
        for t in range(x.shape[0]):
            y[t, r] = _dot(row, x[t])


@njit(nogil=True)
def _outside(piece, mask, low, high):
    """Findings meet in one byte, and all is bytes, so that a scan costs what reading does."""
    bad = np.uint8(0)
    for k in range(len(piece)):
        part = np.uint8(piece[k] & mask)
        bad = np.uint8(bad | np.uint8(part < low) | np.uint8(part > high))
    return bad


@njit(parallel=True, nogil=True, cache=True)
def outside(values, mask, low, high):
    """Whether any of these bytes [n] (uint8), of which `mask` counts, is below `low` or above `high`."""
    found = 0
    for i in prange(-(-len(values) // STRETCH)):
        found += _outside(values[i * STRETCH : (i + 1) * STRETCH], mask, low, high)
    return found > 0


@njit(nogil=True, cache=True)
def outside_few(values, mask, low, high):
    """`outside` by the caller's thread."""
    return _outside(values, mask, low, high) > 0
