"""RMSNorm and its fusion with the quantiser, against float64 and against the kernels it replaces."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_cases import gamma, illegal_bf16, mutant, on_device, poison_new_memory, uneven

from optimized.kernels import norm as norm_file
from optimized.kernels import quantize as quantize_file

rms_norm = on_device(norm_file.rms_norm)
rms_norm_quantize = on_device(norm_file.rms_norm_quantize)
quantize_activation = on_device(quantize_file.quantize_activation)
EPS = 0.02  # far from nothing, so that a misplaced one shows
SHAPES = [(1, 128), (3, 40), (17, 257), (33, 512), (5, 1536), (2, 1)]


def case(rows: int, width: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows with outliers, rows below eps and a zero row; a weight of both signs."""
    generator = torch.Generator().manual_seed(seed)
    x = uneven(generator, rows, width, spread=3)
    x[1::4] *= 1e-4
    x[2::7] = 0
    return x.bfloat16(), torch.randn(width, generator=generator)


def expected(x: torch.Tensor, weight: torch.Tensor, eps: float = EPS) -> tuple[torch.Tensor, torch.Tensor]:
    """float64 norm and its float32 error: the sum of squares in any order counts half under the root; division, eps, a root
    of two ulps and two products remain."""
    x, weight = x.double(), weight.double()
    want = weight * x / (x.square().mean(-1, keepdim=True) + eps).sqrt()
    return want, gamma(x.shape[1] // 2 + 8) * want.abs()


@pytest.mark.parametrize(("rows", "width"), SHAPES)
@pytest.mark.parametrize("tiles", [None, norm_file.Tiles(ROWS=1)])
def test_norm_rounds_a_value_within_the_float32_bound(rows, width, tiles):
    x, weight = case(rows, width)
    y = rms_norm(x, weight, EPS, tiles=tiles)
    assert y.shape == x.shape and not illegal_bf16(y, *expected(x, weight)).any()


@given(st.integers(1, 40), st.integers(1, 700), st.sampled_from([1, 2, 32]), st.integers(0, 9))
def test_fused_equals_norm_then_quantiser(rows, width, rows_of_tile, seed):
    x, weight = case(rows, width, seed)
    tiles = norm_file.Tiles(ROWS=rows_of_tile)
    y, codes, scales = rms_norm_quantize(x, weight, EPS, tiles=tiles)
    assert torch.equal(y, rms_norm(x, weight, EPS, tiles=tiles))
    assert not illegal_bf16(y, *expected(x, weight)).any()
    want_codes, want_scales = quantize_activation(y)
    assert torch.equal(codes, want_codes) and torch.equal(scales, want_scales)


def test_bits_of_a_row_do_not_depend_on_the_others():
    x, weight = case(37, 300)
    whole = rms_norm_quantize(x, weight, EPS)
    for rows in ([0], [36], [5, 31, 5], list(range(3, 30))):
        for part, all_rows in zip(rms_norm_quantize(x[rows], weight, EPS), whole, strict=True):
            assert torch.equal(part, all_rows[rows])


def test_strided_rows_with_poison_around_and_outputs_written_whole(monkeypatch):
    x, weight = case(9, 300)
    clean = rms_norm_quantize(x, weight, EPS)
    wide = torch.full((9, 70_000), torch.nan, dtype=torch.bfloat16)
    view = wide[:, 40:340]
    view.copy_(x)
    poison_new_memory(monkeypatch)
    assert torch.equal(rms_norm(view, weight, EPS), clean[0])
    for again, first in zip(rms_norm_quantize(view, weight, EPS), clean, strict=True):
        assert torch.equal(again, first)


def test_a_row_that_is_not_a_number_stays_alone():
    x, weight = case(5, 300)
    clean = rms_norm_quantize(x, weight, EPS)
    x[3, 7] = torch.nan
    y, codes, scales = rms_norm_quantize(x, weight, EPS)
    assert y[3].isnan().all() and (scales[3] == 255).all()
    rest = [0, 1, 2, 4]
    for got, want in zip((y, codes, scales), clean, strict=True):
        assert torch.equal(got[rest], want[rest])


def test_no_tokens_and_the_width_of_pro():
    x, weight = case(3, 7168)
    assert [tuple(t.shape) for t in rms_norm_quantize(x[:0], weight, EPS)] == [(0, 7168), (0, 7168), (0, 56)]
    assert not illegal_bf16(rms_norm(x, weight, 1e-6), *expected(x, weight, 1e-6)).any()


def test_a_weight_of_another_width_is_refused():
    x, weight = case(2, 256)
    with pytest.raises(ValueError, match="weight"):
        rms_norm(x, weight[:-1], EPS)


@pytest.mark.parametrize(
    "edit",
    [
        ("tl.sum(value * value, 1) / D + eps", "tl.sum(value * value, 1) / D"),  # no eps
        ("tl.sum(value * value, 1) / D + eps", "tl.sum(value * value, 1) / LANES + eps"),  # mean over the padded width
        ("tl.rsqrt(tl.sum(value * value, 1) / D + eps)", "1 / (tl.sqrt(tl.sum(value * value, 1) / D) + eps)"),  # eps outside
        ("w[None, :] * (value", "(1 + w[None, :]) * (value"),
        ("(value * rstd[:, None])", "bf16_up(bf16_rn(value * rstd[:, None]))"),  # a second rounding
        ("t[:, None] * x_stride", "t[:, None] * D"),  # ignores the row stride
        ("mask=inside, other=0.0", "mask=(t < T)[:, None], other=0.0"),  # what lies past the last channel enters the mean
    ],
)
def test_planted_mistakes_are_seen(tmp_path, edit):
    wrong = on_device(mutant(norm_file, tmp_path, edit).rms_norm)
    wide, weight = case(9, 400)
    x = wide[:, :300]
    assert illegal_bf16(wrong(x, weight[:300], EPS), *expected(x, weight[:300])).any()


def test_quantising_before_the_rounding_is_seen(tmp_path):
    """Codes of the unrounded row differ where its bfloat16 lies across an edge: only a comparison by bits sees it."""
    edits = [
        ("return bf16_rn(w[None, :] * (value * rstd[:, None]))", "return w[None, :] * (value * rstd[:, None])"),
        ("tl.store(y + t[:, None] * D + d[None, :], rows", "tl.store(y + t[:, None] * D + d[None, :], bf16_rn(rows)"),
        ("tl.store(y + at, rows", "tl.store(y + at, bf16_rn(rows)"),
        ("quantize_tile(bf16_up(rows)", "quantize_tile((rows)"),
    ]
    wrong = on_device(mutant(norm_file, tmp_path, *edits).rms_norm_quantize)
    x, weight = case(40, 640)
    y, codes, _ = wrong(x, weight, EPS)
    assert torch.equal(y, rms_norm(x, weight, EPS))
    assert not torch.equal(codes, quantize_activation(y)[0])
