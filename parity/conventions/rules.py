"""The rules themselves, in numpy, one function each: scales, floors, codes, edges. Source: docs/conventions.md.

They restate what engines do and share nothing with `reference.formats`, which tests compare with the official ones.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Rule = Callable[[Array], Array]

E4M3_MAX, E2M1_MAX = 448.0, 6.0
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
E4M3 = np.concatenate([np.arange(8) / 512, *((8 + np.arange(8)) * 2.0 ** (e - 10) for e in range(1, 16))])[:127]
OVERFLOW = 464.0  # beyond it a cast that does not saturate is NaN: half a step above 448


def ratio(amax: Array, largest: float) -> Array:
    """amax · fl32(1/largest), in float32."""
    return np.float32(1 / largest) * amax.astype(np.float32)


def ratio_float64(amax: Array, largest: float) -> Array:
    """amax · fl32(1/largest), unrounded: the error of the constant stays."""
    return np.float64(np.float32(1 / largest)) * amax.astype(np.float64)


def quotient(amax: Array, largest: float) -> Array:
    """amax / largest, in float32."""
    return amax.astype(np.float32) / np.float32(largest)


def scale_up(r: Array) -> Array:
    """The smallest power of two that is at least r."""
    mantissa, exponent = np.frexp(r)  # mantissa in [1/2, 1)
    return np.ldexp(np.float64(1), exponent - (mantissa == 0.5))


def scale_down(r: Array) -> Array:
    return np.ldexp(np.float64(1), np.frexp(r)[1] - 1)


def scale_nearest(r: Array) -> Array:
    """The nearer power of two, the upper one at 1.5."""
    mantissa, exponent = np.frexp(r)
    return np.ldexp(np.float64(1), exponent - (mantissa < 0.75))


def nearest(x: Array, grid: Array, ties: str) -> Array:
    """Index into `grid` (ascending, from 0) of the nearest magnitude; beyond the largest, the largest."""
    middle = (grid[1:] + grid[:-1]) / 2
    below, above = (np.searchsorted(middle, np.abs(x), side) for side in ("left", "right"))
    choose: dict[str, Array] = {
        "even": np.where(below % 2 == 0, below, above),
        "toward zero": below,
        "away from zero": above,
        "smaller value": np.where(x < 0, above, below),
    }
    return np.where(below == above, below, choose[ties])


def e2m1(ties: str, signed_zero: bool = True) -> Rule:
    """x -> codes 0 … 15."""

    def encode(x: Array) -> Array:
        code = nearest(x, E2M1, ties)
        return code + 8 * (np.signbit(x) & (signed_zero | (code > 0)))

    return encode


def e4m3(saturates: bool) -> Rule:
    """x -> codes 0 … 255, ties to even; NaN for NaN, and for what is too large where the cast does not saturate."""

    def encode(x: Array) -> Array:
        lost = np.isnan(x) if saturates else np.isnan(x) | (np.abs(x) > OVERFLOW)
        return np.where(lost, 127, nearest(np.where(lost, 0, x), E4M3, "even")) + 128 * np.signbit(x)

    return encode


def e4m3_value(code: Array) -> Array:
    """E4M3 as OCP has it: two NaN codes, and -0."""
    return np.where(code & 127 == 127, np.nan, np.where(code & 128, -1.0, 1.0) * E4M3[np.minimum(code & 127, 126)])


def fnuz_value(code: Array) -> Array:
    """E4M3 of gfx942: bias 8, so half the value; largest 240; 0x80 the only NaN."""
    full = np.append(E4M3, 480.0)
    return np.where(code == 128, np.nan, np.where(code & 128, -0.5, 0.5) * full[code & 127])


def e8m0_power(byte: Array) -> Array:
    """2^(byte - 127), 255 NaN."""
    return np.where(byte == 255, np.nan, np.ldexp(np.float64(1), byte.astype(np.int64) - 127))


def e8m0_bits(byte: Array) -> Array:
    """The byte as the exponent field of a float32: 0 is 0, 255 infinite."""
    return (byte.astype(np.uint32) << 23).view(np.float32).astype(np.float64)


def e8m0_number(byte: Array) -> Array:
    """The byte read as a number."""
    return byte.astype(np.float64)


def bf16_even(bits: Array) -> Array:
    """float32 bits -> bfloat16 bits, nearest, ties to even; NaN stays NaN."""
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(bits & 0x7FFFFFFF > 0x7F800000, 0x7FFF, rounded)


def bf16_half_up(bits: Array) -> Array:
    """Half away from zero."""
    return np.where(bits & 0x7FFFFFFF > 0x7F800000, 0x7FFF, (bits + 0x8000) >> 16)


def bf16_cut(bits: Array) -> Array:
    """The lower half dropped."""
    return np.where(bits & 0x7FFFFFFF > 0x7F800000, 0x7FFF, bits >> 16)


def as_bf16(x: Array) -> Array:
    """float32 -> float32 of bfloat16, ties to even."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32).astype(np.uint64)
    return (bf16_even(bits).astype(np.uint32) << 16).view(np.float32)


def quantised(x: Array, block: int, largest: float, floor: float, encode: Rule, grid: Array) -> Array:
    """x [n, k·block] through codes and back, float64: official scales, `encode`'s codes."""
    blocks = x.reshape(len(x), -1, block)
    scale = scale_up(ratio(np.maximum(np.abs(blocks).max(-1, keepdims=True), np.float32(floor)), largest))
    code = encode(blocks / scale)
    half = 8 if len(grid) == 8 else 128
    return (np.where(code & half, -1.0, 1.0) * grid[code & (half - 1)] * scale).reshape(x.shape)


def hadamard(x: Array) -> Array:
    """Rows times Sylvester's matrix over sqrt(n)."""
    n = x.shape[-1]
    i = np.arange(n)
    signs = np.array([[(-1.0) ** int(a & b).bit_count() for b in i] for a in i])
    return x.astype(np.float64) @ signs / np.sqrt(n)
