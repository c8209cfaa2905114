"""Rotary positions: plain for window-only layers, YaRN for layers with a compressor, and the inverse.

The last `qk_rope_head_dim` channels rotate, in adjacent pairs; there is no amplitude factor. Source: docs/model.md §2.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from .config import Config, RopeScaling
from .rounding import Sites


def plain_frequencies(base: float, dim: int, dtype: torch.dtype) -> Tensor:
    """f_i = 1 / base^(2i/dim), i < dim/2, with the power taken in `dtype`."""
    exponent = torch.arange(0, dim, 2, dtype=dtype) / dim
    return 1 / torch.pow(torch.tensor(base, dtype=dtype), exponent)


def yarn_frequencies(base: float, dim: int, yarn: RopeScaling, dtype: torch.dtype) -> Tensor:
    """YaRN: pairs that turn often keep their frequency, slow ones are divided by `factor`, with a ramp between.

    Static: it holds from position 0 on, and scales nothing but frequencies.
    """

    def pair_that_turns(times: float) -> float:
        return dim * math.log(yarn.original_max_position_embeddings / (2 * math.pi * times)) / (2 * math.log(base))

    low = max(math.floor(pair_that_turns(yarn.beta_fast)), 0)
    high: float = min(math.ceil(pair_that_turns(yarn.beta_slow)), dim - 1)
    if low == high:
        high += 0.001
    f = plain_frequencies(base, dim, dtype)
    ramp = ((torch.arange(dim // 2, dtype=dtype) - low) / (high - low)).clamp(0, 1)
    return f / yarn.factor * ramp + f * (1 - ramp)


@dataclass(frozen=True)
class Rope:
    """The rotation of one layer: one table for its queries, window rows, compressed rows, index keys and outputs."""

    base: float
    dim: int
    yarn: RopeScaling | None

    @classmethod
    def of_layer(cls, config: Config, layer: int) -> Rope:
        if config.ratio(layer) == 0:
            return cls(config.rope_theta, config.qk_rope_head_dim, None)
        return cls(config.compress_rope_theta, config.qk_rope_head_dim, config.rope_scaling)

    @lru_cache  # noqa: B019 - a model has two of these
    def frequencies(self, dtype: torch.dtype) -> Tensor:
        """[dim/2] in `dtype`."""
        if self.yarn is None:
            return plain_frequencies(self.base, self.dim, dtype)
        return yarn_frequencies(self.base, self.dim, self.yarn, dtype)

    def table(self, positions: Tensor, dtype: torch.dtype, sites: Sites) -> tuple[Tensor, Tensor]:
        """cos and sin [t, dim/2] of positions [t], in the type of the run.

        Real kernels hold the angle p * f_i in float32, which is off by 3e-3 at position 65 k: a profile of theirs
        names it as the site `rope.angle`, and the product is then reproduced, not improved.
        """
        sites = Sites(sites.profile, sites.tap, sites.taps)  # a profile names these sites once, whichever module asks
        working = torch.float32 if sites.has("rope.angle") else dtype
        angle = positions.to(working)[:, None] * self.frequencies(working).to(positions.device)
        return sites("rope.table", angle.cos().to(dtype)), sites("rope.table", angle.sin().to(dtype))


def rotate(x: Tensor, table: tuple[Tensor, Tensor], inverse: bool = False) -> Tensor:
    """Rotate the last channels of x [t, d] or [t, h, d] by the angles of table [t, dim/2]; `inverse` turns back.

    A pair of channels is a complex number: (even + i·odd)·(cos + i·sin).
    """
    cos, sin = table
    turn = torch.complex(cos, -sin if inverse else sin)
    turn = turn[:, None] if x.ndim == 3 else turn  # [t, 1, dim/2]
    dim = 2 * turn.shape[-1]
    out = x.clone()
    pairs = torch.view_as_complex(out[..., -dim:].unflatten(-1, (-1, 2)))
    pairs.mul_(turn)
    return out
