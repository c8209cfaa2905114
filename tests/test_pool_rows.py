"""Bytes of pool rows, and the rotary tables of Pro."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch
from kernel_cases import uneven

from optimized.pool import rows
from optimized.rope import frequencies, rope_table
from reference.presets import preset

PRO = preset("v4-pro")


def row_values(n: int, width: int = 512) -> torch.Tensor:
    x = uneven(torch.Generator().manual_seed(n), n, width)
    x[1::5] *= 1e-6
    x[2::5] = 0
    return x


def decoded_by_spec(row: np.ndarray, rotated: np.ndarray) -> np.ndarray:
    """One 2buff row byte by byte."""
    nope = row.size - 64
    values = row[:nope].view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    for tile in range(nope // 64):
        first, second = row[nope + 2 * tile : nope + 2 * tile + 2]
        assert first == second
        values[tile * 64 : tile * 64 + 64] *= 2.0 ** (int(first) - 127)
    assert not row[nope + 2 * (nope // 64) :].any()
    return np.concatenate([values, rotated.astype(np.float64)])


@pytest.mark.parametrize("width", [512, 192, 128])
def test_2buff_rows_decode_byte_by_byte(width):
    x = row_values(12, width)
    nope, rotated = rows.encode_2buff(x)
    assert (nope.shape, rotated.shape) == ((12, width), (12, 64))
    back = rows.decode_2buff(nope, rotated)
    for i in range(12):
        spec = decoded_by_spec(nope[i].numpy(), rotated[i].float().numpy())
        assert np.array_equal(back[i].double().numpy(), spec)
    assert torch.equal(rotated, x[:, -64:].bfloat16())
    codes, scales = rows.unpack_2buff(nope)
    assert scales[2].eq(105).all() and scales.min() == 105  # the floor 1e-4 / 448 -> 2^-22
    step = (codes.float() * 0 + 1) * torch.exp2(scales.float() - 127).repeat_interleave(64, -1)
    error = (back[:, :-64] - x[:, :-64]).abs()
    assert (error <= torch.maximum(x[:, :-64].abs() / 16, step * 2.0**-10)).all()


def test_encoding_decoded_rows_changes_no_value():
    x = row_values(40)
    once = rows.decode_2buff(*rows.encode_2buff(x))
    assert torch.equal(rows.decode_2buff(*rows.encode_2buff(once)), once)
    assert torch.equal(rows.decode_bf16(rows.encode_bf16(x)), x.bfloat16().float())


DIGITS = 3e-7  # the spots have seven digits, float32 as many


def test_rope_frequencies_of_pro():
    f = frequencies(PRO, 2)
    spots = {0: 1, 1: 0.68765604, 14: 5.286857e-3, 15: 3.635539e-3, 16: 2.265625e-3, 20: 2.969778e-4,
             24: 1.953125e-5, 25: 5.372312e-6, 31: 5.680529e-7}  # fmt: skip
    for pair, value in spots.items():
        assert f[pair].item() == pytest.approx(value, rel=DIGITS)
    plain = frequencies(preset("v4-flash"), 0)
    assert plain.tolist() == pytest.approx([10000 ** (-i / 32) for i in range(32)], rel=DIGITS)
    cos, sin = rope_table(PRO, 2, torch.tensor([0, 3, 1000000]))
    angle = (torch.tensor(1e6) * f).double()
    ulp = torch.finfo(torch.float32).eps
    assert (cos[2] - angle.cos()).abs().max() <= ulp
    assert (sin[2] - angle.sin()).abs().max() <= ulp
    assert (cos[0] == 1).all() and (sin[0] == 0).all()
