"""Bounds of what stands around experts: scores, their weights, SwiGLU. Source: docs/judge.md §4."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import softplus

from reference import moe

from .bounded import FUNCTION_ULPS, Arithmetic, Bounded, multiply

BF16_UNIT = 2.0**-8  # half the distance of neighbours, relative to the smaller: what one rounding can do
SILU_SLOPE = 1.1  # the largest slope of x·sigmoid(x), at 2.4, is 1.0998


def sqrt_softplus(z: Bounded, how: Arithmetic) -> Bounded:
    """sqrt(ln(1 + e^z)). With p = softplus, dp = sigmoid(z) dz, and the slope changes by e^E at most within E; the function
    itself is max(z, 0) + log1p(e^-|z|), two functions and a sum, good to 4 function units; the root halves relative errors.
    """
    p = softplus(z.value, threshold=torch.inf)
    moved = torch.sigmoid(z.value) * torch.expm1(z.bound) / p
    relative = moved + (4 * FUNCTION_ULPS + 2) * how.u
    score = p.sqrt()
    return Bounded(score, score * (relative + 2 * FUNCTION_ULPS * how.u) + 2.0**-75)


def normalised(score: Bounded, scaling: float, how: Arithmetic) -> Bounded:
    """score [t, k] over their sum, times `scaling`: all positive, so k roundings of the sum, a division, a product."""
    value = score.value / score.value.sum(1, keepdim=True) * scaling
    inherited = (score.bound / score.value.clamp_min(2.0**-126)).amax(1, keepdim=True)
    return Bounded(value, value * (2 * inherited + (score.value.shape[1] + 4 + FUNCTION_ULPS) * how.u))


def to_bf16(x: Bounded) -> Bounded:
    """One rounding to bfloat16 on the way: the value is the twin's own rounding, and where the bound reaches the other side of
    a midpoint the kernel may have taken the neighbour."""
    nearest = x.value.float().to(torch.bfloat16).double()
    low, high = ((x.value + side * x.bound).float().to(torch.bfloat16).double() for side in (-1, 1))
    return Bounded(nearest, torch.maximum((nearest - low).abs(), (high - nearest).abs()))


def swiglu(gate: Bounded, up: Bounded, limit: float, weight: Tensor | None, how: Arithmetic) -> Bounded:
    """silu(min(gate, limit)) · clamp(up, -limit, limit) · weight [t, 1].

    Clamps do not enlarge an error; silu enlarges it by 1.1 at most; exp, sum and division are relative to silu.
    """
    g, u = gate.value.clamp(max=limit), up.value.clamp(-limit, limit)
    s = moe.clamped_swiglu(g, torch.ones_like(g), torch.inf)
    silu = Bounded(s, SILU_SLOPE * gate.bound + (4 * FUNCTION_ULPS + 3) * how.u * s.abs() + 2.0**-126)
    h = multiply(silu, Bounded(u, up.bound), how)
    return h if weight is None else multiply(h, Bounded(weight, torch.zeros_like(weight)), how)
