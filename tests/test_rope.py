"""Rotary positions: frequencies, pairs, relative positions, the inverse."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from bounds import assert_within, rounding_bound
from hypothesis import strategies as st
from strategies import TINY, adversarial, holds, normal, refuted, seeds
from torch import Tensor

from reference.presets import preset
from reference.rope import Rope, plain_frequencies, rotate, yarn_frequencies
from reference.rounding import Sites

PRO = preset("v4-pro")
ROPE = Rope.of_layer(PRO, 2)
positions = st.lists(st.one_of(st.integers(0, 300), st.integers(0, 2_000_000)), min_size=1, max_size=5)
cases = st.tuples(seeds, positions)
Rotate = Callable[..., Tensor]


def table(at: list[int]) -> tuple[Tensor, Tensor]:
    return ROPE.table(torch.tensor(at), torch.float64, Sites())


def turned_by_complex_numbers(x: Tensor, at: list[int]) -> Tensor:
    """Pair i as one complex number times e^(i p f_i)."""
    f = ROPE.frequencies(torch.float64)
    pairs = torch.view_as_complex(x[..., -64:].contiguous().unflatten(-1, (-1, 2)))
    angle = torch.tensor(at, dtype=torch.float64)[:, None] * f
    turned = torch.view_as_real(pairs * torch.polar(torch.ones_like(angle), angle)).flatten(-2)
    return torch.cat([x[..., :-64], turned], dim=-1)


def rotates_adjacent_pairs(turn: Rotate, case: tuple[int, list[int]]) -> None:
    """The last 64 channels, in adjacent pairs; the others are left as they are."""
    x = adversarial(case[0], len(case[1]), 96)
    out, want = turn(x, table(case[1])), turned_by_complex_numbers(x, case[1])
    assert torch.equal(out[:, :32], x[:, :32])
    assert_within(rounding_bound(4, x), out, want)


def keeps_the_size_of_pairs(turn: Rotate, case: tuple[int, list[int]]) -> None:
    x = adversarial(case[0], len(case[1]), 64)
    size, after = (v.unflatten(-1, (-1, 2)).norm(dim=-1) for v in (x, turn(x, table(case[1]))))
    assert_within(rounding_bound(8, size), after, size)


def inverse_undoes(turn: Rotate, case: tuple[int, list[int]]) -> None:
    x, at = adversarial(case[0], len(case[1]), 3, 80), table(case[1])
    assert_within(rounding_bound(8, x), turn(turn(x, at), at, inverse=True), x)


def depends_on_the_difference(turn: Rotate, case: tuple[int, list[int]]) -> None:
    """<R_p q, R_m k> = <R_(p-m) q, k>, up to what float64 keeps of an angle."""
    q, k = normal(case[0], 1, 64), normal(case[0] + 1, 1, 64)
    p, m = max(case[1]), min(case[1])
    both = turn(q, table([p])) @ turn(k, table([m])).T
    one = turn(q, table([p - m])) @ k.T
    angle_error = (p + 1) * torch.finfo(torch.float64).eps
    assert_within((64 * torch.finfo(torch.float64).eps + 4 * angle_error) * float(q.norm() * k.norm()), both, one)


def half_split(x: Tensor, at: tuple[Tensor, Tensor], inverse: bool = False) -> Tensor:
    cos, sin = at
    sin = -sin if inverse else sin
    low, high = x[..., -64:-32], x[..., -32:]
    if x.ndim == 3:
        cos, sin = cos[:, None], sin[:, None]
    return torch.cat([x[..., :-64], low * cos - high * sin, high * cos + low * sin], dim=-1)


def first_channels(x: Tensor, at: tuple[Tensor, Tensor], inverse: bool = False) -> Tensor:
    return torch.cat([rotate(x[..., :64], at, inverse), x[..., 64:]], dim=-1)


def one_sign(x: Tensor, at: tuple[Tensor, Tensor], inverse: bool = False) -> Tensor:
    return rotate(x, at)


def with_mscale(x: Tensor, at: tuple[Tensor, Tensor], inverse: bool = False) -> Tensor:
    return rotate(x, (at[0] * 1.277, at[1] * 1.277), inverse)


def reflected(x: Tensor, at: tuple[Tensor, Tensor], inverse: bool = False) -> Tensor:
    return rotate(x * torch.tensor([1.0, -1.0], dtype=x.dtype).repeat(x.shape[-1] // 2), at)


LAWS = [rotates_adjacent_pairs, keeps_the_size_of_pairs, inverse_undoes, depends_on_the_difference]


@pytest.mark.parametrize("law", LAWS)
def test_laws(law: Callable[..., None]) -> None:
    holds(law, cases, rotate)


@pytest.mark.parametrize(
    ("law", "wrong"),
    [
        (rotates_adjacent_pairs, half_split),
        (rotates_adjacent_pairs, first_channels),
        (keeps_the_size_of_pairs, half_split),
        (keeps_the_size_of_pairs, with_mscale),
        (inverse_undoes, one_sign),
        (depends_on_the_difference, reflected),
        (depends_on_the_difference, with_mscale),
    ],
)
def test_laws_see(law: Callable[..., None], wrong: Rotate) -> None:
    refuted(law, cases, wrong)


# Pair -> frequency of the layers with a compressor in the released models, and its ratio to the plain one.
SPOT = {0: 1.0, 1: 0.68765604, 14: 5.286857e-3, 15: 3.635539e-3, 16: 2.265625e-3, 20: 2.969778e-4, 24: 1.953125e-5,
        25: 5.372312e-6, 31: 5.680529e-7}  # fmt: skip
RATIO = {15: 1.0, 16: 0.90625, 17: 0.8125, 20: 0.53125, 24: 0.15625, 25: 0.0625, 31: 0.0625}
DIGITS = 1e-6  # the table above has seven


def test_yarn_frequencies() -> None:
    f, plain = ROPE.frequencies(torch.float64), plain_frequencies(160000, 64, torch.float64)
    for pair, want in SPOT.items():
        assert_within(DIGITS * want, f[pair], torch.tensor(want, dtype=torch.float64))
    for pair, want in RATIO.items():
        assert_within(rounding_bound(4, plain / plain), f[pair] / plain[pair], torch.tensor(want, dtype=torch.float64))


def test_plain_frequencies() -> None:
    f = plain_frequencies(10000, 64, torch.float64)
    assert f[0] == 1
    assert_within(rounding_bound(8, f), f, torch.tensor([10000 ** (-i / 32) for i in range(32)], dtype=torch.float64))


def test_a_ramp_of_no_width_is_widened() -> None:
    from reference.config import RopeScaling

    f = yarn_frequencies(10000, 64, RopeScaling(beta_fast=1e9, beta_slow=1e9), torch.float64)
    assert torch.isfinite(f).all()


def test_the_table_of_a_layer_follows_its_ratio() -> None:
    """Window layers and MTP: base 10000, no YaRN. Layers with a compressor: base 160000 with YaRN."""
    assert {Rope.of_layer(TINY, i) for i in (1, 4)} == {Rope(10000, 32, None)}
    assert {Rope.of_layer(TINY, i) for i in (0, 2, 3)} == {Rope(160000, 32, TINY.rope_scaling)}


def test_float32_angles_are_float32_products() -> None:
    at = torch.tensor([3, 70_000])
    angle = at.float()[:, None] * ROPE.frequencies(torch.float32)
    cos, sin = ROPE.table(at, torch.float32, Sites())
    assert torch.equal(cos, angle.cos())
    assert torch.equal(sin, angle.sin())
