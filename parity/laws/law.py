"""A law: something that theory says of an op exactly, tried on operands that bite. Source: docs/judge.md §13."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

Operands = dict[str, Tensor]
Call = Callable[..., tuple[Tensor, ...]]
Side = Literal["kernel", "reference"]
# Float64 sums of fewer than 1,000 terms, a few in a row: 4 * 1,000 * 2^-53 of the largest magnitude.
FLOAT64_SHARE = 4000 * 2.0**-53
# Least relative change of outputs when an operand is drawn anew: 16 half units of bfloat16, the coarsest plain output.
BITES = 16 * 2.0**-9


@dataclass(frozen=True)
class Violation:
    """What broke a law: its name, the op, and where."""

    law: str
    op: str
    words: str


@dataclass(frozen=True)
class Law:
    """`name` is family.subject. `call(**operands(seed))` is the op; `holds` tries the law on any such callable, with the
    operands given. `fixed` names operands that are tables of structure, which a redraw leaves alone."""

    name: str
    op: str
    side: Side
    statement: str
    operands: Callable[[int], Operands]
    call: Call
    holds: Callable[[Call, Operands], str | None]
    fixed: tuple[str, ...] = ()

    @property
    def family(self) -> str:
        return self.name.split(".")[0]

    def run(self, seed: int = 0, call: Call | None = None) -> Violation | None:
        """The law on the right op, or on another callable of the same operands."""
        words = self.holds(call or self.call, self.operands(seed))
        return Violation(self.name, self.op, words) if words else None

    def movements(self, seed: int = 0) -> dict[str, float]:
        """By operand: how far, relative to their size, outputs move when that operand alone is drawn from another seed."""
        operands, others = self.operands(seed), self.operands(seed + 1)
        before = self.call(**_copies(operands))
        moved = {}
        for name in operands.keys() - set(self.fixed):
            after = self.call(**_copies(operands | {name: others[name]}))
            moved[name] = max(distance(a, b) for a, b in zip(after, before, strict=True))
        return moved

    def on(self, name: str, op: str, operands: Callable[[int], Operands], call: Call, fixed: tuple[str, ...] = ()) -> Law:
        """The same law on another op."""
        return replace(self, name=name, op=op, operands=operands, call=call, fixed=fixed)


def _copies(operands: Operands) -> Operands:
    return {name: x.clone() for name, x in operands.items()}


def distance(one: Tensor, other: Tensor) -> float:
    """Relative L2 between two outputs; of bytes and integers, the share that differs."""
    if not one.is_floating_point():
        return float((one != other).double().mean())
    a, b = one.double(), other.double()
    finite = a.isfinite() & b.isfinite()
    size = b[finite].norm()
    return float((a - b)[finite].norm() / size) if size else float(not torch.equal(a, b))


def same_bits(got: tuple[Tensor, ...], want: tuple[Tensor, ...]) -> str | None:
    """None if all outputs agree bit for bit, else which one does not, and where first."""
    for number, (a, b) in enumerate(zip(got, want, strict=True)):
        if a.shape != b.shape:
            return f"output {number} has shape {tuple(a.shape)}, not {tuple(b.shape)}"
        wrong = (_bits(a) != _bits(b)).nonzero()
        if len(wrong):
            return f"output {number}: {len(wrong)} of {a.numel()} elements differ, the first at {wrong[0].tolist()}"
    return None


def within_float64(got: tuple[Tensor, ...], want: tuple[Tensor, ...]) -> str | None:
    """None if outputs agree to `FLOAT64_SHARE` of the largest magnitude, integers exactly."""
    for number, (a, b) in enumerate(zip(got, want, strict=True)):
        if not a.is_floating_point():
            if words := same_bits((a,), (b,)):
                return words
            continue
        largest = b.abs().max() if b.numel() else b.new_zeros(())
        far = float((a - b).abs().max()) if b.numel() else 0.0
        if not far <= FLOAT64_SHARE * float(largest):
            return f"output {number} is {far:.1e} off, of {float(largest):.1e}"
    return None


def _bits(x: Tensor) -> Tensor:
    whole = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    return x.contiguous().view(whole[x.element_size()]) if x.is_floating_point() else x
