"""Around the experts' products: the plan, SwiGLU of the shared expert, the sum."""

from __future__ import annotations

import pytest
import torch
from expert_cases import LIMIT, check_quantized, live_pairs, sum_experts, swiglu, swiglu_quantize
from hypothesis import given
from hypothesis import strategies as st
from kernel_cases import E4M3_VALUES, mutant, on_device, uneven
from torch import Tensor

from optimized.kernels import expert_plan as plan_file
from optimized.kernels import expert_sum as sum_file
from optimized.kernels import swiglu as swiglu_file
from optimized.kernels.expert_plan import ExpertPlan, plan_experts


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
