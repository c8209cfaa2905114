"""Patterns of mistakes: each planted one is named, in every form an output is stored in; random damage has no name."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent / "meta"))

from judge_cases import HOW, generator, uneven

from parity.budget.bounded import Bounded
from parity.judge import Bytes, Codes, Dense, Places, judge
from reference import formats

ROWS, HEADS, WIDTH, BLOCK = 5, 3, 128, 64
SHAPE = (ROWS, HEADS, WIDTH)
FORMS = ("bf16", "f32", "codes")
FEWER = settings(max_examples=max(1, settings.default.max_examples // 5))  # an example is a whole verdict
seeds, forms = st.integers(0, 2**31), st.sampled_from(FORMS)


def roll(by: int, axis: int):
    return lambda x, g: x.roll(by, axis)


def scaled(factor: float):
    return lambda x, g: x * factor


def changed(where, to):
    """`x[where]` becomes `to(x)[where]`."""

    def plant(x: Tensor, g: torch.Generator) -> Tensor:
        return x.clone().index_put_(_mask(x, where), to(x)[_mask(x, where)])

    return plant


def _mask(x: Tensor, where) -> tuple[Tensor, ...]:
    mask = torch.zeros(x.shape, dtype=torch.bool)
    mask[where] = True
    return (mask,)


HALVES = torch.arange(WIDTH).roll(WIDTH // 2)
TAIL = slice(WIDTH - BLOCK, WIDTH)  # one block: channels that move to another scale's are rounded otherwise
PAIRS = torch.arange(BLOCK).view(2, -1).T.flatten()  # split -> side by side

# name -> (kind, a part of the text, the mistake, made to the unrounded values)
MISTAKES = {
    "rows shifted along tokens": ("row_permuted", "shifted by one token, each that of the token before", roll(1, 0)),
    "rows shifted along heads": ("row_permuted", "shifted by one head, each that of the head after", roll(-1, 1)),
    "two rows exchanged": ("row_permuted", "two exchanged: token 1, head 0 and token 3, head 2",
                           lambda x, g: _exchange(x, (1, 0), (3, 2))),
    "rows in another order": ("row_permuted", "in another order",
                              lambda x, g: x.flatten(0, 1)[_derangement(g)].view(x.shape)),
    "a row twice": ("stale", "in 1 of 15 rows: token 4, head 1 holds token 0, head 2",
                    lambda x, g: x.index_put((torch.tensor(4), torch.tensor(1)), x[0, 2])),
    "halved": ("scale_shifted", "a factor of 2^-1 in all rows", scaled(0.5)),
    "negative and doubled": ("scale_shifted", "a factor of -2^1 in all rows", scaled(-2.0)),
    "another softmax scale": ("scale_shifted", "a factor of 0.7", scaled(math.sqrt(0.5))),
    "one head four times as large": ("scale_shifted", "2^2 in 5 of 15 rows", changed((slice(None), 1), lambda x: 4 * x)),
    "a block of channels eight times": ("scale_shifted", "2^3 in channels 64–127 of all rows",
                                        changed((..., slice(64, 128)), lambda x: 8 * x)),
    "sign": ("sign_flipped", "in all rows", scaled(-1.0)),
    "sign of the tail": ("sign_flipped", "in channels 64–127 of all rows", changed((..., TAIL), lambda x: -x)),
    "halves": ("swapped_halves", "channels 0–127", lambda x, g: x[..., HALVES]),
    "halves of the tail": ("swapped_halves", "channels 64–127",
                           lambda x, g: torch.cat([x[..., :64], x[..., 96:], x[..., 64:96]], -1)),
    "interleaved": ("interleaved", "channels 64–127", changed((..., TAIL), lambda x: in_tail(x, PAIRS))),
    "split": ("split", "channels 64–127", changed((..., TAIL), lambda x: in_tail(x, PAIRS.argsort()))),
    "nibbles": ("swapped_neighbours", "channels 0–127", lambda x, g: x[..., torch.arange(WIDTH) ^ 1]),
    "dropped tail": ("dropped_tail", "zero from channel 96 on", changed((..., slice(96, None)), torch.zeros_like)),
    "dropped rows": ("zeros", "zero in 6 of 15 rows", changed((slice(3, None),), torch.zeros_like)),
    "a gap": ("zeros", "in channels 32–63 of all rows", changed((..., slice(32, 64)), torch.zeros_like)),
}  # fmt: skip


def in_tail(x: Tensor, order: Tensor) -> Tensor:
    return torch.cat([x[..., :-BLOCK], x[..., TAIL][..., order]], -1)


def _exchange(x: Tensor, a: tuple[int, int], b: tuple[int, int]) -> Tensor:
    y = x.clone()
    y[a], y[b] = x[b], x[a]
    return y


def _derangement(g: torch.Generator) -> Tensor:
    """A cycle through all rows in random order: no row stays, and no two are neighbours' throughout."""
    order = torch.randperm(ROWS * HEADS, generator=g)
    return torch.empty_like(order).index_put_((order,), order.roll(1))


