"""Rotary tables: cosine and sine of position times frequency, per kind of layer. Source: docs/model.md §2."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from reference.config import Config


def frequencies(config: Config, layer: int) -> Tensor:
    """float32 [rope/2]: plain powers of `rope_theta` in window layers, YaRN on `compress_rope_theta` in the others."""
    pairs = torch.arange(0, config.qk_rope_head_dim, 2, dtype=torch.float32) / config.qk_rope_head_dim
    if config.kind(layer) == "window":
        return 1.0 / config.rope_theta**pairs
    plain = 1.0 / config.compress_rope_theta**pairs
    blend = _interpolated_share(config)
    return plain / config.rope_scaling.factor * blend + plain * (1 - blend)


def _interpolated_share(config: Config) -> Tensor:
    """How far each pair is slowed down: 0 for fast pairs, 1 for slow ones, a ramp between."""
    s, width = config.rope_scaling, config.qk_rope_head_dim

    def pair_with_turns(n: float) -> float:
        turns = s.original_max_position_embeddings / (2 * math.pi * n)
        return width * math.log(turns) / (2 * math.log(config.compress_rope_theta))

    low = max(math.floor(pair_with_turns(s.beta_fast)), 0)
    high = min(math.ceil(pair_with_turns(s.beta_slow)), width - 1)
    width_of_ramp = high - low or 0.001
    return ((torch.arange(width // 2, dtype=torch.float32) - low) / width_of_ramp).clamp(0, 1)


def rope_table(config: Config, layer: int, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Positions [n] -> cos, sin float32 [n, rope/2]. The angle is the float32 product, as every kernel forms it."""
    angle = positions.float()[:, None] * frequencies(config, layer)
    return angle.cos(), angle.sin()
