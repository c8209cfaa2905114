"""Which kernels this CPU runs, what they take, and calls of many products at once. Source: docs/cpu.md §1 and §4."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec

import numpy as np
import torch
from torch import Tensor

from reference import formats
from reference.checkpoint.manifest import FP4_BLOCK, FP8_BLOCK, cdiv
from reference.checkpoint.threads import threads_for
from reference.errors import BadInput

KERNELS = ("avx512", "vector", "plain", "torch")  # in order of speed
SCALES = (1, 240)  # bytes from a normal number to one that 2^14 times does not overflow
_WIDTH = 128  # columns of a block of the vector kernels
_FLOATS = (torch.float32, torch.float64)

Job = tuple[Tensor, Tensor | None, Tensor, int, int]  # weight, scale, x [t, in], rows [start, stop)


@cache
def best() -> str:
    """The quickest kernels that this CPU can run: of vector code those with AVX-512 or those for hardware that widens
    half precision; plain loops; torch where there is no numba."""
    if find_spec("numba") is None:
        return "torch"
    from llvmlite import binding

    there = {name for name, has in binding.get_host_cpu_features().items() if has}
    if {"avx512f", "avx512bw"} <= there:
        return "avx512"
    return "vector" if {"avx2", "f16c", "fma"} <= there or "fullfp16" in there else "plain"


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

    def __call__(self, jobs: Sequence[Job]) -> list[Tensor]:
        """Products of admitted weights: y [t, stop - start] of each job. Jobs of one storage and width share a call.

        Raises ValueError for rows or widths outside the weight.
        """
        for job in jobs:
            _check_job(*job)
        out = [x.new_empty(len(x), stop - start) for _, _, x, start, stop in jobs]
        alike: dict[tuple[torch.dtype, int, torch.dtype], list[int]] = {}
        for i, job in enumerate(jobs):
            self.multiply_adds += out[i].numel() * job[2].shape[1]
            if out[i].numel():
                alike.setdefault((job[0].dtype, job[2].shape[1], job[2].dtype), []).append(i)
        for (_, width, _), indices in alike.items():
            run = _run_vector if self.kernels != "plain" and width % _WIDTH == 0 else _run_plain
            with threads_for(sum(_nbytes(jobs[i]) for i in indices)):
                run(self.kernels, [jobs[i] for i in indices], [out[i] for i in indices])
        return out


def _check_shape(name: str, weight: Tensor, scale: Tensor) -> None:
    rows, width = weight.shape[0], _columns(weight)
    height, block = (1, FP4_BLOCK) if weight.dtype == torch.int8 else (FP8_BLOCK, FP8_BLOCK)
    if tuple(scale.shape) != (cdiv(rows, height), cdiv(width, block)):
        raise BadInput(f"{name}: scale {tuple(scale.shape)} does not fit a weight of {(rows, width)}")


def _check_values(name: str, weight: Tensor, scale: Tensor) -> None:
    from . import plain

    exponents = scale.contiguous().view(torch.uint8).flatten()
    if plain.outside(exponents.numpy(), *SCALES):
        at = int(((exponents < SCALES[0]) | (exponents > SCALES[1])).int().argmax())
        raise BadInput(f"{name}: scale byte {int(exponents[at])} at element {at}, outside {SCALES[0]}..{SCALES[1]}")
    if weight.dtype == torch.float8_e4m3fn:
        codes = weight.contiguous().view(torch.uint8).flatten()
        with threads_for(codes.nbytes):
            count = plain.without_number(codes.numpy())
        if count:
            at = int(((codes & 0x7F) == 0x7F).int().argmax())
            raise BadInput(f"{name}: E4M3 code of no number at element {at}")


def _check_job(weight: Tensor, scale: Tensor | None, x: Tensor, start: int, stop: int) -> None:
    if x.dtype not in _FLOATS or x.dim() != 2 or x.shape[1] != _columns(weight) or not 0 <= start <= stop <= len(weight):
        raise ValueError(f"x {tuple(x.shape)} {x.dtype} or rows {start}..{stop} do not fit a weight {tuple(weight.shape)}")


def _columns(weight: Tensor) -> int:
    return weight.shape[1] * (2 if weight.dtype == torch.int8 else 1)


def _nbytes(job: Job) -> int:
    weight, _, x, start, stop = job
    return (stop - start) * weight.shape[1] * weight.itemsize * len(x)


def _run_vector(kernels: str, jobs: list[Job], out: list[Tensor]) -> None:
    from . import vector

    stored = jobs[0][0].dtype
    fp4 = vector.E2M1 if kernels == "avx512" else vector.E2M1_HALF
    code = {torch.int8: fp4, torch.float8_e4m3fn: vector.E4M3, torch.bfloat16: vector.BF16}[stored]
    height, scaled = {torch.int8: (1, _WIDTH // FP4_BLOCK), torch.float8_e4m3fn: (FP8_BLOCK, 1), torch.bfloat16: (1, 0)}[stored]
    packed: dict[object, Tensor] = {}
    for _, _, x, _, _ in jobs:
        if _place(x) not in packed:
            packed[_place(x)] = _pack(x, nibbles=stored == torch.int8)
    table = np.empty((len(jobs), 9), np.int64)
    ends = 0
    kept = []
    for row, (weight, scale, x, start, stop), y in zip(table, jobs, out, strict=True):
        weight, scale = weight.contiguous(), None if scale is None else scale.contiguous()
        kept.append((weight, scale))  # the table knows addresses only
        ends += (stop - 1) // vector.GROUP - start // vector.GROUP + 1
        row[:4] = weight.data_ptr(), 0 if scale is None else scale.data_ptr(), packed[_place(x)].data_ptr(), y.data_ptr()
        row[4:] = start, stop, len(x), y.stride(0) * y.itemsize, ends
    width, row_bytes = jobs[0][2].shape[1], jobs[0][0].shape[1] * jobs[0][0].itemsize
    blocks = width // _WIDTH
    number = np.float64(0) if out[0].dtype == torch.float64 else np.float32(0)
    vector.product(code, number, table, row_bytes // blocks, row_bytes, scaled * blocks, height, scaled, blocks)


def _place(x: Tensor) -> object:
    return x.data_ptr(), x.shape, x.stride()


def _pack(x: Tensor, nibbles: bool) -> Tensor:
    """x [t, in] in the order of the vector kernels, [in/128, padded t, 128]."""
    from . import vector

    tokens = 1 if len(x) == 1 else cdiv(len(x), vector.FEW) * vector.FEW
    if tokens == 1 and not nibbles:
        return x.contiguous()
    out = x.new_empty(x.shape[1] // _WIDTH, tokens, _WIDTH)
    vector.pack(x.contiguous().numpy(), nibbles, out.numpy())
    return out


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
