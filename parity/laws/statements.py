"""The laws as functions of a callable and its operands: None where it obeys, else what is wrong. Source: docs/judge.md §13.

Callables take operands by name and return a tuple of tensors. `same` says how equality is meant: to the bit for kernels,
within rounding of float64 for the reference.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .law import Call, Operands, same_bits

Same = Callable[[tuple[Tensor, ...], tuple[Tensor, ...]], str | None]


@dataclass(frozen=True)
class Renaming:
    """Where the names of things stand: `axes` of operands (one or several each), operands that hold names (`labels`, -1:
    none), axes of outputs and outputs that hold names, by number."""

    axes: Mapping[str, int | tuple[int, ...]]
    labels: tuple[str, ...] = ()
    out_axes: Mapping[int, int | tuple[int, ...]] = ()  # type: ignore[assignment]
    out_labels: tuple[int, ...] = ()


def relabelling(call: Call, operands: Operands, names: Renaming, order: Tensor, same: Same = same_bits) -> str | None:
    """Things called otherwise give the same, called otherwise. Thing i of the new order is thing order[i] of the old."""
    new_name = torch.argsort(order)

    def rename(x: Tensor) -> Tensor:
        return torch.where(x >= 0, new_name[x.long().clamp_min(0)], x.long()).to(x.dtype)

    def move(x: Tensor, axes: int | tuple[int, ...]) -> Tensor:
        for axis in (axes,) if isinstance(axes, int) else axes:
            x = x.index_select(axis, order)
        return x.contiguous()

    moved = {n: move(x, names.axes[n]) if n in names.axes else x.clone() for n, x in operands.items()}
    moved |= {n: rename(moved[n]) for n in names.labels}
    want = list(call(**{n: x.clone() for n, x in operands.items()}))
    for number, axes in dict(names.out_axes).items():
        want[number] = move(want[number], axes)
    for number in names.out_labels:
        want[number] = rename(want[number])
    return same(call(**moved), tuple(want))


def chunking(call: Call, operands: Operands, cuts: Sequence[int], same: Same = same_bits) -> str | None:
    """In pieces as in one: `call` takes, besides operands, where to cut the tokens."""
    return same(call(**operands, cuts=tuple(cuts)), call(**operands, cuts=()))


def padding(call: Call, operands: Operands, filler: Mapping[str, Tensor], blank: Sequence[Tensor], at: int) -> str | None:
    """Rows of nobody between tokens change no other token, and put out what is promised: `filler` by operand with a row a
    token, `blank` by output."""
    want = call(**{n: x.clone() for n, x in operands.items()})
    padded = {n: torch.cat([x[:at], filler[n], x[at:]]) if n in filler else x.clone() for n, x in operands.items()}
    got = call(**padded)
    spread = (torch.cat([x[:at], blank[i], x[at:]]) for i, x in enumerate(want))
    return same_bits(_unsigned(got), _unsigned(tuple(spread)))


def causality(call: Call, operands: Operands, unseen: Mapping[str, Tensor], garbage: float = float("nan")) -> str | None:
    """What a token must not see may be anything: `unseen` marks elements, of bytes and floats, that take garbage."""
    want = call(**{n: x.clone() for n, x in operands.items()})
    spoilt = {n: x.clone() for n, x in operands.items()}
    for name, mask in unseen.items():
        x = spoilt[name]
        x[mask] = garbage if x.is_floating_point() else 0xFF
    return same_bits(call(**spoilt), want)


def scaling(call: Call, operands: Operands, name: str, power: int, scales: Sequence[int]) -> str | None:
    """2^power times the input: the same outputs, but scale bytes (outputs `scales`) are larger by `power`."""
    want = list(call(**operands))
    for number in scales:
        want[number] = (want[number].int() + power).to(want[number].dtype)
    x = operands[name]
    return same_bits(call(**{**operands, name: (x * 2.0**power).to(x.dtype)}), tuple(want))


def shift(call: Call, operands: Operands, shifted: Operands, same: Same = same_bits) -> str | None:
    """Two sets of operands that must give the same: all scores and sinks moved by one number, or all positions by one."""
    return same(call(**shifted), call(**operands))


def linearity(call: Call, one: Operands, other: Operands, same: Same = same_bits) -> str | None:
    """f(x + y) = f(x) + f(y), in the operands that `other` has."""
    together = {n: x + other[n] if n in other else x for n, x in one.items()}
    parts = call(**one), call(**{**one, **other})
    total = tuple((a.double() + b.double()).to(a.dtype) for a, b in zip(*parts, strict=True))
    return same(_unsigned(call(**together)), _unsigned(total))


def idempotence(value_of: Callable[[Tensor], Tensor], x: Tensor) -> str | None:
    """What was rounded once stays."""
    once = value_of(x)
    return same_bits((value_of(once),), (once,))


def selection(picks: Tensor, scores: Tensor, visible: Tensor, k: int) -> str | None:
    """Of the first visible[t] scores the k largest, lower columns first among equals, NaN above all; ascending, then -1."""
    for t, row in enumerate(scores.double().nan_to_num(nan=torch.inf, posinf=torch.inf, neginf=-torch.inf).tolist()):
        best = sorted(range(int(visible[t])), key=lambda c, row=row: (-row[c], c))[:k]  # type: ignore[misc]
        want = sorted(best) + [-1] * (picks.shape[1] - len(best))
        if picks[t].tolist() != want:
            return f"token {t} picks {picks[t].tolist()}, not {want}"
    return None


def _unsigned(outputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Outputs whose zeros have no sign: theory does not give them one."""
    return tuple(x + 0 for x in outputs)
