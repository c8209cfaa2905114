"""What a block of stored codes holds, as LLVM vectors of 16 numbers: eight of them in turn, and the scales of its rows.

A witness number tells by its type how codes are read (`CODES`). `vector` has the loops; numba's cache of that file does not
look at this one. Source: docs/cpu.md §2. Imported on first use: it needs numba.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numba import types

from .ir import BLOCK, F16, F32, I8, I16, I32, LANES, broadcast, call, constant, load, pick, splat, vector

# Witnesses of what is stored: E4M3 and E2M1, read through tables (AVX-512) or half precision, E4M3 with its bits moved,
# BF16, E2M1 for `vnni`.
E4M3, E4M3_HALF, E2M1, E2M1_HALF, BF16 = np.uint8(0), np.int32(0), np.int8(0), np.int16(0), np.uint16(0)
E4M3_MOVED = np.uint32(0)
E2M1_BYTES = np.int64(0)
UNDONE = 14  # of a moved code's 2^-120, what the scale makes good; x does the rest
MOVED_X = 2.0 ** (120 - UNDONE)
LEAST = 2.0 ** (UNDONE - 149 + 32)  # of x: in sums of so much and more no bit is lost (23 of x and 9 of a code below it)
MOST = 2.0 ** (UNDONE + 8)  # from here on x would be infinite
_SIGN_AND_EXPONENT = (128, 0, 0, 0, 0, 64, 32, 16)  # of each bit s000 0eee the bit of the code that it is
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def _e4m3_bits(code: int) -> int:
    """The BF16 bits of an E4M3 magnitude, which has them exactly."""
    exponent, mantissa = code >> 3, code & 7
    value = mantissa * 2.0**-9 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    return int(np.float32(value).view(np.uint32)) >> 16


def _halves(b: Any, bits: Any) -> Any:
    """Bits of half precision, 16 lanes, as float32: hardware widens subnormals at full speed, float32 arithmetic does not."""
    return b.fpext(b.bitcast(bits, vector(LANES, F16)), vector(LANES, F32))


def _decode_e4m3(b: Any, w: Any) -> Iterator[Any]:
    """Eight vectors of values, in `ORDERS[E4M3]`. Two tables of 128 bytes hold both bytes of a BF16 number: a permutation
    looks a magnitude up, the sign joins, and bytes side by side are the upper halves of float32."""
    bits, bytes_of = [_e4m3_bits(c) for c in range(128)], vector(64, I8)

    def look_up(v: Any, table: list[int]) -> Any:
        halves = [constant(I8, table[:64]), constant(I8, table[64:])]
        return call(b, "llvm.x86.avx512.vpermi2var.qi.512", bytes_of, [halves[0], v, halves[1]])

    for half in range(0, BLOCK, 64):
        v = load(b, w, half, bytes_of)
        low = look_up(v, [n & 255 for n in bits])
        high = b.or_(look_up(v, [n >> 8 for n in bits]), b.and_(v, splat(64, I8, 0x80)))
        yield from _upper_halves(b, low, high)


def _upper_halves(b: Any, low: Any, high: Any) -> Iterator[Any]:
    """Four vectors of float32 of which 64 pairs of bytes are the upper halves."""
    for part in (0, 8):
        lanes = [i + 64 * k for lane in range(0, 64, 16) for i in range(lane + part, lane + part + 8) for k in (0, 1)]
        pairs = b.bitcast(pick(b, low, lanes, high), vector(LANES, I32))
        yield b.bitcast(b.shl(pairs, splat(LANES, I32, 16)), vector(LANES, F32))
        yield b.bitcast(b.and_(pairs, splat(LANES, I32, 0xFFFF0000)), vector(LANES, F32))


def _decode_e4m3_moved(b: Any, w: Any) -> Iterator[Any]:
    """Eight vectors of code · 2⁻¹²⁰ in the same order: under a float32's exponent a code is that number, if the hardware
    computes with subnormals. Bits move into the upper byte by a matrix of bits, into the lower one by a table that ignores
    two of them: more permutations, or more products, than one of each would wait for each other."""
    bytes_of, lowest = vector(64, I8), [(i & 15) << 4 for i in range(64)]
    for half in range(0, BLOCK, 64):
        v = load(b, w, half, bytes_of)
        low = call(b, "llvm.x86.avx512.permvar.qi.512", bytes_of, [constant(I8, lowest), v])
        matrix = constant(I8, _SIGN_AND_EXPONENT * 8)
        high = call(b, "llvm.x86.vgf2p8affineqb.512", bytes_of, [v, matrix, I8(0)])
        yield from _upper_halves(b, low, high)


def _decode_e4m3_half(b: Any, w: Any) -> Iterator[Any]:
    """Eight vectors of code · 2⁻⁸: an E4M3 code moved under a half's exponent is that half, subnormals included."""
    for offset in range(0, BLOCK, 32):
        wide = b.sext(load(b, w, offset, vector(32, I8)), vector(32, I16))
        half = b.and_(b.shl(wide, splat(32, I16, 7)), splat(32, I16, 0xBF80))
        yield _halves(b, pick(b, half, range(LANES)))
        yield _halves(b, pick(b, half, range(LANES, 32)))


