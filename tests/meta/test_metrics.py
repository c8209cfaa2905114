"""Metrics against exact rational arithmetic, and on zeros, nothing, NaN and infinity."""

from __future__ import annotations

import math
from decimal import Decimal, localcontext
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
import torch
from judge_cases import generator

from parity import metrics

DECIMALS = 12  # digits that a float64 evaluation of a dozen terms shares with the exact result


def fractions(x: torch.Tensor) -> list[Fraction]:
    return [Fraction(float(v)) for v in x.flatten()]


@pytest.mark.parametrize("seed", range(5))
def test_relative_l2_cosine_and_max_abs_are_the_exact_ones(seed):
    g = generator(seed)
    c, t = (torch.randint(-9, 10, (3, 4), generator=g).double() / 8 for _ in range(2))
    a, b = fractions(c), fractions(t)
    error = sum((x - y) ** 2 for x, y in zip(a, b, strict=True))
    size_a, size_b = sum(x * x for x in a), sum(y * y for y in b)
    inner = sum(x * y for x, y in zip(a, b, strict=True))
    d = metrics.distance(c, t, "bf16")
    assert round(d.relative_l2, DECIMALS) == round(math.sqrt(error / size_b), DECIMALS)
    assert round(d.cosine, DECIMALS) == round(float(inner) / math.sqrt(size_a * size_b), DECIMALS)
    assert Fraction(d.max_abs) == max(abs(x - y) for x, y in zip(a, b, strict=True))


def exact_ulp(x: Fraction, bits: int) -> Fraction:
    """Spacing of a binary format of so many significant bits at |x|, by search."""
    exponent = -126
    while abs(x) >= Fraction(2) ** (exponent + 1):
        exponent += 1
    return Fraction(2) ** (exponent + 1 - bits)


@pytest.mark.parametrize(("form", "bits"), [("bf16", 8), ("f32", 24)])
def test_ulp_distances_are_the_exact_ones(form, bits):
    t = torch.tensor([1.0, -1.999, 2.0, 3e-39, 0.0, 448.0, -1e-3], dtype=torch.float64)
    c = t + torch.tensor([2**-9, -(2**-7), 3 * 2**-8, 2.0**-149, 2.0**-140, 1.0, 1e-5], dtype=torch.float64)
    pairs = zip(fractions(c), fractions(t), strict=True)
    apart = sorted(abs(x - y) / exact_ulp(y, bits) for x, y in pairs)
    d = metrics.distance(c, t, form)
    assert [Fraction(x) for x in (d.ulp_median, d.ulp_p99, d.ulp_max)] == [apart[3], apart[6], apart[6]]


def exact_kl(p: list[int], q: list[int]) -> Decimal:
    """Of two distributions given by whole weights, to fifty digits."""
    with localcontext(prec=50):
        shares = [[Decimal(n) / sum(weights) for n in weights] for weights in (p, q)]
        return sum((a * (a / b).ln() for a, b in zip(*shares, strict=True)), Decimal(0))


@pytest.mark.parametrize("seed", range(5))
def test_kl_is_the_exact_one_in_its_direction(seed):
    p, q = (torch.randint(1, 50, (3, 6), generator=generator(seed + at)) for at in (0, 100))
    found = metrics.kl(q.double().log() - 7, p.double().log() + 3)  # a shift of all logits is nothing
    for x, a, b in zip(found.tolist(), p.tolist(), q.tolist(), strict=True):
        assert abs(Decimal(x) - exact_kl(a, b)) < Decimal(10) ** -DECIMALS
        assert abs(Decimal(x) - exact_kl(b, a)) > Decimal(10) ** -4
    assert metrics.kl(p.double(), p.double()).tolist() == [0.0] * 3


def test_kl_of_what_cannot_be():
    never, ever = torch.tensor([[0.0, -math.inf]]), torch.tensor([[0.0, 0.0]])
    assert round(float(metrics.kl(ever.double(), never.double())), DECIMALS) == round(math.log(2), DECIMALS)
    assert metrics.kl(never.double(), ever.double()).item() == math.inf


