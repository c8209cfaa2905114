"""Routed experts: the grouped products with SwiGLU and quantiser behind them, and the whole of them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from expert_cases import (
    LIMIT,
    Case,
    case,
    check_quantized,
    down,
    gate_up,
    live_pairs,
    product,
    sum_experts,
    swiglu,
    values_fp4,
    values_fp8,
    values_of,
    with_plan,
)
from kernel_cases import bf16, mutant, poison_new_memory, uneven
from torch import Tensor

from optimized.kernels import experts as experts_file
from optimized.kernels.expert_plan import plan_experts
from optimized.kernels.quantize import quantize_activation

SMALL = experts_file.Tiles(ROWS=16, COLS=128, STEP=32)
SHAPES = [(1, 1, 1, 128, 128), (9, 3, 8, 256, 128), (40, 2, 3, 200, 72), (7, 6, 7, 160, 136)]


def check_up(c: Case, h: Tensor, h_scales: Tensor) -> float:
    """The share of values whose bfloat16 products are the same for every legal sum; those are held to their codes."""
    pair, token, expert = live_pairs(c.experts)
    x = values_fp8(*c.x)[token]
    ends = []
    for w in (c.w1, c.w3):
        value, error = product(x, values_of(*w)[expert])
        error *= not c.exact
        ends += [bf16(value - error), bf16(value + error)]
    sure = (ends[0] == ends[1]) & (ends[2] == ends[3])
    want, bound = swiglu(ends[0], ends[2], c.weights.flatten()[pair, None].double())
    check_quantized(h[pair], h_scales[pair], want, bound, sure)
    return sure.double().mean().item()


@pytest.mark.parametrize(("tokens", "slots", "count", "width", "inner"), SHAPES)
@pytest.mark.parametrize("tiles", [None, SMALL])
def test_gate_up_on_sums_that_are_exact(tokens, slots, count, width, inner, tiles):
    c = case(tokens, slots, count, width, inner)
    assert check_up(c, *gate_up(*c.up_args, tiles=tiles)) == 1


@pytest.mark.parametrize("shape", [*SHAPES, (2, 1, 1, 7168, 128)])
def test_sums_are_exact_here(shape):
    """What `exact` claims: magnitudes of a sum, in the unit of its smallest summand, fit 24 bits."""
    c = case(*shape)
    x, w = values_fp8(*c.x).abs(), values_fp4(*c.w1).abs()
    sums = torch.einsum("tk,enk->ten", x, w) * 2**11
    assert (x * 2**3 % 1 == 0).all() and (w * 2**8 % 1 == 0).all() and sums.max() < 2**24


def test_gate_up_on_uneven_input():
    c = case(20, 3, 5, 384, 128, exact=False)
    assert check_up(c, *gate_up(*c.up_args)) > 0.5


@pytest.mark.parametrize(("tokens", "slots", "count", "width", "inner"), SHAPES)
@pytest.mark.parametrize("tiles", [None, SMALL])
def test_down_stays_within_the_float32_bound(tokens, slots, count, width, inner, tiles):
    c = case(tokens, slots, count, width, inner)
    check_down(lambda *args: down(*args, tiles=tiles), c)


def check_down(kernel, c: Case) -> None:
    h = quantize_activation(uneven(torch.Generator().manual_seed(1), c.experts.numel(), c.w2_depth).bfloat16())
    pair, _, expert = live_pairs(c.experts)
    want, bound = product(values_fp8(*h)[pair], values_of(*c.w2)[expert])
    assert ((kernel(*h, *c.w2, c.plan)[pair].double() - want).abs() <= bound).all()


@pytest.mark.parametrize(
    "edit",
    [
        ("w2 += expert * w2_stride", "w2 += 0"),
        ("w2_scale += expert * w2_scale_stride", "w2_scale += 0"),
        ("STEP), acc)", "STEP), bf16_up(bf16_rn(acc)))"),
        ("y + pair[:, None] * N + n[None, :], acc", "y + pair[:, None] * N + n[None, :], bf16_up(bf16_rn(acc))"),  # no site
    ],
)
def test_planted_mistakes_in_down_are_seen(tmp_path, edit):
    wrong = with_plan(mutant(experts_file, tmp_path, edit).expert_down)
    with pytest.raises(AssertionError):
        check_down(lambda *args: wrong(*args, tiles=SMALL), case(5, 3, 3, 72, 200))


def test_an_expert_at_the_depths_of_pro():
    """d = 7168 in 56 scale blocks and i = 3072 in 24, with the other width cut."""
    c = case(2, 1, 1, 7168, 128)
    assert check_up(c, *gate_up(*c.up_args)) == 1
    check_down(down, case(2, 1, 1, 128, 3072))


def test_weights_come_out_exactly_for_every_code_and_scale():
    """x = 1 in one channel and 0 elsewhere picks one column of the weight; scale bytes 2 ... 250."""
    bytes_ = torch.arange(256, dtype=torch.uint8)[:, None].repeat(1, 32)
    scales = (2 + torch.arange(256) * 248 // 255).to(torch.uint8)[:, None] + torch.zeros(1, 2, dtype=torch.uint8)
    w = bytes_[None], scales[None]
    channels = [0, 1, 37, 62]
    codes = torch.zeros(4, 64, dtype=torch.uint8)
    codes[range(4), channels] = 0x38
    plan = plan_experts(torch.zeros(4, 1, dtype=torch.int32), 1, experts_file.block_height())
    y = down(codes, torch.full((4, 1), 127, dtype=torch.uint8), *w, plan)
    assert torch.equal(y.double(), values_fp4(*w)[0].T[channels])


def whole(c: Case, shared: Tensor) -> Tensor:
    h = gate_up(*c.up_args)
    return sum_experts(down(*h, *c.w2, c.plan), c.plan.summands, shared)


def test_bits_of_a_token_do_not_depend_on_the_others():
    """40 and more pairs an expert: several blocks, and every subset meets them elsewhere."""
    c = case(70, 2, 3, 200, 72, exact=False)
    shared = torch.randn(70, 200, generator=torch.Generator().manual_seed(3))
    out = whole(c, shared)
    assert not out.isnan().any()
    for rows in ([0], [7, 64, 5], list(range(1, 66))):
        assert torch.equal(whole(c.rows(rows), shared[rows]), out[rows])


def test_padding_is_not_written_and_not_read(monkeypatch):
    c = case(9, 3, 5, 256, 128)
    shared = torch.randn(9, 256)
    clean = whole(c, shared)
    poison_new_memory(monkeypatch)
    h, h_scales = gate_up(*c.up_args)
    y = down(h, h_scales, *c.w2, c.plan)
    dead = c.experts.flatten() < 0
    assert dead.any() and (h[dead] == 0xFF).all() and (h_scales[dead] == 0xFF).all() and y[dead].isnan().all()
    out = sum_experts(y, c.plan.summands, shared)
    assert torch.equal(out, clean) and torch.equal(out[3], shared[3].bfloat16())


def test_strided_stacks_and_inputs():
    c = case(9, 3, 4, 256, 128)
    shared = torch.randn(9, 256)
    clean = whole(c, shared)

    def apart(t: Tensor) -> Tensor:
        return torch.full((2 * t.shape[0], *t.shape[1:]), 0xFF, dtype=torch.uint8)[1::2].copy_(t)

    def wide(t: Tensor) -> Tensor:
        return torch.full((t.shape[0], t.shape[1] + 70_000), 0xFF, dtype=torch.uint8)[:, 9 : 9 + t.shape[1]].copy_(t)

    spread = {name: tuple(apart(t) for t in getattr(c, name)) for name in ("w1", "w3", "w2")}
    assert torch.equal(whole(replace(c, x=tuple(wide(t) for t in c.x), **spread), shared), clean)


def test_an_expert_two_gib_away():
    c = case(2, 1, 2, 64, 128)
    c = replace(c, experts=torch.tensor([[1], [0]], dtype=torch.int32))
    far = torch.empty(5 << 29, dtype=torch.uint8).as_strided((2, *c.w1[0].shape[1:]), (9 << 28, c.w1[0].shape[2], 1))
    far.copy_(c.w1[0])
    for got, want in zip(gate_up(*replace(c, w1=(far, c.w1[1])).up_args), gate_up(*c.up_args), strict=True):
        assert torch.equal(got, want)


def test_no_tokens_and_refusals():
    c = case(4, 2, 3, 128, 128)
    none = c.rows([])
    assert whole(none, torch.zeros(0, 128)).shape == (0, 128)
    with pytest.raises(ValueError, match="w3"):
        gate_up(*c.x, *c.w1, c.w3[0][:, :-1], c.w3[1], c.weights, c.plan, LIMIT)
    with pytest.raises(ValueError, match="rows"):
        gate_up(*c.up_args[:-2], plan_experts(c.experts, 3, 8), LIMIT)
    with pytest.raises(ValueError, match="summands"):
        gate_up(*c.up_args[:-2], c.rows([0, 1]).plan, LIMIT)


@pytest.mark.parametrize(
    "edit",
    [
        ("tl.join(byte & 0xF, byte >> 4)", "tl.join(byte >> 4, byte & 0xF)"),  # nibbles swapped
        ("scale_at = first // 32 +", "scale_at = first // 128 +"),
        ("row * x_scale_stride + first // 128", "row * x_scale_stride"),
        ("token = pair // TOP_K", "token = pair // (TOP_K + 1)"),
        ("bf16_up(bf16_rn(gate))", "gate"),  # the site after w1
        ("bf16_up(bf16_rn(up))", "up"),
        (" * weight[:, None]", ""),
        ("weights + pair", "weights + token"),
        ("load_weight(w3, w3_scale", "load_weight(w1, w1_scale"),
        ("w3_scale += expert * w3_scale_stride", "w3_scale += 0"),
        ("(byte_at < K // 2)", "(byte_at < K // 2 - 1)"),
        ("return bf16_rn(e4m3_up(code) * scale[:, None])", "return bf16_rn(e4m3_up(code))"),
        ("STEP), up)", "STEP), tl.zeros((ROWS, COLS), tl.float32))"),
    ],
)
def test_planted_mistakes_in_gate_up_are_seen(tmp_path, edit):
    wrong = with_plan(mutant(experts_file, tmp_path, edit).expert_gate_up)
    c = case(5, 3, 3, 200, 136)
    with pytest.raises(AssertionError):
        check_up(c, *wrong(*c.up_args, tiles=replace(SMALL, STEP=64)))
