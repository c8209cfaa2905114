"""Ops of the experts: scores, choice and weights, both halves of an expert, the shared one, and the sum.

Candidate and twin side by side. Source: docs/judge.md §7.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from optimized.kernels.expert_plan import ExpertPlan, plan_experts
from optimized.kernels.expert_sum import INTERPRETER as SUM_TILES
from optimized.kernels.expert_sum import sum_experts
from optimized.kernels.experts import block_height, expert_down, expert_gate_up
from optimized.kernels.gemm_fp8 import gemm_fp8
from optimized.kernels.launch import power_of_two
from optimized.kernels.router import choose_experts, look_up_experts, router_scores
from optimized.kernels.swiglu import Tiles as SwigluTiles
from optimized.kernels.swiglu import swiglu_quantize
from reference import formats
from reference import moe as reference

from . import storage
from .budget import codes, gates
from .budget.bounded import Bounded, dot, exact, rounded
from .candidates import ACTIVATION_BLOCK, tall, there
from .judge import Bytes, Codes, Dense, Places, Selection, Stored
from .step import Step
from .twins import Expectation, Expectations, StoredOutputs, product


def _input(step: Step) -> Tensor:
    return step.capture["ffn_norm"]


def scores(step: Step, op: str) -> dict[str, Stored]:
    gate = storage.exactly_bf16(step.block.ffn.gate.weight)
    return {op: router_scores(*there(_input(step).to(torch.bfloat16), gate)).cpu()}


def scores_expected(step: Step, op: str, stored: StoredOutputs) -> Expectations:
    """Product, softplus and root as one span."""
    logits = dot(exact(_input(step)), exact(step.block.ffn.gate.weight), step.how)
    score = gates.sqrt_softplus(logits, step.how)
    return {op: Expectation(Dense(score, "f32", "te", fair=False), step.places)}


def _scores(step: Step) -> Tensor:
    """Scores that the choice is made from, float32 [t, e]: the candidate's own where there are any."""
    own = step.stored.get("ffn.gate.scores")
    return own if isinstance(own, Tensor) else step.capture["ffn.gate.scores"].float()


def choice(step: Step, op: str) -> dict[str, Stored]:
    """Experts by score or by token id, and their weights; the experts once more for the question of the set."""
    ffn = step.block.ffn
    if ffn.tid2eid is not None:
        experts, weights = look_up_experts(*there(_scores(step), ffn.tid2eid, step.batch.ids), ffn.scaling)
    else:
        assert ffn.bias is not None
        experts, weights = choose_experts(*there(_scores(step), ffn.bias.float()), ffn.top_k, ffn.scaling)
    out: dict[str, Stored] = {op: experts.cpu(), "ffn.gate.weights": weights.cpu()}
    return out if ffn.tid2eid is not None else out | {f"{op}.set": experts.cpu()}


def choice_expected(step: Step, op: str, stored: StoredOutputs) -> Expectations:
    """To the bit by the float32 scores that went in; by the twin's own, a gap within both bounds excuses another set."""
    ffn, how, given = step.block.ffn, step.how, _scores(step)
    if ffn.tid2eid is not None:
        best = ffn.tid2eid[step.batch.ids]
    else:
        assert ffn.bias is not None
        best = reference.choose_experts(given, ffn.bias.float(), ffn.top_k)
    experts = stored[op]
    assert isinstance(experts, Tensor)
    chosen = experts.clamp(0, given.shape[1] - 1).long()
    weights = gates.normalised(exact(given.double().gather(1, chosen)), ffn.scaling, how)
    out = {
        op: Expectation(Bytes(best.int(), "tk"), step.places),
        "ffn.gate.weights": Expectation(Dense(weights, "f32", "tk"), step.places),
    }
    if ffn.bias is not None and f"{op}.set" in stored:
        logits = dot(exact(_input(step)), exact(ffn.gate.weight), how)
        score = gates.sqrt_softplus(logits, how)
        rank = rounded(Bounded(score.value + ffn.bias, score.bound), how.u)
        everyone = torch.full((len(given),), given.shape[1], dtype=torch.int32)
        out[f"{op}.set"] = Expectation(Selection(rank, everyone, ffn.top_k), step.places)
    return out


@dataclass(frozen=True)
class Routed:
    """What the routed experts of the tokens get: input codes and scales, experts int32 [t, k] as numbers among `present`,
    weights float32 [t, k], and the plan."""

    x_codes: Tensor
    x_scales: Tensor
    experts: Tensor
    weights: Tensor
    present: list[int]
    plan: ExpertPlan


