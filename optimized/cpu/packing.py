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

padded_of = vector.few_padded.py_func  # a compiled call costs more than it does
ALONE, ALONE_INTEGERS = 1 << 18, 1 << 15  # elements that one thread packs, or makes integers of, before another is awake


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
        padded = [padded_of(t) for t in inputs.tokens]
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
    tokens, rests = inputs.tokens, [None] * len(inputs.xs)
    addresses, out, wide = _integers(inputs.rows, tokens)
    if wide.any():
        rows, tokens, rests = _with_rests(inputs, wide)
        addresses, out, _ = _integers(rows, tokens)
    return inputs.packed(addresses, tokens, rests, [out])


def _integers(rows: Tensor, tokens: list[int]) -> tuple[list[int], Tensor, Any]:
    """Tokens [all t, in] of inputs that have so many each -> where each input is packed, what holds them, and which tokens
    are far from their integers [all t]."""
    sizes = [rows.shape[1] // vector.BLOCK * padded_of(t) * vnni.PACKED + 8 * padded_of(t) for t in tokens]
    ends = list(accumulate(sizes))
    places = [(end - size, end, t, padded_of(n), t == n - 1)
              for end, size, n in zip(ends, sizes, tokens, strict=True) for t in range(n)]  # fmt: skip
    out, wide = torch.empty(ends[-1], dtype=torch.uint8), np.empty(len(rows), np.bool_)
    prepare = vnni.prepare if rows.numel() > ALONE_INTEGERS else vnni.prepare_few
    prepare(rows.numpy(), np.array(places, np.int64), out.numpy(), wide)
    return [out.data_ptr() + end - size for end, size in zip(ends, sizes, strict=True)], out, wide


def _with_rests(inputs: Distinct, wide: Any) -> tuple[Tensor, list[int], list[Tensor | None]]:
    """The rows of inputs, behind those of each what integers leave out of its tokens where `wide`; how many each has then;
    and which of its tokens those are."""
    few = [one.nonzero()[:, 0] for one in torch.from_numpy(wide).split(inputs.tokens)]
    left = torch.from_numpy(vnni.left_out(inputs.rows.numpy(), wide)).split([len(rest) for rest in few])
    rows = torch.cat([part for pair in zip(inputs.rows.split(inputs.tokens), left, strict=True) for part in pair])
    tokens = [t + len(rest) for t, rest in zip(inputs.tokens, few, strict=True)]
    return rows, tokens, [rest if len(rest) else None for rest in few]
