"""How weights are stored, as the candidate's kernels take them: products of codes need codes with scales that are powers of
two, products in bfloat16 need values that bfloat16 holds, whatever they are stored as. Source: docs/judge.md §7.
"""

from __future__ import annotations

import torch
from torch import Tensor

from optimized.weights import scale_bytes
from reference.errors import BadInput
from reference.linear import Linear


class Unfit(BadInput):
    """No kernel takes a weight as it is stored: the op is not run."""


def packed(linear: Linear) -> tuple[Tensor, Tensor]:
    """Codes and scale bytes, both uint8, of an FP8 or FP4 weight. Raises Unfit for any other, and for scales between powers
    of two."""
    if not linear.quantized or linear.scale is None:
        stored = str(linear.weight.dtype).removeprefix("torch.")
        raise Unfit(f"the weight is stored as {stored}, not as codes with scales")
    try:
        return linear.weight.view(torch.uint8), scale_bytes(linear.scale, "the weight")
    except BadInput as error:
        raise Unfit(str(error)) from None


def side_by_side(linears: list[Linear]) -> tuple[Tensor, Tensor]:
    """Codes and scale bytes of one matrix of several experts. Raises Unfit as `packed`, and where forms differ."""
    codes, scales = zip(*(packed(linear) for linear in linears), strict=True)
    if len({c.shape for c in codes} | {s.shape for s in scales}) > 2:
        raise Unfit("experts are stored as FP4 and as FP8, side by side")
    return torch.stack(codes), torch.stack(scales)


def in_bf16(linear: Linear) -> Tensor:
    """A weight as bfloat16 products take it. Raises Unfit for values that bfloat16 does not hold."""
    return linear.weight if linear.weight.dtype == torch.bfloat16 else exactly_bf16(linear.dense(torch.float32))


def exactly_bf16(values: Tensor) -> Tensor:
    """These weights in bfloat16. Raises Unfit if one does not fit."""
    narrow = values.to(torch.bfloat16)
    if not torch.equal(narrow.to(values.dtype), values):
        raise Unfit("the weight has values that bfloat16 does not hold, and the kernel takes bfloat16")
    return narrow


def unsigned(linear: Linear) -> Linear:
    """The absolute values of a weight, stored as it is."""
    if linear.weight.dtype == torch.int8:
        weight = linear.weight & 0x77  # two E2M1 codes a byte
    elif linear.quantized:
        weight = (linear.weight.view(torch.uint8) & 0x7F).view(linear.weight.dtype)
    else:
        weight = linear.weight.abs()
    return Linear(weight, linear.scale, linear.products)
