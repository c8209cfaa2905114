"""Products y = x · dequant(W)ᵀ in vector code: LLVM vectors for one block of 128 columns, numba loops around them.

What a row's address holds is told by the type of a witness number (`CODES`), what is accumulated by that of another
(float32 or float64). Every output is the same sum in the same order however many tokens, rows and threads share the
call. Intrinsics and loops are in one file because numba's cache looks at the time of the loops' file only.
Source: docs/cpu.md §2. Imported on first use: it needs numba.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numba import get_num_threads, njit, prange, types
from numba.extending import intrinsic

from . import vnni
from .ir import (
    BLOCK,
    F16,
    F32,
    F64,
    I8,
    I16,
    I32,
    I64,
    LANES,
    ROWS,
    broadcast,
    call,
    constant,
    fma,
    load,
    pick,
    prefetch,
    rows,
    splat,
    store,
    sum_lanes,
    vector,
)

GROUP = 32  # rows of one task; divides 128, so the rows of a task share their FP8 scales
FEW = 4  # tokens of a block; up to as many see rows whole, and memory binds
TOKENS = 32  # tokens of a tile: its inputs and sums stay in the second cache
PIECE = 8  # blocks of columns of a tile: inputs of four tokens stay in the first cache
_LINE = 8  # counters to a line of the cache
AHEAD = 28 << 10  # bytes between use and prefetch at least: less than that does not hide the memory's latency

# Witnesses of what is stored: E4M3 and E2M1, read through tables (AVX-512) or half precision, BF16, E2M1 for `vnni`.
E4M3, E4M3_HALF, E2M1, E2M1_HALF, BF16 = np.uint8(0), np.int32(0), np.int8(0), np.int16(0), np.uint16(0)
E2M1_BYTES = np.int64(0)
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
        for part in (0, 8):
            lanes = [i + 64 * k for lane in range(0, 64, 16) for i in range(lane + part, lane + part + 8) for k in (0, 1)]
            pairs = b.bitcast(pick(b, low, lanes, high), vector(LANES, I32))
            yield b.bitcast(b.shl(pairs, splat(LANES, I32, 16)), vector(LANES, F32))
            yield b.bitcast(b.and_(pairs, splat(LANES, I32, 0xFFFF0000)), vector(LANES, F32))


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
    return lambda b, s: _powers(b, broadcast(b, LANES, load(b, s, 0, I8)), factor)


def _scale_e2m1(factor: float) -> Any:
    """Four bytes for 128 columns: of lane i the columns 8i … 8i+7."""
    return lambda b, s: _powers(b, pick(b, load(b, s, 0, vector(4, I8)), [i // 4 for i in range(LANES)]), factor)


# By witness type: decoding of a block, its scale, and its bytes. E2M1 by bytes is a block of its own.
CODES: dict[Any, tuple[Any, Any, int]] = {
    types.uint8: (_decode_e4m3, _scale_e4m3(1.0), BLOCK),
    types.int32: (_decode_e4m3_half, _scale_e4m3(2.0**8), BLOCK),
    types.int8: (_decode_e2m1, _scale_e2m1(1.0), BLOCK // 2),
    types.int16: (_decode_e2m1_half, _scale_e2m1(2.0**14), BLOCK // 2),
    types.uint16: (_decode_bf16, None, 2 * BLOCK),
    types.int64: (None, None, BLOCK // 2),
}

# The column, of 128, that each place of a block decodes to.
_LANE = np.arange(BLOCK) % LANES
_VECTOR = np.arange(BLOCK) // LANES
NATURAL = np.arange(BLOCK)
BY_NIBBLE = _LANE * 8 + _VECTOR
BY_BYTE = _VECTOR // 4 * 64 + _LANE // 4 * 16 + _VECTOR % 4 // 2 * 8 + _LANE % 4 * 2 + _VECTOR % 2


def _widened(b: Any, v: Any, wide: Any) -> Any:
    return v if v.type == wide else b.fpext(v, wide)


def _multiply(b: Any, tokens: int, code: Any, at: list[Any], scales: list[Any], x: Any, sums: list[Any], wide: Any) -> None:
    """sums[r, t, :] += x[t, 128 columns] · w[r, 128 columns] · scale, in 16 lanes."""
    decode, scale, _ = CODES[code]
    size = 8 if wide.element == F64 else 4
    total = [[splat(LANES, wide.element, 0.0)] * tokens for _ in at]
    streams = [decode(b, row) for row in at]
    for j in range(BLOCK // LANES):
        values = [_widened(b, next(stream), wide) for stream in streams]
        for t in range(tokens):
            here = load(b, x, (t * BLOCK + j * LANES) * size, wide)
            for r, value in enumerate(values):
                total[r][t] = fma(b, here, value, total[r][t])
    for r, row in enumerate(sums):
        factor = _widened(b, scale(b, scales[r]), wide) if scale else splat(LANES, wide.element, 1.0)
        for t in range(tokens):
            before = load(b, row, t * LANES * size, wide)
            store(b, fma(b, total[r][t], factor, before), row, t * LANES * size)


def _block(tokens: int) -> Any:
    """An intrinsic: what so many tokens and ROWS rows of one block add to their sums [ROWS, tokens, 16]. Of the rows
    `there` exist: the others repeat the last one."""

    @intrinsic
    def block(typing, code, number, w, ldw, ahead, s, lds, there, x, sums, lda):
        wide = vector(LANES, F64 if number == types.float64 else F32)
        together = ROWS // 2 if wide.element == F64 and tokens == FEW else ROWS  # rows whose sums are in registers

        def generate(context, b, signature, arguments):
            w, ldw, ahead, s, lds, there, x, sums, lda = arguments[2:]
            at, scales = rows(b, w, ldw, there, ROWS), rows(b, s, lds, there, ROWS)
            out = [b.add(sums, b.mul(I64(r), lda)) for r in range(ROWS)]
            for row in at:
                for line in range(0, CODES[code][2], 64):
                    prefetch(b, b.add(row, b.add(ahead, I64(line))))
            if code == types.int64:
                vnni.block(b, tokens, at, scales, x, out)
                return context.get_dummy_value()
            for r in range(0, ROWS, together):
                few = slice(r, r + together)
                _multiply(b, tokens, code, at[few], scales[few], x, out[few], wide)
            return context.get_dummy_value()

        return types.void(code, number, *[types.intp] * 9), generate

    return block


_one, _two, _four = _block(1), _block(2), _block(FEW)


@intrinsic
def _finish(typing, code, number, sums, factor, y):
    """The 16 lanes at address `sums`, added pairwise, to the number at y; with E2M1_BYTES times the float64 at `factor`."""
    of = F64 if number == types.float64 else F32

    def generate(context, b, signature, arguments):
        _, _, sums, factor, y = arguments
        total = sum_lanes(b, load(b, sums, 0, vector(LANES, of)))
        if code == types.int64:
            total = b.fptrunc(b.fmul(b.fpext(total, F64), load(b, factor, 0, F64)), F32)
        store(b, total, y)
        return context.get_dummy_value()

    return types.void(code, number, *[types.intp] * 3), generate


@njit(nogil=True)
def _blocks(tokens, code, number, blocks, held, w, ldw, ahead, scaled, s, lds, there, ldx, x, sums, lda):
    """Blocks of columns, one after the other. Each number of tokens has a loop of its own: branches within one would have
    LLVM decode all that they share before it branches, more than registers hold."""
    if tokens == 1:
        for k in range(blocks):
            _one(code, number, w + k * held, ldw, ahead, s + k * scaled, lds, there, x + k * ldx, sums, lda)
    elif tokens == 2:
        for k in range(blocks):
            _two(code, number, w + k * held, ldw, ahead, s + k * scaled, lds, there, x + k * ldx, sums, lda)
    else:
        for k in range(blocks):
            _four(code, number, w + k * held, ldw, ahead, s + k * scaled, lds, there, x + k * ldx, sums, lda)


@njit(nogil=True)
def _walk(code, number, held, w, ldw, s, lds, scaled, x, tokens, blocks, rows, y, ldy, sums):
    """Rows times tokens: the rows of a block whole if tokens are few, else a piece of columns for a tile of tokens."""
    at, size, padded, few = sums.ctypes.data, sums.itemsize, few_padded(tokens), tokens <= FEW
    lda, token, piece = sums.shape[1] * LANES * size, BLOCK * size, blocks if few else PIECE
    factors, far = x + blocks * padded * token, -(-AHEAD // (ROWS * ldw)) * ROWS * ldw
    for t0 in range(0, tokens, TOKENS):
        here = min(TOKENS, padded - t0)
        sums[:] = 0
        for k in range(0, blocks, piece):
            for r in range(0, rows, ROWS):
                there, ahead = min(ROWS, rows - r), ROWS * ldw if r + ROWS < rows else piece * held - r * ldw
                codes, scale = w + r * ldw + k * held, s + r * lds + k * scaled
                for t in range(0, here, FEW):
                    mine, out = x + (k * padded + t0 + t) * token, at + r * lda + t * LANES * size
                    _blocks(here - t, code, number, min(piece, blocks - k), held, codes, ldw, far if few else ahead, scaled,
                            scale, lds, there, padded * token, mine, out, lda)  # fmt: skip
        for r in range(rows):
            for t in range(min(TOKENS, tokens - t0)):
                place = y + (t0 + t) * ldy + r * size
                _finish(code, number, at + r * lda + t * LANES * size, factors + (t0 + t) * 8, place)


@njit(nogil=True)
def few_padded(tokens):
    """Tokens as blocks take them: fours, and 1 or 2 beside those."""
    return tokens + (tokens % FEW == FEW - 1)


@njit(nogil=True)
def _task(code, number, jobs, held, ldw, lds, height, scaled, blocks, task):
    """One task of `product`: at most GROUP rows, those of one stretch between multiples of GROUP."""
    j = 0
    while task >= jobs[j, 8]:
        j += 1
    first, tokens, group = jobs[j, 4], jobs[j, 6], jobs[j, 4] // GROUP + task - (jobs[j - 1, 8] if j else 0)
    begin, end = max(first, group * GROUP), min(jobs[j, 5], (group + 1) * GROUP)
    sums = np.full((GROUP, min(TOKENS, few_padded(tokens)), LANES), number)
    w, s, step = jobs[j, 0] + begin * ldw, jobs[j, 1] + begin // height * lds, lds if height == 1 else 0
    y = jobs[j, 3] + (begin - first) * sums.itemsize
    _walk(code, number, held, w, ldw, s, step, scaled, jobs[j, 2], tokens, blocks, end - begin, y, jobs[j, 7], sums)


@intrinsic
def _take(typing, counter):
    """The number at an address, which goes up by one for the next thread that asks."""

    def generate(context, b, signature, arguments):
        return b.atomic_rmw("add", b.inttoptr(arguments[0], I64.as_pointer()), I64(1), "monotonic")

    return types.intp(types.intp), generate


@njit(parallel=True, nogil=True, cache=True)
def _product(code, number, jobs, counters, held, ldw, lds, height, scaled, blocks):
    tasks, workers = jobs[-1, 8], len(counters)
    for worker in prange(workers):
        for i in range(workers):  # its own share, whose rows follow one another in memory, then what others have left
            share = (np.int64(worker) + i) % workers
            task = _take(counters.ctypes.data + 8 * _LINE * share)
            while task < tasks * (share + 1) // workers:
                _task(code, number, jobs, held, ldw, lds, height, scaled, blocks, task)
                task = _take(counters.ctypes.data + 8 * _LINE * share)


def product(code: Any, number: Any, jobs: Any, held: int, ldw: int, lds: int, height: int, scaled: int, blocks: int) -> None:
    """All jobs at once: rows [first, stop) of a matrix times the tokens of packed x, to y.

    jobs int64 [n, 9]: addresses of w, s, x and y (row 0 of the matrix, its scales, packed x, y of row `first` and token
    0), first, stop, tokens, bytes between tokens of y, and the number of tasks up to and with this job. A block of 128
    columns has `held` bytes of codes and `scaled` of scales, a scale is that of `height` rows; ldw and lds are the bytes
    of a row of codes and of scales.
    """
    workers = get_num_threads()
    counters = np.empty((workers, _LINE), np.int64)
    counters[:, 0] = jobs[-1, 8] * np.arange(workers) // workers  # where the share of each begins
    _product(code, number, jobs, counters, held, ldw, lds, height, scaled, blocks)


@njit(nogil=True)
def _pack_block(x, firsts, order, out, k):
    blocks, at = x.shape[1] // BLOCK, 0
    for i in range(len(firsts) - 1):
        tokens = firsts[i + 1] - firsts[i]
        padded = few_padded(tokens)
        for t in range(padded):
            place = at + (k * padded + t) * BLOCK
            for c in range(BLOCK):
                out[place + c] = x[firsts[i] + t, k * BLOCK + order[c]] if t < tokens else 0
        at += blocks * padded * BLOCK


@njit(parallel=True, nogil=True, cache=True)
def pack(x, firsts, order, out):
    """Tokens x [t, in] of several inputs, each from its own of firsts [n + 1] (int64) on -> out, flat: one after the other
    as [in/128, padded t, 128], columns of a block in this order [128]; missing tokens become zero."""
    for k in prange(x.shape[1] // BLOCK):
        _pack_block(x, firsts, order, out, np.int64(k))


@njit(nogil=True, cache=True)
def pack_few(x, firsts, order, out):
    """`pack` by the caller's thread."""
    for k in range(x.shape[1] // BLOCK):
        _pack_block(x, firsts, order, out, k)
