"""The Hadamard rotation: Sylvester's order, orthonormal, its own inverse."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from bounds import assert_within, rounding_bound
from hypothesis import strategies as st
from strategies import adversarial, holds, refuted, seeds
from torch import Tensor

from reference.hadamard import hadamard, hadamard_matrix

cases = st.tuples(seeds, st.sampled_from([1, 2, 32, 64, 128]))


def test_sylvester() -> None:
    h = hadamard_matrix(128, torch.float64, torch.device("cpu")) * 128**0.5
    want = torch.tensor([[(-1.0) ** (i & j).bit_count() for j in range(128)] for i in range(128)], dtype=torch.float64)
    assert_within(rounding_bound(2, want), h, want)


def own_inverse(turn: Callable[[Tensor], Tensor], case: tuple[int, int]) -> None:
    x = adversarial(case[0], 2, case[1])
    assert_within(rounding_bound(2 * case[1], x), turn(turn(x)), x)


def keeps_products(turn: Callable[[Tensor], Tensor], case: tuple[int, int]) -> None:
    q, k = adversarial(case[0], 3, case[1]), adversarial(case[0] + 1, 4, case[1])
    size = q.norm(dim=-1)[:, None] * k.norm(dim=-1)
    assert_within(rounding_bound(4 * case[1], size), turn(q) @ turn(k).T, q @ k.T)


def without_root(x: Tensor) -> Tensor:
    return hadamard(x) * x.shape[-1] ** 0.5


def with_random_signs(x: Tensor) -> Tensor:
    return hadamard(x * (-1.0) ** torch.arange(x.shape[-1]))


def one_half_only(x: Tensor) -> Tensor:
    return torch.cat([hadamard(x[..., ::2]), x[..., 1::2] * 0.5], dim=-1)


def test_laws() -> None:
    holds(own_inverse, cases, hadamard)
    holds(keeps_products, cases, hadamard)


@pytest.mark.parametrize(
    ("law", "wrong"),
    [(own_inverse, without_root), (own_inverse, with_random_signs), (keeps_products, without_root),
     (keeps_products, one_half_only)],
)  # fmt: skip
def test_laws_see(law: Callable[..., None], wrong: Callable[[Tensor], Tensor]) -> None:
    refuted(law, cases, wrong)
