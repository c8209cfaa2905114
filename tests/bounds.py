"""How close is close: every bound of these tests has a name and a reason here; none is a bare number in a test."""

from __future__ import annotations

import torch
from torch import Tensor

# Against stored outputs of independent software (float32): what a careful float32 and float64 evaluation reach.
ORACLE_FLOAT32 = 1e-4
ORACLE_FLOAT32_SHORT = 2e-5  # prompts of at most five tokens
ORACLE_FLOAT64 = 2e-6  # the stored values are rounded to float32
# Two float64 evaluations of one model: about a million roundings of 1e-16 apart, no selection within a tie.
PEER_FLOAT64 = 1e-9
PEER_FLOAT32 = 1e-4
# A planted mistake is seen when it moves a value by at least this many bounds.
FAR = 100


def rounding_bound(roundings: int, *values: Tensor) -> float:
    """`roundings` units in the last place of the largest of `values`, in the coarsest of their dtypes."""
    eps = max(torch.finfo(v.dtype).eps for v in values)
    return roundings * eps * max(float(v.abs().amax()) if v.numel() else 0.0 for v in values)


def distance(got: Tensor, want: Tensor) -> float:
    """Largest absolute difference; infinite where one is NaN."""
    assert got.shape == want.shape, f"{tuple(got.shape)} is not {tuple(want.shape)}"
    if not got.numel():
        return 0.0
    return float((got.double() - want.double()).abs().nan_to_num(torch.inf).amax())


def assert_within(bound: float, got: Tensor, want: Tensor) -> None:
    """Every element of `got` is within `bound` of `want`; the message names the worst."""
    worst = distance(got, want)
    if not worst <= bound:
        at = int((got.double() - want.double()).abs().nan_to_num(torch.inf).argmax())
        place = tuple(int(i) for i in torch.unravel_index(torch.tensor(at), got.shape))
        raise AssertionError(f"off by {worst:.3g} at {place}: {got[place]:.9g} for {want[place]:.9g}, allowed {bound:.3g}")
