"""Inputs of products as the vector kernels take them, those of a whole call at once. Source: docs/cpu.md §2 and §3."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from . import codes, vector, vnni

ALONE = 1 << 15  # elements that one thread packs before another is awake


@dataclass(frozen=True)
class Packed:
    """Where the packed input of each job is, how many tokens it has, and, if some of them are of what others leave out,
    which those are. Holds the memory."""

    addresses: list[int]
    tokens: list[int]
    rests: list[Tensor | None]
    held: list[Tensor]


class Distinct:
    """The inputs x [t, in] of jobs, each once, their tokens one after the other: rows [all t, in]."""

    def __init__(self, xs: Sequence[Tensor]) -> None:
        number: dict[tuple[int, int, int, int], int] = {}
        self.of_job = [number.setdefault((x.data_ptr(), len(x), *x.stride()), len(number)) for x in xs]
        self.xs: list[Tensor] = [None] * len(number)  # type: ignore[list-item]
        for i, x in zip(self.of_job, xs, strict=True):
            self.xs[i] = x
        self.tokens = [len(x) for x in self.xs]
        self.rows = (self.xs[0] if len(self.xs) == 1 else torch.cat(self.xs)).contiguous()

    def packed(self, addresses: list[int], tokens: list[int], rests: list[Tensor | None], held: list[Tensor]) -> Packed:
        """What is known of each input, by job."""
        return Packed(*([of[i] for i in self.of_job] for of in (addresses, tokens, rests)), held)


def in_order(inputs: Distinct, order: Any, factor: float) -> Packed:
    """Float inputs times a power of two, columns of a block in this order: [in/128, padded t, 128] each. Without an order
    the factor is 1."""
    width, none = inputs.rows.shape[1], [None] * len(inputs.xs)
    if order is None and max(inputs.tokens) == 1:
        out, padded = inputs.rows, inputs.tokens
    else:
        padded = [_padded(t) for t in inputs.tokens]
        out, firsts = inputs.rows.new_empty(sum(padded) * width), np.array([0, *accumulate(inputs.tokens)])
        pack = vector.pack if out.numel() > ALONE else vector.pack_few
        rows = inputs.rows.numpy()
        pack(rows, firsts, codes.NATURAL if order is None else order, rows.dtype.type(factor), out.numpy())
    addresses, token = [out.data_ptr()], width * out.itemsize
    for t in padded[:-1]:
        addresses.append(addresses[-1] + t * token)
    return inputs.packed(addresses, inputs.tokens, none, [out])


def in_integers(xs: Sequence[Tensor]) -> Packed:
    """Float32 inputs as `vnni` takes them. Where integers leave out much of a token, the rest of it follows as a token of
    its own."""
    inputs = Distinct(xs)
    width = inputs.rows.shape[1]
    sizes = [_nbytes(width, _padded(t)) for t in inputs.tokens]
    ends = list(accumulate(sizes))
    places = [(end - size, end, t, _padded(n), t == n - 1)
              for end, size, n in zip(ends, sizes, inputs.tokens, strict=True) for t in range(n)]  # fmt: skip
    out, wide = torch.empty(ends[-1], dtype=torch.uint8), np.empty(len(inputs.rows), np.bool_)
    prepare = vnni.prepare if inputs.rows.numel() > ALONE else vnni.prepare_few
    prepare(inputs.rows.numpy(), np.array(places, np.int64), out.numpy(), wide)
    addresses, tokens, held = [out.data_ptr() + end - size for end, size in zip(ends, sizes, strict=True)], inputs.tokens, [out]
    rests: list[Tensor | None] = [None] * len(tokens)
    if wide.any():
        for i, one in enumerate(np.split(wide, np.cumsum(tokens)[:-1])):
            if one.any():
                more, rests[i] = _with_rest(inputs.xs[i].contiguous(), torch.from_numpy(one).nonzero()[:, 0])
                held.append(more)
                addresses[i], tokens[i] = more.data_ptr(), tokens[i] + int(one.sum())
    return inputs.packed(addresses, tokens, rests, held)


def _with_rest(x: Tensor, rest: Tensor) -> tuple[Tensor, Tensor]:
    """x [t, in] packed, and behind it, as tokens of their own, what its integers leave out of the tokens `rest`."""
    integers, exponents, tops = _integers(x)
    step = (exponents[rest] - vnni.BITS).repeat_interleave(vnni.UNIT, 1)
    left = x[rest].double() - torch.ldexp(integers[rest].double(), step)
    pairs = zip((integers, exponents, tops), _integers(left.float()), strict=True)
    integers, exponents, tops = (torch.cat(pair) for pair in pairs)
    padded = _padded(len(integers))
    out = torch.empty(_nbytes(x.shape[1], padded), dtype=torch.uint8)
    vnni.pack(integers.numpy(), exponents.numpy(), tops.numpy(), padded, out.numpy())
    return out, rest


def _integers(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    integers = torch.empty(x.shape, dtype=torch.int32)
    exponents, tops = integers.new_empty(x.shape[0], x.shape[1] // vnni.UNIT), integers.new_empty(x.shape[0])
    vnni.split(x.numpy(), integers.numpy(), exponents.numpy(), tops.numpy(), np.empty(len(x), np.bool_))
    return integers, exponents, tops


def _nbytes(width: int, padded: int) -> int:
    return width // vector.BLOCK * padded * vnni.PACKED + 8 * padded


def _padded(tokens: int) -> int:
    """`vector.few_padded`, for less than a call of it."""
    return tokens + (tokens % vector.FEW == vector.FEW - 1)
