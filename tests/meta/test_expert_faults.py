"""Planted faults in router and experts: each is caught, in the right op, at the right place."""

from __future__ import annotations

import math

import pytest
import torch
from judge_cases import failing, only, run, run_layer
from kernel_cases import mutant

from optimized.kernels import experts as experts_file
from optimized.kernels import router as router_file
from optimized.kernels import swiglu as swiglu_file
from parity import experts, ops

SCORED, HASHED = 4, 0  # layers of mini
NAMES = (
    "ffn.gate.scores", "ffn.gate.experts", "ffn.experts.h", "ffn.experts.w2",
    "ffn.shared_experts.w2.input", "ffn.shared_experts.w2", "ffn.out",
)  # fmt: skip


@pytest.mark.parametrize("layer", [SCORED, HASHED])
@pytest.mark.parametrize("phases", [("prefill", "chunk"), ("decode", "verify")])
def test_the_clean_run_passes(layer, phases):
    judged = run_layer(layer, [ops.BY_NAME[n] for n in NAMES], phases, (7, 23))
    assert not failing(judged)
    assert {j.op.name for j in judged if any(v.elements for v in j.verdicts)} == set(NAMES)


@pytest.mark.parametrize(
    ("edit", "found"),
    [
        (("tl.sqrt(softplus)", "softplus"), "ffn.gate.scores"),
        ((") + offset", ")"), "ffn.gate.experts"),  # the bias does not choose
        (("[:, None] * scaling", "[:, None]"), "ffn.gate.experts"),
    ],
)
def test_faults_inside_the_router(tmp_path, monkeypatch, edit, found):
    wrong = mutant(router_file, tmp_path, edit)
    monkeypatch.setattr(experts, "router_scores", wrong.router_scores)
    monkeypatch.setattr(experts, "choose_experts", wrong.choose_experts)
    judged = failing(run(SCORED, *NAMES))
    assert found in judged and set(judged) <= {found, "ffn.gate.experts"}


def test_weights_that_carry_the_bias(monkeypatch):
    honest = experts.choose_experts

    def biased(scores, bias, k, scaling):
        return honest(scores + bias, torch.zeros_like(bias), k, scaling)

    monkeypatch.setattr(experts, "choose_experts", biased)
    assert {v.output for v in only(run(SCORED, *NAMES), "ffn.gate.experts")} == {"ffn.gate.weights"}


def test_a_token_id_that_looks_up_its_neighbours_experts(monkeypatch):
    honest = experts.look_up_experts
    monkeypatch.setattr(experts, "look_up_experts", lambda s, table, ids, scaling: honest(s, table, ids ^ 1, scaling))
    for v in only(run(HASHED, *NAMES), "ffn.gate.experts"):
        assert v.budget_used == math.inf and {"token", "slot"} <= set(v.worst)


@pytest.mark.parametrize(
    ("edit", "found"),
    [
        (("limit) * weight[:, None]", "limit)"), "ffn.experts.h"),  # no routing weight
        (("bf16_up(bf16_rn(gate)), bf16_up(bf16_rn(up))", "bf16_up(bf16_rn(up)), bf16_up(bf16_rn(gate))"), "ffn.experts.h"),
        (("w2 += expert * w2_stride", "w2 += 0 * w2_stride"), "ffn.experts.w2"),  # every expert has the first one's w2
    ],
)
def test_faults_inside_the_experts(tmp_path, monkeypatch, edit, found):
    wrong = mutant(experts_file, tmp_path, edit)
    monkeypatch.setattr(experts, "expert_gate_up", wrong.expert_gate_up)
    monkeypatch.setattr(experts, "expert_down", wrong.expert_down)
    for v in only(run(SCORED, *NAMES), found):
        assert {"expert", "slot", "position"} <= set(v.worst)


def test_a_gate_that_is_clamped_elsewhere(tmp_path, monkeypatch):
    wrong = mutant(swiglu_file, tmp_path, ("tl.where(gate > limit, limit, gate)", "tl.minimum(gate, 0.1)"))
    monkeypatch.setattr(experts, "swiglu_quantize", wrong.swiglu_quantize)
    only(run(SCORED, *NAMES), "ffn.shared_experts.w2.input")


def test_a_sum_that_leaves_out_the_shared_expert(monkeypatch):
    honest = experts.sum_experts
    monkeypatch.setattr(experts, "sum_experts", lambda y, s, shared, **more: honest(y, s, 0 * shared, **more))
    only(run(SCORED, *NAMES), "ffn.out")
