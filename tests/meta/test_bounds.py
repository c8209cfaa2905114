"""The bounds are sound (right kernels stay inside), tight (they use a stated share; 4A is caught) and monotone."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from judge_cases import HOW, SEEDS, generator, uneven

from parity.budget import spans
from parity.budget.bounded import ACCUMULATE, Bounded, dot, exact
from parity.judge import Dense, Places, judge

TIGHT = 0.02  # a clean run uses at least this share of A where outputs are stored in float32
PLANT = 4.0  # an error of so many A is always caught


def dot_case(seed: int):
    """Summed one product after the other, in float32; same signs in half the cases, where error piles up."""
    g = generator(seed)
    x, w = torch.randn(9, 96, generator=g).bfloat16().float(), torch.randn(33, 96, generator=g).bfloat16().float()
    if seed % 2:
        x, w = x.abs(), w.abs()
    acc = torch.zeros(9, 33)
    for k in range(96):
        acc = acc + x[:, k, None] * w[None, :, k]
    return acc, dot(exact(x), exact(w), HOW)


def norm_case(seed: int):
    g = generator(seed)
    x, weight = uneven(g, 40, 192), torch.rand(192, generator=g) + 0.5
    total = torch.zeros(40, 1)
    for k in range(192):
        total = total + x[:, k, None] * x[:, k, None]
    got = weight * (x * torch.rsqrt(total / 192 + 2e-6))
    return got, spans.rms_norm(exact(x), weight.double(), 2e-6, HOW)


def rotate_case(seed: int):
    g = generator(seed)
    x, angle = uneven(g, 30, 128), torch.rand(30, 32, generator=g) * 100
    cos, sin = angle.cos(), angle.sin()
    even, odd = x[:, 64::2], x[:, 65::2]
    turned = torch.stack([even * cos - odd * sin, odd * cos + even * sin], -1).flatten(-2)
    return torch.cat([x[:, :64], turned], -1), spans.rotate(exact(x), cos.double(), sin.double(), HOW)


def pooled_case(seed: int):
    g = generator(seed)
    values, gates = uneven(g, 20, 8, 96), 3 * torch.randn(20, 8, 96, generator=g)
    gates[:3, :4] = -torch.inf  # a first block with nothing before it
    e = torch.exp(gates - gates.amax(1, keepdim=True))
    got = (e * values).sum(1) / e.sum(1)
    return got, spans.pooled(exact(values), exact(gates), HOW)


def attention_case(seed: int):
    """Probabilities rounded to bfloat16 in the numerator only."""
    g = generator(seed)
    q, rows = torch.randn(6, 8, 128, generator=g).bfloat16().float(), torch.randn(6, 40, 128, generator=g).bfloat16().float()
    absent, sink = torch.rand(6, 40, generator=g) < 0.3, torch.randn(8, generator=g) * 2
    s = torch.einsum("thd,tnd->thn", q, rows) * 128**-0.5
    s = s.masked_fill(absent[:, None], -torch.inf)
    peak = s.amax(-1, keepdim=True)
    p = torch.exp(s - peak)
    total = p.sum(-1, keepdim=True) + torch.exp(sink[:, None] - peak)
    got = torch.einsum("thn,tnd->thd", p.bfloat16().float(), rows) / total
    return got, spans.sink_attention(q.double(), rows.double(), absent, sink.double(), HOW)


CASES = [dot_case, norm_case, rotate_case, pooled_case, attention_case]
DIMS = {2: "td", 3: "thd"}


def verdict(got: torch.Tensor, expected: Bounded):
    return judge("out", got, Dense(expected, "f32", DIMS[got.ndim]), HOW, Places())


@pytest.mark.parametrize("case", CASES)
def test_clean_runs_never_reach_the_budget_and_use_a_share_of_it(case):
    verdicts = [verdict(*case(seed)) for seed in SEEDS]
    assert all(v.passed for v in verdicts)
    assert max(v.tests["element"] for v in verdicts) >= TIGHT


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_every_error_of_four_bounds_is_caught(case, seed):
    """Planted in some forty elements, one at a time; the verdict names that element."""
    got, expected = case(seed)
    size = expected.bound.flatten()
    inexact = size.nonzero().flatten().tolist()  # channels that do not rotate have nothing to plant
    for at in inexact[seed :: len(inexact) // 40]:
        wrong = got.double().flatten()
        wrong[at] = expected.value.flatten()[at] + PLANT * size[at] * (1 if at % 2 else -1)
        wrong[at] += torch.sign(wrong[at] - expected.value.flatten()[at]) * wrong[at].abs() * 2.0**-23
        v = verdict(wrong.reshape(got.shape), expected)
        assert not v.passed and v.failing_rows == 1
        place = [int(i) for i in torch.unravel_index(torch.tensor(at), got.shape)]
        assert [v.worst[name] for name in ("token", "head", "channel") if name in v.worst] == place


@pytest.mark.parametrize("case", CASES)
def test_a_larger_input_bound_never_gives_a_smaller_one(case):
    """Exact inputs against inputs known to a part in a thousand."""
    g = generator(5)
    x, weight = uneven(g, 8, 128), torch.rand(128, generator=g).double()
    sure, unsure = exact(x), Bounded(x.double(), x.double().abs() * 1e-3)
    cos = torch.rand(8, 32, generator=g).double()
    grow = {
        dot_case: lambda b: dot(b, exact(x), HOW),
        norm_case: lambda b: spans.rms_norm(b, weight, 1e-6, HOW),
        rotate_case: lambda b: spans.rotate(b, cos, (1 - cos**2).sqrt(), HOW),
        pooled_case: lambda b: spans.pooled(b[None], b[None], HOW),
        attention_case: lambda b: spans.pooled(exact(x)[None], b[None], HOW),
    }[case]
    assert (grow(unsure).bound >= grow(sure).bound).all() and (grow(unsure).bound > grow(sure).bound).any()


def test_a_coarser_accumulator_has_a_larger_bound():
    g = generator(1)
    x, w = exact(torch.randn(4, 512, generator=g)), exact(torch.randn(6, 512, generator=g))
    bounds = [dot(x, w, ACCUMULATE[name]).bound for name in ("fp32", "tf32", "hopper-fp8")]
    assert (bounds[0] < bounds[1]).all() and (bounds[1] < bounds[2]).all()


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
