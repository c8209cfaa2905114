"""Routed experts: the plan, the grouped FP4 products, SwiGLU with its quantiser, the sum, and the whole of them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_cases import (
    E4M3_VALUES,
    bf16,
    gamma,
    illegal_e4m3,
    mutant,
    on_device,
    poison_new_memory,
    scale_byte,
    scale_value,
    uneven,
)
from torch import Tensor

from optimized.kernels import expert_plan as plan_file
from optimized.kernels import expert_sum as sum_file
from optimized.kernels import experts as experts_file
from optimized.kernels import swiglu as swiglu_file
from optimized.kernels.expert_plan import ExpertPlan, plan_experts
from optimized.kernels.quantize import quantize_activation

LIMIT = 3.0
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64)
SMALL = experts_file.Tiles(ROWS=16, COLS=128, STEP=32)
swiglu_quantize = on_device(swiglu_file.swiglu_quantize)
sum_experts = on_device(sum_file.sum_experts)


def moved(plan: ExpertPlan, device: torch.device) -> ExpertPlan:
    return ExpertPlan(plan.rows.to(device), plan.block_expert.to(device), plan.summands.to(device))


def with_plan(kernel):
    """The wrapper as `on_device` carries it; the plan goes where the first tensor is."""

    def carried(*args, **kwargs):
        return kernel(*[moved(a, args[0].device) if isinstance(a, ExpertPlan) else a for a in args], **kwargs)

    return on_device(carried)


gate_up, down = with_plan(experts_file.expert_gate_up), with_plan(experts_file.expert_down)


@dataclass(frozen=True)
class Case:
    """x [t, d] as codes and scales, stacked FP4 weights, experts and weights [t, k]."""

    x: tuple[Tensor, Tensor]
    w1: tuple[Tensor, Tensor]
    w3: tuple[Tensor, Tensor]
    w2: tuple[Tensor, Tensor]
    experts: Tensor
    weights: Tensor
    exact: bool

    @property
    def plan(self) -> ExpertPlan:
        return plan_experts(self.experts, self.w1[0].shape[0], experts_file.block_height())

    @property
    def up_args(self) -> tuple:
        return *self.x, *self.w1, *self.w3, self.weights, self.plan, LIMIT

    def rows(self, which: list[int]) -> Case:
        part = self.x[0][which], self.x[1][which]
        return replace(self, x=part, experts=self.experts[which].contiguous(), weights=self.weights[which].contiguous())


def fp4(generator: torch.Generator, count: int, outputs: int, depth: int, low: int, high: int) -> tuple[Tensor, Tensor]:
    """All bytes; a scale byte of its own for each row and 32 channels."""
    packed = torch.randint(0, 256, (count, outputs, depth // 2), generator=generator).to(torch.uint8)
    return packed, torch.randint(low, high, (count, outputs, -(-depth // 32)), generator=generator).to(torch.uint8)


def case(tokens: int, slots: int, count: int, width: int, inner: int, exact: bool = True, seed: int = 0) -> Case:
    """If exact, x has few bits and scales are near each other: every sum over d fits float32."""
    g = torch.Generator().manual_seed(seed)
    experts = torch.stack([torch.randperm(count, generator=g)[:slots] for _ in range(tokens)]).int()
    experts[3::5] = -1
    if exact:
        values = torch.randint(-8, 9, (tokens, width), generator=g).float()
        scales = torch.randint(124, 128, (tokens, -(-width // 128)), generator=g).to(torch.uint8)
        x = values.to(torch.float8_e4m3fn).view(torch.uint8), scales
        w1, w3 = (fp4(g, count, inner, width, 120, 123) for _ in range(2))
    else:
        x = quantize_activation(uneven(g, tokens, width).bfloat16())
        w1, w3 = (fp4(g, count, inner, width, 105, 120) for _ in range(2))
    weights = torch.rand(tokens, slots, generator=g) * 2.5
    return Case(x, w1, w3, fp4(g, count, width, inner, 110, 130), experts, weights, exact)


def values_fp8(codes: Tensor, scales: Tensor) -> Tensor:
    return E4M3_VALUES[codes.int()] * scale_value(scales).repeat_interleave(128, -1)[..., : codes.shape[-1]]


def values_fp4(packed: Tensor, scales: Tensor) -> Tensor:
    value = torch.stack([E2M1[(packed & 15).int()], E2M1[(packed >> 4).int()]], -1).flatten(-2)
    return value * scale_value(scales).repeat_interleave(32, -1)[..., : value.shape[-1]]


def live_pairs(experts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Numbers, tokens and experts of the pairs that are no padding."""
    pair = (experts.flatten() >= 0).nonzero().flatten()
    return pair, pair // experts.shape[1], experts.flatten()[pair].long()