@pytest.mark.parametrize("k", [1, 3, 8])
def test_overlap_counts_the_common_ones_of_two_sets(k):
    c, other = (torch.randperm(40, generator=generator(seed)).view(5, 8).double() for seed in (1, 2))
    t = torch.cat([c[:2], other[2:]])
    largest = [[set(x.sort(descending=True).indices[:k].tolist()) for x in rows] for rows in (c, t)]
    exact = sum(Fraction(len(a & b), k) for a, b in zip(*largest, strict=True)) / 5
    assert round(metrics.top_overlap(c, t, k), DECIMALS) == round(float(exact), DECIMALS)
    assert k == 8 or 0 < exact < 1
    assert metrics.top_overlap(c[:0], t[:0], k) == 1.0


@pytest.mark.parametrize("form", ["bf16", "f32"])
def test_ulp_is_the_gap_to_the_next_number_of_the_format(form):
    kind = {"bf16": ml_dtypes.bfloat16, "f32": np.float32}[form]
    x = torch.tensor([1.0, 1.5, 2.0, 3.9, 448.0, 1e-3, 2.0**-126, -7.25, 1e30], dtype=torch.float64)
    stored = np.abs(x.numpy()).astype(kind)
    below = np.minimum(stored, np.abs(x.numpy())).astype(kind)  # a number of the format at or under |x|
    gap = np.nextafter(below, kind(np.inf)).astype(np.float64) - below.astype(np.float64)
    under = below.astype(np.float64) <= np.abs(x.numpy())
    assert torch.equal(metrics.ulp(x, form)[torch.from_numpy(under)], torch.from_numpy(gap)[torch.from_numpy(under)])
    assert under.sum() >= 6


@pytest.mark.parametrize(("form", "kind"), [("bf16", torch.bfloat16), ("f32", torch.float32)])
def test_round_to_is_the_nearest_with_ties_to_even(form, kind):
    x = torch.randn(4096, generator=generator(1), dtype=torch.float64) * 2.0 ** torch.randint(-40, 40, (4096,))
    once = x.to(torch.float32) if form == "bf16" else x  # exact in float32, so that torch rounds once
    x = once.double()
    assert torch.equal(metrics.round_to(x, form), x.to(kind).double())
    step = 2.0**-7 if form == "bf16" else 2.0**-23
    ties = torch.tensor([1 + step / 2, 1 + 3 * step / 2], dtype=torch.float64)
    assert metrics.round_to(ties, form).tolist() == [1.0, 1 + 2 * step]


def test_quantiles_are_elements_with_that_share_at_or_below():
    t = torch.ones(200, dtype=torch.float64)
    c = t + torch.arange(200, dtype=torch.float64) * 2.0**-7  # 0, 1, 2, ... ulps
    d = metrics.distance(c, t, "bf16")
    assert (d.ulp_median, d.ulp_p99, d.ulp_max) == (99.0, 197.0, 199.0)


def test_zero_and_empty_tensors():
    zero, one, none = torch.zeros(4).double(), torch.ones(4).double(), torch.zeros(0).double()
    assert metrics.distance(zero, zero, "bf16") == metrics.Distance(0.0, 1.0, 0.0, 0.0, 0.0, 0.0)
    assert metrics.relative_l2(one, zero) == math.inf and metrics.cosine(one, zero) == 0.0
    assert metrics.distance(none, none, "f32") == metrics.Distance(0.0, 1.0, 0.0, 0.0, 0.0, 0.0)


def test_norms_survive_values_whose_squares_do_not():
    for size in (1e-200, 1e200):
        x = torch.full((9,), size, dtype=torch.float64)
        assert round(metrics.cosine(x, x), DECIMALS) == 1.0
        assert round(metrics.relative_l2(2 * x, x), DECIMALS) == 1.0


def test_anomalies_must_agree_in_kind_and_sign():
    inf, nan = math.inf, math.nan
    c = torch.tensor([nan, inf, -inf, inf, 1.0, nan, inf, nan])
    t = torch.tensor([nan, inf, -inf, -inf, 1.0, 1.0, 1.0, inf])
    assert metrics.anomalies(c, t).tolist() == [False, False, False, True, False, True, True, True]
