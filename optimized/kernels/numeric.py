"""Exact widening and rounding inside kernels: bfloat16, E4M3, UE8M0, and the two matrix products.

One source for all modes. The interpreter's own bfloat16 arithmetic and its casts to bfloat16 and FP8 are wrong, so
there the bits are moved by integers; compiled code uses the hardware's conversion where it has one. FP8, FP4 and
scale buffers are uint8 everywhere. Source: docs/model.md §2, docs/pool.md §6.
"""

from __future__ import annotations

import triton
import triton.language as tl

INTERP = tl.constexpr(bool(triton.knobs.runtime.interpret))
RECIPROCAL_E4M3_MAX = tl.constexpr(0.002232142857142857)  # 1/448; becomes fl32(1/448) where it meets a float32
E4M3_AMAX_FLOOR_BITS = tl.constexpr(0x38D1B717)  # fl32(1e-4)
RECIPROCAL_E2M1_MAX = tl.constexpr(0.16666666666666666)  # 1/6, likewise
E2M1_AMAX_FLOOR_BITS = tl.constexpr(0x01C00000)  # 6 * 2^-126


@triton.jit
def bf16_up(x):
    """bfloat16 -> float32, exact for all codes."""
    if INTERP:
        return (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:
        return x.to(tl.float32)


@triton.jit
def bf16_rn(x):
    """float32 -> bfloat16, nearest even."""
    if INTERP:
        u = x.to(tl.uint32, bitcast=True)
        r = (u + 0x7FFF + ((u >> 16) & 1)) >> 16
        r = tl.where((u & 0x7FFFFFFF) > 0x7F800000, 0x7FC0, r)
        return r.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        return x.to(tl.bfloat16)


@triton.jit
def e4m3_up(code):
    """E4M3 code (uint8) -> float32, exact; codes 0x7F and 0xFF are NaN."""
    u = code.to(tl.uint32)
    x = ((u & 0x7F) << 20).to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2^120: the biases differ by 120
    x = tl.where((u & 0x7F) == 0x7F, float("nan"), x)
    return (x.to(tl.uint32, bitcast=True) | ((u & 0x80) << 24)).to(tl.float32, bitcast=True)


@triton.jit
def e4m3_rn(x):
    """float32 -> E4M3 code (uint8), nearest even, clamped to +-448 first; NaN becomes a NaN code."""
    x = tl.where(x > 448.0, 448.0, tl.where(x < -448.0, -448.0, x))
    if INTERP:
        u = x.to(tl.uint32, bitcast=True)
        a = u & 0x7FFFFFFF
        normal = (a + 0x7FFFF + ((a >> 20) & 1) - (120 << 23)) >> 20
        # Below 2^-6 the spacing is 2^-9; adding 2^14, whose last place is 2^-9, rounds there.
        subnormal = (a.to(tl.float32, bitcast=True) + 16384.0).to(tl.uint32, bitcast=True) - 0x46800000
        code = tl.where(a < 0x3C800000, subnormal, normal)
        code = tl.where(a > 0x7F800000, 0x7F, code)
        return (code | ((u >> 24) & 0x80)).to(tl.uint8)
    else:
        return x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)


@triton.jit
def e8m0_up(byte):
    """Scale byte (uint8) -> float32 power of two 2^(byte-127), exact; 255 is NaN."""
    u = byte.to(tl.uint32) << 23
    u = tl.where(u == 0, 0x00400000, u)  # 2^-127 is a float32 subnormal
    u = tl.where(u == 0x7F800000, 0x7FC00000, u)
    return u.to(tl.float32, bitcast=True)


@triton.jit
def e8m0_inverse(byte):
    """Scale byte 1..253 (uint8) -> float32 2^(127-byte): one exact product replaces the division. 255 is NaN."""
    u = (254 - byte.to(tl.int32)).to(tl.uint32) << 23
    u = tl.where(byte == 255, 0x7FC00000, u)
    return u.to(tl.float32, bitcast=True)


@triton.jit
def e8m0_ceil(x):
    """Positive float32 -> scale byte (uint8) of the smallest power of two >= x, from the bits; not finite -> 255."""
    byte = (x.to(tl.uint32, bitcast=True) + 0x7FFFFF) >> 23
    return tl.where(byte > 255, 255, byte).to(tl.uint8)


@triton.jit
def magnitude_bits(x):
    """float32 -> int32 that orders like |x|, NaN above infinity: `tl.max` over floats would drop a NaN."""
    return (x.to(tl.uint32, bitcast=True) & 0x7FFFFFFF).to(tl.int32)


@triton.jit
def e4m3_scale(amax_bits):
    """Magnitude bits of a block's amax -> scale byte: 2^ceil(log2(max(amax, 1e-4) * fl32(1/448)))."""
    floored = tl.maximum(amax_bits, E4M3_AMAX_FLOOR_BITS)
    return e8m0_ceil(floored.to(tl.float32, bitcast=True) * RECIPROCAL_E4M3_MAX)


@triton.jit
def e2m1_scale(amax_bits):
    """Magnitude bits of a block's amax -> scale byte: 2^ceil(log2(max(amax, 6 * 2^-126) * fl32(1/6)))."""
    floored = tl.maximum(amax_bits, E2M1_AMAX_FLOOR_BITS)
    return e8m0_ceil(floored.to(tl.float32, bitcast=True) * RECIPROCAL_E2M1_MAX)


@triton.jit
def e2m1_rn(x):
    """float32 -> E2M1 code 0..15 (uint8), nearest, ties to the even code, clamped to +-6. NaN has no code."""
    a = tl.abs(x)
    low = (a > 0.25).to(tl.uint8) + (a >= 0.75).to(tl.uint8) + (a > 1.25).to(tl.uint8) + (a >= 1.75).to(tl.uint8)
    high = (a > 2.5).to(tl.uint8) + (a >= 3.5).to(tl.uint8) + (a > 5.0).to(tl.uint8)
    return low + high + ((x.to(tl.uint32, bitcast=True) >> 28) & 8).to(tl.uint8)


@triton.jit
def e2m1_up(code):
    """E2M1 code 0..15 (uint8) -> float32, exact."""
    u = code.to(tl.uint32)
    x = ((u & 7) << 22).to(tl.float32, bitcast=True) * 8.507059173023462e37  # 2^126: the biases differ by 126
    return (x.to(tl.uint32, bitcast=True) | ((u & 8) << 28)).to(tl.float32, bitcast=True)


@triton.jit
def mma_fp8(a, b, acc):
    """acc + a @ b for E4M3 codes (uint8) [M,K] and [K,N], float32 [M,N]."""
    if INTERP:
        return tl.dot(e4m3_up(a), e4m3_up(b), acc, input_precision="ieee")
    else:
        return tl.dot(a.to(tl.float8e4nv, bitcast=True), b.to(tl.float8e4nv, bitcast=True), acc)


@triton.jit
def mma_bf16(a, b, acc):
    """acc + a @ b for bfloat16 [M,K] and [K,N], float32 [M,N]."""
    if INTERP:
        return tl.dot(bf16_up(a), bf16_up(b), acc, input_precision="ieee")
    else:
        return tl.dot(a, b, acc)
