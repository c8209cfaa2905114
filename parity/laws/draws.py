"""Operands that bite: outliers, blocks of unequal size, planted ties and NaN."""

from __future__ import annotations

import torch
from torch import Tensor

PAIRS = 32  # that turn


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def order_of(n: int) -> Tensor:
    """A permutation of 0 ... n-1, at least two, that leaves nothing in its place."""
    g = generator(n)
    order = torch.arange(n)
    while (order == torch.arange(n)).any():
        order = torch.randperm(n, generator=g)
    return order


def uneven(seed: int, *shape: int) -> Tensor:
    """float32 normals, every run of 32 channels on its own power of two, an outlier in one of 29 places."""
    g = generator(seed)
    x = torch.randn(*shape, generator=g)
    runs = torch.randint(-4, 5, (*shape[:-1], -(-shape[-1] // 32)), generator=g).float().exp2()
    x *= runs.repeat_interleave(32, -1)[..., : shape[-1]]
    return x * torch.where(torch.rand(*shape, generator=g) < 1 / 29, 40.0, 1.0)


def planted_scores(seed: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """`scores` [9, 40], of few values so that ties stand at every cut, with NaN, infinities and both zeros; `visible` [9]."""
    g = generator(seed)
    scores = torch.randint(-2, 3, (9, 40), generator=g).to(dtype)
    special = torch.tensor([torch.nan, torch.inf, -torch.inf, -0.0, 0.0], dtype=dtype)
    where = torch.rand(9, 40, generator=g) < 0.15
    scores = torch.where(where, special[torch.randint(0, 5, (9, 40), generator=g)], scores)
    scores[-1] = 1.0  # nothing but ties
    visible = torch.randint(7, 41, (9,), generator=g, dtype=torch.int32)
    visible[:4] = torch.tensor([0, 1, 6, 40])
    return {"scores": scores, "visible": visible}


def f32(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator(seed))


def bf16(seed: int, *shape: int) -> Tensor:
    return f32(seed, *shape).bfloat16()


def turns(seed: int, n: int) -> dict[str, Tensor]:
    angle = 3 * f32(seed, n, PAIRS)
    return {"cos": angle.cos(), "sin": angle.sin()}


def quarters(turn: Tensor) -> tuple[Tensor, Tensor]:
    """Numbers of quarter turns [n, 32] -> cos and sin, which are 0, 1 or -1: turning rounds nothing."""
    return torch.tensor([1.0, 0.0, -1.0, 0.0])[turn % 4], torch.tensor([0.0, 1.0, 0.0, -1.0])[turn % 4]


def whole(seed: int, low: int, high: int, *shape: int) -> Tensor:
    return torch.randint(low, high + 1, shape, generator=generator(seed))
