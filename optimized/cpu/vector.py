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
from llvmlite import ir
from numba import njit, prange, types
from numba.extending import intrinsic

BLOCK = 128  # columns of one intrinsic: 8 vectors of 16
LANES = 16
GROUP = 32  # rows of one task; divides 128, so the rows of a task share their FP8 scales
FEW = 4  # tokens up to which codes are decoded in registers; with more, once into a scratch for all
ROWS = 4  # rows of a block: each input that is loaded meets four weights
TOKENS = 32  # tokens of a tile: its inputs and sums stay in the second cache
PIECE = 8  # blocks of columns of a tile: 4 rows of scratch stay in the first cache

# Witnesses of what is stored: E4M3, E2M1 read through a permutation (AVX-512) or through half precision, BF16.
E4M3, E2M1, E2M1_HALF, BF16 = np.uint8(0), np.int8(0), np.int16(0), np.uint16(0)
_DECODED = np.float32(0)
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)

_I8, _I16, _I32, _I64 = (ir.IntType(n) for n in (8, 16, 32, 64))
_F16, _F32, _F64 = ir.HalfType(), ir.FloatType(), ir.DoubleType()


def _vector(n: int, of: Any) -> Any:
    return ir.VectorType(of, n)


def _splat(n: int, of: Any, value: float) -> Any:
    return ir.Constant(_vector(n, of), [value] * n)


def _pick(b: Any, v: Any, lanes: Any) -> Any:
    return b.shuffle_vector(v, ir.Constant(v.type, ir.Undefined), ir.Constant(_vector(len(lanes), _I32), list(lanes)))


def _at(b: Any, address: Any, offset: int, of: Any) -> Any:
    return b.inttoptr(b.add(address, _I64(offset)) if offset else address, of.as_pointer())


def _load(b: Any, address: Any, offset: int, of: Any) -> Any:
    return b.load(_at(b, address, offset, of), align=1)


def _call(b: Any, name: str, result: Any, arguments: list[Any]) -> Any:
    function = b.module.globals.get(name)
    if function is None:
        function = ir.Function(b.module, ir.FunctionType(result, [a.type for a in arguments]), name)
    return b.call(function, arguments)


def _fma(b: Any, x: Any, y: Any, z: Any) -> Any:
    return _call(b, f"llvm.fma.v{LANES}f{64 if z.type.element == _F64 else 32}", z.type, [x, y, z])


def _prefetch(b: Any, address: Any) -> None:
    _call(b, "llvm.prefetch.p0", ir.VoidType(), [_at(b, address, 0, _I8), _I32(0), _I32(3), _I32(1)])


def _halves(b: Any, bits: Any) -> Any:
    """Bits of half precision, 16 lanes, as float32: hardware widens subnormals at full speed, float32 arithmetic does not."""
    return b.fpext(b.bitcast(bits, _vector(LANES, _F16)), _vector(LANES, _F32))


def _decode_e4m3(b: Any, w: Any) -> Iterator[Any]:
    """Eight vectors of code · 2⁻⁸: an E4M3 code moved under a half's exponent is that half, subnormals included."""
    for at in range(0, BLOCK, 32):
        wide = b.sext(_load(b, w, at, _vector(32, _I8)), _vector(32, _I16))
        half = b.and_(b.shl(wide, _splat(32, _I16, 7)), _splat(32, _I16, 0xBF80))
        yield _halves(b, _pick(b, half, range(LANES)))
        yield _halves(b, _pick(b, half, range(LANES, 32)))


def _decode_e2m1(b: Any, w: Any) -> Iterator[Any]:
    """Eight vectors of values; lane i of vector j is column 8i + j. The permutation ignores all but four bits of a lane."""
    packed, table = _load(b, w, 0, _vector(LANES, _I32)), [*E2M1_VALUES, *(-v for v in E2M1_VALUES)]
    for j in range(8):
        index = b.lshr(packed, _splat(LANES, _I32, 4 * j))
        values = ir.Constant(_vector(LANES, _F32), table)
        yield _call(b, "llvm.x86.avx512.permvar.sf.512", values.type, [values, index])


