"""Readers of other engines' bytes against the pool's own codecs and ml_dtypes, on random bytes."""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
import torch

from optimized.pool import flashmla, index_rows
from optimized.pool import rows as codec
from parity import payloads
from reference.errors import BadInput

RNG = np.random.default_rng(5)


def random_bytes(*shape: int) -> np.ndarray:
    return RNG.integers(0, 256, shape, dtype=np.uint8)


def same(a: np.ndarray, b: torch.Tensor) -> bool:
    return np.array_equal(a, b.double().numpy(), equal_nan=True)


def row_bytes(n: int) -> tuple[np.ndarray, np.ndarray]:
    """2buff rows of random codes and rotated channels, every scale different from its neighbours."""
    codes, scales = random_bytes(n, 448), RNG.permuted(np.arange(100, 160, dtype=np.uint8)[None].repeat(n, 0), axis=1)[:, :7]
    nope = codec.pack_2buff(torch.from_numpy(codes), torch.from_numpy(np.ascontiguousarray(scales)), 512).numpy()
    return nope, random_bytes(n, 128)


def test_every_code_and_scale_is_the_formats():
    every = np.arange(256, dtype=np.uint8)
    oracle = every.view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    assert np.array_equal(payloads.e4m3(every), oracle, equal_nan=True)
    four = np.arange(16, dtype=np.uint8)
    assert np.array_equal(payloads.e2m1(four), four.view(ml_dtypes.float4_e2m1fn).astype(np.float64))
    words = np.arange(1 << 16, dtype=np.uint16)
    assert same(payloads.bf16(words.view(np.uint8)), torch.from_numpy(words.view(np.int16)).view(torch.bfloat16))


def test_rows_of_both_planes_are_those_of_the_pool():
    nope, rope = row_bytes(40)
    read = payloads.rows_2buff(nope, rope)
    own = codec.decode_2buff(torch.from_numpy(nope), torch.from_numpy(rope).view(torch.bfloat16))
    assert same(read.values, own) and not np.isfinite(read.values).all()
    assert np.array_equal(read.spare, nope[:, 448:])
    swapped = nope.copy()
    swapped[:, 448:450], swapped[:, 450:452] = nope[:, 450:452], nope[:, 448:450]
    assert not same(payloads.rows_2buff(swapped, rope).values, own)


@pytest.mark.parametrize("page_rows", [2, 64, 128, 256])
def test_flashmla_pages_are_the_same_rows_elsewhere(page_rows):
    nope, rope = row_bytes(3 * page_rows)
    rotated = torch.from_numpy(rope).view(torch.bfloat16)
    pages = flashmla.to_pages(torch.from_numpy(nope).unflatten(0, (3, -1)), rotated.unflatten(0, (3, -1))).numpy()
    assert pages.shape[1] == payloads.flashmla_stride(page_rows)
    slots = RNG.permutation(3 * page_rows)
    read, own = payloads.rows_flashmla(pages, slots, page_rows), payloads.rows_2buff(nope, rope)
    assert np.array_equal(read.values, own.values[slots], equal_nan=True)
    assert np.array_equal(read.codes, own.codes[slots]) and np.array_equal(read.scales, own.scales[slots])
    assert not np.array_equal(read.values, own.values[slots[::-1]], equal_nan=True)


def test_strides_of_the_pages_in_use():
    known = {64: 37_440, 128: 74_880, 256: 149_760, 2: 1_728}
    assert {n: payloads.flashmla_stride(n) for n in known} == known


def test_readers_know_every_layout_of_the_pool():
    assert set(payloads.KEY_LAYOUTS) == set(index_rows.LAYOUTS)


@pytest.mark.parametrize("name", sorted(payloads.KEY_LAYOUTS))
def test_index_keys_are_those_of_the_pool(name):
    layout, rule = index_rows.LAYOUTS[name], payloads.KEY_LAYOUTS[name]
    width = index_rows.key_bytes(layout.form, 128)
    codes = torch.from_numpy(random_bytes(3, 64, width))
    if layout.form == "fp4":
        scales = torch.from_numpy(RNG.permuted(np.arange(192, dtype=np.uint8).repeat(4)).reshape(3, 64, 4) + np.uint8(30))
    else:
        scales = torch.from_numpy(RNG.normal(size=(3, 64, 1)).astype(np.float32))  # of any mantissa
    regions = [x.contiguous().numpy().view(np.uint8) for x in index_rows.pack(codes, scales, layout)]
    pages = np.concatenate(regions, 1) if rule.joined else regions[0]
    slots = RNG.permutation(192)
    read = payloads.index_keys(name, pages, None if rule.joined else regions[1], slots)
    wide = scales if layout.form == "fp4" else scales.double()  # float32 would round the product
    own = index_rows.decode(codes, wide, layout.form).flatten(0, 1)[slots]
    assert same(read.values, own)
    scale = replace(rule, scales=lambda r, g, n: (r * n + g) ^ 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(payloads.KEY_LAYOUTS, name, scale)
        assert not same(payloads.index_keys(name, pages, None if rule.joined else regions[1], slots).values, own)


@pytest.mark.parametrize(
    ("read", "says"),
    [
        (lambda: payloads.rows_2buff(random_bytes(2, 511), random_bytes(2, 128)), r"2buff rows: uint8 \[2, 511\]"),
        (lambda: payloads.rows_flashmla(random_bytes(2, 584 * 64), np.arange(2)), r"expected uint8 \[n, 37440\]"),
        (lambda: payloads.rows_flashmla(random_bytes(2, 37_440), np.array([0, 128])), "slot 128 of row 1"),
        (lambda: payloads.index_keys("fp4", random_bytes(1, 4096), None, np.arange(1)), "known are"),
        (lambda: payloads.index_keys("fp4_opus", random_bytes(1, 4096), None, np.arange(1)), "scales are missing"),
        (lambda: payloads.index_keys("fp4_split", random_bytes(1, 4352), random_bytes(1, 256), np.arange(1)), "in their page"),
        (lambda: payloads.index_keys("fp8_linear", random_bytes(1, 8192), None, np.arange(1)), "8448"),
        (lambda: payloads.index_keys("fp8_linear", random_bytes(1, 8448), None, np.array([-1])), "slot -1"),
    ],
)
def test_bytes_of_another_size_are_refused_in_one_line(read, says):
    with pytest.raises(BadInput, match=says) as caught:
        read()
    assert "\n" not in str(caught.value)
