"""Which kernels this CPU runs, what they take, and calls of many products at once. Source: docs/cpu.md §1 and §4."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from reference import formats
from reference.checkpoint.manifest import FP4_BLOCK, FP8_BLOCK, cdiv
from reference.checkpoint.threads import ALONE_BELOW, threads_for
from reference.errors import BadInput

if TYPE_CHECKING:
    from .packing import Distinct, Packed

KERNELS = ("vnni", "avx512", "vector", "plain", "torch")  # in order of speed
SCALES = (1, 240)  # bytes from a normal number to one that 2^14 times does not overflow
_WIDTH = 128  # columns of a block of the vector kernels
_FLOATS = (torch.float32, torch.float64)

Job = tuple[Tensor, Tensor | None, Tensor, int, int]  # weight, scale, x [t, in], rows [start, stop)
Runner = Callable[[str, list[Job], list[Tensor]], None]


@cache
def best() -> str:
    """The quickest kernels that this CPU can run: of vector code those with AVX-512 or those for hardware that widens
    half precision; plain loops; torch where there is no numba."""
    if find_spec("numba") is None:
        return "torch"
    there = cpu_features()
    if {"avx512f", "avx512bw", "avx512vbmi"} <= there:
        return "vnni" if "avx512vnni" in there else "avx512"
    return "vector" if {"avx2", "f16c", "fma"} <= there or "fullfp16" in there else "plain"


def cpu_features() -> set[str]:
    """What this CPU has beyond the least of its kind, by LLVM's names."""
    from llvmlite import binding

    return {name for name, has in binding.get_host_cpu_features().items() if has}


@cache
def moves_bits() -> bool:
    """Whether this CPU moves bits by matrices, and computes with subnormal numbers about as fast as with others."""
    return "gfni" in cpu_features() and seconds_of(2.0**-140) < 2 * seconds_of(2.0**-100)


def seconds_of(value: float) -> float:
    """The time of 2^14 float32 multiplications of this value, the best of 32."""
    x, least = np.full(1 << 14, value, np.float32), float("inf")
    out = np.empty_like(x)
    for _ in range(32):
        began = time.perf_counter()
        np.multiply(x, np.float32(2.0**100), out=out)
        least = min(least, time.perf_counter() - began)
    return least


