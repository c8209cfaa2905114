"""Laws of the norms."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from bounds import assert_within, rounding_bound
from hypothesis import strategies as st
from strategies import adversarial, holds, normal, refuted, seeds, widths
from torch import Tensor

from reference.norm import head_norm, rms_norm
from reference.rounding import Sites, profile

EPS = 2e-6
cases = st.tuples(seeds, widths)


def definition(norm: Callable[..., Tensor], case: tuple[int, int]) -> None:
    """w * x / sqrt(mean(x^2) + eps), the sum taken one by one; rows down to 1e-6, where eps decides."""
    seed, n = case
    x, w = adversarial(seed, 4, n) * torch.tensor([[1.0], [1e-3], [1e-6], [0.0]], dtype=torch.float64), normal(seed, n)
    want = torch.stack([w * row / (sum(v * v for v in row) / n + EPS) ** 0.5 for row in x])
    assert_within(rounding_bound(n + 8, want), norm(x, w, EPS), want)


def ignores_the_size(norm: Callable[..., Tensor], case: tuple[int, int]) -> None:
    """Scaling by c changes nothing but what eps does, which is at most eps / (2 mean(x^2)) of the value."""
    x, w = normal(case[0], 3, case[1]) + 2, normal(case[0] + 1, case[1])
    out = norm(x, w, EPS)
    by_eps = EPS / float(x.square().mean(-1).amin()) * float(out.abs().amax())
    for c in (0.5, 3.0, 1e4):
        assert_within(max(1, c**-2) * by_eps + rounding_bound(case[1] + 8, out), norm(c * x, w, EPS), out)


def one_plus_weight(x: Tensor, w: Tensor, eps: float) -> Tensor:
    return rms_norm(x, 1 + w, eps)


def eps_outside(x: Tensor, w: Tensor, eps: float) -> Tensor:
    return w * x / (x.square().mean(-1, keepdim=True).sqrt() + eps)


def sum_not_mean(x: Tensor, w: Tensor, eps: float) -> Tensor:
    return w * x * torch.rsqrt(x.square().sum(-1, keepdim=True) + eps)


def mean_square(x: Tensor, w: Tensor, eps: float) -> Tensor:
    return w * x / (x.square().mean(-1, keepdim=True) + eps)


def test_rms_norm() -> None:
    holds(definition, cases, rms_norm)
    holds(ignores_the_size, cases, rms_norm)


@pytest.mark.parametrize("wrong", [one_plus_weight, eps_outside, sum_not_mean, mean_square])
def test_definition_sees(wrong: Callable[..., Tensor]) -> None:
    refuted(definition, cases, wrong)


def test_size_law_sees() -> None:
    refuted(ignores_the_size, cases, mean_square)


def test_head_norm_is_a_norm_of_each_head_without_weight() -> None:
    q = adversarial(3, 5, 3, 64)
    want = rms_norm(q, torch.ones(64, dtype=torch.float64), EPS)
    assert_within(rounding_bound(8, want), head_norm(q, EPS, Sites()), want)
    over_all_heads = rms_norm(q.flatten(1), torch.ones(192, dtype=torch.float64), EPS).view_as(q)
    with pytest.raises(AssertionError):
        assert_within(rounding_bound(8, want), over_all_heads, want)


def test_head_norm_in_bfloat16_rounds_every_step() -> None:
    """The official profile against the same steps taken in bfloat16 tensors."""
    q = normal(4, 6, 2, 128, dtype=torch.float32).bfloat16()
    mean = q.square().float().mean(-1, keepdim=True).bfloat16()
    want = q * torch.rsqrt((mean + EPS).float()).bfloat16()
    got = head_norm(q.float(), EPS, Sites(profile("official")).at("attn").at("q_head_norm"))
    assert torch.equal(got.bfloat16(), want)
    assert torch.equal(got.bfloat16().float(), got)
