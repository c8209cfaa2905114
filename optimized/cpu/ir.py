"""Vectors of LLVM for the intrinsics of `vector`, `codes` and `vnni`. Source: docs/cpu.md §2.

numba's cache of those files does not look at this one: after a change here, delete `optimized/cpu/__pycache__`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llvmlite import ir

LANES = 16
BLOCK = 128  # columns of one intrinsic: 8 vectors of 16
ROWS = 4  # and its rows: each input that is loaded meets four weights

I8, I16, I32, I64 = (ir.IntType(n) for n in (8, 16, 32, 64))
F16, F32, F64 = ir.HalfType(), ir.FloatType(), ir.DoubleType()


def vector(n: int, of: Any) -> Any:
    return ir.VectorType(of, n)


def constant(of: Any, values: Sequence[float]) -> Any:
    return ir.Constant(vector(len(values), of), list(values))


def splat(n: int, of: Any, value: float) -> Any:
    return constant(of, [value] * n)


def pick(b: Any, v: Any, lanes: Sequence[int], w: Any = None) -> Any:
    """Lanes of v, or of v and w behind it."""
    return b.shuffle_vector(v, ir.Constant(v.type, ir.Undefined) if w is None else w, constant(I32, lanes))


def broadcast(b: Any, n: int, value: Any) -> Any:
    one = b.insert_element(ir.Constant(vector(1, value.type), ir.Undefined), value, I32(0))
    return pick(b, one, [0] * n)


def at(b: Any, address: Any, offset: int, of: Any) -> Any:
    return b.inttoptr(b.add(address, I64(offset)) if offset else address, of.as_pointer())


def load(b: Any, address: Any, offset: int, of: Any) -> Any:
    return b.load(at(b, address, offset, of), align=1)


def store(b: Any, value: Any, address: Any, offset: int = 0) -> None:
    b.store(value, at(b, address, offset, value.type), align=1)


def call(b: Any, name: str, result: Any, arguments: list[Any]) -> Any:
    function = b.module.globals.get(name)
    if function is None:
        function = ir.Function(b.module, ir.FunctionType(result, [a.type for a in arguments]), name)
    return b.call(function, arguments)


def fma(b: Any, x: Any, y: Any, z: Any) -> Any:
    return call(b, f"llvm.fma.v{LANES}f{64 if z.type.element == F64 else 32}", z.type, [x, y, z])


def prefetch(b: Any, address: Any) -> None:
    """Into the second cache: what misses the first one waits in few places, which the loads need."""
    call(b, "llvm.prefetch.p0", ir.VoidType(), [at(b, address, 0, I8), I32(0), I32(2), I32(1)])


def rows(b: Any, first: Any, stride: Any, there: Any, n: int) -> list[Any]:
    """Addresses of n rows of which `there` exist: the last one stands in for those that do not."""
    found = [first]
    for i in range(1, n):
        step = b.select(b.icmp_signed("<", I64(i), there), stride, I64(0))
        found.append(b.add(found[-1], step))
    return found


def sum_lanes(b: Any, v: Any) -> Any:
    """Pairwise: lane i with lane i + 8, then i + 4, i + 2, i + 1."""
    n = LANES
    while n > 1:
        n //= 2
        v = b.fadd(pick(b, v, range(n)), pick(b, v, range(n, 2 * n)))
    return b.extract_element(v, I32(0))