class Products:
    """y = x · dequant(W)ᵀ straight from stored weights, in float32 or float64 as x is. `kernels` is one of KERNELS.

    `multiply_adds` counts what was done so far.
    """

    def __init__(self, kernels: str | None = None) -> None:
        self.kernels = kernels or best()
        self.multiply_adds = 0
        self._examined: set[str] = set()

    def admit(self, name: str, weight: Tensor, scale: Tensor | None) -> bool:
        """Whether these kernels take a weight of this storage; its values are examined when its name first comes.

        Raises BadInput for a scale that does not fit, a scale byte outside SCALES, or an E4M3 code of no number.
        """
        if self.kernels == "torch" or weight.dim() != 2 or weight.device.type != "cpu" or weight.numel() == 0:
            return False
        if weight.dtype == torch.bfloat16:
            return True
        if weight.dtype not in (torch.float8_e4m3fn, torch.int8) or scale is None or scale.dtype != torch.float8_e8m0fnu:
            return False
        _check_shape(name, weight, scale)
        if name not in self._examined:
            _check_values(name, weight, scale)
            self._examined.add(name)
        return True

    def warm(self, dtype: torch.dtype) -> None:
        """Compile what products in this dtype need, or load it where it was compiled before, so that no step waits for it."""
        if self.kernels == "torch":
            return
        from .packing import ALONE

        rows, before = ALONE_BELOW // 4, self.multiply_adds  # their FP4 scales are examined by all threads
        scale = torch.full((rows, _WIDTH // FP4_BLOCK), 127, dtype=torch.uint8).view(torch.float8_e8m0fnu)
        stored = (
            (torch.zeros(_WIDTH, _WIDTH, dtype=torch.bfloat16), None),
            (torch.zeros(_WIDTH, _WIDTH, dtype=torch.uint8).view(torch.float8_e4m3fn), scale[:1, :1]),
            (torch.zeros(rows, _WIDTH // 2, dtype=torch.int8), scale),
        )
        for weight, its_scale in stored:
            self.admit("", weight, its_scale)
            for tokens in (1, ALONE // _WIDTH + 1):  # packed by one thread, and by all
                x = torch.ones(tokens, _WIDTH, dtype=dtype)
                self([(weight, its_scale, x, 0, _WIDTH)])
                x[0, 0] = 2.0**30  # of which integers leave out much, and with which bits are not moved
                self([(weight, its_scale, x, 0, _WIDTH)])
        self.multiply_adds = before
        self._examined.clear()

    def __call__(self, jobs: Sequence[Job]) -> list[Tensor]:
        """Products of admitted weights: y [t, stop - start] of each job. Jobs of one storage and width share a call.

        Raises ValueError for rows or widths outside the weight.
        """
        out: list[Tensor] = []
        alike: dict[tuple[torch.dtype, int, torch.dtype], list[int]] = {}
        work = 0
        for i, job in enumerate(jobs):
            _check_job(*job)
            weight, _, x, start, stop = job
            out.append(x.new_empty(len(x), stop - start))
            work += out[i].numel() * x.shape[1]
            if out[i].numel():
                alike.setdefault((weight.dtype, x.shape[1], x.dtype), []).append(i)
        self.multiply_adds += work
        with threads_for(work):
            for kind, indices in alike.items():
                _runner(self.kernels, *kind)(self.kernels, [jobs[i] for i in indices], [out[i] for i in indices])
        return out


def _runner(kernels: str, stored: torch.dtype, width: int, dtype: torch.dtype) -> Runner:
    if kernels == "plain" or width % _WIDTH:
        return _run_plain
    return _run_vnni if kernels == "vnni" and stored == torch.int8 and dtype == torch.float32 else _run_vector


def _check_shape(name: str, weight: Tensor, scale: Tensor) -> None:
    rows, width = weight.shape[0], _columns(weight)
    height, block = (1, FP4_BLOCK) if weight.dtype == torch.int8 else (FP8_BLOCK, FP8_BLOCK)
    if tuple(scale.shape) != (cdiv(rows, height), cdiv(width, block)):
        raise BadInput(f"{name}: scale {tuple(scale.shape)} does not fit a weight of {(rows, width)}")


def _check_values(name: str, weight: Tensor, scale: Tensor) -> None:
    at = _outside(scale, 0xFF, *SCALES)
    if at is not None:
        byte = int(scale.contiguous().view(torch.uint8).flatten()[at])
        raise BadInput(f"{name}: scale byte {byte} at element {at}, outside {SCALES[0]}..{SCALES[1]}")
    at = _outside(weight, 0x7F, 0, 0x7E) if weight.dtype == torch.float8_e4m3fn else None
    if at is not None:
        raise BadInput(f"{name}: E4M3 code of no number at element {at}")


def _outside(stored: Tensor, mask: int, low: int, high: int) -> int | None:
    """The first element whose byte under the mask is not within [low, high]."""
    from . import plain

    values = stored.contiguous().view(torch.uint8).flatten()
    within = values.numpy(), np.uint8(mask), np.uint8(low), np.uint8(high)
    if values.nbytes < ALONE_BELOW:
        found = plain.outside_few(*within)
    else:
        with threads_for(values.nbytes):
            found = plain.outside(*within)
    if not found:
        return None
    part = values & mask
    return int(((part < low) | (part > high)).int().argmax())


def _check_job(weight: Tensor, scale: Tensor | None, x: Tensor, start: int, stop: int) -> None:
    if x.dtype not in _FLOATS or x.dim() != 2 or x.shape[1] != _columns(weight) or not 0 <= start <= stop <= weight.shape[0]:
        raise ValueError(f"x {tuple(x.shape)} {x.dtype} or rows {start}..{stop} do not fit a weight {tuple(weight.shape)}")


def _columns(weight: Tensor) -> int:
    return weight.shape[1] * (2 if weight.dtype == torch.int8 else 1)


def _run_vector(kernels: str, jobs: list[Job], out: list[Tensor]) -> None:
    from . import codes, packing, vector

    stored, tables = jobs[0][0].dtype, kernels != "vector"  # tables are read by the permutations of AVX-512
    inputs, order, factor = packing.Distinct([x for _, _, x, _, _ in jobs]), None, 1.0
    if stored == torch.float8_e4m3fn:
        code, height, scaled = codes.E4M3 if tables else codes.E4M3_HALF, FP8_BLOCK, 1
        order = codes.BY_BYTE if tables else None
        if tables and _movable(inputs):
            code, factor = codes.E4M3_MOVED, codes.MOVED_X
    elif stored == torch.int8:
        code, height, scaled, order = codes.E2M1 if tables else codes.E2M1_HALF, 1, _WIDTH // FP4_BLOCK, codes.BY_NIBBLE
    else:
        code, height, scaled = codes.BF16, 1, 0
    held, packed = _contiguous(jobs), packing.in_order(inputs, order, factor)
    table = _table(jobs, held, packed, out)
    width, row_bytes = jobs[0][2].shape[1], jobs[0][0].shape[1] * jobs[0][0].itemsize
    blocks = width // _WIDTH
    number = np.float64(0) if out[0].dtype == torch.float64 else np.float32(0)
    vector.product(code, number, table, row_bytes // blocks, row_bytes, scaled * blocks, height, scaled, blocks)


def _movable(inputs: Distinct) -> bool:
    """Whether codes are read by moving their bits: for one token, where it is quicker, of inputs with which it is exact."""
    from . import codes, vector

    if inputs.rows.dtype != torch.float32 or max(inputs.tokens) > 1 or not moves_bits():
        return False
    return bool(vector.movable(inputs.rows.numpy(), codes.LEAST, codes.MOST))


def _run_vnni(kernels: str, jobs: list[Job], out: list[Tensor]) -> None:
    from . import codes, packing, vector

    packed, stored, width = packing.in_integers([x for _, _, x, _, _ in jobs]), _contiguous(jobs), jobs[0][2].shape[1]
    found = [y if rest is None else y.new_empty(t, y.shape[1])
             for y, t, rest in zip(out, packed.tokens, packed.rests, strict=True)]  # fmt: skip
    held, scaled, blocks = _WIDTH // 2, _WIDTH // FP4_BLOCK, width // _WIDTH
    table = _table(jobs, stored, packed, found)
    vector.product(codes.E2M1_BYTES, np.float32(0), table, held, width // 2, width // FP4_BLOCK, 1, scaled, blocks)
    for y, more, rest in zip(out, found, packed.rests, strict=True):
        if rest is not None:
            y.copy_(more[: len(y)]).index_add_(0, rest, more[len(y) :])


def _contiguous(jobs: list[Job]) -> list[tuple[Tensor, Tensor | None]]:
    return [(weight.contiguous(), None if scale is None else scale.contiguous()) for weight, scale, *_ in jobs]


def _table(jobs: list[Job], held: Sequence[tuple[Tensor, Tensor | None]], packed: Packed, out: list[Tensor]) -> Any:
    """The jobs as the kernels take them: addresses only, so that the tensors must be held meanwhile."""
    from .vector import GROUP

    table, tasks = [], 0
    for (_, _, _, start, stop), (weight, scale), x, y in zip(jobs, held, packed.addresses, out, strict=True):
        tasks += (stop - 1) // GROUP - start // GROUP + 1
        at = weight.data_ptr(), 0 if scale is None else scale.data_ptr(), x, y.data_ptr()
        table.append((*at, start, stop, y.shape[0], y.stride(0) * y.itemsize, tasks))
    return np.array(table, np.int64)


def _run_plain(kernels: str, jobs: list[Job], out: list[Tensor]) -> None:
    from . import plain

    e4m3 = formats.e4m3_decode(torch.arange(256, dtype=torch.uint8)).numpy()
    for (weight, scale, x, start, _), y in zip(jobs, out, strict=True):
        kind = {torch.float8_e4m3fn: plain.E4M3, torch.int8: plain.E2M1, torch.bfloat16: plain.BF16}[weight.dtype]
        table = formats.E2M1_VALUES.numpy() if kind == plain.E2M1 else e4m3
        exponents = torch.zeros(1, 1, dtype=torch.uint8) if scale is None else scale.contiguous().view(torch.uint8)
        plain.product(
            kind, weight.contiguous().view(torch.uint8).numpy(), exponents.numpy(), FP8_BLOCK if kind == plain.E4M3 else 1,
            table, formats.E8M0_VALUES.numpy(), start, x.contiguous().numpy(), y.numpy(),
        )  # fmt: skip
