"""Products with E2M1 weights by byte dot products: twice a code is a small integer, an input three bytes of one.

Here is the block for `vector`'s loops and what makes its inputs. Needs AVX-512 with VNNI and VBMI, float32 inputs and
numba. Source: docs/cpu.md §3.
"""

from __future__ import annotations

import math

import numpy as np
from numba import njit, prange

from .ir import BLOCK, F32, I8, I32, LANES, ROWS, broadcast, call, constant, fma, load, pick, splat, store, vector

UNIT = 32  # columns that share a scale, of the weights and of the inputs
LIMBS = 3
PACKED = (2 * LIMBS + 2) * 64  # bytes of a token's block: limbs, what the offset adds, factors
OFFSET = 12  # makes twice a code positive
TWICE = (0, 1, 2, 3, 4, 6, 8, 12)  # of the E2M1 magnitudes
BITS = 23
LARGEST = 127 * (1 + 256 + 65536)  # the largest integer of three signed bytes
DEEPEST = 100  # binary orders below a token's largest input down to which a unit has its own exponent
LEFT_OUT = 2.0**-21  # of a token's length: with more, what integers leave out is multiplied too
NOT_FINITE = 1 << 20
NOTHING = -(1 << 20)  # an exponent of zeros

_TABLE = [OFFSET + v for v in (*TWICE, *(-v for v in TWICE))] * 4


def block(b, tokens, at, scales, x, sums):
    """sums[r, t, :] += x[t, 128 columns] · w[r, 128 columns] in 16 lanes, for rows of codes at `at`, scales at `scales`."""
    words, numbers = vector(LANES, I32), vector(LANES, F32)
    weights = [_codes(b, row) for row in at]
    factors = [_scales(b, row) for row in scales]
    for t in range(tokens):
        parts = [load(b, x, t * PACKED + 64 * i, vector(64, I8)) for i in range(2 * LIMBS)]
        offset, own = (load(b, x, t * PACKED + 128 * LIMBS + 64 * i, of) for i, of in enumerate((words, numbers)))
        for r in range(ROWS):
            total = splat(LANES, I32, 0)
            for limb in range(LIMBS):
                total = b.shl(total, splat(LANES, I32, 8)) if limb else total
                for half in (0, 1):
                    operands = [total, weights[r][half], parts[2 * limb + half]]
                    total = call(b, "llvm.x86.avx512.vpdpbusd.512", words, operands)
            value = b.fmul(b.sitofp(b.add(total, offset), numbers), own)
            before = load(b, sums[r], t * LANES * 4, numbers)
            store(b, fma(b, value, factors[r], before), sums[r], t * LANES * 4)


def _codes(b, at):
    """Low and high nibbles as 2 · value + OFFSET: a permutation of 64 ignores the two bits above a nibble."""
    bytes_of, words = vector(64, I8), vector(LANES, I32)
    packed = load(b, at, 0, bytes_of)
    high = b.bitcast(b.lshr(b.bitcast(packed, words), splat(LANES, I32, 4)), bytes_of)
    return [call(b, "llvm.x86.avx512.permvar.qi.512", bytes_of, [constant(I8, _TABLE), v]) for v in (packed, high)]