def _decode_e2m1(b: Any, w: Any) -> Iterator[Any]:
    """Eight vectors of values; lane i of vector j is column 8i + j. The permutation ignores all but four bits of a lane."""
    packed, table = load(b, w, 0, vector(LANES, I32)), [*E2M1_VALUES, *(-v for v in E2M1_VALUES)]
    for j in range(8):
        index = b.lshr(packed, splat(LANES, I32, 4 * j))
        values = constant(F32, table)
        yield call(b, "llvm.x86.avx512.permvar.sf.512", values.type, [values, index])


def _decode_e2m1_half(b: Any, w: Any) -> Iterator[Any]:
    """The same columns as value · 2⁻¹⁴: sign to the top of a half, exponent and mantissa to where they meet there."""
    packed = load(b, w, 0, vector(LANES, I32))
    for j in range(8):
        code = b.lshr(packed, splat(LANES, I32, 4 * j))
        sign = b.shl(b.and_(code, splat(LANES, I32, 8)), splat(LANES, I32, 12))
        rest = b.shl(b.and_(code, splat(LANES, I32, 7)), splat(LANES, I32, 9))
        yield _halves(b, b.trunc(b.or_(sign, rest), vector(LANES, I16)))


def _decode_bf16(b: Any, w: Any) -> Iterator[Any]:
    for offset in range(0, 2 * BLOCK, 2 * LANES):
        wide = b.zext(load(b, w, offset, vector(LANES, I16)), vector(LANES, I32))
        yield b.bitcast(b.shl(wide, splat(LANES, I32, 16)), vector(LANES, F32))


def _powers(b: Any, exponents: Any, factor: float) -> Any:
    """E8M0 bytes (16 lanes) times a power of two, as float32: the byte is the exponent, for bytes 1 and above."""
    bits = b.shl(b.zext(exponents, vector(LANES, I32)), splat(LANES, I32, 23))
    return b.fmul(b.bitcast(bits, vector(LANES, F32)), splat(LANES, F32, factor))


def _scale_e4m3(factor: float) -> Any:
    """One byte for 128 columns of all rows."""
    return lambda b, at: [_powers(b, broadcast(b, LANES, load(b, at[0], 0, I8)), factor)] * len(at)


def _scale_e2m1(factor: float) -> Any:
    """Four bytes for 128 columns of a row: of lane i the columns 8i … 8i+7."""
    lanes = [i // 4 for i in range(LANES)]
    return lambda b, at: (_powers(b, pick(b, load(b, s, 0, vector(4, I8)), lanes), factor) for s in at)


def _no_scale(b: Any, at: list[Any]) -> list[Any]:
    return [splat(LANES, F32, 1.0)] * len(at)


# By witness type: decoding of a block, the scales of its rows, and its bytes. E2M1 by bytes is a block of its own.
CODES: dict[Any, tuple[Any, Any, int]] = {
    types.uint8: (_decode_e4m3, _scale_e4m3(1.0), BLOCK),
    types.uint32: (_decode_e4m3_moved, _scale_e4m3(2.0**UNDONE), BLOCK),
    types.int32: (_decode_e4m3_half, _scale_e4m3(2.0**8), BLOCK),
    types.int8: (_decode_e2m1, _scale_e2m1(1.0), BLOCK // 2),
    types.int16: (_decode_e2m1_half, _scale_e2m1(2.0**14), BLOCK // 2),
    types.uint16: (_decode_bf16, _no_scale, 2 * BLOCK),
    types.int64: (None, None, BLOCK // 2),
}

# The column, of 128, that each place of a block decodes to.
_LANE = np.arange(BLOCK) % LANES
_VECTOR = np.arange(BLOCK) // LANES
NATURAL = np.arange(BLOCK)
BY_NIBBLE = _LANE * 8 + _VECTOR
BY_BYTE = _VECTOR // 4 * 64 + _LANE // 4 * 16 + _VECTOR % 4 // 2 * 8 + _LANE % 4 * 2 + _VECTOR % 2
