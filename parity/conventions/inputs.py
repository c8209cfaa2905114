"""What the rules are run on: every bfloat16, every amax on an edge, normal numbers in blocks. Source: docs/conventions.md."""

from __future__ import annotations

import numpy as np

from .rules import E2M1_MAX, Array, as_bf16, ratio, scale_up

SEED = 20260824


def all_bf16() -> Array:
    """All 65,536 bit patterns as float32."""
    return (np.arange(1 << 16, dtype=np.uint32) << 16).view(np.float32)


def bf16_numbers() -> Array:
    """Those that are no NaN, the infinities among them."""
    return all_bf16()[~np.isnan(all_bf16())]


def amax_bf16() -> Array:
    """Every amax that a block of bfloat16 can have: 0 and all positive finite ones."""
    return all_bf16()[: 0x7F80]


def amax_edges(largest: float, *floors: float) -> Array:
    """largest·2^k for every k that keeps it and its scale normal, the floors, and the float32 neighbours of each."""
    powers = np.ldexp(np.float64(largest), np.arange(-126, 128 - int(np.frexp(largest)[1]) + 1))
    at = np.concatenate([powers, np.array(floors)]).astype(np.float32)
    return np.concatenate([np.nextafter(at, np.float32(0)), at, np.nextafter(at, np.float32(np.inf))])


def near_ties() -> Array:
    """float32 bits: every upper half, with lower halves on and beside the tie."""
    upper = np.arange(1 << 16, dtype=np.uint64) << 16
    return np.concatenate([upper | low for low in (0, 0x7FFF, 0x8000, 0x8001, 0xFFFF)])


def normal(rows: int, width: int) -> Array:
    """Standard normal float32 rows, every eighth channel eight times as large."""
    x = np.random.default_rng(SEED).standard_normal((rows, width), np.float32)
    return x * np.where(np.arange(width) % 8, np.float32(1), np.float32(8))


def over_scales() -> Array:
    """bfloat16 of plain normal numbers, each over the FP4 scale of its block of 32."""
    x = as_bf16(np.random.default_rng(SEED).standard_normal((4096, 32), np.float32))
    return (x / scale_up(ratio(np.abs(x).max(-1, keepdims=True), E2M1_MAX))).ravel()
