"""Formats, exhaustively, against ml_dtypes; scale choice at every edge; packing; laws of the quantisers."""

from __future__ import annotations

from collections.abc import Callable

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from strategies import adversarial, holds, refuted, seeds, widths
from torch import Tensor

from reference import formats as F

CODES = torch.arange(256, dtype=torch.uint8)
BF16 = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
FINITE = BF16[torch.isfinite(BF16)]


def same_floats(got: Tensor, want: np.ndarray) -> bool:
    """Bit for bit, zeros with their signs; any NaN equals any other."""
    want = torch.from_numpy(want.astype(np.float32))
    nan = torch.isnan(want)
    return torch.equal(torch.isnan(got), nan) and torch.equal(got[~nan].view(torch.int32), want[~nan].view(torch.int32))


def test_e4m3_decode_all_codes() -> None:
    assert same_floats(F.e4m3_decode(CODES), CODES.numpy().view(ml_dtypes.float8_e4m3fn))


def test_e2m1_decode_all_codes() -> None:
    assert same_floats(F.e2m1_decode(CODES[:16]), CODES[:16].numpy().view(ml_dtypes.float4_e2m1fn))


def test_e8m0_decode_all_codes() -> None:
    assert same_floats(F.e8m0_decode(CODES), CODES.numpy().view(ml_dtypes.float8_e8m0fnu))


def encodes_e4m3(encode: Callable[[Tensor], Tensor]) -> None:
    """Every finite bfloat16, every midpoint of two codes and its float32 neighbours; NaN stays NaN."""
    grid = F.e4m3_decode(CODES[:127])
    middle = (grid[1:] + grid[:-1]) / 2
    near = [torch.nextafter(middle, torch.tensor(to)) for to in (0.0, 1e9)]
    x = torch.cat([FINITE, middle, -middle, *near, torch.tensor([447.9, 464, 465, 1e30, -1e30])])
    want = np.clip(x.numpy(), -448, 448).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    assert torch.equal(encode(x), torch.from_numpy(want))
    assert torch.isnan(F.e4m3_decode(encode(BF16[torch.isnan(BF16)]))).all()


def encodes_e2m1(encode: Callable[[Tensor], Tensor]) -> None:
    grid = F.e2m1_decode(CODES[:8])
    middle = (grid[1:] + grid[:-1]) / 2
    near = [torch.nextafter(middle, torch.tensor(to)) for to in (0.0, 1e9)]
    x = torch.cat([FINITE, middle, -middle, *near, -near[0], torch.tensor([6.1, -6.1, 1e30, -1e30, 0.0, -0.0])])
    want = np.clip(x.numpy(), -6, 6).astype(ml_dtypes.float4_e2m1fn).view(np.uint8)
    assert torch.equal(encode(x), torch.from_numpy(want))


def test_encoders() -> None:
    encodes_e4m3(F.e4m3_encode)
    encodes_e2m1(F.e2m1_encode)


def test_e2m1_ties() -> None:
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    even = torch.tensor([0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0])
    assert torch.equal(F.e2m1_decode(F.e2m1_encode(ties)), even)
    assert torch.equal(F.e2m1_decode(F.e2m1_encode(-ties)), -even)


def ties_to_smaller(x: Tensor) -> Tensor:
    middle = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    return (torch.bucketize(x.abs(), middle) + 8 * torch.signbit(x)).to(torch.uint8)


def unsigned_zero(x: Tensor) -> Tensor:
    return F.e2m1_encode(x + 0.0)


def truncated(x: Tensor) -> Tensor:
    toward_zero = torch.where(torch.isfinite(x), (x.view(torch.int32) & ~0xFFFFF).view(torch.float32), x)
    return F.e4m3_encode(toward_zero)


def saturated_nan(x: Tensor) -> Tensor:
    return F.e4m3_encode(x.nan_to_num(nan=448.0))


