"""Widening and rounding helpers, exhaustively, against torch and ml_dtypes."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch
from kernel_cases import DEVICE, mutant

from optimized.kernels import numeric

triton, tl = numeric.triton, numeric.tl  # importing triton first would settle its mode
N = 1 << 16


def run(helper, x: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
    """Apply a one-argument helper to a flat tensor, 2^16 elements a program."""
    padded = torch.zeros(-(-x.numel() // N) * N, dtype=x.dtype, device=DEVICE)
    padded[: x.numel()] = x
    out = torch.empty(padded.numel(), dtype=out_dtype, device=DEVICE)
    apply[(padded.numel() // N,)](padded, out, HELPER=helper, SIZE=N)
    return out[: x.numel()].cpu()


@triton.jit
def apply(x, out, HELPER: tl.constexpr, SIZE: tl.constexpr):
    i = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    tl.store(out + i, HELPER(tl.load(x + i)))


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[x.element_size()])


def assert_same(got: torch.Tensor, want: torch.Tensor) -> None:
    """Equal bits, where any NaN equals any NaN."""
    nan = got.float().isnan() & want.float().isnan()
    assert torch.equal(bits(got)[~nan], bits(want)[~nan])


def float32_cases() -> torch.Tensor:
    """Every bfloat16 pattern, each rounding boundary between two of them, and one ulp to either side; random bits."""
    high = torch.arange(1 << 16, dtype=torch.int64) << 16
    patterns = (high[:, None] + torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF])).flatten()
    random = torch.randint(0, 1 << 32, (1 << 18,), generator=torch.Generator().manual_seed(1))
    both = torch.cat([patterns, random])
    return (both - ((both >> 31) << 32)).to(torch.int32).view(torch.float32)


def with_neighbours(x: torch.Tensor) -> torch.Tensor:
    return torch.cat([x, torch.nextafter(x, torch.tensor(torch.inf)), torch.nextafter(x, torch.tensor(0.0))])


def e4m3_edges() -> torch.Tensor:
    """All E4M3 values and midpoints of neighbours, one float32 ulp to either side, and the clamp."""
    values = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    beyond = torch.tensor([464.0, 480.0, 1e30, torch.inf, torch.nan])
    around = with_neighbours(torch.cat([values, (values[1:] + values[:-1]) / 2, beyond]))
    return torch.cat([around, -around])


def test_bf16_up_is_exact_for_all_codes():
    x = torch.arange(N).to(torch.int32).to(torch.int16).view(torch.bfloat16)
    assert_same(run(numeric.bf16_up, x, torch.float32), x.float())


def test_bf16_rn_matches_torch_and_ml_dtypes_at_every_boundary():
    x = float32_cases()
    got = run(numeric.bf16_rn, x, torch.bfloat16)
    assert_same(got, x.to(torch.bfloat16))
    with np.errstate(all="ignore"):
        assert_same(got, torch.from_numpy(x.numpy().astype(ml_dtypes.bfloat16).view(np.int16)).view(torch.bfloat16))


def test_e4m3_up_is_exact_for_all_codes():
    code = torch.arange(256, dtype=torch.uint8)
    want = torch.from_numpy(code.numpy().view(ml_dtypes.float8_e4m3fn).astype(np.float32))
    assert_same(run(numeric.e4m3_up, code, torch.float32), want)


@pytest.mark.parametrize("cases", [float32_cases, e4m3_edges])
def test_e4m3_rn_matches_torch_and_ml_dtypes(cases):
    x = cases()
    got = run(numeric.e4m3_rn, x, torch.uint8).view(torch.float8_e4m3fn)
    clamped = x.clamp(-448, 448)
    assert_same(got, clamped.to(torch.float8_e4m3fn))
    with np.errstate(all="ignore"):
        other = torch.from_numpy(clamped.numpy().astype(ml_dtypes.float8_e4m3fn).view(np.uint8))
    assert_same(got, other.view(torch.float8_e4m3fn))


def test_e8m0_up_and_inverse_for_all_codes():
    byte = torch.arange(256, dtype=torch.uint8)
    want = torch.from_numpy(byte.numpy().view(ml_dtypes.float8_e8m0fnu).astype(np.float32))
    assert_same(run(numeric.e8m0_up, byte, torch.float32), want)
    inverse = run(numeric.e8m0_inverse, byte, torch.float32)
    assert inverse[255].isnan()
    assert torch.equal(inverse[1:254], 1 / want[1:254])


def test_e8m0_ceil_is_the_smallest_power_of_two_not_below():
    exponent = torch.arange(-126, 127).double().exp2().float()
    x = torch.cat([exponent, torch.nextafter(exponent, torch.tensor(torch.inf)), 1.5 * exponent])
    scale = torch.ldexp(torch.ones(x.shape, dtype=torch.float64), run(numeric.e8m0_ceil, x, torch.uint8).int() - 127)
    assert ((scale >= x.double()) & (scale / 2 < x.double())).all()
    assert run(numeric.e8m0_ceil, torch.tensor([torch.inf, torch.nan]), torch.uint8).tolist() == [255, 255]


def block_amax() -> torch.Tensor:
    """Amax values around 448 * 2^k and around the floor: where the scale doubles."""
    edge = 448.0 * torch.arange(-40, 100).double().exp2().float()
    for _ in range(3):
        edge = torch.unique(with_neighbours(edge))
    return torch.cat([edge, torch.tensor([0.0, 1e-4, 1.0001e-4, 3e-5, torch.inf, torch.nan])])


def scale_by_spec(amax: torch.Tensor) -> torch.Tensor:
    """2^ceil(log2(max(amax, 1e-4) * fl32(1/448))): one float32 product, then the exponent in float64."""
    product = np.maximum(amax.numpy(), np.float32(1e-4)) * np.float32(1 / 448)
    mantissa, exponent = np.frexp(product.astype(np.float64))
    byte = 127 + exponent - (mantissa == 0.5)
    return torch.from_numpy(np.where(np.isfinite(product), byte, 255).astype(np.uint8))


def test_e4m3_scale_multiplies_by_the_float32_reciprocal():
    amax = block_amax()
    got = run(numeric.e4m3_scale, amax.view(torch.int32), torch.uint8)
    assert torch.equal(got, scale_by_spec(amax))
    assert got[amax == 448.0].item() == 127
    assert got[amax == 0.0].item() == 127 - 22


@pytest.mark.parametrize(
    "edit",
    [
        ("+ 0x7FFFFF) >> 23", ") >> 23"),  # floor exponent
        ("+ 0x7FFFFF) >> 23", "+ 0x400000) >> 23"),  # nearest exponent
        ("* RECIPROCAL_E4M3_MAX)", "* 0.0022321431897580624)"),  # the reciprocal one ulp up: doubles at 448 * 2^k
        ("tl.maximum(amax_bits, E4M3_AMAX_FLOOR_BITS)", "amax_bits"),  # no floor
    ],
)
def test_a_wrong_scale_rule_is_seen(tmp_path, edit):
    wrong = mutant(numeric, tmp_path, edit)
    amax = block_amax()
    assert not torch.equal(run(wrong.e4m3_scale, amax.view(torch.int32), torch.uint8), scale_by_spec(amax))


@pytest.mark.parametrize(
    "edit",
    [("+ 0x7FFFF + ((a >> 20) & 1)", "+ 0x80000"), ("tl.where(a < 0x3C800000, subnormal, normal)", "normal")],
)
def test_a_wrong_e4m3_rounding_is_seen(tmp_path, edit):
    wrong = mutant(numeric, tmp_path, edit)
    x = e4m3_edges()
    got = run(wrong.e4m3_rn, x, torch.uint8).view(torch.float8_e4m3fn)
    with pytest.raises(AssertionError):
        assert_same(got, x.clamp(-448, 448).to(torch.float8_e4m3fn))


def e2m1_edges() -> torch.Tensor:
    """All E2M1 values and midpoints of neighbours, one float32 ulp to either side, and the clamp; both signs."""
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    around = with_neighbours(torch.cat([values, (values[1:] + values[:-1]) / 2, torch.tensor([7.0, 1e30, torch.inf])]))
    return torch.cat([around, -around])


@pytest.mark.parametrize("cases", [lambda: float32_cases()[:: 1 << 4], e2m1_edges])
def test_e2m1_rn_matches_ml_dtypes(cases):
    x = cases()
    x = x[~x.isnan()]
    want = x.clamp(-6, 6).numpy().astype(ml_dtypes.float4_e2m1fn).view(np.uint8) & 15
    assert torch.equal(run(numeric.e2m1_rn, x, torch.uint8), torch.from_numpy(want))


def test_e2m1_up_is_exact_for_all_codes():
    code = torch.arange(16, dtype=torch.uint8)
    want = torch.from_numpy(code.numpy().view(ml_dtypes.float4_e2m1fn).astype(np.float32))
    assert_same(run(numeric.e2m1_up, code, torch.float32), want)


def test_e2m1_scale_at_every_power_of_two():
    """amax = 6 * 2^k gives 2^k exactly, one ulp above it the next; zero and what is small give byte 1; no number 255."""
    exact = 6 * torch.arange(-126, 124).double().exp2().float()
    above = torch.nextafter(exact, torch.tensor(torch.inf)) * (1 + 2.0**-22)  # past the rounding of the product
    x = torch.cat([exact, above, torch.tensor([0.0, 1e-40, torch.inf, torch.nan])])
    got = run(numeric.e2m1_scale, x.view(torch.int32), torch.uint8).int()
    k = torch.arange(-126, 124) + 127
    assert torch.equal(got, torch.cat([k, k + 1, torch.tensor([1, 1, 255, 255])]).int())


TIES = [("a >= 0.75", "a > 0.75"), ("a > 2.5", "a >= 2.5"), ("a > 5.0", "a > 4.5"), ("28) & 8", "28) & 0")]


@pytest.mark.parametrize("edit", TIES)
def test_another_tie_of_e2m1_is_seen(tmp_path, edit):
    wrong = mutant(numeric, tmp_path, edit)
    want = run(numeric.e2m1_rn, e2m1_edges(), torch.uint8)
    assert not torch.equal(run(wrong.e2m1_rn, e2m1_edges(), torch.uint8), want)