def routed(step: Step) -> Routed:
    """Input and routing of the step's tokens, as the twin has them."""
    x_codes, x_scales = formats.quantize_e4m3(_input(step).float(), ACTIVATION_BLOCK)
    experts = step.capture["ffn.gate.experts"]
    present, local = experts.unique(return_inverse=True)
    weights = step.capture["ffn.gate.weights"].float().contiguous()
    plan = plan_experts(local.int().contiguous(), len(present), block_height())
    return Routed(x_codes, x_scales, local.int(), weights, present.tolist(), plan)


def matrices(step: Step, present: list[int], *parts: str) -> list[Tensor]:
    """Codes and scale bytes of these matrices of the experts at hand, [e, ...] each."""
    experts = [step.block.ffn.expert(e) for e in present]
    return [x for part in parts for x in storage.side_by_side([getattr(e, part) for e in experts])]


def on_device(plan: ExpertPlan) -> ExpertPlan:
    return ExpertPlan(*there(plan.rows, plan.block_expert, plan.summands))


def gate_up(step: Step, op: str) -> dict[str, Stored]:
    """w1, w3, SwiGLU with the routing weight, and the quantiser, in one kernel -> a row a pair of token and slot."""
    r = routed(step)
    *weights, _, _ = matrices(step, r.present, "w1", "w3", "w2")  # codes go out for w2 only if it takes codes
    h = expert_gate_up(*there(r.x_codes, r.x_scales, *weights, r.weights), on_device(r.plan), step.block.ffn.limit)
    return {"ffn.experts.h": (h[0].cpu(), h[1].cpu())}


def pair_places(step: Step, r: Routed) -> Places:
    """Token, sequence, position, slot and expert of every pair."""
    slots = r.experts.shape[1]
    labels = {name: values.repeat_interleave(slots) for name, values in step.places.labels.items()}
    number = torch.tensor(r.present)[r.experts.flatten().long()]
    return Places(labels | {"slot": torch.arange(r.experts.numel()) % slots, "expert": number})


def by_expert(r: Routed, width: int) -> tuple[Bounded, list[tuple[int, Tensor]]]:
    """Room for a row a pair, and each expert at hand with its pairs."""
    empty = torch.zeros(2, r.experts.numel(), width, dtype=torch.float64)
    flat = r.experts.flatten()
    return Bounded(*empty), [(e, (flat == i).nonzero().flatten()) for i, e in enumerate(r.present)]


