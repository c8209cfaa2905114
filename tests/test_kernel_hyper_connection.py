"""Hyper-connection kernels against float64, and the fused one against the two it replaces.

Inputs are small integers times powers of two, so that products and sums are exact in float32 in any order: what is left
to bound is what comes after the product.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from kernel_cases import UNIT, gamma, illegal_bf16, mutant, on_device, poison_new_memory
from torch import Tensor

from optimized.kernels import hyper_connection as hc_file

hc_pre, hc_post = on_device(hc_file.hc_pre), on_device(hc_file.hc_post)
hc_post_pre, hc_head = on_device(hc_file.hc_post_pre), on_device(hc_file.hc_head)
EPS = (0.02, 0.3)  # hc_eps, rms_eps: unequal, and far from nothing
SMALL = hc_file.Tiles(ROWS=16, STEP=32, SPLIT=64, MIX_ROWS=2, COLS=64)
SHAPES = [(1, 256), (3, 40), (18, 129), (17, 320)]


@dataclass(frozen=True)
class Case:
    x: Tensor
    fn: Tensor
    base: Tensor
    scale: Tensor
    iterations: int = 20

    @property
    def weights(self) -> tuple[Tensor, Tensor, Tensor, int, float, float]:
        return self.fn, self.base, self.scale, self.iterations, *EPS

    @property
    def head(self) -> tuple[Tensor, Tensor, Tensor, float, float]:
        return self.fn[:4], self.base[:4], self.scale[2:], *EPS


def case(rows: int, width: int, seed: int = 0, spread: float = 1.0, iterations: int = 20) -> Case:
    """Streams of different size, channels with scales of their own that fn takes back; a zero token."""
    g = torch.Generator().manual_seed(seed)
    exponent = torch.randint(-1, 2, (4, width), generator=g)
    x = torch.randint(-7, 8, (rows, 4, width), generator=g) * exponent.double().exp2()
    x[2::9] = 0
    fn = torch.randint(-7, 8, (24, 4 * width), generator=g) * (-exponent.flatten().double()).exp2() / width**0.5
    fn = torch.ldexp(torch.round(fn * 16), torch.tensor(-4))
    base = spread * torch.randn(24, generator=g)
    return Case(x.bfloat16(), fn.float(), base, torch.tensor([0.7, 1.3, 0.9]), iterations)


def mixes(c: Case, fn: Tensor, scale: Tensor, base: Tensor) -> tuple[Tensor, Tensor]:
    """Logits of some mixes in float64 and their float32 error, the product being exact: division by the width, eps, half of
    both and two ulps under the root, two products, one sum."""
    v = c.x.double().flatten(1)
    m = (v @ fn.double().T) / (v.square().mean(1, keepdim=True) + EPS[1]).sqrt() * scale.double()
    logits = m + base.double()
    return logits, gamma(9) * m.abs() + UNIT * logits.abs()


def through_sigmoid(logits: Tensor, error: Tensor) -> tuple[Tensor, Tensor]:
    """Sigmoid, and its error: the exponential of the hardware is off by two ulps and by its rounded argument."""
    y = torch.sigmoid(logits)
    return y, y * (error + gamma(8) + 2 * UNIT * logits.abs())


def by_sinkhorn(logits: Tensor, error: Tensor, iterations: int) -> tuple[Tensor, Tensor]:
    """Float64 Sinkhorn and an error bound. Of the error of an entry, what is common to its row or column falls out at the
    next step, for scaling is non-expansive in Hilbert's metric: each of the 2n steps adds at most twice the error of the
    entries so far, which grows by a division of two ulps a step, and twice that of a sum of four and its eps."""
    c = torch.softmax(logits, 2) + EPS[0]
    c = c / (c.sum(1, keepdim=True) + EPS[0])
    for _ in range(iterations - 1):
        c = c / (c.sum(2, keepdim=True) + EPS[0])
        c = c / (c.sum(1, keepdim=True) + EPS[0])
    spread = (logits.amax(2, keepdim=True) - logits).clamp_max(90)  # beyond, the exponential vanishes before eps
    entry = (error + gamma(4) + 3 * UNIT * spread).amax((1, 2), keepdim=True) + 2 * iterations * gamma(4)
    return c, c * 4 * iterations * (entry + gamma(6))


def mixed(weight: Tensor, error: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    terms = weight[:, :, None] * x.double()
    return terms.sum(1), ((error[:, :, None] + gamma(6) * weight[:, :, None]) * x.double().abs()).sum(1)


def check_pre(got: tuple[Tensor, Tensor, Tensor], c: Case) -> None:
    logits, error = mixes(c, c.fn, c.scale.repeat_interleave(torch.tensor([4, 4, 16])), c.base)
    pre, pre_error = through_sigmoid(logits[:, :4], error[:, :4])
    u, post, comb = got
    assert not illegal_bf16(u, *mixed(pre + EPS[0], pre_error + UNIT * (pre + EPS[0]), c.x)).any()
    want, bound = through_sigmoid(logits[:, 4:8], error[:, 4:8])
    assert ((post.double() - 2 * want).abs() <= 2 * bound).all()
    want, bound = by_sinkhorn(logits[:, 8:].unflatten(1, (4, 4)), error[:, 8:].unflatten(1, (4, 4)), c.iterations)
    assert ((comb.double() - want).abs() <= bound).all()


def spreading(rows: int, width: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """z, streams, post and comb; comb far from symmetric."""
    g = torch.Generator().manual_seed(seed)
    z, x = torch.randn(rows, width, generator=g), torch.randn(rows, 4, width, generator=g) * 3
    post, comb = 2 * torch.rand(rows, 4, generator=g), torch.rand(rows, 4, 4, generator=g) ** 3
    return z.bfloat16(), x.bfloat16(), post, comb


def check_post(got: Tensor, z: Tensor, x: Tensor, post: Tensor, comb: Tensor) -> None:
    """Five products and four sums: gamma(5) on the magnitudes."""
    terms = torch.cat([(post[:, :, None] * z[:, None].double())[:, None], comb.double()[..., None] * x.double()[:, :, None]], 1)
    assert not illegal_bf16(got, terms.sum(1), gamma(5) * terms.abs().sum(1)).any()


@pytest.mark.parametrize(("rows", "width"), SHAPES)
@pytest.mark.parametrize("tiles", [None, SMALL])
def test_pre_and_head_stay_within_the_float32_bounds(rows, width, tiles):
    c = case(rows, width)
    check_pre(hc_pre(c.x, *c.weights, tiles=tiles), c)
    logits, error = mixes(c, c.fn[:4], c.scale[2:], c.base[:4])
    weight, error = through_sigmoid(logits, error)
    want = mixed(weight + EPS[0], error + UNIT * (weight + EPS[0]), c.x)
    assert not illegal_bf16(hc_head(c.x, *c.head, tiles=tiles), *want).any()


@pytest.mark.parametrize("iterations", [1, 2, 5])
@pytest.mark.parametrize("spread", [0.0, 3.0, 200.0])
def test_sinkhorn_from_flat_to_sharp_logits(iterations, spread):
    c = case(9, 64, spread=spread, iterations=iterations)
    got = hc_pre(c.x, *c.weights)
    check_pre(got, c)
    assert (got[2].double().sum(1) < 1).all()  # a column step came last, and eps stood in it


@pytest.mark.parametrize(("rows", "width"), [*SHAPES, (2, 7168)])
def test_sums_of_squares_and_products_are_exact_here(rows, width):
    """What the bounds of this file lean on."""
    c = case(rows, width)
    v = c.x.flatten(1)
    squares, products = v.double().square().sum(1), v.double().abs() @ c.fn.double().abs().T
    for steps in (4 * squares, 32 * products):
        assert (steps % 1 == 0).all() and steps.max() < 2**24


@pytest.mark.parametrize(("rows", "width"), [(1, 40), (2, 1), (18, 160), (3, 300)])
@pytest.mark.parametrize("tiles", [None, replace(SMALL, STEP=64, SPLIT=128)])
def test_fused_equals_post_then_pre(rows, width, tiles):
    z, x, post, comb = spreading(rows, width)
    c = case(rows, width)
    streams = hc_post(z, x, post, comb, tiles=tiles)
    check_post(streams, z, x, post, comb)
    fused = hc_post_pre(z, x, post, comb, *c.weights, tiles=tiles)
    for got, want in zip(fused, (streams, *hc_pre(streams, *c.weights, tiles=tiles)), strict=True):
        assert torch.equal(got, want)


def test_bits_of_a_token_do_not_depend_on_the_others():
    z, x, post, comb = spreading(37, 72)
    c = case(1, 72)
    whole = hc_post_pre(z, x, post, comb, *c.weights)
    head = hc_head(x, *c.head)
    for rows in ([0], [36], [5, 31, 5], list(range(3, 30))):
        for part, every in zip(hc_post_pre(z[rows], x[rows], post[rows], comb[rows], *c.weights), whole, strict=True):
            assert torch.equal(part, every[rows])
        assert torch.equal(hc_head(x[rows], *c.head), head[rows])


def test_strided_streams_with_poison_around_and_outputs_written_whole(monkeypatch):
    z, x, post, comb = spreading(9, 200)
    c = case(1, 200)
    clean = (*hc_post_pre(z, x, post, comb, *c.weights), *hc_pre(x, *c.weights), hc_head(x, *c.head), hc_post(z, x, post, comb))
    wide = torch.full((9, 70_000), torch.nan, dtype=torch.bfloat16)
    streams, sub = wide[:, 8:808].unflatten(1, (4, 200)), wide[:, 1000:1200]
    streams.copy_(x), sub.copy_(z)
    poison_new_memory(monkeypatch)
    again = (
        *hc_post_pre(sub, streams, post, comb, *c.weights),
        *hc_pre(streams, *c.weights),
        hc_head(streams, *c.head),
        hc_post(sub, streams, post, comb),
    )
    for got, want in zip(again, clean, strict=True):
        assert torch.equal(got, want)


def test_no_tokens_and_a_token_that_is_not_a_number():
    c = case(6, 64)
    assert [tuple(t.shape) for t in hc_pre(c.x[:0], *c.weights)] == [(0, 64), (0, 4), (0, 4, 4)]
    clean = hc_pre(c.x, *c.weights)
    c.x[3, 2, 5] = torch.nan
    rest = [0, 1, 2, 4, 5]
    for got, want in zip(hc_pre(c.x, *c.weights), clean, strict=True):
        assert got[3].isnan().all() and torch.equal(got[rest], want[rest])


def test_foreign_weights_and_three_streams_are_refused():
    c = case(2, 64)
    with pytest.raises(ValueError, match="fn"):
        hc_pre(c.x, c.fn[:, 1:], *c.weights[1:])
    with pytest.raises(ValueError, match="streams"):
        hc_head(c.x[:, :3], *c.head)


STEPS = "c = c / (tl.sum(c, 2)[:, :, None] + eps)\n        c = c / (tl.sum(c, 1)[:, None, :] + eps)"


@pytest.mark.parametrize(
    "edit",
    [
        ("pre + hc_eps", "pre"),
        ("/ width + rms_eps", "/ width"),
        ("/ width + rms_eps", "/ (width // STREAMS) + rms_eps"),  # a norm over one stream
        ("2.0 * sigmoid", "hc_eps + 2.0 * sigmoid"),
        ("tl.load(scale + 1)", "tl.load(scale)"),
        ("tl.load(base + STREAMS + s)", "tl.load(base + s)"),
        ("range(1, iterations)", "range(0, iterations)"),
        ("range(1, iterations)", "range(2, iterations)"),
        ("/ tl.sum(c, 2)[:, :, None] + eps", "/ tl.sum(c, 2)[:, :, None]"),  # no eps after the softmax
        (STEPS, "c = c / (tl.sum(c, 2)[:, :, None] + eps)\n        c = c / tl.sum(c, 1)[:, None, :]"),
        (STEPS, "c = c / (tl.sum(c, 1)[:, None, :] + eps)\n        c = c / (tl.sum(c, 2)[:, :, None] + eps)"),  # ends on rows
        ("tl.exp(c - tl.max(c, 2)[:, :, None])", "tl.exp(c)"),
        ("range(1, parts)", "range(2, parts)"),  # a part of the product lost
        ("(n < MIXES)[:, None]", "(n < MIXES - 1)[:, None]"),
        ("squares + tl.sum(v * v, 1)", "tl.sum(v * v, 1)"),
    ],
)
def test_planted_mistakes_in_pre_are_seen(tmp_path, edit):
    wrong = on_device(mutant(hc_file, tmp_path, edit).hc_pre)
    c = case(9, 100, spread=300.0 if "exp(c)" in edit[1] else 3.0, iterations=3)
    with pytest.raises(AssertionError):
        check_pre(wrong(c.x, *c.weights, tiles=SMALL), c)


@pytest.mark.parametrize(
    "edit",
    [
        ("(t * STREAMS + j) * STREAMS + k", "(t * STREAMS + k) * STREAMS + j"),  # comb untransposed
        ("tl.load(post + t * STREAMS + k", "tl.load(post + t * STREAMS"),
        ("total += share[:, None] * v", "total += bf16_up(bf16_rn(share[:, None] * v))"),
    ],
)
def test_planted_mistakes_in_post_are_seen(tmp_path, edit):
    wrong = on_device(mutant(hc_file, tmp_path, edit).hc_post)
    args = spreading(9, 160)
    with pytest.raises(AssertionError):
        check_post(wrong(*args), *args)


def test_a_product_over_unrounded_streams_is_seen(tmp_path):
    edits = [
        ("return bf16_rn(total)", "return total"),
        ("squares, bf16_up(stream)", "squares, stream"),
        ("d[None, :], stream, mask=mask)\n            acc", "d[None, :], bf16_rn(stream), mask=mask)\n            acc"),
    ]
    wrong = on_device(mutant(hc_file, tmp_path, *edits).hc_post_pre)
    z, x, post, comb = spreading(9, 160)
    c = case(9, 160)
    got, want = wrong(z, x, post, comb, *c.weights), hc_post_pre(z, x, post, comb, *c.weights)
    assert torch.equal(got[0], want[0]) and not torch.equal(got[3], want[3])


def test_real_width_of_pro():
    """D = 7168, in 2 parts."""
    c = case(2, 7168)
    check_pre(hc_pre(c.x, *c.weights), c)
