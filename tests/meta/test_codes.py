"""Legal flips of codes and scale bytes: exactly those that an error within the bound can cause."""

from __future__ import annotations

import math

import pytest
import torch
from judge_cases import HOW, generator, uneven

from parity.budget.bounded import Bounded, exact
from parity.budget.codes import E2M1, code_used, scale_used
from parity.judge import Codes, Places, judge
from reference import formats

FLOOR = formats.E4M3_AMAX_FLOOR
BLOCK = 64


def verdict(codes, scales, t: Bounded):
    return judge("row", (codes, scales), Codes(t, BLOCK, FLOOR, "cd"), HOW, Places())


@pytest.mark.parametrize("seed", range(20))
def test_quantising_any_value_within_the_bound_is_legal(seed):
    g = generator(seed)
    t = uneven(g, 30, 192).double()
    bound = t.abs() * 2.0**-9 + 1e-6
    moved = t + bound * (2 * torch.rand(t.shape, generator=g, dtype=torch.float64) - 1)
    codes, scales = formats.quantize_e4m3(moved.float(), BLOCK)
    v = verdict(codes, scales, Bounded(t, bound + t.abs() * 2.0**-24))
    assert v.passed and v.flips > 0 and 0 < v.tests["code"] <= 1


def test_an_exact_payload_allows_no_flip_at_all():
    t = uneven(generator(0), 4, 128)
    codes, scales = formats.quantize_e4m3(t, BLOCK)
    assert verdict(codes, scales, exact(t)).budget_used == 0
    for at in (0, 70, 127):
        wrong = codes.clone()
        wrong[2, at] ^= 1
        v = verdict(wrong, scales, exact(t))
        assert v.budget_used == math.inf and v.worst == {"row": 2, "channel": at, "channels": [at, at + 1]}


def test_a_code_is_as_far_as_its_bin():
    """Scale 1: 17.2 lies in the bin of 18, [17, 19], 0.2 from that of 16; a bound of 0.1 does not reach it, one of 0.4 does."""
    t = torch.zeros(1, 64, dtype=torch.float64)
    t[0, 0], t[0, 1] = 448.0, 17.2
    codes, scales = formats.quantize_e4m3(t.float(), BLOCK)
    down = codes.clone()
    down[0, 1] -= 1
    for bound, used in ((0.1, 2.0), (0.4, 0.5)):
        share = code_used(down, scales, Bounded(t, torch.full_like(t, bound)), BLOCK)[0, 1].item()
        assert abs(share - used) < 2.0**-40


def test_nan_codes_and_wrong_signs_are_illegal():
    t = Bounded(torch.full((1, 64), 3.0, dtype=torch.float64), torch.full((1, 64), 1e-3, dtype=torch.float64))
    codes, scales = formats.quantize_e4m3(t.value.float(), BLOCK)
    for wrong in (0x7F, 0xFF, int(codes[0, 5]) | 0x80):
        bad = codes.clone()
        bad[0, 5] = wrong
        assert code_used(bad, scales, t, BLOCK)[0, 5] > 1


@pytest.mark.parametrize("exponent", [-3, 0, 5])
def test_a_scale_may_differ_only_at_its_power_of_two(exponent):
    """amax a hair below 448 * 2^k: the next byte is legal for a bound that reaches the edge, and codes follow it."""
    edge = 448.0 * 2.0**exponent
    t = torch.full((1, 64), edge * (1 - 2.0**-14), dtype=torch.float64)
    own_codes, own = formats.quantize_e4m3(t.float(), BLOCK)
    up_codes, up = formats.quantize_e4m3(torch.full((1, 64), edge * (1 + 2.0**-12)), BLOCK)
    assert up[0, 0] == own[0, 0] + 1
    for reach, legal in ((2.0**-13, True), (2.0**-16, False)):
        bounded = Bounded(t, t * reach)
        assert (scale_used(up, bounded, BLOCK, FLOOR)[0, 0] <= 1).item() == legal
        assert verdict(up_codes, up, bounded).passed == legal
        assert verdict(own_codes, own, bounded).budget_used == 0
    assert not verdict(own_codes, up, Bounded(t, t * 2.0**-13)).passed  # codes must be those of the scale that was chosen


def test_a_floored_exponent_is_illegal_in_every_block_but_exact_powers():
    t = uneven(generator(3), 16, 128)
    codes, scales = formats.quantize_e4m3(t, BLOCK)
    v = verdict(codes, scales - 1, Bounded(t.double(), t.double().abs() * 2.0**-12))
    assert not v.passed and v.failing_rows == 16


def test_scale_byte_255_is_illegal():
    t = uneven(generator(4), 2, 64)
    codes, scales = formats.quantize_e4m3(t, BLOCK)
    scales[1, 0] = 255
    assert not verdict(codes, scales, Bounded(t.double(), t.double().abs())).passed


@pytest.mark.parametrize("seed", range(10))
def test_quantising_to_four_bits_within_the_bound_is_legal(seed):
    g = generator(seed)
    t = uneven(g, 30, 128).double()
    bound = t.abs() * 2.0**-9 + 1e-6
    moved = t + bound * (2 * torch.rand(t.shape, generator=g, dtype=torch.float64) - 1)
    codes, scales = formats.quantize_e2m1(moved.float(), 32)
    expected = Codes(Bounded(t, bound + t.abs() * 2.0**-24), 32, formats.E2M1_AMAX_FLOOR, "cd", E2M1)
    v = judge("key", (codes, scales), expected, HOW, Places())
    assert v.passed and v.flips > 0 and 0 < v.tests["code"] <= 1 and v.storage == "e2m1_32"


def test_every_other_code_of_four_bits_costs_its_distance():
    """Scale 1, a value of 2.4: code 4 (2) is its own; 5 (3) begins at 2.5; 3 (1.5) ends at 1.75; -2 begins at -1.75."""
    t = torch.zeros(1, 32, dtype=torch.float64)
    t[0, 0], t[0, 1] = 6.0, 2.4
    codes, scales = formats.quantize_e2m1(t.float(), 32, formats.E2M1_AMAX_FLOOR)
    assert codes[0, 1] == 4
    for code, share in ((4, 0.0), (5, 1.0), (3, 6.5), (12, 41.5)):
        codes[0, 1] = code
        used = code_used(codes, scales, Bounded(t, torch.full_like(t, 0.1)), 32, E2M1)
        assert used[0, 1].item() == pytest.approx(share)