def twin(seed: int) -> Bounded:
    t = uneven(generator(seed), *SHAPE).double()
    return Bounded(t, t.abs() * 2.0**-13 + 2.0**-40)


def expectation(t: Bounded, form: str):
    return Codes(t, BLOCK, formats.E4M3_AMAX_FLOOR, "thd") if form == "codes" else Dense(t, form, "thd")


def store(x: Tensor, form: str):
    if form == "codes":
        return formats.quantize_e4m3(x.float(), BLOCK)
    return x.to(torch.bfloat16 if form == "bf16" else torch.float32)


def verdict(seed: int, form: str, plant, earlier=None):
    """A right kernel's output, within the bound of the twin, with a mistake put in before it is stored."""
    g, t = generator(seed + 1), twin(seed)
    computed = t.value + t.bound / 2 * (2 * torch.rand(SHAPE, generator=g, dtype=torch.float64) - 1)
    return judge("x", store(plant(computed, g), form), expectation(t, form), HOW, Places(), earlier)


@pytest.mark.parametrize("name", MISTAKES)
@FEWER
@given(seed=seeds, form=forms)
def test_every_planted_pattern_is_named(name, seed, form):
    kind, words, plant = MISTAKES[name]
    v = verdict(seed, form, plant)
    assert not v.passed and v.pattern is not None
    assert v.pattern.kind == kind and words in v.pattern.text, v.pattern


@FEWER
@given(seed=seeds, form=forms)
def test_a_clean_output_has_no_pattern(seed, form):
    v = verdict(seed, form, lambda x, g: x)
    assert v.passed and v.pattern is None


def noise(x: Tensor, g: torch.Generator) -> Tensor:
    return x + 0.3 * x.abs() * torch.randn(x.shape, generator=g, dtype=torch.float64)


def another(x: Tensor, g: torch.Generator) -> Tensor:
    return uneven(g, *SHAPE).double()


def few(x: Tensor, g: torch.Generator) -> Tensor:
    """Three elements of any size."""
    at = torch.randint(0, x.numel(), (3,), generator=g)
    return x.flatten().index_put((at,), 2.0 ** torch.randint(-8, 12, (3,), generator=g).double()).view(x.shape)


def flipped_bit(x: Tensor, g: torch.Generator) -> Tensor:
    """The sign of one element, which is too little to speak of."""
    at = int(torch.randint(0, x.numel(), (1,), generator=g))
    return x.flatten().index_put((torch.tensor(at),), -x.flatten()[at]).view(x.shape)


def two_mistakes(x: Tensor, g: torch.Generator) -> Tensor:
    y = x.roll(1, 0)
    return y.index_put((torch.tensor(3),), another(x, g)[3])


