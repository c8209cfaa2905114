"""Dequantisation against `ml_dtypes`: every code with every scale, every alignment of rows and blocks."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from reference.checkpoint import dequantize as module
from reference.checkpoint.dequantize import dequantize
from reference.errors import BadInput

E8M0 = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
E4M3 = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
E2M1 = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float32)


def same_bits(ours, theirs):
    """Equal as bits, except that any NaN equals any NaN."""
    theirs = torch.from_numpy(np.ascontiguousarray(theirs))
    return bool(((ours.view(torch.int32) == theirs.view(torch.int32)) | (ours.isnan() & theirs.isnan())).all())


def fp8(codes):
    return torch.from_numpy(codes).view(torch.float8_e4m3fn)


def fp4(codes):
    """Codes [rows, n] -> packed bytes [rows, n/2]."""
    return torch.from_numpy(codes[:, 0::2] | codes[:, 1::2] << 4).view(torch.int8)


def e8m0(codes):
    return torch.from_numpy(codes).view(torch.float8_e8m0fnu)


def test_every_e4m3_code_with_every_scale():
    """Row block i has scale i: [256 * 128, 256] holds all 65,536 pairs."""
    codes = np.tile(np.arange(256, dtype=np.uint8), (256 * 128, 1))
    scale = np.repeat(np.arange(256, dtype=np.uint8)[:, None], 2, axis=1)
    with np.errstate(over="ignore", invalid="ignore"):
        expected = E4M3[None, :] * np.repeat(E8M0, 128)[:, None]
    assert same_bits(dequantize(fp8(codes), e8m0(scale)), expected)


def test_every_e2m1_pair_with_every_scale():
    """Row s has scale s in all blocks, and all 256 bytes."""
    packed = torch.arange(256, dtype=torch.uint8).repeat(256, 1).view(torch.int8)
    scale = np.repeat(np.arange(256, dtype=np.uint8)[:, None], 16, axis=1)
    pairs = np.stack([E2M1[np.arange(256) & 15], E2M1[np.arange(256) >> 4]], axis=-1).reshape(-1)
    with np.errstate(over="ignore", invalid="ignore"):
        expected = pairs[None, :] * E8M0[:, None]
    assert same_bits(dequantize(packed, e8m0(scale)), expected)


@given(st.integers(0, 2**32 - 1), st.integers(1, 300), st.integers(1, 300), st.booleans(), st.data())
def test_rows_of_any_alignment(seed, rows, half_columns, four, data):
    """Any row range of a ragged weight, from `row0`: each element takes the scale of its own block."""
    rng, columns = np.random.default_rng(seed), 2 * half_columns
    row_block, column_block = (1, 32) if four else (128, 128)
    codes = rng.integers(0, 16 if four else 0x7F, (rows, columns), dtype=np.uint8)
    scale = rng.integers(1, 250, (-(-rows // row_block), -(-columns // column_block)), dtype=np.uint8)
    start = data.draw(st.integers(0, rows - 1))
    stop = data.draw(st.integers(start, rows))
    factor = np.repeat(np.repeat(E8M0[scale], row_block, 0)[:rows], column_block, 1)[:, :columns]
    expected = ((E2M1 if four else E4M3)[codes] * factor)[start:stop]
    weight = (fp4 if four else fp8)(codes)[start:stop]
    assert same_bits(dequantize(weight, e8m0(scale), row0=start), expected)
    assert torch.equal(dequantize(weight, e8m0(scale), torch.float64, start), torch.from_numpy(expected).double())
    out = torch.full((stop - start, columns), torch.nan)
    assert dequantize(weight, e8m0(scale), row0=start, out=out) is out
    assert same_bits(out, expected)


@pytest.mark.parametrize("four", [False, True], ids=["fp8", "fp4"])
def test_compiled_and_plain_paths_agree(four):
    rng = np.random.default_rng(5)
    codes = rng.integers(0, 16 if four else 256, (300, 416), dtype=np.uint8)
    weight = (fp4 if four else fp8)(codes)
    scale = e8m0(rng.integers(0, 255, (300, 13) if four else (3, 4), dtype=np.uint8))
    compiled, plain = dequantize(weight[130:], scale, row0=130), torch.empty(170, 416)
    module._plain(weight[130:], scale, 130, four, plain)
    assert same_bits(compiled, plain.numpy())


def test_a_float32_scale_is_used_as_it_is():
    codes = np.full((2, 130), 0x38, dtype=np.uint8)  # 1.0
    scale = torch.tensor([[0.5, 3.0]])
    values = dequantize(fp8(codes), scale)
    assert values[0, 127] == 0.5 and values[0, 128] == 3.0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_plain_dtypes_pass_through(dtype):
    weight = torch.randn(3, 5).to(dtype)
    assert torch.equal(dequantize(weight, None, torch.float64), weight.double())
    out = torch.empty(3, 5)
    assert torch.equal(dequantize(weight, None, out=out), weight.float())


def test_an_out_of_another_shape_is_refused():
    """The compiled loop writes without looking: the shape is compared before it."""
    with pytest.raises(RuntimeError):
        dequantize(torch.zeros(4, 16, dtype=torch.int8), torch.ones(4, 1).to(torch.float8_e8m0fnu), out=torch.empty(2, 32))


def test_wrong_row0_gives_other_values():
    """The planted mistake that alignment tests must see: rows 64.. read with the scales of rows 0.."""
    codes = np.full((192, 128), 0x38, dtype=np.uint8)
    scale = e8m0(np.array([[127], [130]], dtype=np.uint8))
    right, wrong = dequantize(fp8(codes)[64:], scale, row0=64), dequantize(fp8(codes)[64:], scale)
    assert torch.equal(right[:64], wrong[:64]) and (right[64:] == 8 * wrong[:64].new_ones(64, 128)).all()
    assert not torch.equal(right, wrong)


@pytest.mark.parametrize(
    ("weight", "scale"),
    [
        (torch.zeros(128, 128, dtype=torch.int8), None),
        (torch.zeros(129, 128).to(torch.float8_e4m3fn), torch.ones(1, 1)),
        (torch.zeros(128, 129).to(torch.float8_e4m3fn), torch.ones(1, 1)),
        (torch.zeros(128, 16, dtype=torch.int8), torch.ones(128, 2)),
        (torch.zeros(128, 16, dtype=torch.int8), torch.ones(4, 1)),
        (torch.zeros(128, 128).to(torch.float8_e4m3fn), torch.ones(128)),
    ],
)
def test_missing_and_misshapen_scales_are_refused(weight, scale):
    with pytest.raises(BadInput, match="scale"):
        dequantize(weight, scale)
