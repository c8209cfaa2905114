"""Experts of one layer. Wiring of kernels only. Source: docs/pool.md §6 and §11."""

from __future__ import annotations

import torch
from torch import Tensor

from .kernels.expert_plan import in_ascending_order, plan_experts
from .kernels.expert_sum import sum_experts
from .kernels.experts import block_height, expert_down, expert_gate_up
from .kernels.gemm_fp8 import gemm_fp8
from .kernels.router import choose_experts, look_up_experts, router_scores
from .kernels.swiglu import swiglu_quantize
from .tiles import ModelTiles
from .weights import LayerWeights, MoEWeights, SharedExpert, Weights, whole_blocks


def moe(
    x: Tensor, codes: Tensor, scales: Tensor, ids: Tensor, layer: LayerWeights, weights: Weights, tiles: ModelTiles
) -> Tensor:
    """Normed input bfloat16 [t, D], its quantised form and token ids int64 [t] -> bfloat16 [t, D]."""
    config = weights.config
    chosen, share = route(x, ids, layer.ffn, config.num_experts_per_tok, config.routed_scaling_factor)
    first, *others = weights.pieces(layer.name, chosen)
    routed = routed_experts(codes, scales, first, share, layer.name, weights)
    for part in others:  # a pair is in one part, and its bits do not depend on the others
        y = routed_experts(codes, scales, part, share, layer.name, weights)
        routed = torch.where(part.view(-1, 1) >= 0, y, routed)
    shared = shared_expert(codes, scales, layer.ffn.shared, config.swiglu_limit)
    return sum_experts(routed, in_ascending_order(chosen), shared, tiles.expert_sum)


def routed_experts(codes: Tensor, scales: Tensor, chosen: Tensor, share: Tensor, layer: str, weights: Weights) -> Tensor:
    """float32 [t*k, D], a row a pair; undefined where `chosen` [t, k] is -1."""
    experts, chosen = weights.experts(layer, chosen)
    plan = plan_experts(chosen, experts.count, block_height())
    h = expert_gate_up(
        codes, scales, experts.w1.codes, experts.w1.scales, experts.w3.codes, experts.w3.scales,
        share, plan, weights.config.swiglu_limit,
    )  # fmt: skip
    return expert_down(*h, experts.w2.codes, experts.w2.scales, plan)


def route(x: Tensor, ids: Tensor, w: MoEWeights, top_k: int, scaling: float) -> tuple[Tensor, Tensor]:
    """The experts of each token, int32 [t, k], and their weights, float32 [t, k]."""
    scores = router_scores(x, w.gate)
    if w.tid2eid is not None:
        return look_up_experts(scores, w.tid2eid, ids, scaling)
    assert w.bias is not None
    return choose_experts(scores, w.bias, top_k, scaling)


def shared_expert(codes: Tensor, scales: Tensor, w: SharedExpert, limit: float) -> Tensor:
    """float32 [t, D]."""
    gate_up = gemm_fp8(codes, scales, w.gate_up.codes, w.gate_up.scales)  # [t, i | gap | i]
    h = swiglu_quantize(gate_up[:, : w.width], gate_up[:, whole_blocks(w.width) :], limit)
    return gemm_fp8(*h, w.down.codes, w.down.scales, dtype=torch.float32)
