"""Bounds of whole operations: norm, rotation, pooling, attention. Source: docs/judge.md §4.

The values are the twin's (reference, float64); here stands only what rounding can do to them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from reference import attention, compressor, norm, rope
from reference import hadamard as turn
from reference.rounding import Sites

from .bounded import FUNCTION_ULPS, Arithmetic, Bounded, independent_sum

BF16_UNIT = 2.0**-8  # what rounding to bfloat16 can do, relative: half of 2^-7


def exp_error(argument_bound: Tensor, how: Arithmetic) -> Tensor:
    """Relative error of exp of an argument that is off by up to its bound: e^A - 1, and the function's own ulps."""
    return torch.expm1(argument_bound) + 2 * FUNCTION_ULPS * how.u


def rms_norm(x: Bounded, weight: Tensor, eps: float, how: Arithmetic) -> Bounded:
    """w · x · rsqrt(mean(x²) + eps) over the last dimension.

    The mean is off by 2|x|E + E² on average, and by growth(n) + 3 roundings; it moves all channels together, by half
    its relative error. Each channel adds its own error and three roundings.
    """
    n = x.value.shape[-1]
    mean = x.value.square().mean(-1, keepdim=True) + eps
    inherited = (2 * x.value.abs() * x.bound + x.bound.square()).mean(-1, keepdim=True)
    relative = inherited / mean + (how.growth(n) + 3) * how.u
    factor = torch.rsqrt(mean)
    # (1 - r)^(-1/2) - 1 is the larger side; past r = 1 nothing is known any more
    common = torch.where(relative < 1, torch.rsqrt((1 - relative).clamp_min(2.0**-52)) - 1, torch.inf)
    common = common + (2 * FUNCTION_ULPS + 3) * how.u
    value = norm.rms_norm(x.value, weight, eps)
    return Bounded(value, value.abs() * common + weight.abs() * x.bound * factor * (1 + common))


def rotate(x: Bounded, cos: Bounded, sin: Bounded, how: Arithmetic, inverse: bool = False) -> Bounded:
    """Adjacent pairs of the last 2·n channels of x [t, d] or [t, h, d] turned by tables [t, n], which are payloads, or known
    within a bound.

    A product and a sum each: 2u(|x||cos| + |y||sin|), the pair's own errors turned likewise, and the tables' times the pair.
    """
    value = rope.rotate(x.value, (cos.value, sin.value), inverse)
    if x.value.ndim == 3:
        cos, sin = cos[:, None], sin[:, None]  # [t, 1, n]
    still, turning = x.split_last(2 * cos.value.shape[-1])
    even, odd = turning[..., 0::2], turning[..., 1::2]
    own = 2 * how.u * _turned(even.largest, odd.largest, cos.largest, sin.largest)
    inherited = _turned(even.bound, odd.bound, cos.value.abs(), sin.value.abs())
    tables = _turned(even.largest, odd.largest, cos.bound, sin.bound)
    return Bounded(value, torch.cat([still.bound, (own + inherited + tables).flatten(-2)], -1))


