"""Root-mean-square norms. Source: docs/model.md §2."""

from __future__ import annotations

import torch
from torch import Tensor

from .rounding import Sites


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """w * x / rms(x) over the last dimension. x [..., n], weight [n] in the dtype of x; eps inside the root, no "1 + w"."""
    return weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps))


def head_norm(q: Tensor, eps: float, sites: Sites) -> Tensor:
    """The norm of each query head, without a weight. q [..., h, d].

    The official code runs this one op entirely in bfloat16, so every step is a site.
    """
    mean = sites("mean", sites("square", q.square()).mean(-1, keepdim=True))  # [..., h, 1]
    factor = sites("rsqrt", torch.rsqrt(sites("eps", mean + eps)))
    return sites("out", q * factor)
