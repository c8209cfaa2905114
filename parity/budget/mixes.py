"""Bounds of the mixes of residual streams: their projection, sigmoid, Sinkhorn, and weighted sums. Source: docs/judge.md §4."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from reference import hyper_connection

from .bounded import FUNCTION_ULPS, Arithmetic, Bounded, add, dot, exact, multiply

TINY = 2.0**-126  # below it float32 loses precision, and may flush to zero


def stream_mixes(x: Tensor, fn: Tensor, rms_eps: float, how: Arithmetic) -> Bounded:
    """x [t, s, d] and fn [n, s*d], exact -> the product over the streams' common rms [t, n].

    Operands are bfloat16 times float32: each product rounds once, besides the sum. The mean of squares is a sum of
    positive terms: growth(k) roundings, and four for product, division, eps and the last.
    """
    v = x.flatten(1)
    product = dot(exact(v), exact(fn), how)
    product = Bounded(product.value, product.bound + how.u * (v.abs() @ fn.abs().T))
    mean = v.square().mean(-1, keepdim=True) + rms_eps
    relative = (how.growth(v.shape[1]) * how.accumulate / how.u + 4) * how.u
    common = ((1 - relative) ** -0.5 - 1 if relative < 1 else math.inf) + 2 * FUNCTION_ULPS * how.u
    factor = torch.rsqrt(mean)
    return multiply(product, Bounded(factor, factor * common), how)


def sigmoid(z: Bounded, how: Arithmetic) -> Bounded:
    """1 / (1 + exp(-z)): the slope is s(1 - s) and changes by e^E at most within E; exp errs where it is not drowned by
    the 1; sum and division."""
    s = torch.sigmoid(z.value)
    slope = s * torch.sigmoid(-z.value)
    moved = slope * (torch.expm1(z.bound) + 2 * FUNCTION_ULPS * how.u)
    return Bounded(s, moved + (2 + 2 * FUNCTION_ULPS) * how.u * s + TINY)


def affine(m: Bounded, scale: Tensor, base: Tensor, how: Arithmetic) -> Bounded:
    """m [t, n] times one scale, plus base [n]."""
    return add(multiply(m, exact(scale), how), exact(base), how)


def sinkhorn(logits: Bounded, iterations: int, eps: float, how: Arithmetic) -> Bounded:
    """Logits [t, j, k] -> nearly doubly stochastic matrices.

    In logarithms a normalisation is x_jk -> x_jk - ln(sum + eps): its Jacobian takes the weighted mean of the row's or
    column's errors off each. Products of these Jacobians, from every step to the end, say what becomes of a rounding made
    there; absolute values are taken of the products and not of the factors, so that what later steps cancel stays cancelled.
    A step rounds s sums, eps and a division. The last line covers second order: e^2L/2 - 1/2 > L + L^2.
    """
    s = logits.value.shape[1]
    fresh = (s + 2 + 2 * FUNCTION_ULPS) * how.u
    p = torch.softmax(logits.value, 2)
    shift = (logits.value - logits.value.amax(2, keepdim=True)).abs()
    keep = (p / (p + eps)).flatten(1)  # what eps drowns does not matter
    jacobians = [keep[:, :, None] * _normalisation(p, 2)]
    c = p + eps
    for dim in [1] + [2, 1] * (iterations - 1):
        share = c / (c.sum(dim, keepdim=True) + eps)
        jacobians.append(_normalisation(share, dim))
        c = share
    to_end = torch.eye(s * s, dtype=c.dtype).expand(len(c), -1, -1)
    bound = torch.full((len(c), s * s), fresh, dtype=c.dtype)
    for jacobian in reversed(jacobians[1:]):
        to_end = to_end @ jacobian
        bound = bound + fresh * to_end.abs().sum(2)
    of_logits = logits.bound + how.u * shift + 2 * FUNCTION_ULPS * how.u
    bound = bound + ((to_end @ jacobians[0]).abs() @ of_logits.flatten(1)[:, :, None])[:, :, 0]
    value = hyper_connection.sinkhorn(logits.value, iterations, eps)
    return Bounded(value, value * (torch.expm1(2 * bound) / 2).view_as(value) + TINY)


def _normalisation(share: Tensor, dim: int) -> Tensor:
    """Jacobian [t, s*s, s*s] in logarithms of a division by the sum along `dim`, which leaves shares [t, j, k]."""
    t, s, _ = share.shape
    same = torch.eye(s, dtype=share.dtype)
    if dim == 2:  # entries (j, k) and (j, l): the share of l in row j
        mean = torch.einsum("ji,tjl->tjil", same, share)[:, :, None].expand(t, s, s, s, s)
    else:  # entries (j, k) and (i, k): the share of i in column k
        mean = torch.einsum("kl,tik->tkil", same, share)[:, None].expand(t, s, s, s, s)
    return torch.eye(s * s, dtype=share.dtype) - mean.reshape(t, s * s, s * s)


def weighted_streams(x: Tensor, weight: Bounded, how: Arithmetic) -> Bounded:
    """x [t, s, d] exact, weight [t, s] -> sum over the streams [t, d]: a product and a sum each."""
    sizes = torch.einsum("ts,tsd->td", weight.largest, x.abs())
    inherited = torch.einsum("ts,tsd->td", weight.bound, x.abs())
    return Bounded(torch.einsum("ts,tsd->td", weight.value, x), inherited + (x.shape[1] + 1) * how.u * sizes)


def spread_streams(z: Tensor, x: Tensor, post: Tensor, comb: Tensor, how: Arithmetic) -> Bounded:
    """post[k] * z + sum_j comb[j, k] * x[j]: z [t, d], x [t, s, d], post [t, s], comb [t, s, s], all exact -> [t, s, d]."""
    value = post[:, :, None] * z[:, None] + torch.einsum("tjk,tjd->tkd", comb, x)
    sizes = post.abs()[:, :, None] * z.abs()[:, None] + torch.einsum("tjk,tjd->tkd", comb.abs(), x.abs())
    return Bounded(value, (x.shape[1] + 2) * how.u * sizes)