@pytest.mark.parametrize("wrong", [ties_to_smaller, unsigned_zero])
def test_e2m1_check_sees(wrong: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(AssertionError):
        encodes_e2m1(wrong)


@pytest.mark.parametrize("wrong", [truncated, saturated_nan])
def test_e4m3_check_sees(wrong: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(AssertionError):
        encodes_e4m3(wrong)


def test_round_bf16() -> None:
    fine = torch.cat([FINITE[:, None] * (1 + k * 2.0**-9) for k in (0, 1, 2, 3)]).flatten().float()
    fine = fine[torch.isfinite(fine)]
    want = fine.numpy().astype(ml_dtypes.bfloat16).astype(np.float32)
    assert same_floats(F.round_bf16(fine), want)


# ---- scales


def powers(first: int, last: int) -> Tensor:
    return torch.exp2(torch.arange(first, last + 1, dtype=torch.float64)).float()


def chooses_e4m3_scale(scale_of: Callable[[Tensor], Tensor]) -> None:
    """At amax = 448 * 2^k exactly 2^k, one float32 above it twice that; below the floor and for zero 2^-22."""
    k = torch.arange(-20, 100)
    edge = 448 * powers(-20, 99)
    above = torch.nextafter(edge * (1 + 2.0**-22), torch.tensor(torch.inf))  # past the rounding of the product
    below = torch.nextafter(edge, torch.tensor(0.0))
    assert torch.equal(scale_of(edge[:, None]).long(), (k + 127)[:, None])
    assert torch.equal(scale_of(below[:, None]).long(), (k + 127)[:, None])
    assert torch.equal(scale_of(above[:, None]).long(), (k + 128)[:, None])
    small = torch.tensor([[0.0], [1e-30], [9.9e-5], [1e-4]])
    assert torch.equal(scale_of(small), torch.full((4, 1), 127 - 22, dtype=torch.uint8))


def e4m3_scale(x: Tensor) -> Tensor:
    return F.quantize_e4m3(x, 128)[1]


def by_float_log2(x: Tensor) -> Tensor:
    return (torch.ceil(torch.log2(x.abs().amax(-1, keepdim=True).clamp_min(1e-4).double() / 448) + 1e-7) + 127).to(torch.uint8)


def by_nearest(x: Tensor) -> Tensor:
    return (torch.round(torch.log2(x.abs().amax(-1, keepdim=True).clamp_min(1e-4) / 448)) + 127).to(torch.uint8)


def without_floor(x: Tensor) -> Tensor:
    return F.quantize_e4m3(x, 128, amax_floor=2.0**-126)[1]


def scale_floored(x: Tensor) -> Tensor:
    """The floor put on the scale instead of on amax."""
    return F.quantize_e4m3(x, 128, amax_floor=448 * 2.0**-13)[1]


def test_e4m3_scale_at_every_edge() -> None:
    chooses_e4m3_scale(e4m3_scale)


@pytest.mark.parametrize("wrong", [by_float_log2, by_nearest, without_floor, scale_floored])
def test_e4m3_scale_check_sees(wrong: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(AssertionError):
        chooses_e4m3_scale(wrong)


def by_float64_product(x: Tensor) -> Tensor:
    """fl32(1/448) is larger than 1/448: a product kept in float64 is past the power of two at every edge."""
    product = x.abs().amax(-1, keepdim=True).clamp_min(1e-4).double() * torch.tensor(1 / 448, dtype=torch.float32).double()
    return (torch.ceil(torch.log2(product)) + 127).to(torch.uint8)


def test_a_float64_product_doubles_the_scale_at_the_edges() -> None:
    with pytest.raises(AssertionError):
        chooses_e4m3_scale(by_float64_product)


@pytest.mark.parametrize("largest", [448, 6])
def test_float32_product_and_quotient_choose_the_same_scale(largest: int) -> None:
    """For every float32 mantissa, so that a kernel may divide."""
    first, last = (torch.tensor(float(n) * largest).view(torch.int32) for n in (1, 2))
    amax = torch.arange(int(first), int(last), dtype=torch.int32).view(torch.float32)
    by_product = F.e8m0_ceil(amax * torch.tensor(1 / largest, dtype=torch.float32))
    assert torch.equal(by_product, F.e8m0_ceil(amax / largest))


def test_e2m1_scale_at_every_edge() -> None:
    k = torch.arange(-120, 120)
    edge = 6 * powers(-120, 119)
    above = torch.nextafter(edge * (1 + 2.0**-22), torch.tensor(torch.inf))
    assert torch.equal(F.quantize_e2m1(edge[:, None], 32)[1].flatten().long(), k + 127)
    assert torch.equal(F.quantize_e2m1(above[:, None], 32)[1].flatten().long(), k + 128)
    zero, scale = F.quantize_e2m1(torch.zeros(1, 32), 32)
    assert not zero.any()
    assert int(scale[0, 0]) == 1  # the floor 6 * 2^-126 gives the smallest normal scale


def test_e8m0_ceil_reads_bits() -> None:
    exact = powers(-126, 127)
    assert torch.equal(F.e8m0_ceil(exact).long(), torch.arange(1, 255))
    assert torch.equal(F.e8m0_ceil(torch.nextafter(exact[:-1], torch.tensor(torch.inf))).long(), torch.arange(2, 255))
    assert F.e8m0_ceil(torch.tensor([torch.inf, torch.nan])).tolist() == [255, 255]


# ---- blocks


def outlier_blocks(quantize: Callable[[Tensor], tuple[Tensor, Tensor]], block: int) -> None:
    """One outlier per block of `block`, each another power of two, the rest so small that its neighbours' scale would
    flush it: the block size shows in every scale. The last block is short."""
    x = torch.full((2, 3 * block + 5), 2.0**-9)
    outlier = torch.tensor([1.0, 64.0, 2.0**-4, 2.0**10])
    x[:, ::block] = outlier
    code, scale = quantize(x)
    assert code.shape == x.shape
    assert scale.shape == (2, 4)
    reach = F.E4M3_MAX if quantize.__name__.startswith("e4m3") else F.E2M1_MAX
    assert torch.equal(F.e8m0_decode(scale), torch.exp2(torch.ceil(torch.log2(outlier.double() / reach))).float().expand(2, 4))


def e4m3_128(x: Tensor) -> tuple[Tensor, Tensor]:
    return F.quantize_e4m3(x, 128)


def e4m3_64(x: Tensor) -> tuple[Tensor, Tensor]:
    return F.quantize_e4m3(x, 64)


def e4m3_32(x: Tensor) -> tuple[Tensor, Tensor]:
    return F.quantize_e4m3(x, 32)


def e2m1_32(x: Tensor) -> tuple[Tensor, Tensor]:
    return F.quantize_e2m1(x, 32)


@pytest.mark.parametrize(("quantize", "block"), [(e4m3_128, 128), (e4m3_64, 64), (e2m1_32, 32)])
def test_blocks(quantize: Callable[[Tensor], tuple[Tensor, Tensor]], block: int) -> None:
    outlier_blocks(quantize, block)


@pytest.mark.parametrize(("wrong", "block"), [(e4m3_32, 128), (e4m3_32, 64), (e4m3_64, 128), (e4m3_128, 64)])
def test_block_check_sees(wrong: Callable[[Tensor], tuple[Tensor, Tensor]], block: int) -> None:
    with pytest.raises(AssertionError):
        outlier_blocks(wrong, block)


def test_packing_puts_the_even_element_low() -> None:
    codes = torch.arange(32, dtype=torch.uint8).remainder(16).view(2, 16)
    packed = F.e2m1_pack(codes)
    assert packed[0, 0] == 0x10
    assert packed[0, 7] == 0xFE
    assert torch.equal(F.e2m1_unpack(packed), codes)
    assert torch.equal(F.e2m1_unpack(CODES.view(torch.int8)[:, None])[:, 0], CODES & 15)


def test_fp4_weights_fit_e4m3_up_to_a_span_of_2_to_14() -> None:
    """E2M1 values over scales s_max / 2^d, kept as E4M3 over s_max / 64: exact up to d = 14, not beyond."""
    values = F.e2m1_decode(CODES[:16])
    exact = [torch.equal(F.e4m3_decode(F.e4m3_encode(values * 2.0 ** (6 - d))), values * 2.0 ** (6 - d)) for d in range(18)]
    assert exact == [d <= 14 for d in range(18)]


# ---- laws of quantise-dequantise

Quantiser = Callable[[Tensor], Tensor]
cases = st.tuples(seeds, widths)


def through_e4m3(x: Tensor) -> Tensor:
    code, scale = F.quantize_e4m3(x, 64)
    return F.dequantize_blocks(F.e4m3_decode(code), scale, 64)


def through_e2m1(x: Tensor) -> Tensor:
    code, scale = F.quantize_e2m1(x, 32)
    return F.dequantize_blocks(F.e2m1_decode(code), scale, 32)


def sample(case: tuple[int, int]) -> Tensor:
    return adversarial(case[0], 3, case[1], dtype=torch.float32)


def idempotent(q: Quantiser, case: tuple[int, int]) -> None:
    once = q(sample(case))
    assert torch.equal(q(once), once)


def odd(q: Quantiser, case: tuple[int, int]) -> None:
    assert torch.equal(q(-sample(case)), -q(sample(case)))


def scales_with_powers(q: Quantiser, case: tuple[int, int]) -> None:
    x = sample(case)
    for k in (-3, 1, 9):
        assert torch.equal(q(x * 2.0**k), q(x) * 2.0**k)


def near(q: Quantiser, case: tuple[int, int]) -> None:
    """Within half a step: 2^-4 of a value in E4M3's normal range, 2^-10 of the scale below it; never past the largest."""
    x = sample(case)
    scale = F.e8m0_decode(F.quantize_e4m3(x, 64)[1]).repeat_interleave(64, -1)[:, : x.shape[1]]
    assert ((q(x) - x).abs() <= torch.maximum(x.abs() * 2.0**-4, scale * 2.0**-10)).all()


def one_way(x: Tensor) -> Tensor:
    return through_e4m3(x.abs())


def drifting(x: Tensor) -> Tensor:
    return through_e4m3(x) * (1 + 2.0**-4)


def absolute_step(x: Tensor) -> Tensor:
    return torch.round(x * 64) / 64


def nearest_scale(x: Tensor) -> Tensor:
    """A scale rounded to nearest cuts off the largest values."""
    blocks = F._blocks(x, 64)
    scale = torch.exp2(torch.round(torch.log2(blocks.abs().amax(-1, keepdim=True).clamp_min(1e-4) / 448)))
    return (F.e4m3_decode(F.e4m3_encode(blocks / scale)) * scale).flatten(-2)[..., : x.shape[-1]]


@pytest.mark.parametrize("q", [through_e4m3, through_e2m1])
@pytest.mark.parametrize("law", [idempotent, odd, scales_with_powers])
def test_laws(law: Callable[..., None], q: Quantiser) -> None:
    holds(law, cases, q)


def test_error_bound() -> None:
    holds(near, cases, through_e4m3)


@pytest.mark.parametrize(
    ("law", "wrong"),
    [(idempotent, drifting), (odd, one_way), (scales_with_powers, absolute_step), (near, nearest_scale), (near, drifting)],
)
def test_laws_see(law: Callable[..., None], wrong: Quantiser) -> None:
    refuted(law, cases, wrong)
