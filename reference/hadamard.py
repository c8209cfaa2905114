"""The Hadamard rotation of index keys and queries. Source: docs/model.md §2."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor


@lru_cache
def hadamard_matrix(n: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Sylvester's matrix over sqrt(n): H[i, j] = (-1)^popcount(i & j) / sqrt(n). Symmetric, orthonormal. n a power of two."""
    h = torch.ones(1, 1, dtype=dtype, device=device)
    while h.shape[0] < n:
        h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)], 0)
    return h / n**0.5


def hadamard(x: Tensor) -> Tensor:
    """Rotate x [..., n] over all n channels. On both sides of a dot product it cancels."""
    return x @ hadamard_matrix(x.shape[-1], x.dtype, x.device)
