"""Routed experts whose weights are FP8 with a scale per 128 x 128, as base models store them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from expert_cases import LIMIT, case, down, fp4, fp8, gate_up, values_of, with_plan
from kernel_cases import mutant
from test_kernel_experts import SHAPES, SMALL, check_down, check_up

from optimized.kernels import experts as experts_file
from optimized.kernels.expert_plan import plan_experts

BLOCKED = replace(SMALL, STEP=64)  # two steps a scale block
WIDE = (3, 1, 2, 136, 264)


@pytest.mark.parametrize(("shape", "tiles"), [(SHAPES[1], None), (SHAPES[2], None), (WIDE, None), (WIDE, SMALL)])
def test_products_of_fp8_experts(shape, tiles):
    """Widths that fill no scale block, and 264 rows in three blocks of scales."""
    c = case(*shape, weight=fp8)
    assert check_up(c, *gate_up(*c.up_args, tiles=tiles)) == 1
    check_down(lambda *args: down(*args, tiles=tiles), c)


def test_every_code_and_scale_comes_out_exactly():
    """x = 1 in one channel and 0 elsewhere picks a column; blocks of scale bytes 10 ... 245, the exact range."""
    codes = torch.arange(256, dtype=torch.uint8).repeat(2)[:, None].repeat(1, 256)
    codes[codes & 0x7F == 0x7F] = 0
    scales = torch.tensor([[10, 245], [60, 127], [200, 11], [244, 90]], dtype=torch.uint8)
    w = codes[None], scales[None]
    channels = [0, 127, 128, 255]
    x = torch.zeros(4, 256, dtype=torch.uint8)
    x[range(4), channels] = 0x38
    plan = plan_experts(torch.zeros(4, 1, dtype=torch.int32), 1, experts_file.block_height())
    y = down(x, torch.full((4, 2), 127, dtype=torch.uint8), *w, plan)
    assert torch.equal(y.double(), values_of(*w)[0].T[channels])


@pytest.mark.parametrize(
    "edit",
    [
        ("w_scale + n // 128 * ((K + 127) // 128)", "w_scale + n // 128"),
        ("* ((K + 127) // 128) + first // 128", "* ((K + 127) // 128)"),
        ("n[:, None] * K + d[None, :], mask=(n < N)[:, None]", "n[:, None] * K + d[None, :] * 0, mask=(n < N)[:, None]"),
        ("bf16_rn(e4m3_up(code) * scale[:, None]))", "bf16_rn(e4m3_up(code)))"),
        ("if FP4:", "if not FP4:"),
    ],
)
def test_planted_mistakes_in_fp8_weights_are_seen(tmp_path, edit):
    wrong = mutant(experts_file, tmp_path, edit)
    c = case(5, 2, 2, 264, 264, weight=fp8)
    with pytest.raises(AssertionError):
        check_up(c, *with_plan(wrong.expert_gate_up)(*c.up_args, tiles=BLOCKED))


def test_mixed_forms_are_refused():
    c, other = case(4, 2, 3, 128, 128, weight=fp8), case(4, 2, 3, 128, 128, weight=fp4)
    with pytest.raises(ValueError, match="different forms"):
        gate_up(*c.x, *c.w1, *other.w3, c.weights, c.plan, LIMIT)
    with pytest.raises(ValueError, match="w1_scales"):
        gate_up(*c.x, c.w1[0], other.w1[1], *c.w3, c.weights, c.plan, LIMIT)
