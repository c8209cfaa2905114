"""Activation quantiser and FP8 block GEMM, against float64 written from the definition."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_cases import (
    E4M3_VALUES,
    bf16,
    e4m3,
    fp8_partial_error,
    gamma,
    illegal_bf16,
    mutant,
    on_device,
    poison_new_memory,
    scale_byte,
    scale_value,
    uneven,
)

from optimized.kernels import gemm_fp8 as gemm_file
from optimized.kernels import quantize as quantize_file

gemm_fp8 = on_device(gemm_file.gemm_fp8)
quantize_activation = on_device(quantize_file.quantize_activation)
GPU_LIKE = gemm_file.Tiles(ROWS=16, COLS=32)
SHAPES = [(1, 128, 128), (3, 40, 72), (17, 200, 300), (70, 129, 257), (5, 384, 1024), (2, 16, 1)]


def activations(rows: int, width: int, seed: int = 0) -> torch.Tensor:
    """bfloat16 with outliers, neighbouring blocks apart, a zero row, and rows below the amax floor."""
    x = uneven(torch.Generator().manual_seed(seed), rows, width)
    x[4::5] *= 1e-7
    x[3:4] = 0
    return x.bfloat16()


def quantized(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Expected E4M3 values (float64) and scale bytes; no bfloat16 amax but 448 * 2^k itself meets the scale's edge."""
    width = x.shape[-1]
    blocks = torch.nn.functional.pad(x.double(), (0, -width % 128)).unflatten(-1, (-1, 128))
    byte = scale_byte(blocks.abs().amax(-1))
    return e4m3(blocks / scale_value(byte).unsqueeze(-1)).flatten(-2)[:, :width], byte


def check_quantized(codes: torch.Tensor, scales: torch.Tensor, x: torch.Tensor) -> None:
    values, byte = quantized(x)
    assert torch.equal(scales.long(), byte)
    assert torch.equal(E4M3_VALUES[codes.int()], values)
    assert torch.equal(codes >= 128, torch.signbit(x))