def _scales(b, at):
    """Four bytes: each is the exponent of four lanes, and moves to its place from a lane's top byte."""
    four = b.bitcast(broadcast(b, LANES, load(b, at, 0, I32)), vector(64, I8))
    lanes = [n for lane in range(LANES) for n in (64, 64, 64, 4 * lane + lane // 4)]
    top = b.bitcast(pick(b, four, lanes, splat(64, I8, 0)), vector(LANES, I32))
    return b.bitcast(b.lshr(top, splat(LANES, I32, 1)), vector(LANES, F32))


@njit(nogil=True)
def _exponent(values):
    """The least e for which the largest magnitude times 2^(BITS - e) is an integer's; very small for zeros."""
    largest = np.float64(0)
    for v in values:
        largest = max(largest, abs(np.float64(v)))
    m, e = math.frexp(largest)
    return NOTHING if largest == 0 else e + (m * 2.0**BITS > LARGEST)


@njit(nogil=True)
def _split_token(x, integers, exponents):
    """x [in] ~ integers [in] (int32) · 2^(exponents [in/32] - BITS) -> the largest exponent, and whether more than LEFT_OUT of
    the token's length is left out, every unit's largest input not counted. With infinity or NaN, zeros and NOT_FINITE."""
    top, finite = NOTHING, True
    for u in range(len(exponents)):
        row = x[u * UNIT : (u + 1) * UNIT]
        for v in row:
            finite &= abs(v) < np.inf
        exponents[u] = _exponent(row) if finite else 0
        top = max(top, exponents[u])
    left, length = 0.0, 0.0
    for u in range(len(exponents)):
        e = max(exponents[u], top - DEEPEST)
        up, down, largest = math.ldexp(1.0, BITS - e), math.ldexp(1.0, e - BITS), 0.0
        for c in range(u * UNIT, (u + 1) * UNIT):
            v = np.float64(x[c]) if finite else 0.0
            n = np.rint(v * up)
            integers[c] = np.int32(n)
            left += (v - n * down) ** 2
            length += v * v
            largest = max(largest, v * v)
        length -= largest
        exponents[u] = e
    return top if finite else NOT_FINITE, left > LEFT_OUT**2 * length


@njit(nogil=True)
def _pack_token(integers, exponents, top, t, padded, out):
    """What `_split_token` found, as place t of `padded` in `out`; see `prepare`."""
    bytes_of, words, numbers, factors = out.view(np.int8), out.view(np.int32), out.view(np.float32), out.view(np.float64)
    factors[len(factors) - padded + t] = np.nan if top == NOT_FINITE else math.ldexp(1.0, top)
    for k in range(len(integers) // BLOCK):
        at = (k * padded + t) * PACKED
        for lane in range(LANES):
            total = 0
            for i in range(8):
                n = integers[k * BLOCK + lane * 8 + i]
                total += n
                place = at + i % 2 * 64 + lane * 4 + i // 2
                low = ((n + 128) & 255) - 128
                n = (n - low) >> 8
                middle = ((n + 128) & 255) - 128
                bytes_of[place + 256] = low
                bytes_of[place + 128] = middle
                bytes_of[place] = (n - middle) >> 8
            words[at // 4 + 96 + lane] = -OFFSET * total
            numbers[at // 4 + 112 + lane] = math.ldexp(1.0, exponents[k * 4 + lane // 4] - BITS - 1 - top)


@njit(nogil=True)
def _prepare_token(x, place, out, wide, j):
    first, end, t, padded, last = place
    integers, exponents = np.empty(len(x), np.int32), np.empty(len(x) // UNIT, np.int32)
    top, wide[j] = _split_token(x, integers, exponents)
    for slot in range(t, padded if last else t + 1):
        _pack_token(integers, exponents, top, slot, padded, out[first:end])


@njit(parallel=True, nogil=True, cache=True)
def prepare(x, places, out, wide):
    """Tokens x [t, in] float32 of several inputs as the blocks take them; `wide` [t] tells of which much is left out.

    places int64 [t, 5]: the bytes [begin, end) of its input in `out`, its place there, the places of that input with padding,
    and whether it is the last that is no padding. Those bytes are [in/128, padded t, PACKED] and behind it float64 [padded t],
    2^(its largest exponent). A token's block: its three bytes, largest first, each for even and odd columns; -OFFSET times the
    sum of the integers of each lane, int32 [16]; what a lane's sum of products counts, float32 [16].
    """
    for j in prange(len(x)):
        _prepare_token(x[np.int64(j)], places[np.int64(j)], out, wide, np.int64(j))


@njit(nogil=True, cache=True)
def prepare_few(x, places, out, wide):
    """`prepare` by the caller's thread."""
    for j in range(len(x)):
        _prepare_token(x[j], places[j], out, wide, j)


@njit(nogil=True, cache=True)
def left_out(x, wide):
    """x less what its integers are, of the tokens of x [t, in] where `wide` [t]: float32 [their number, in]."""
    out, at = np.empty((wide.sum(), x.shape[1]), np.float32), 0
    integers, exponents = np.empty(x.shape[1], np.int32), np.empty(x.shape[1] // UNIT, np.int32)
    for t in range(len(x)):
        if wide[t]:
            _split_token(x[t], integers, exponents)
            for c in range(x.shape[1]):
                out[at, c] = np.float64(x[t, c]) - integers[c] * math.ldexp(1.0, exponents[c // UNIT] - BITS)
            at += 1
    return out
