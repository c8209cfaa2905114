"""bfloat16 products and the grouped product with an FP8 weight, against float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_cases import (
    E4M3_VALUES,
    gamma,
    illegal_bf16,
    mutant,
    on_device,
    poison_new_memory,
    scale_value,
    uneven,
)

from optimized.kernels import gemm_bf16 as gemm_file

gemm_bf16, grouped_gemm = on_device(gemm_file.gemm_bf16), on_device(gemm_file.grouped_gemm)
SMALL = gemm_file.Tiles(ROWS=16, COLS=32, STEP=64)
SHAPES = [(1, 128, 128), (3, 40, 72), (17, 200, 300), (70, 33, 257), (2, 16, 1)]
GROUPED = [(1, 1, 128, 128), (3, 2, 40, 72), (17, 3, 136, 300), (70, 8, 20, 129), (2, 4, 1, 5)]


def operands(rows: int, outputs: int, depth: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return uneven(generator, rows, depth).bfloat16(), uneven(generator, outputs, depth, spread=2).bfloat16()


def product(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """float64 product and the error of float32 sums in any order, by hardware that may cut instead of round."""
    x, w = x.double(), w.double()
    return x @ w.mT, gamma(2 * x.shape[-1]) * (x.abs() @ w.abs().mT)


def grouped_operands(rows, groups, rank, depth, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x with groups of unequal size; all code bytes but NaN; scale bytes unlike their neighbours'."""
    generator = torch.Generator().manual_seed(seed)
    x = uneven(generator, rows, groups, depth, spread=3) * torch.arange(1, groups + 1)[:, None]
    codes = torch.randint(0, 254, (groups * rank, depth), generator=generator).to(torch.uint8)
    codes += (codes >= 127).to(torch.uint8)
    scales = torch.randint(112, 128, (-(-groups * rank // 128), -(-depth // 128)), generator=generator).to(torch.uint8)
    return x.bfloat16(), codes, scales


def grouped_product(x, codes, scales) -> tuple[torch.Tensor, torch.Tensor]:
    outputs, depth = codes.shape
    scale = scale_value(scales).repeat_interleave(128, 0)[:outputs].repeat_interleave(128, 1)[:, :depth]
    w = (E4M3_VALUES[codes.int()] * scale).unflatten(0, (x.shape[1], -1))  # [g, r, k]
    want, bound = product(x.transpose(0, 1), w)
    return want.transpose(0, 1).flatten(1), bound.transpose(0, 1).flatten(1)


@pytest.mark.parametrize(("rows", "outputs", "depth"), SHAPES)
@pytest.mark.parametrize("tiles", [None, SMALL])
def test_product_in_both_dtypes(rows, outputs, depth, tiles):
    x, w = operands(rows, outputs, depth)
    want, bound = product(x, w)
    y = gemm_bf16(x, w, tiles=tiles)
    assert y.dtype == torch.float32 and ((y.double() - want).abs() <= bound).all()
    assert torch.equal(gemm_bf16(x, w, dtype=torch.bfloat16, tiles=tiles), y.bfloat16())
    assert want.abs().mean() > 100 * bound.mean()


@pytest.mark.parametrize(("rows", "groups", "rank", "depth"), GROUPED)
@pytest.mark.parametrize("tiles", [None, SMALL])
def test_grouped_product(rows, groups, rank, depth, tiles):
    args = grouped_operands(rows, groups, rank, depth)
    y = grouped_gemm(*args, tiles=tiles)
    assert y.shape == (rows, groups * rank) and not illegal_bf16(y, *grouped_product(*args)).any()


@given(st.integers(1, 40), st.integers(1, 3), st.integers(1, 150), st.integers(1, 300), st.integers(0, 9))
def test_any_shape(rows, groups, rank, depth, seed):
    args = grouped_operands(rows, groups, rank, depth, seed)
    assert not illegal_bf16(grouped_gemm(*args), *grouped_product(*args)).any()
    x, w = operands(rows, rank, depth, seed)
    want, bound = product(x, w)
    assert ((gemm_bf16(x, w).double() - want).abs() <= bound).all()


@pytest.mark.parametrize("byte", [10, 245])
def test_the_ends_of_the_scale_are_exact_in_bfloat16(byte):
    """One weight at a time against x = 1: what comes out is the weight itself."""
    codes = torch.arange(256, dtype=torch.uint8)[:, None].repeat(1, 16)
    codes[[127, 255]] = 0
    codes[:, 1:] = 0
    y = grouped_gemm(torch.ones(1, 1, 16).bfloat16(), codes, torch.full((2, 1), byte, dtype=torch.uint8))
    assert torch.equal(y[0].double(), E4M3_VALUES[codes[:, 0].int()] * scale_value(torch.tensor(byte)))


@pytest.mark.parametrize("tiles", [None, SMALL])
def test_bits_of_a_token_do_not_depend_on_the_others(tiles):
    x, w = operands(70, 50, 300)
    args = grouped_operands(70, 2, 30, 300)
    whole, grouped = gemm_bf16(x, w, tiles=tiles), grouped_gemm(*args, tiles=tiles)
    for rows in ([0], [69], [3, 64, 7], list(range(1, 66))):
        assert torch.equal(gemm_bf16(x[rows], w, tiles=tiles), whole[rows])
        assert torch.equal(grouped_gemm(args[0][rows], *args[1:], tiles=tiles), grouped[rows])


def test_strided_views_with_poison_around_and_outputs_written_whole(monkeypatch):
    x, w = operands(6, 50, 300)
    grouped = grouped_operands(6, 2, 75, 300)
    clean = gemm_bf16(x, w), grouped_gemm(*grouped)
    moved = []
    for t in (x, w, *grouped):
        wide = torch.full((*t.shape[:-1], t.shape[-1] + 40_000), 0xFF, dtype=torch.uint8)
        if t.dtype == torch.bfloat16:
            wide = torch.full(wide.shape, torch.nan, dtype=torch.bfloat16)
        moved.append(wide[..., 24 : 24 + t.shape[-1]].copy_(t))
    poison_new_memory(monkeypatch)
    assert torch.equal(gemm_bf16(*moved[:2]), clean[0])
    assert torch.equal(grouped_gemm(*moved[2:]), clean[1])


def test_no_tokens_and_refusals():
    x, w = operands(2, 40, 128)
    grouped = grouped_operands(2, 3, 40, 128)
    assert gemm_bf16(x[:0], w).shape == (0, 40) and grouped_gemm(grouped[0][:0], *grouped[1:]).shape == (0, 120)
    with pytest.raises(ValueError, match="w is"):
        gemm_bf16(x, w[:, 1:])
    with pytest.raises(ValueError, match="float16"):
        gemm_bf16(x, w, dtype=torch.float16)
    with pytest.raises(ValueError, match="groups"):
        grouped_gemm(grouped[0], grouped[1][:119], grouped[2])


@pytest.mark.parametrize(
    "edit",
    [
        ("(n < N)[:, None] & (d < K)[None, :]", "(n < N)[:, None] & (d < K - 1)[None, :]"),
        ("acc = mma_bf16(a, tl.trans(b), acc)", "acc = bf16_rn(mma_bf16(a, tl.trans(b), acc)).to(tl.float32)"),
        ("acc = mma_bf16(a, tl.trans(b), acc)", "acc = mma_bf16(a, tl.trans(b), tl.zeros((ROWS, COLS), tl.float32))"),
        ("w + n[:, None] * w_stride + d[None, :], mask=(n < N)", "w + n[:, None] * K + d[None, :], mask=(n < N)"),
        ("n[None, :], acc, mask", "n[None, :], acc * 1.0001, mask"),
    ],
)
def test_planted_mistakes_are_seen(tmp_path, edit):
    wrong = on_device(mutant(gemm_file, tmp_path, edit).gemm_bf16)
    x, w = operands(7, 50, 300)
    wide = torch.zeros(50, 400).bfloat16()
    wide[:, :300] = w
    want, bound = product(x, w)
    assert ((wrong(x, wide[:, :300], tiles=SMALL).double() - want).abs() > bound).any()


@pytest.mark.parametrize(
    "edit",
    [
        ("(n // 128) * w_scale_stride", "(r // 128) * w_scale_stride"),  # blocks counted within the group
        ("+ first // 128", ""),
        ("group * x_group_stride", "0"),
        ("n = group * R + r", "n = r * tl.num_programs(2) + group"),
        ("bf16_rn(acc), mask=(t < T)[:, None] & (r < R)", "bf16_rn(acc * 1.00390625), mask=(t < T)[:, None] & (r < R)"),
        ("e4m3_up(code) * scale[:, None]", "e4m3_up(code)"),
        ("(r < R)[:, None] & (d < K)[None, :]", "(r < R)[:, None] & (d < K - 1)[None, :]"),
    ],
)
def test_planted_mistakes_in_the_grouped_product_are_seen(tmp_path, edit):
    wrong = on_device(mutant(gemm_file, tmp_path, edit).grouped_gemm)
    args = grouped_operands(7, 3, 100, 300)
    assert illegal_bf16(wrong(*args, tiles=SMALL), *grouped_product(*args)).any()


def test_the_depths_of_pro():
    """K = 7168, and a group's 4096 with the rank cut."""
    x, w = operands(5, 64, 7168)
    want, bound = product(x, w)
    assert ((gemm_bf16(x, w).double() - want).abs() <= bound).all()
    args = grouped_operands(5, 2, 64, 4096)
    assert not illegal_bf16(grouped_gemm(*args), *grouped_product(*args)).any()
