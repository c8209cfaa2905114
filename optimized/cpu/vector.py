"""Products y = x · dequant(W)ᵀ in vector code: LLVM vectors for one block of 128 columns, numba loops around them.

What a row's address holds is told by the type of a witness number (`CODES`), what is accumulated by that of another
(float32 or float64). Every output is the same sum in the same order however many tokens, rows and threads share the
call. Intrinsics and loops are in one file because numba's cache looks at the time of the loops' file only: after a change
in `codes`, `ir` or `vnni` delete it.
Source: docs/cpu.md §2. Imported on first use: it needs numba.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import get_num_threads, njit, prange, types
from numba.extending import intrinsic

from . import vnni
from .codes import CODES
from .ir import BLOCK, F32, F64, I32, I64, LANES, ROWS, call, fma, load, prefetch, rows, splat, store, sum_lanes, vector

GROUP = 32  # rows of one task; divides 128, so the rows of a task share their FP8 scales
FEW = 4  # tokens of a block; up to as many see rows whole, and memory binds
TOKENS = 32  # tokens of a tile: its inputs and sums stay in the second cache
PIECE = 8  # blocks of columns of a tile: inputs of four tokens stay in the first cache
_LINE = 8  # counters to a line of the cache
AHEAD = 28 << 10  # bytes between use and prefetch at least: less than that does not hide the memory's latency
_FLUSHES = 0x8040  # bits of a thread's control word: subnormal inputs are zeros, subnormal results are


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
    for row, totals, factor in zip(sums, total, scale(b, scales), strict=True):
        for t in range(tokens):
            before = load(b, row, t * LANES * size, wide)
            store(b, fma(b, totals[t], _widened(b, factor, wide), before), row, t * LANES * size)


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


@intrinsic
def _compute_subnormals(typing, code):
    """With E4M3_MOVED, this thread computes with subnormals from here on, whatever it did -> what `_as_before` wants."""

    def generate(context, b, signature, arguments):
        if code != types.uint32:
            return I64(0)
        before, after = b.alloca(I32), b.alloca(I32)
        call(b, "llvm.x86.sse.stmxcsr", ir.VoidType(), [before])
        b.store(b.and_(b.load(before), I32(~_FLUSHES)), after)
        call(b, "llvm.x86.sse.ldmxcsr", ir.VoidType(), [after])
        return b.zext(b.load(before), I64)

    return types.intp(code), generate


@intrinsic
def _as_before(typing, code, control):
    def generate(context, b, signature, arguments):
        if code == types.uint32:
            before = b.alloca(I32)
            b.store(b.trunc(arguments[1], I32), before)
            call(b, "llvm.x86.sse.ldmxcsr", ir.VoidType(), [before])
        return context.get_dummy_value()

    return types.void(code, types.intp), generate


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
    control = _compute_subnormals(code)
    _walk(code, number, held, w, ldw, s, step, scaled, jobs[j, 2], tokens, blocks, end - begin, y, jobs[j, 7], sums)
    _as_before(code, control)


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


@njit(nogil=True, cache=True)
def movable(x, least, most):
    """Whether all of x [t, in] is zero or of a magnitude within [least, most): NaN is not."""
    outside = 0
    for v in x.flat:
        size = abs(v)
        outside += not (size < most and (size >= least or size == 0))
    return outside == 0


@njit(nogil=True)
def _pack_block(x, firsts, order, factor, out, k):
    blocks, at = x.shape[1] // BLOCK, 0
    for i in range(len(firsts) - 1):
        tokens = firsts[i + 1] - firsts[i]
        padded = few_padded(tokens)
        for t in range(padded):
            place = at + (k * padded + t) * BLOCK
            for c in range(BLOCK):
                out[place + c] = x[firsts[i] + t, k * BLOCK + order[c]] * factor if t < tokens else 0
        at += blocks * padded * BLOCK


@njit(parallel=True, nogil=True, cache=True)
def pack(x, firsts, order, factor, out):
    """Tokens x [t, in] of several inputs, each from its own of firsts [n + 1] (int64) on -> out, flat: x · factor, one after
    the other as [in/128, padded t, 128], columns of a block in this order [128]; missing tokens become zero."""
    for k in prange(x.shape[1] // BLOCK):
        _pack_block(x, firsts, order, factor, out, np.int64(k))


@njit(nogil=True, cache=True)
def pack_few(x, firsts, order, factor, out):
    """`pack` by the caller's thread."""
    for k in range(x.shape[1] // BLOCK):
        _pack_block(x, firsts, order, factor, out, k)