def _decode_e2m1_half(b: Any, w: Any) -> Iterator[Any]:
    """The same columns as value · 2⁻¹⁴: sign to the top of a half, exponent and mantissa to where they meet there."""
    packed = _load(b, w, 0, _vector(LANES, _I32))
    for j in range(8):
        code = b.lshr(packed, _splat(LANES, _I32, 4 * j))
        sign = b.shl(b.and_(code, _splat(LANES, _I32, 8)), _splat(LANES, _I32, 12))
        rest = b.shl(b.and_(code, _splat(LANES, _I32, 7)), _splat(LANES, _I32, 9))
        yield _halves(b, b.trunc(b.or_(sign, rest), _vector(LANES, _I16)))


def _decode_bf16(b: Any, w: Any) -> Iterator[Any]:
    for at in range(0, 2 * BLOCK, 2 * LANES):
        wide = b.zext(_load(b, w, at, _vector(LANES, _I16)), _vector(LANES, _I32))
        yield b.bitcast(b.shl(wide, _splat(LANES, _I32, 16)), _vector(LANES, _F32))


def _decoded(b: Any, w: Any) -> Iterator[Any]:
    for at in range(0, 4 * BLOCK, 4 * LANES):
        yield _load(b, w, at, _vector(LANES, _F32))


def _powers(b: Any, exponents: Any, factor: float) -> Any:
    """E8M0 bytes (16 lanes) times a power of two, as float32: the byte is the exponent, for bytes 1 and above."""
    bits = b.shl(b.zext(exponents, _vector(LANES, _I32)), _splat(LANES, _I32, 23))
    return b.fmul(b.bitcast(bits, _vector(LANES, _F32)), _splat(LANES, _F32, factor))


def _scale_e4m3(b: Any, s: Any) -> Any:
    one = b.insert_element(ir.Constant(_vector(1, _I8), ir.Undefined), _load(b, s, 0, _I8), _I32(0))
    return _powers(b, _pick(b, one, [0] * LANES), 2.0**8)