def gate_up_expected(step: Step, op: str, stored: StoredOutputs) -> Expectations:
    """Products on the codes, each rounded to bfloat16 on the way, then SwiGLU, weight and quantiser as one span."""
    r, ffn, how = routed(step), step.block.ffn, step.how
    x = exact(codes.dequantize(r.x_codes, r.x_scales, ACTIVATION_BLOCK))
    out, parts = by_expert(r, ffn.expert(r.present[0]).w1.out_features)
    for e, pairs in parts:
        expert, mine = ffn.expert(e), x[pairs // r.experts.shape[1]]
        gate, up = (gates.to_bf16(product(mine, w, step)) for w in (expert.w1, expert.w3))
        weight = r.weights.flatten()[pairs].double()[:, None]
        h = gates.swiglu(gate, up, ffn.limit, weight, how)
        out.value[pairs], out.bound[pairs] = h.value, h.bound
    expected = Codes(out, ACTIVATION_BLOCK, formats.E4M3_AMAX_FLOOR, "td")
    return {"ffn.experts.h": Expectation(expected, pair_places(step, r))}


def down_input(step: Step, r: Routed) -> tuple[Tensor, Tensor]:
    """Codes and scales of w2's input, a row a pair: the candidate's own where it made them."""
    own = step.stored.get("ffn.experts.h")
    if isinstance(own, tuple):
        return own
    h = torch.zeros(r.experts.numel(), step.block.ffn.expert(r.present[0]).w1.out_features)
    x = codes.dequantize(r.x_codes, r.x_scales, ACTIVATION_BLOCK)
    for e, pairs in by_expert(r, 1)[1]:
        expert, mine = step.block.ffn.expert(e), x[pairs // r.experts.shape[1]]
        gate, up = (formats.round_bf16(w.apply(mine)) for w in (expert.w1, expert.w3))
        h[pairs] = (reference.clamped_swiglu(gate, up, step.block.ffn.limit) * r.weights.flatten()[pairs, None]).float()
    return formats.quantize_e4m3(h, ACTIVATION_BLOCK)


def down(step: Step, op: str) -> dict[str, Stored]:
    r = routed(step)
    weights = matrices(step, r.present, "w2")
    return {op: expert_down(*there(*down_input(step, r), *weights), on_device(r.plan)).cpu()}


def down_expected(step: Step, op: str, stored: StoredOutputs) -> Expectations:
    r = routed(step)
    return {op: Expectation(Dense(_outputs(step, r), "f32", "td"), pair_places(step, r))}


def _outputs(step: Step, r: Routed) -> Bounded:
    """Products of w2 with the codes that went in, a row a pair."""
    h = exact(codes.dequantize(*down_input(step, r), ACTIVATION_BLOCK))
    out, parts = by_expert(r, step.config.hidden_size)
    for e, pairs in parts:
        y = product(h[pairs], step.block.ffn.expert(e).w2, step)
        out.value[pairs], out.bound[pairs] = y.value, y.bound
    return out


def _shared(step: Step) -> tuple[Tensor, Tensor]:
    return step.capture["ffn.shared_experts.w1"], step.capture["ffn.shared_experts.w3"]


def shared_codes(step: Step, op: str) -> dict[str, Stored]:
    """SwiGLU of the shared expert, straight into codes."""
    storage.packed(step.linear("ffn.shared_experts.w2"))  # of another storage the input is not quantised
    gate, up = (x.to(torch.bfloat16) for x in _shared(step))
    groups = power_of_two(-(-gate.shape[1] // ACTIVATION_BLOCK))
    tiles = tall(SwigluTiles(ROWS=16, GROUPS=min(groups, 64)), len(gate), min(gate.shape[1], 64 * ACTIVATION_BLOCK))
    h = swiglu_quantize(*there(gate, up), step.block.ffn.limit, tiles=tiles)
    return {op: (h[0].cpu(), h[1].cpu())}


def shared_expected(step: Step, op: str, stored: StoredOutputs) -> Expectations:
    gate, up = (exact(x) for x in _shared(step))
    h = gates.swiglu(gate, up, step.block.ffn.limit, None, step.how)
    return {op: Expectation(Codes(h, ACTIVATION_BLOCK, formats.E4M3_AMAX_FLOOR, "td"), step.places)}


def shared_down(step: Step, op: str) -> dict[str, Stored]:
    """The shared expert's w2, which stays float32 for the sum."""
    weight = storage.packed(step.linear(op))
    return {op: gemm_fp8(*there(*shared_input(step), *weight), dtype=torch.float32).cpu()}


def shared_input(step: Step) -> tuple[Tensor, Tensor]:
    own = step.stored.get("ffn.shared_experts.w2.input")
    if isinstance(own, tuple):
        return own
    return formats.quantize_e4m3(step.capture["ffn.shared_experts.h"].float(), ACTIVATION_BLOCK)


def shared_down_expected(step: Step, op: str, stored: StoredOutputs) -> Expectations:
    x = exact(codes.dequantize(*shared_input(step), ACTIVATION_BLOCK))
    return {op: Expectation(Dense(product(x, step.linear(op), step), "f32", "td"), step.places)}


def _summands(step: Step) -> tuple[Routed, Tensor, Tensor]:
    """Outputs of the routed experts, a row a pair, and of the shared one, of every token; float32."""
    r = routed(step)
    own, shared = step.stored.get("ffn.experts.w2"), step.stored.get("ffn.shared_experts.w2")
    y = own if isinstance(own, Tensor) else _outputs(step, r).value.float()
    rest = shared if isinstance(shared, Tensor) else step.capture["ffn.shared_experts.w2"].float()
    return r, y, rest.contiguous()


def total(step: Step, op: str) -> dict[str, Stored]:
    r, y, shared = _summands(step)
    width = shared.shape[1]
    tiles = tall(replace(SUM_TILES, COLS=power_of_two(width)), len(shared), width)
    return {op: sum_experts(*there(y, r.plan.summands, shared), tiles=tiles).cpu()}


def total_expected(step: Step, op: str, stored: StoredOutputs) -> Expectations:
    """A float32 sum of k + 1 numbers, which are exact here, in any order."""
    r, y, shared = _summands(step)
    terms = torch.cat([y.double().unflatten(0, r.experts.shape), shared.double()[:, None]], 1)
    bound = (terms.shape[1]) * step.how.u * terms.abs().sum(1)
    return {op: Expectation(Dense(Bounded(terms.sum(1), bound), "bf16", "td"), step.places)}