def product(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """float64 x [p, k] by its own w [p, n, k], and the error of float32 sums in any order, cut or rounded."""
    bound = gamma(2 * x.shape[-1]) * torch.einsum("pk,pnk->pn", x.abs(), w.abs())
    return torch.einsum("pk,pnk->pn", x, w), bound


def swiglu(gate: Tensor, up: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Definition in float64; an exponential of two ulps and a rounded argument, and six roundings."""
    a = gate.clamp(max=LIMIT)
    want = a * torch.sigmoid(a) * up.clamp(-LIMIT, LIMIT) * weight
    return want, (gamma(12) + 2 * gamma(1) * a.abs()) * want.abs()


def by_128(x: Tensor, fill: float) -> Tensor:
    return torch.nn.functional.pad(x.double(), (0, -x.shape[1] % 128), value=fill).unflatten(1, (-1, 128))


def check_quantized(codes: Tensor, scales: Tensor, want: Tensor, bound: Tensor, sure: Tensor) -> None:
    """Codes legal for the scale they came with where the value is sure, and scales where its whole block is."""
    scale = scale_value(scales).repeat_interleave(128, 1)[:, : codes.shape[1]]
    assert not (illegal_e4m3(codes, want / scale, bound / scale) & sure).any()
    low, high = by_128(want.abs() - bound, 0).amax(2), by_128(want.abs() + bound, 0).amax(2)
    legal = (scale_byte(low) <= scales) & (scales <= scale_byte(high))
    assert legal[by_128(sure, 1).bool().all(2)].all()


def check_up(c: Case, h: Tensor, h_scales: Tensor) -> float:
    """The share of values whose bfloat16 products are the same for every legal sum; those are held to their codes."""
    pair, token, expert = live_pairs(c.experts)
    x = values_fp8(*c.x)[token]
    ends = []
    for w in (c.w1, c.w3):
        value, error = product(x, values_fp4(*w)[expert])
        error *= not c.exact
        ends += [bf16(value - error), bf16(value + error)]
    sure = (ends[0] == ends[1]) & (ends[2] == ends[3])
    want, bound = swiglu(ends[0], ends[2], c.weights.flatten()[pair, None].double())
    check_quantized(h[pair], h_scales[pair], want, bound, sure)
    return sure.double().mean().item()


@given(st.integers(1, 60), st.integers(1, 6), st.integers(1, 20), st.sampled_from([1, 4, 16]), st.integers(0, 99))
def test_plan_names_every_pair_once_in_a_block_of_its_expert(tokens, slots, count, height, seed):
    g = torch.Generator().manual_seed(seed)
    experts = torch.stack([torch.randperm(count, generator=g)[: min(slots, count)] for _ in range(tokens)]).int()
    experts[torch.rand(tokens, generator=g) < 0.2] = -1
    check_plan(plan_experts(experts, count, height), experts)


def check_plan(plan: ExpertPlan, experts: Tensor) -> None:
    pair, token, expert = live_pairs(experts)
    named = plan.rows[plan.rows >= 0].long()
    assert torch.equal(named, pair[torch.argsort(expert, stable=True)])  # ascending expert, then token
    owner = plan.block_expert[:, None].expand_as(plan.rows)[plan.rows >= 0].long()
    assert torch.equal(owner, experts.flatten()[named].long())
    used = plan.block_expert >= 0
    assert ((plan.rows >= 0).any(1) == used).all() and (plan.rows[used][:, 0] >= 0).all()
    for t in range(experts.shape[0]):
        row = plan.summands[t][plan.summands[t] >= 0].long()
        assert set(row.tolist()) == set(pair[token == t].tolist())
        assert (experts.flatten()[row].diff() > 0).all()


@pytest.mark.parametrize(
    "edit",
    [
        ("(sizes[:-1] + height - 1) // height", "sizes[:-1] // height + 1"),  # a block too many where all are full
        ("first_row = torch.cat([ends.new_zeros(1), ends])", "first_row = torch.cat([ends, ends[-1:]])"),
        ("torch.argsort(experts, dim=1)", "torch.arange(slots).expand(tokens, -1)"),  # slots in the order of scores
        ("right=True", "right=False"),
    ],
)
def test_planted_mistakes_in_the_plan_are_seen(tmp_path, edit):
    wrong = mutant(plan_file, tmp_path, edit).plan_experts
    experts = torch.tensor([[1, 0], [0, 1], [2, 1], [-1, -1], [1, 3]], dtype=torch.int32)
    with pytest.raises((AssertionError, RuntimeError, IndexError)):
        check_plan(wrong(experts, 5, 2), experts)


def test_plan_of_no_tokens_and_of_padding_alone():
    assert plan_experts(torch.empty(0, 3, dtype=torch.int32), 8, 16).rows.shape == (0, 16)
    plan = plan_experts(torch.full((5, 3), -1, dtype=torch.int32), 8, 16)
    assert (plan.rows == -1).all() and (plan.block_expert == -1).all() and (plan.summands == -1).all()


SHAPES = [(1, 1, 1, 128, 128), (9, 3, 8, 256, 128), (40, 2, 3, 200, 72), (7, 6, 7, 160, 136)]


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
    h = quantize_activation(uneven(torch.Generator().manual_seed(1), c.experts.numel(), c.w2[0].shape[2] * 2).bfloat16())
    pair, _, expert = live_pairs(c.experts)
    want, bound = product(values_fp8(*h)[pair], values_fp4(*c.w2)[expert])
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


@pytest.mark.parametrize("width", [1, 128, 200, 520])
@pytest.mark.parametrize("tiles", [None, swiglu_file.Tiles(ROWS=2, GROUPS=1)])
def test_swiglu_of_the_shared_expert(width, tiles):
    check_swiglu(lambda *a: swiglu_quantize(*a, tiles=tiles), width)


def check_swiglu(kernel, width: int) -> None:
    """Values around both clamps, far beyond them, and a row below the amax floor; views of one wide product."""
    g = torch.Generator().manual_seed(0)
    both = (torch.randn(19, 2 * width, generator=g) * 3).bfloat16()
    both[1], both[2] = both[1] * 30, both[2] * 1e-4
    both[3, ::3] = torch.tensor(LIMIT).bfloat16()
    gate, up = both[:, :width], both[:, width:]
    want, bound = swiglu(gate.double(), up.double(), torch.ones(19, 1).double())
    check_quantized(*kernel(gate, up, LIMIT), want, bound, torch.ones_like(want, dtype=torch.bool))


def test_swiglu_keeps_what_is_no_number():
    gate, up = torch.ones(3, 128).bfloat16(), torch.ones(3, 128).bfloat16()
    gate[0, 5], up[1, 7] = torch.nan, torch.nan
    codes, scales = swiglu_quantize(gate, up, LIMIT)
    assert scales[:, 0].tolist()[:2] == [255, 255] and scales[2, 0] != 255
    assert E4M3_VALUES[codes[:2].int()].isnan().all()


def test_sum_is_in_ascending_order_of_experts():
    """Magnitudes far apart: another order gives other bits."""
    g = torch.Generator().manual_seed(0)
    y, shared = uneven(g, 60, 300, spread=12), uneven(g, 20, 300, spread=12)
    experts = torch.stack([torch.randperm(9, generator=g)[:3] for _ in range(20)]).int()
    check_sum(sum_experts, y, experts, shared)


def check_sum(kernel, y: Tensor, experts: Tensor, shared: Tensor) -> None:
    summands = plan_experts(experts, 9, 16).summands
    want = torch.zeros_like(shared)
    for e in range(9):
        token, slot = (experts == e).nonzero(as_tuple=True)
        want[token] += y[token * 3 + slot]
    assert torch.equal(kernel(y, summands, shared), (want + shared).bfloat16())


@pytest.mark.parametrize(
    "edit",
    [
        ("t * K + k", "t * K + K - 1 - k"),
        ("range(K)", "range(K - 1)"),
        ("total += tl.load(shared", "total -= tl.load(shared"),
    ],
)
def test_planted_mistakes_in_the_sum_are_seen(tmp_path, edit):
    g = torch.Generator().manual_seed(0)
    y, shared = uneven(g, 60, 300, spread=12), uneven(g, 20, 300, spread=12)
    experts = torch.stack([torch.randperm(9, generator=g)[:3] for _ in range(20)]).int()
    with pytest.raises(AssertionError):
        check_sum(on_device(mutant(sum_file, tmp_path, edit).sum_experts), y, experts, shared)


@pytest.mark.parametrize(
    "edit",
    [
        ("tl.where(gate > limit, limit, gate)", "tl.where(gate > limit, limit, tl.where(gate < -limit, -limit, gate))"),
        ("tl.where(gate > limit, limit, gate)", "gate"),
        ("tl.where(up < -limit, -limit, up)", "up"),
        ("gate / (1.0 + tl.exp(-gate))", "1 / (1.0 + tl.exp(-gate))"),
        ("g = tl.program_id(1) * GROUPS + tl", "g = tl"),
    ],
)
def test_planted_mistakes_in_swiglu_are_seen(tmp_path, edit):
    wrong = on_device(mutant(swiglu_file, tmp_path, edit).swiglu_quantize)
    with pytest.raises(AssertionError):
        check_swiglu(lambda *a: wrong(*a, tiles=swiglu_file.Tiles(ROWS=16, GROUPS=1)), 200)


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
        ("load_fp4(w3, w3_scale", "load_fp4(w1, w1_scale"),
        ("w3_scale += expert * w3_scale_stride", "w3_scale += 0"),
        ("(byte_at < K // 2)", "(byte_at < K // 2 - 1)"),
        ("e4m3_up(code) * scale[:, None]", "e4m3_up(code)"),
        ("STEP), up)", "STEP), tl.zeros((ROWS, COLS), tl.float32))"),
    ],
)
def test_planted_mistakes_in_gate_up_are_seen(tmp_path, edit):
    wrong = with_plan(mutant(experts_file, tmp_path, edit).expert_gate_up)
    c = case(5, 3, 3, 200, 136)
    with pytest.raises(AssertionError):
        check_up(c, *wrong(*c.up_args, tiles=replace(SMALL, STEP=64)))