def _scale_e2m1(factor: float) -> Any:
    def scale(b: Any, s: Any) -> Any:
        """Four bytes for 128 columns: of lane i the columns 8i … 8i+7."""
        return _powers(b, _pick(b, _load(b, s, 0, _vector(4, _I8)), [i // 4 for i in range(LANES)]), factor)

    return scale


# By witness type: decoding of a block, its scale, and its bytes if they come from memory rather than a scratch.
CODES: dict[Any, tuple[Any, Any, int]] = {
    types.uint8: (_decode_e4m3, _scale_e4m3, BLOCK),
    types.int8: (_decode_e2m1, _scale_e2m1(1.0), BLOCK // 2),
    types.int16: (_decode_e2m1_half, _scale_e2m1(2.0**14), BLOCK // 2),
    types.uint16: (_decode_bf16, None, 2 * BLOCK),
    types.float32: (_decoded, None, 0),
}


def _rows(b: Any, first: Any, stride: Any, n: int) -> list[Any]:
    rows = [first]
    for _ in range(n - 1):
        rows.append(b.add(rows[-1], stride))
    return rows


def _block(tokens: int, rows: int) -> Any:
    """An intrinsic: sums[r, t, :] += x[t, 128 columns] · w[r, 128 columns] · scale, in 16 lanes, for this many t and r."""

    @intrinsic
    def block(typing, held, code, number, w, ldw, ahead, s, lds, x, sums, lda):
        decode, _, nbytes = CODES[held]
        scale = CODES[code][1]
        size, of = (8, _F64) if number == types.float64 else (4, _F32)
        wide = _vector(LANES, of)

        def widened(b, v):
            return b.fpext(v, wide) if of is _F64 else v

        def generate(context, b, signature, arguments):
            w, ldw, ahead, s, lds, x, sums, lda = arguments[3:]
            at = _rows(b, w, ldw, rows)
            for row in at:
                for line in range(0, nbytes, 64):
                    _prefetch(b, b.add(row, b.add(ahead, _I64(line))))
            total = [[_splat(LANES, of, 0.0)] * tokens for _ in range(rows)]
            streams = [decode(b, row) for row in at]
            for j in range(BLOCK // LANES):
                values = [widened(b, next(stream)) for stream in streams]
                for t in range(tokens):
                    here = _load(b, x, (t * BLOCK + j * LANES) * size, wide)
                    for r in range(rows):
                        total[r][t] = _fma(b, here, values[r], total[r][t])
            factors = [_splat(LANES, of, 1.0)] * rows
            if scale:
                factors = [widened(b, scale(b, row)) for row in _rows(b, s, lds, rows)]
            for r, row in enumerate(_rows(b, sums, lda, rows)):
                for t in range(tokens):
                    before = _load(b, row, t * LANES * size, wide)
                    b.store(_fma(b, total[r][t], factors[r], before), _at(b, row, t * LANES * size, wide), align=1)
            return context.get_dummy_value()

        return types.void(held, code, number, *[types.intp] * 8), generate

    return block


_one_row, _one_row_few = _block(1, 1), _block(FEW, 1)
_rows_one, _rows_few = _block(1, ROWS), _block(FEW, ROWS)


@intrinsic
def _decode(typing, code, w, out):
    """128 columns at address w to 128 float32 at `out`, in the order in which `_block` takes them, without the scale."""

    def generate(context, b, signature, arguments):
        _, w, out = arguments
        for j, values in enumerate(CODES[code][0](b, w)):
            b.store(values, _at(b, out, 4 * LANES * j, values.type), align=1)
        return context.get_dummy_value()

    return types.void(code, types.intp, types.intp), generate


@intrinsic
def _finish(typing, number, sums, y):
    """The 16 lanes at address `sums`, added pairwise, to the number at address y."""
    of = _F64 if number == types.float64 else _F32

    def generate(context, b, signature, arguments):
        _, sums, y = arguments
        v, n = _load(b, sums, 0, _vector(LANES, of)), LANES
        while n > 1:
            n //= 2
            v = b.fadd(_pick(b, v, range(n)), _pick(b, v, range(n, 2 * n)))
        b.store(b.extract_element(v, _I32(0)), _at(b, y, 0, of))
        return context.get_dummy_value()

    return types.void(number, types.intp, types.intp), generate


@njit(nogil=True)
def _direct(code, number, held, w, ldw, s, lds, scaled, x, tokens, blocks, rows, narrow, y, ldy, sums):
    """Rows times at most FEW tokens (1 or FEW in x): codes are decoded in registers and each row is walked once."""
    at, size, ldx = sums.ctypes.data, sums.itemsize, (1 if tokens == 1 else FEW) * BLOCK * sums.itemsize
    lda = FEW * LANES * size
    r = 0
    while r < rows:
        together = ROWS if rows - r >= ROWS and not narrow else 1
        ahead = together * ldw
        sums[:] = 0
        for k in range(blocks):
            here, scale, mine = w + r * ldw + k * held, s + r * lds + k * scaled, x + k * ldx
            if tokens == 1 and together == 1:
                _one_row(code, code, number, here, ldw, ahead, scale, lds, mine, at, lda)
            elif tokens == 1:
                _rows_one(code, code, number, here, ldw, ahead, scale, lds, mine, at, lda)
            elif together == 1:
                _one_row_few(code, code, number, here, ldw, ahead, scale, lds, mine, at, lda)
            else:
                _rows_few(code, code, number, here, ldw, ahead, scale, lds, mine, at, lda)
        for i in range(together):
            for t in range(tokens):
                _finish(number, at + i * lda + t * LANES * size, y + t * ldy + (r + i) * size)
        r += together


@njit(nogil=True)
def _tiled(code, number, held, w, ldw, s, lds, scaled, x, tokens, blocks, rows, y, ldy, sums, scratch):
    """Rows times many tokens: ROWS rows of a piece of columns are decoded once for a tile of tokens."""
    at, size, decoded, padded = sums.ctypes.data, sums.itemsize, scratch.ctypes.data, -(-tokens // FEW) * FEW
    lda, block = TOKENS * LANES * size, BLOCK * scratch.itemsize
    row = PIECE * block
    for t0 in range(0, tokens, TOKENS):
        here = min(TOKENS, padded - t0)
        sums[:] = 0
        for k0 in range(0, blocks, PIECE):
            some = min(PIECE, blocks - k0)
            for r in range(0, rows, ROWS):
                there = min(ROWS, rows - r)
                for i in range(there):
                    for k in range(some):
                        _decode(code, w + (r + i) * ldw + (k0 + k) * held, decoded + i * row + k * block)
                for t in range(0, here, FEW):
                    for k in range(some):
                        mine, scale = x + ((k0 + k) * padded + t0 + t) * BLOCK * size, s + r * lds + (k0 + k) * scaled
                        out = at + r * lda + t * LANES * size
                        if there == ROWS:
                            _rows_few(_DECODED, code, number, decoded + k * block, row, 0, scale, lds, mine, out, lda)
                        else:
                            for i in range(there):
                                held_row, scale_row = decoded + i * row + k * block, scale + i * lds
                                _one_row_few(_DECODED, code, number, held_row, row, 0, scale_row, lds, mine, out + i * lda, lda)
        for r in range(rows):
            for t in range(min(TOKENS, tokens - t0)):
                _finish(number, at + r * lda + t * LANES * size, y + (t0 + t) * ldy + r * size)


@njit(nogil=True)
def _task(code, number, jobs, held, ldw, lds, height, scaled, blocks, task):
    """One task of `product`: at most GROUP rows, those of one stretch between multiples of GROUP."""
    j = 0
    while task >= jobs[j, 8]:
        j += 1
    first, tokens, group = jobs[j, 4], jobs[j, 6], jobs[j, 4] // GROUP + task - (jobs[j - 1, 8] if j else 0)
    begin, end = max(first, group * GROUP), min(jobs[j, 5], (group + 1) * GROUP)
    few = tokens <= FEW
    sums = np.full((ROWS * FEW if few else GROUP * TOKENS, LANES), number)
    w, s, step = jobs[j, 0] + begin * ldw, jobs[j, 1] + begin // height * lds, lds if height == 1 else 0
    x, y, ldy = jobs[j, 2], jobs[j, 3] + (begin - first) * sums.itemsize, jobs[j, 7]
    if few:
        narrow = tokens == 1 and held < BLOCK
        _direct(code, number, held, w, ldw, s, step, scaled, x, tokens, blocks, end - begin, narrow, y, ldy, sums)
    else:
        scratch = np.full((ROWS * PIECE, BLOCK), _DECODED)
        _tiled(code, number, held, w, ldw, s, step, scaled, x, tokens, blocks, end - begin, y, ldy, sums, scratch)


@njit(parallel=True, nogil=True, cache=True)
def product(code, number, jobs, held, ldw, lds, height, scaled, blocks):
    """All jobs at once: rows [first, stop) of a matrix times the tokens of packed x, to y.

    jobs int64 [n, 9]: addresses of w, s, x and y (row 0 of the matrix, its scales, packed x, y of row `first` and token
    0), first, stop, tokens, bytes between tokens of y, and the number of tasks up to and with this job. A block of 128
    columns has `held` bytes of codes and `scaled` of scales, a scale is that of `height` rows; ldw and lds are the bytes
    of a row of codes and of scales.
    """
    for task in prange(jobs[-1, 8]):
        _task(code, number, jobs, held, ldw, lds, height, scaled, blocks, task)


@njit(nogil=True, cache=True)
def pack(x, nibbles, out):
    """x [t, in] -> out [in/128, padded t, 128], in the order of E2M1's lanes if `nibbles`; missing tokens become zero."""
    for k in range(out.shape[0]):
        for t in range(out.shape[1]):
            for i in range(BLOCK):
                at = i % LANES * 8 + i // LANES if nibbles else i
                out[k, t, i] = x[t, k * BLOCK + at] if t < x.shape[0] else 0
