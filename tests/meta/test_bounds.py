"""The bounds are sound (right kernels stay inside), tight (they use a stated share; 4A is caught) and monotone."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from bound_cases import CASES, PRODUCTS, expert_case
from judge_cases import HOW, SEEDS, generator, uneven

from parity.budget import gates, mixes, spans
from parity.budget.bounded import ACCUMULATE, Arithmetic, Bounded, dot, exact
from parity.judge import Dense, Places, element_used, judge

TIGHT = 0.02  # a clean run uses at least this share of A where outputs are stored in float32
PLANT = 4.0  # an error of so many A is always caught
DIMS = {2: "td", 3: "thd"}
COS = torch.rand(8, 32, generator=generator(9), dtype=torch.float64)
ONES = torch.ones(8, 128, dtype=torch.float64)
WEIGHT = torch.rand(128, generator=generator(8), dtype=torch.float64)


def square(x: Bounded) -> Bounded:
    """[8, 128] -> logits [64, 4, 4] within [-4, 4]."""
    value = x.value.clamp(-4, 4).view(64, 4, 4)
    return Bounded(value, x.bound.view(64, 4, 4).clamp_max(1e-2))


# Operations whose inputs carry bounds, of an input [8, 128].
GROW = {
    "dot": lambda x: dot(x, exact(ONES), HOW),
    "norm": lambda x: spans.rms_norm(x, WEIGHT, 1e-6, HOW),
    "rotate": lambda x: spans.rotate(x, exact(COS), exact((1 - COS**2).sqrt()), HOW),
    "rotate by a table": lambda x: spans.rotate(x, Bounded(COS, x.bound[:, :1]), Bounded(COS, x.bound[:, 1:2]), HOW),
    "hadamard": lambda x: spans.hadamard(x, HOW),
    "pooled": lambda x: spans.pooled(x[None], x[None], HOW),
    "pooled by gates": lambda x: spans.pooled(exact(x.value)[None], x[None], HOW),
    "affine": lambda x: mixes.affine(x, WEIGHT, WEIGHT, HOW),
    "sigmoid": lambda x: mixes.sigmoid(Bounded(x.value / 64, x.bound / 64), HOW),
    "sinkhorn": lambda x: mixes.sinkhorn(square(x), 20, 1e-6, HOW),
    "weighted": lambda x: mixes.weighted_streams(ONES[:, :, None], x, HOW),
    "scores": lambda x: gates.sqrt_softplus(Bounded(x.value / 64, x.bound / 64), HOW),
    "shares": lambda x: gates.normalised(Bounded(x.value.abs(), x.bound), 2.5, HOW),
    "bfloat16": gates.to_bf16,
    "swiglu": lambda x: gates.swiglu(x, x, 10.0, None, HOW),
}
# Operations that are linear in an exact input [8, 128], or pass its size on.
LINEAR = {
    "dot": lambda x: dot(exact(x), exact(ONES), HOW),
    "rotate": lambda x: spans.rotate(exact(x), exact(COS), exact((1 - COS**2).sqrt()), HOW),
    "hadamard": lambda x: spans.hadamard(exact(x), HOW),
    "index scores": lambda x: spans.index_scores(x[:, None], WEIGHT[:8, None], ONES, HOW),
    "spread": lambda x: mixes.spread_streams(x, x[:, None], ONES[:, :1], ONES[:, :1, None], HOW),
    "weighted": lambda x: mixes.weighted_streams(x[:, None], exact(ONES[:, :1]), HOW),
}


def verdict(got: torch.Tensor, expected: Bounded, how: Arithmetic = HOW):
    return judge("out", got, Dense(expected, "f32", DIMS[got.ndim]), how, Places())


@pytest.mark.parametrize("case", CASES)
def test_clean_runs_never_reach_the_budget_and_use_a_share_of_it(case):
    verdicts = [verdict(*case(seed, HOW)) for seed in SEEDS]
    assert all(v.passed for v in verdicts)
    assert max(v.tests["element"] for v in verdicts) >= TIGHT


@pytest.mark.parametrize("name", ["tf32", "hopper-fp8"])
@pytest.mark.parametrize("case", PRODUCTS)
def test_what_really_sums_in_fewer_bits_stays_within_its_own_bound(case, name):
    how = ACCUMULATE[name]
    verdicts = [verdict(*case(seed, how), how) for seed in SEEDS]
    assert all(v.passed for v in verdicts)
    assert max(v.tests["element"] for v in verdicts) >= TIGHT


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("seed", [0, 1])
def test_every_error_of_four_bounds_is_caught(case, seed):
    """Planted in some fifteen elements, one at a time; the verdict names that element."""
    got, expected = case(seed, HOW)
    size = expected.bound.flatten()
    inexact = size.nonzero().flatten().tolist()  # channels that do not rotate have nothing to plant
    for at in inexact[seed :: len(inexact) // 15]:
        wrong = got.double().flatten()
        wrong[at] = expected.value.flatten()[at] + PLANT * size[at] * (1 if at % 2 else -1)
        wrong[at] += torch.sign(wrong[at] - expected.value.flatten()[at]) * wrong[at].abs() * 2.0**-23
        v = verdict(wrong.reshape(got.shape), expected)
        assert not v.passed and v.failing_rows == 1
        place = [int(i) for i in torch.unravel_index(torch.tensor(at), got.shape)]
        assert [v.worst[name] for name in ("token", "head", "channel") if name in v.worst] == place


@pytest.mark.parametrize("name", GROW)
def test_a_larger_input_bound_never_gives_a_smaller_one(name):
    """Exact inputs against inputs known to a part in a thousand, and those against inputs known to a part in a hundred."""
    x = uneven(generator(5), 8, 128)
    bounds = [GROW[name](Bounded(x.double(), x.double().abs() * part)).bound for part in (0, 1e-3, 1e-2)]
    for less, more in pairwise(bounds):
        assert (more >= less).all() and (more > less).any()


@pytest.mark.parametrize("name", LINEAR)
def test_larger_inputs_have_a_larger_bound(name):
    """Eight times the input, eight times the bound, where the operation is linear or passes signs."""
    x = uneven(generator(6), 8, 128).double()
    near, far = (LINEAR[name](size * x).bound for size in (1, 8))
    assert (far == 8 * near).all() and (far > near).any()


@pytest.mark.parametrize("case", CASES)
def test_a_coarser_accumulator_never_has_a_smaller_bound(case):
    fine, *coarse = (case(0, ACCUMULATE[name])[1].bound for name in ("fp32", "tf32", "hopper-fp8"))
    assert all((bound >= fine).all() for bound in coarse)
    if case in PRODUCTS:
        assert (coarse[-1] > fine).all()


@pytest.mark.parametrize("case", [case for case in PRODUCTS if case is not expert_case])
def test_a_sum_that_lost_bits_is_outside_the_bound_of_float32(case):
    """All of these but experts, whose bfloat16 on the way hides it, can tell an accumulator of 14 bits."""
    how, fine = ACCUMULATE["hopper-fp8"], ACCUMULATE["fp32"]
    shares = [element_used(case(seed, how)[0].double(), case(seed, fine)[1], "f32").max() for seed in SEEDS]
    assert max(shares) > 1


def test_a_mean_that_an_accumulator_may_lose_whole_has_no_bound():
    """16,384 squares, each sum cut at 2^-13."""
    x = torch.ones(1, 1, 1 << 14, dtype=torch.float64)
    assert mixes.stream_mixes(x, x[:, 0], 1e-6, ACCUMULATE["hopper-fp8"]).bound.isinf().all()


def test_a_sum_that_lost_bits_as_tf32_does_is_inside_its_own_bound_and_outside_that_of_float32():
    g = generator(2)
    x, w = torch.randn(8, 256, generator=g), torch.randn(16, 256, generator=g)

    def short(t):
        return ((t.view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)

    got = short(x) @ short(w).T
    for name, passes in (("tf32", True), ("fp32", False)):
        how = ACCUMULATE[name]
        assert judge("out", got, Dense(dot(exact(x), exact(w), how), "f32", "td"), how, Places()).passed == passes


def test_lambda_grows_with_nothing_but_is_what_hoeffding_asks():
    """Signs of n fair coins: the largest of many sums stays below λ·sqrt(n), and is not far below for many trials."""
    flips = torch.randint(0, 2, (20_000, 64), generator=generator(0)) * 2.0 - 1
    reach = flips.sum(1).abs().max().item() / 64**0.5
    assert 3.0 < reach < HOW.lam


def test_hidden_errors_below_half_an_ulp_are_seen_by_row():
    """Every element off by 0.45 ulp in whatever direction it was rounded: no element fails, every row does."""
    g = generator(3)
    t = torch.randn(5, 256, generator=g, dtype=torch.float64).abs() + 1
    near = torch.round(t * 128) / 128  # bfloat16 grid of [1, 2): steps of 1/128
    t = near + torch.sign(t - near) * 0.45 / 128
    t = t.clamp(1.01, 1.99)
    bound = torch.full_like(t, 1e-5)
    ok = judge("out", near.clamp(1.01, 1.99).bfloat16(), Dense(Bounded(t, bound), "bf16", "td"), HOW, Places())
    assert ok.passed  # a perfect rounding that happens to lie at the edge is no fault
    shifted = judge("out", (t + 0.3 / 128).bfloat16(), Dense(Bounded(t, bound), "bf16", "td"), HOW, Places())
    assert not shifted.passed


def test_a_biased_kernel_is_seen_though_every_element_is_legal():
    """Results a hair too small, always: flips to the lower neighbour only."""
    t = torch.randn(3000, 64, generator=generator(4), dtype=torch.float64)
    bound = t.abs() * 2.0**-12
    expected = Dense(Bounded(t, bound), "bf16", "td")
    noise = torch.rand(t.shape, generator=generator(5), dtype=torch.float64) - 0.5
    fair = judge("out", (t + noise * bound).bfloat16(), expected, HOW, Places())
    biased = judge("out", (t * (1 - 2.0**-13)).bfloat16(), expected, HOW, Places())
    assert fair.passed and biased.tests["element"] <= 1 and biased.tests["bias"] > 1
    assert judge("out", (t * (1 - 2.0**-13)).bfloat16(), replace(expected, fair=False), HOW, Places()).passed