def half_of_a_row(x: Tensor, g: torch.Generator) -> Tensor:
    """Another row's first half, and nothing's second."""
    y = x.clone()
    y[2, 1] = torch.cat([x[0, 0, : WIDTH // 2], another(x, g)[2, 1, WIDTH // 2 :]])
    return y


@pytest.mark.parametrize("damage", [noise, another, few, flipped_bit, two_mistakes, half_of_a_row])
@FEWER
@given(seed=seeds, form=forms)
def test_random_damage_is_named_nothing(damage, seed, form):
    v = verdict(seed, form, damage)
    assert v.pattern is None


@FEWER
@given(seed=seeds, form=forms)
def test_what_the_step_before_stored_is_stale(seed, form):
    before = store(another(twin(seed).value, generator(seed + 7)), form)
    held = tuple(x[-1] for x in before) if isinstance(before, tuple) else before[-1]

    def plant(x: Tensor, g: torch.Generator) -> Tensor:
        y = x.clone()
        y[2] = formats.dequantize_blocks(formats.e4m3_decode(held[0]), held[1], BLOCK) if form == "codes" else held
        return y

    v = verdict(seed, form, plant, before)
    assert v.pattern is not None and v.pattern.kind == "stale" and "step before" in v.pattern.text
    assert verdict(seed, form, plant).pattern is None


def test_nan_and_nothing_else():
    def plant(x: Tensor, g: torch.Generator) -> Tensor:
        return x.index_put((torch.tensor(1), torch.tensor(2)), torch.tensor(math.nan, dtype=torch.float64))

    v = verdict(3, "bf16", plant)
    assert v.pattern is not None and (v.pattern.kind, v.pattern.fields["elements"]) == ("nan", WIDTH)
    assert "1 of 15 rows" in v.pattern.text
    at = tuple(map(torch.tensor, (0, 0, 9)))
    one = verdict(3, "bf16", lambda x, g: x.index_put(at, x.new_tensor(math.nan)))
    assert one.pattern is not None and one.pattern.text == "NaN in channel 9 of 1 of 15 rows, and right elsewhere"
    worse = verdict(3, "bf16", lambda x, g: noise(plant(x, g), g))
    assert worse.pattern is None


def test_blocks_under_the_scales_of_others():
    """Right codes, each block's scale its neighbour's."""
    t = twin(11)
    codes, scales = formats.quantize_e4m3(t.value.float(), BLOCK // 2)
    stored = codes, scales.roll(1, -1)
    v = judge("x", stored, Codes(t, BLOCK // 2, formats.E4M3_AMAX_FLOOR, "thd"), HOW, Places())
    assert v.pattern is not None and v.pattern.kind == "scale_shifted" and v.pattern.fields["block"] == BLOCK // 2


@FEWER
@given(seed=seeds)
def test_bytes_are_searched_too(seed):
    """Rows of a ring hold the row of the token before; bytes at random hold nothing."""
    g = generator(seed)
    rows = torch.randint(0, 256, (9, 80), generator=g).byte()
    shifted = judge("ring", rows.roll(1, 0), Bytes(rows, "td"), HOW, Places())
    assert shifted.pattern is not None and shifted.pattern.kind == "row_permuted"
    noise = judge("ring", torch.randint(0, 256, (9, 80), generator=g).byte(), Bytes(rows, "td"), HOW, Places())
    assert not noise.passed and noise.pattern is None


def test_the_proof_must_exceed_chance():
    """So few elements with the sign flipped may be chance, one more and they are not."""
    t = torch.full((1, 8), 1.0, dtype=torch.float64)
    bounded = Bounded(t, t * 2.0**-8)  # room 2^-8 + 2^-9: an element says log2(2 / room) = 8.4 bits
    named = []
    for n in range(1, 9):
        c = t.clone()
        c[0, :n] *= -1
        named.append(judge("x", c.bfloat16(), Dense(bounded, "bf16", "td"), HOW, Places()).pattern is not None)
    assert named == [False] * 3 + [True] * 5
