"""Manifold-constrained hyper-connections: four residual streams, mixed anew around every sub-layer.

Source: docs/model.md §3.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .rounding import Sites


def stream_mixes(x: Tensor, fn: Tensor, rms_eps: float) -> Tensor:
    """What the streams say about how to mix them: a linear map of all streams, over their common rms.

    x [t, s, d], fn [n, s*d] -> [t, n]. The norm has no weight and comes after the product.
    """
    v = x.flatten(1)  # [t, s*d], stream 0 first
    return (v @ fn.T) * torch.rsqrt(v.square().mean(-1, keepdim=True) + rms_eps)


def sinkhorn(logits: Tensor, iterations: int, eps: float) -> Tensor:
    """Nearly doubly stochastic matrices from logits [t, j, k].

    A softmax over k is the first row step; then column, and (row, column) for the remaining iterations. It ends on a
    column step: columns sum to 1, rows only nearly.
    """
    c = torch.softmax(logits, dim=2) + eps
    c = c.permute(1, 2, 0).contiguous()  # [j, k, t]: with tokens last, a sum over four is one over long rows
    c /= c.sum(0, keepdim=True) + eps
    for _ in range(iterations - 1):
        c /= c.sum(1, keepdim=True) + eps
        c /= c.sum(0, keepdim=True) + eps
    return c.permute(2, 0, 1)


@dataclass(frozen=True)
class HyperConnection:
    """Weights of one mix: fn [(2+s)*s, s*d], base [(2+s)*s], scale [3], for pre, post and comb in that order."""

    fn: Tensor
    base: Tensor
    scale: Tensor
    iterations: int
    hc_eps: float
    rms_eps: float

    def pre(self, x: Tensor, sites: Sites) -> tuple[Tensor, Tensor, Tensor]:
        """Streams x [t, s, d] -> the sub-layer's input u [t, d], and post [t, s], comb [t, s, s] for afterwards."""
        s = x.shape[1]
        m_pre, m_post, m_comb = stream_mixes(x, self.fn, self.rms_eps).split([s, s, s * s], dim=-1)
        b_pre, b_post, b_comb = self.base.split([s, s, s * s])
        pre = sites("pre", torch.sigmoid(m_pre * self.scale[0] + b_pre) + self.hc_eps)  # [t, s]
        post = sites("post", 2 * torch.sigmoid(m_post * self.scale[1] + b_post))  # [t, s], no eps
        logits = (m_comb * self.scale[2] + b_comb).unflatten(-1, (s, s))  # [t, j, k]
        comb = sites("comb", sinkhorn(logits, self.iterations, self.hc_eps))
        return sites("u", torch.einsum("ts,tsd->td", pre, x)), post, comb

    def post(self, z: Tensor, x: Tensor, post: Tensor, comb: Tensor, sites: Sites) -> Tensor:
        """Sub-layer output z [t, d] back into the streams: x'[k] = post[k] * z + sum_j comb[j, k] * x[j]."""
        mixed = torch.einsum("tjk,tjd->tkd", comb, x)
        return sites("streams", post[:, :, None] * z[:, None, :] + mixed)


@dataclass(frozen=True)
class HyperHead:
    """Weights of the last mix, four streams into one: fn [s, s*d], base [s], scale [1]."""

    fn: Tensor
    base: Tensor
    scale: Tensor
    hc_eps: float
    rms_eps: float

    def __call__(self, x: Tensor, sites: Sites) -> Tensor:
        """Streams x [t, s, d] -> [t, d]."""
        w = torch.sigmoid(stream_mixes(x, self.fn, self.rms_eps) * self.scale + self.base) + self.hc_eps
        return sites("hc_head", torch.einsum("ts,tsd->td", w, x))