def weights(outputs: int, depth: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """All code bytes but NaN, and a scale byte per 128 x 128 that differs from its neighbours'."""
    generator = torch.Generator().manual_seed(seed)
    code = torch.randint(0, 254, (outputs, depth), generator=generator).to(torch.uint8)
    code += (code >= 127).to(torch.uint8)
    scale = torch.randint(112, 128, (-(-outputs // 128), -(-depth // 128)), generator=generator).to(torch.uint8)
    return code, scale


def product(codes, scales, weight_codes, weight_scales) -> tuple[torch.Tensor, torch.Tensor]:
    """float64 product, and the error bound of its float32 evaluation: every summand passes at most 127 additions in its
    block and one a block; scales are powers of two and the products exact."""
    (outputs, depth), blocks = weight_codes.shape, scales.shape[1]
    x = E4M3_VALUES[codes.int()] * scale_value(scales).repeat_interleave(128, 1)[:, :depth]
    by_output = scale_value(weight_scales).repeat_interleave(128, 0)[:outputs]
    w = E4M3_VALUES[weight_codes.int()] * by_output.repeat_interleave(128, 1)[:, :depth]
    return x @ w.T, (gamma(min(depth, 128) - 1 + blocks) + fp8_partial_error()) * (x.abs() @ w.abs().T)


@pytest.mark.parametrize(("rows", "outputs", "width"), SHAPES)
@pytest.mark.parametrize("tiles", [None, quantize_file.Tiles(ROWS=2, GROUPS=1), quantize_file.Tiles(ROWS=16, GROUPS=2)])
def test_quantiser_codes_and_scales_are_exact(rows, outputs, width, tiles):
    x = activations(rows, width)
    check_quantized(*quantize_activation(x, tiles), x)


def test_quantiser_at_scale_edges_and_strided_rows():
    """amax on, one bfloat16 above and one below 448 * 2^k, in rows cut from a wider tensor whose rest is NaN."""
    edge = (448.0 * torch.arange(-30, 30).double().exp2()).bfloat16()
    amax = torch.cat([edge, torch.nextafter(edge, torch.tensor(torch.inf).bfloat16()), torch.nextafter(edge, edge * 0)])
    wide = torch.full((amax.numel(), 5000), torch.nan, dtype=torch.bfloat16)
    x = wide[:, 136 : 136 + 256]
    x.copy_(activations(amax.numel(), 256).sign() * amax[:, None] * torch.linspace(0, 1, 256).bfloat16())
    check_quantized(*quantize_activation(x), x)


@pytest.mark.parametrize("bad", [torch.nan, -torch.inf])
def test_quantiser_marks_a_block_that_is_not_finite(bad):
    x = activations(4, 384)
    clean = quantize_activation(x)
    x[2, 200] = bad
    codes, scales = quantize_activation(x)
    assert scales[2, 1] == 255 and E4M3_VALUES[codes[2, 128:256].int()].isnan().all()
    scales[2, 1], codes[2, 128:256] = clean[1][2, 1], clean[0][2, 128:256]
    assert torch.equal(codes, clean[0]) and torch.equal(scales, clean[1])


@pytest.mark.parametrize(
    "edit",
    [
        ("e8m0_inverse(scale)", "e8m0_inverse((scale - 1).to(tl.uint8))"),  # floored exponent
        ("other=0.0", "other=1e6"),  # what lies past the last channel enters the amax
        ("t[:, None] * x_stride", "t[:, None] * D"),  # ignores the row stride
    ],
)
def test_planted_mistakes_in_the_quantiser_are_seen(tmp_path, edit):
    wrong = mutant(quantize_file, tmp_path, edit)
    wide = activations(9, 400)
    x = wide[:, :300]
    with pytest.raises(AssertionError):
        check_quantized(*on_device(wrong.quantize_activation)(x), x)


@pytest.mark.parametrize(("rows", "outputs", "width"), SHAPES)
@pytest.mark.parametrize("tiles", [None, GPU_LIKE])
def test_gemm_rounds_a_sum_within_the_float32_bound(rows, outputs, width, tiles):
    args = (*quantize_activation(activations(rows, width)), *weights(outputs, width))
    y = gemm_fp8(*args, tiles=tiles)
    want, bound = product(*args)
    assert y.shape == want.shape and want.std() > 100 * bound.max()
    assert not illegal_bf16(y, want, bound).any()


@given(st.integers(1, 40), st.integers(1, 300), st.integers(1, 520), st.sampled_from([16, 32, 64]), st.integers(0, 9))
def test_any_shape_and_tile(rows, outputs, width, rows_of_tile, seed):
    x = activations(rows, width, seed)
    quantised = quantize_activation(x, quantize_file.Tiles(ROWS=rows_of_tile // 16, GROUPS=rows_of_tile // 16))
    check_quantized(*quantised, x)
    args = (*quantised, *weights(outputs, width, seed))
    y = gemm_fp8(*args, tiles=gemm_file.Tiles(ROWS=rows_of_tile, COLS=2048 // rows_of_tile))
    assert not illegal_bf16(y, *product(*args)).any()


def test_gemm_on_strided_views_with_poison_around():
    args = [*quantize_activation(activations(6, 300)), *weights(150, 300)]
    want = gemm_fp8(*args)
    for i, t in enumerate(args):
        wide = torch.full((t.shape[0], t.shape[1] + 70_000), 0xFF, dtype=torch.uint8)
        args[i] = wide[:, 33 : 33 + t.shape[1]].copy_(t)
    assert torch.equal(gemm_fp8(*args), want)


@pytest.mark.parametrize("tiles", [None, GPU_LIKE])
def test_gemm_bits_of_a_token_do_not_depend_on_the_others(tiles):
    codes, scales = quantize_activation(activations(70, 640))
    weight = weights(130, 640)
    whole = gemm_fp8(codes, scales, *weight, tiles=tiles)
    for rows in ([0], [69], [3, 64, 7], list(range(1, 66))):
        assert torch.equal(gemm_fp8(codes[rows], scales[rows], *weight, tiles=tiles), whole[rows])


def test_outputs_are_written_whole(monkeypatch):
    x, weight = activations(9, 300), weights(150, 300)
    clean = quantize_activation(x)
    y = gemm_fp8(*clean, *weight)
    poison_new_memory(monkeypatch)
    again = quantize_activation(x)
    assert torch.equal(again[0], clean[0]) and torch.equal(again[1], clean[1])
    assert torch.equal(gemm_fp8(*clean, *weight), y)


def test_gemm_in_float32_is_what_bfloat16_rounds():
    args = (*quantize_activation(activations(7, 300)), *weights(200, 300))
    y = gemm_fp8(*args, dtype=torch.float32)
    want, bound = product(*args)
    assert ((y.double() - want).abs() <= bound).all()
    assert torch.equal(gemm_fp8(*args), y.bfloat16())
    with pytest.raises(ValueError, match="float16"):
        gemm_fp8(*args, dtype=torch.float16)


def test_gemm_of_no_tokens_is_empty():
    assert gemm_fp8(*quantize_activation(activations(1, 256)[:0]), *weights(40, 256)).shape == (0, 40)


def test_gemm_refuses_scales_of_another_block_size():
    codes, scales = quantize_activation(activations(2, 256))
    code, scale = weights(40, 256)
    with pytest.raises(ValueError, match="weight_scales"):
        gemm_fp8(codes, scales, code, scale.repeat(1, 2))


@pytest.mark.parametrize(
    "edit",
    [
        ("range(0, (K + 127) // 128)", "range(0, K // 128)"),  # drops a short last block
        ("(n // 128) * w_scale_stride", "(n // 64) * 0"),  # every output block takes the first scale
        ("w_scale_stride + block", "w_scale_stride"),  # every depth block takes the first scale
        ("x_scale_stride + block", "x_scale_stride"),
        ("bf16_rn(acc)", "acc.to(tl.uint32, bitcast=True).to(tl.uint16).to(tl.bfloat16, bitcast=True)"),
        ("bf16_rn(acc)", "bf16_rn(acc * 1.00390625)"),  # one bfloat16 ulp
        ("(d < K)[None, :]", "(d < K - 1)[None, :]"),  # last channel lost
        ("acc += mma_fp8", "acc = bf16_rn(acc).to(tl.float32) + mma_fp8"),  # accumulates in bfloat16
    ],
)
def test_planted_mistakes_in_the_gemm_are_seen(tmp_path, edit):
    wrong = mutant(gemm_file, tmp_path, edit)
    args = (*quantize_activation(activations(7, 300)), *weights(200, 300))
    want, bound = product(*args)
    assert illegal_bf16(on_device(wrong.gemm_fp8)(*args), want, bound).any()


def test_gemm_at_the_real_depth_of_pro():
    """K = 7168: 56 steps, with the output width cut."""
    args = (*quantize_activation(activations(8, 7168)), *weights(256, 7168))
    y = gemm_fp8(*args)
    want, bound = product(*args)
    assert not illegal_bf16(y, want, bound).any()
    assert (y.double() == bf16(want)).double().mean() > 0.99
