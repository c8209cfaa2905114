"""Compiled loops of `dequantize`. Imported on first use: it needs numba. Source: docs/checkpoint.md §4."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit, prange

from .manifest import FP4_BLOCK, FP8_BLOCK

Array = np.ndarray[Any, Any]


@njit(parallel=True, cache=True, nogil=True)
def decode_e4m3(codes: Array, scale: Array, powers: Array, row0: int, table: Array, out: Array) -> None:
    """codes [rows, n], scale [*, ceil(n/128)], both uint8, powers and table [256] float32 -> out [rows, n] float32."""
    n = codes.shape[1]
    for r in prange(codes.shape[0]):
        code, factors, values = codes[r], scale[(row0 + r) // FP8_BLOCK], out[r]
        for block in range(factors.shape[0]):
            factor = powers[factors[block]]
            for c in range(block * FP8_BLOCK, min(n, (block + 1) * FP8_BLOCK)):
                values[c] = table[code[c]] * factor


@njit(parallel=True, cache=True, nogil=True)
def decode_e2m1(codes: Array, scale: Array, powers: Array, row0: int, table: Array, out: Array) -> None:
    """codes [rows, n/2], low nibble first, scale [*, ceil(n/32)], both uint8, powers [256], table [16] -> out [rows, n]."""
    n = codes.shape[1]
    half = FP4_BLOCK // 2
    for r in prange(codes.shape[0]):
        code, factors, values = codes[r], scale[row0 + r], out[r]
        for block in range(factors.shape[0]):
            factor = powers[factors[block]]
            for j in range(block * half, min(n, (block + 1) * half)):
                values[2 * j] = table[code[j] & 15] * factor
                values[2 * j + 1] = table[code[j] >> 4] * factor
