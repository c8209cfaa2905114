"""Stored weights to numbers: E4M3 in 128x128 blocks, packed E2M1 in blocks of 32 columns, BF16 and F32 as they are.

value = code * scale, exact in float32. On a CPU the loops are compiled; elsewhere torch reads the same table.
Source: docs/checkpoint.md §4.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .. import formats
from ..errors import BadInput
from .manifest import FP4_BLOCK, FP8_BLOCK, cdiv

_E4M3_TABLE = formats.e4m3_decode(torch.arange(256, dtype=torch.uint8))


def dequantize(
    weight: Tensor, scale: Tensor | None, dtype: torch.dtype = torch.float32, row0: int = 0, out: Tensor | None = None
) -> Tensor:
    """Rows of a stored weight as `dtype` [rows, in] (float32 or float64: exact).

    weight: F8_E4M3 [rows, in], I8 [rows, in/2] (two codes a byte) or any float dtype, which needs no scale. scale: E8M0
    (or F32) of the whole tensor, in which the first row of `weight` is row `row0`. The result goes to `out` if given.
    Raises BadInput where a quantised weight has no scale, or one of the wrong shape.
    """
    if weight.dtype not in (torch.float8_e4m3fn, torch.int8):
        return weight.to(dtype) if out is None else out.copy_(weight)
    if scale is None:
        raise BadInput(f"a weight of {str(weight.dtype).removeprefix('torch.')} needs a scale")
    fp4 = weight.dtype == torch.int8
    shape = (weight.shape[0], weight.shape[1] * 2 if fp4 else weight.shape[1])
    _check(scale, shape, row0, fp4)
    direct = out is not None and out.shape == shape and out.dtype == torch.float32 and out.is_contiguous()
    values = out if direct and out is not None else torch.empty(shape, dtype=torch.float32, device=weight.device)
    if weight.device.type == "cpu" and scale.dtype == torch.float8_e8m0fnu:
        _compiled(weight, scale, row0, fp4, values)
    else:
        _plain(weight, scale, row0, fp4, values)
    if out is not None:
        return out if direct else out.copy_(values)
    return values.to(dtype)


def _check(scale: Tensor, shape: tuple[int, int], row0: int, fp4: bool) -> None:
    height, width = (1, FP4_BLOCK) if fp4 else (FP8_BLOCK, FP8_BLOCK)
    if scale.dim() != 2 or scale.shape[0] < cdiv(row0 + shape[0], height) or scale.shape[1] != cdiv(shape[1], width):
        raise BadInput(f"scale {tuple(scale.shape)} does not fit a weight of {shape} at row {row0}")


def _compiled(weight: Tensor, scale: Tensor, row0: int, fp4: bool, out: Tensor) -> None:
    from . import decoding
    from .threads import threads_for

    codes = weight.contiguous().view(torch.uint8).numpy()
    exponents = scale.contiguous().view(torch.uint8).numpy()
    table = formats.E2M1_VALUES if fp4 else _E4M3_TABLE
    decode = decoding.decode_e2m1 if fp4 else decoding.decode_e4m3
    with threads_for(out.nbytes):
        decode(codes, exponents, formats.E8M0_VALUES.numpy(), row0, table.numpy(), out.numpy())


def _plain(weight: Tensor, scale: Tensor, row0: int, fp4: bool, out: Tensor) -> None:
    rows = torch.arange(row0, row0 + len(weight), device=weight.device)
    if fp4:
        values, block = formats.e2m1_decode(formats.e2m1_unpack(weight)), FP4_BLOCK
    else:
        values, block, rows = formats.e4m3_decode(weight.view(torch.uint8)), FP8_BLOCK, rows // FP8_BLOCK
    factors = scale[rows] if scale.dtype == torch.float32 else formats.e8m0_decode(scale.view(torch.uint8)[rows])
    factor = factors.repeat_interleave(block, dim=1)  # [rows, scale columns] -> [rows, in or a little more]
    torch.mul(values, factor[:, : values.shape[1]], out=out)