def _turned(even: Tensor, odd: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """What both channels of each pair come to, all signs alike [..., n, 2]."""
    return torch.stack([even * cos + odd * sin, odd * cos + even * sin], -1)


def hadamard(x: Bounded, how: Arithmetic) -> Bounded:
    """Rotation over all n channels of the last dimension: log2(n) levels of sums, and a factor."""
    n = x.value.shape[-1]
    each = (x.bound + (n.bit_length() + 1) * how.u * x.largest).sum(-1, keepdim=True) * n**-0.5
    return Bounded(turn.hadamard(x.value), each.expand_as(x.value))


def index_scores(q: Tensor, weights: Tensor, keys: Tensor, how: Arithmetic) -> Bounded:
    """sum_h w_h · ReLU(q_h·k): q [t, h, d], weights [t, h], keys [c, d], all exact -> [t, c].

    ReLU passes an error on at most; each head adds a product and a sum.
    """
    dots = torch.einsum("thd,cd->thc", q, keys)
    sizes = torch.einsum("thd,cd->thc", q.abs(), keys.abs())
    w = weights.abs()[:, :, None]
    value = (weights[:, :, None] * dots.relu()).sum(1)
    bound = (w * (how.growth(q.shape[-1]) * how.accumulate * sizes + (q.shape[1] + 1) * how.u * dots.relu())).sum(1)
    return Bounded(value, bound)


def pooled(values: Bounded, gates: Bounded, how: Arithmetic) -> Bounded:
    """[c, k, d] -> [c, d]: per channel a softmax over the k slots of the gates weights the values.

    An error ε_k of a weight moves the mean by w_k ε_k (v_k - mean): errors that all weights share cancel. Numerator
    and denominator are sums of k terms, rescaled at most k times where the softmax runs online. A slot with gate -inf
    has weight 0 and no error, whatever its value.
    """
    k = values.value.shape[1]
    weight = torch.softmax(gates.value, 1)
    mean = compressor.pool(values.value, gates.value)
    shift = gates.value - gates.value.amax(1, keepdim=True)
    shift = torch.where(weight > 0, shift, 0.0)
    argument = torch.where(weight > 0, gates.bound, 0.0) + 2 * how.u * shift.abs()
    relative = exp_error(argument, how)
    moved = independent_sum(weight * relative * (values.value - mean[:, None]).abs(), 1, how.lam)
    sizes = (weight * values.value.abs()).sum(1)
    steps = 2 * how.growth(2 * k) + 2
    inherited = (weight * values.bound).sum(1)
    return Bounded(mean, moved + inherited + steps * how.u * (sizes + mean.abs()))


def sink_attention(q: Tensor, rows: Tensor, absent: Tensor, sink: Tensor, how: Arithmetic) -> Bounded:
    """One softmax over rows, with a sink in the denominator: q [t, h, d], rows [t, n, d] exact payloads, absent [t, n].

    With shares w_j (the sink's included) and the output o: an error ε_j of exp(s_j), which comes from the score's dot
    product, moves o by w_j ε_j (v_j - o); the sink's by w ε o; a probability rounded to bfloat16 for the product with
    v, and not in the denominator, by w_j 2^-8 v_j. Then the sums over n rows, rescaled once a tile, that of the product with v
    in the accumulator, and a division.
    """
    n, scale = rows.shape[1], q.shape[-1] ** -0.5
    nothing = rows.new_empty(0, rows.shape[-1]), absent[:, :0]
    o = attention.sink_attention(q, *nothing, rows, absent, sink, Sites())
    score = (torch.einsum("thd,tnd->thn", q, rows) * scale).masked_fill_(absent[:, None], -torch.inf)
    sizes = torch.einsum("thd,tnd->thn", q.abs(), rows.abs()) * scale
    largest = torch.maximum(score.amax(-1), sink)  # [t, h]
    p, p_sink = torch.exp(score - largest[..., None]), torch.exp(sink - largest)
    total = p.sum(-1) + p_sink
    w, w_sink = p / total[..., None], p_sink / total

    finite = score.masked_fill(absent[:, None], 0.0)
    argument = how.growth(q.shape[-1]) * how.accumulate * sizes + 4 * how.u * (finite.abs() + largest.abs()[..., None])
    moved = _spread(w * exp_error(argument, how), rows, o, how.lam)
    rounding = how.lam * BF16_UNIT * torch.einsum("thn,tnd->thd", w.square(), rows.square()).sqrt()
    of_sink = w_sink * exp_error(4 * how.u * (sink.abs() + largest.abs()), how)
    steps = how.growth(2 * n) * (how.accumulate + how.u) + 4 * how.u
    sums = torch.einsum("thn,tnd->thd", w, rows.abs()) + o.abs()
    return Bounded(o, moved + rounding + of_sink[..., None] * o.abs() + steps * sums)


def _spread(e: Tensor, rows: Tensor, o: Tensor, lam: float) -> Tensor:
    """λ·sqrt(Σ_j e_j² (v_j - o)²) for e [t, h, n], rows [t, n, d], o [t, h, d], without forming [t, h, n, d]."""
    square = e.square()
    second = torch.einsum("thn,tnd->thd", square, rows.square())
    first = torch.einsum("thn,tnd->thd", square, rows)
    total = second - 2 * o * first + o.square() * square.sum(-1, keepdim=True)
    # the difference of nearly equal squares is good to a few float64 roundings of its largest term
    return lam * (total.clamp_min(0) + 2.0**-48 * second).sqrt()
