"""Values with a bound on their error, and arithmetic that carries both. Source: docs/judge.md §3.

Every function models one step of a kernel that works in float32: the value is the exact result in float64, the bound
holds what the inputs' errors can do to it plus this step's own rounding.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

FAILURE = 1e-9  # probability that a right kernel breaks any bound of a run
RUN_ELEMENTS = 2**36  # no run judges more: an element's verdict does not depend on what else is judged
LAMBDA = math.sqrt(2 * math.log(2 * RUN_ELEMENTS / FAILURE))  # 9.6
FUNCTION_ULPS = 2.0  # error of a hardware exp2, rsqrt, sin or cos, in units of the last place


@dataclass(frozen=True)
class Arithmetic:
    """How a kernel computes: unit roundoff `u` of its registers, `accumulate` of its sums, `operand` of what enters a
    matrix product (0: as it comes), whether sums truncate, and λ.

    λ = sqrt(2 ln(2N/δ)) makes a sum of n independent roundings, each at most c, stay within λ·sqrt(n)·c for all N
    elements of a run but for a chance of δ (Hoeffding).
    """

    name: str
    u: float
    accumulate: float
    operand: float
    truncates: bool
    lam: float = LAMBDA

    def growth(self, n: int) -> float:
        """min(n, λ·sqrt(n)): how many of n roundings in a row add up. Truncation has one sign and adds up whole."""
        return float(n) if self.truncates else min(float(n), self.lam * math.sqrt(n))

    def dot_share(self, n: int) -> float:
        """What a dot product of n terms may be off by, as a share of the sum of its absolute products."""
        return self.growth(n) * self.accumulate + 2 * self.operand


ACCUMULATE = {
    how.name: how
    for how in (
        Arithmetic("fp32", 2.0**-24, 2.0**-24, 0.0, truncates=False),
        Arithmetic("hopper-fp8", 2.0**-24, 2.0**-13, 0.0, truncates=True),
        Arithmetic("tf32", 2.0**-24, 2.0**-24, 2.0**-11, truncates=False),
    )
}


@dataclass(frozen=True)
class Bounded:
    """value and bound, float64 of one shape; |what a right kernel holds - value| <= bound."""

    value: Tensor
    bound: Tensor

    def __getitem__(self, key: object) -> Bounded:
        return Bounded(self.value[key], self.bound[key])  # type: ignore[index]

    @property
    def largest(self) -> Tensor:
        """|value| + bound."""
        return self.value.abs() + self.bound

    def split_last(self, n: int) -> tuple[Bounded, Bounded]:
        """All but the last n channels, and those."""
        return self[..., :-n], self[..., -n:]


def exact(x: Tensor) -> Bounded:
    """A captured payload: what the kernel had, to the bit."""
    return Bounded(x.double(), torch.zeros(x.shape, dtype=torch.float64))


def rounded(x: Bounded, u: float) -> Bounded:
    """One rounding with unit roundoff u; the value stays the unrounded one."""
    return Bounded(x.value, x.bound + u * x.largest)


def add(a: Bounded, b: Bounded, how: Arithmetic) -> Bounded:
    return rounded(Bounded(a.value + b.value, a.bound + b.bound), how.u)


def multiply(a: Bounded, b: Bounded, how: Arithmetic) -> Bounded:
    bound = a.value.abs() * b.bound + a.bound * b.largest
    return rounded(Bounded(a.value * b.value, bound), how.u)


def dot(a: Bounded, b: Bounded, how: Arithmetic) -> Bounded:
    """a [t, k] times b [n, k] transposed -> [t, n]: products exact or rounded once, one accumulation rounding each.

    bound = growth(k) · u · |a||b|ᵀ + |a| Ebᵀ + Ea (|b| + Eb)ᵀ, whatever the order of summation.
    """
    value = a.value @ b.value.T
    inherited = a.value.abs() @ b.bound.T + a.bound @ b.largest.T
    sizes = a.largest @ b.largest.T
    return Bounded(value, inherited + how.dot_share(a.value.shape[-1]) * sizes)


def independent_sum(terms: Tensor, dim: int, lam: float) -> Tensor:
    """Bound of a sum of independent errors of mean zero, each at most `terms`: min(Σ c, λ·sqrt(Σ c²))."""
    return torch.minimum(terms.sum(dim), lam * terms.square().sum(dim).sqrt())
