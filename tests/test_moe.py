"""Routing and experts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from bounds import assert_within, rounding_bound
from hypothesis import strategies as st
from strategies import TINY, adversarial, holds, normal, refuted, seeds, tiny_model, tokens
from torch import Tensor

from reference.moe import MoE, choose_experts, clamped_swiglu, router_scores, routing_weights
from reference.rounding import Sites

SITES = Sites()
E, K, SCALING = 9, 3, 1.75


def test_scores_are_the_root_of_softplus() -> None:
    x, gate = normal(0, 5, 8), 4 * normal(1, E, 8)
    want = torch.sqrt(torch.log1p(torch.exp(x @ gate.T)))
    assert_within(rounding_bound(64, want) + torch.exp(torch.tensor(-20.0)).item(), router_scores(x @ gate.T), want)


def chooses_by_biased_score(choose: Callable[..., Tensor], seed: int) -> None:
    """The k largest of score + bias, the lower number of equal ones (many are)."""
    g = torch.Generator().manual_seed(seed)
    scores, bias = (torch.randint(0, 4, shape, generator=g).double() for shape in ((6, E), (E,)))
    for t, chosen in enumerate(choose(scores, bias, K).tolist()):
        total = (scores[t] + bias).tolist()
        assert chosen == sorted(range(E), key=lambda e, total=total: (-total[e], e))[:K]


def without_bias(scores: Tensor, bias: Tensor, k: int) -> Tensor:
    return choose_experts(scores, torch.zeros_like(bias), k)


def higher_number_wins(scores: Tensor, bias: Tensor, k: int) -> Tensor:
    return E - 1 - choose_experts(scores.flip(1), bias.flip(0), k)


def test_choice() -> None:
    holds(chooses_by_biased_score, seeds, choose_experts)


@pytest.mark.parametrize("wrong", [without_bias, higher_number_wins])
def test_choice_sees(wrong: Callable[..., Tensor]) -> None:
    refuted(chooses_by_biased_score, seeds, wrong)


Weigh = Callable[[Tensor, Tensor, Tensor, float], Tensor]


def unbiased(scores: Tensor, bias: Tensor, experts: Tensor, scaling: float) -> Tensor:
    return routing_weights(scores, experts, scaling)


def weights_sum_to_scaling(weigh: Weigh, seed: int) -> None:
    scores = normal(seed, 6, E).abs() + 0.01
    experts = torch.stack([torch.randperm(E, generator=torch.Generator().manual_seed(seed + t))[:K] for t in range(6)])
    total = weigh(scores, normal(seed, E), experts, SCALING).sum(1)
    assert_within(rounding_bound(2 * K, total), total, torch.full_like(total, SCALING))


def bias_only_chooses(weigh: Weigh, seed: int) -> None:
    """For given experts the weights are those of the scores, in proportion, whatever the bias."""
    scores, bias = normal(seed, 6, E).abs() + 0.01, normal(seed + 1, E)
    experts = choose_experts(scores, bias, K)
    weights = weigh(scores, bias, experts, SCALING)
    ratio = weights[:, :1] * scores.gather(1, experts)
    assert_within(rounding_bound(8, ratio), ratio, weights * scores.gather(1, experts[:, :1]))


def bias_leaks(scores: Tensor, bias: Tensor, experts: Tensor, scaling: float) -> Tensor:
    return routing_weights(scores + bias, experts, scaling)


def unscaled(scores: Tensor, bias: Tensor, experts: Tensor, scaling: float) -> Tensor:
    return routing_weights(scores, experts, 1.0)


def over_all_experts(scores: Tensor, bias: Tensor, experts: Tensor, scaling: float) -> Tensor:
    return scores.gather(1, experts) / scores.sum(1, keepdim=True) * scaling


def test_weights() -> None:
    holds(weights_sum_to_scaling, seeds, unbiased)
    holds(bias_only_chooses, seeds, unbiased)


@pytest.mark.parametrize(
    ("law", "wrong"),
    [(weights_sum_to_scaling, unscaled), (weights_sum_to_scaling, over_all_experts), (bias_only_chooses, bias_leaks)],
)
def test_weights_see(law: Callable[..., None], wrong: Weigh) -> None:
    refuted(law, seeds, wrong)


# ---- the clamp

LIMIT = 0.6
Swiglu = Callable[[Tensor, Tensor, float], Tensor]


def plain_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return gate / (1 + torch.exp(-gate)) * up


def inside_the_limit_nothing_is_clamped(swiglu: Swiglu, seed: int) -> None:
    """gate <= limit (down to any depth) and |up| <= limit: the plain formula."""
    gate, up = normal(seed, 64).clamp(max=LIMIT) * 3, normal(seed + 1, 64).clamp(-LIMIT, LIMIT)
    gate = torch.where(gate > LIMIT, LIMIT, gate)
    want = plain_swiglu(gate, up)
    assert_within(rounding_bound(8, want), swiglu(gate, up, LIMIT), want)


def outside_it_saturates(swiglu: Swiglu, seed: int) -> None:
    """Beyond the limit nothing changes any more: gate above, up on both sides."""
    gate, up = LIMIT + normal(seed, 64).abs(), (LIMIT + normal(seed + 1, 64).abs()) * normal(seed + 2, 64).sign()
    want = plain_swiglu(torch.full_like(gate, LIMIT), LIMIT * up.sign())
    assert_within(rounding_bound(8, want), swiglu(gate, up, LIMIT), want)


def both_sides(gate: Tensor, up: Tensor, limit: float) -> Tensor:
    return clamped_swiglu(gate.clamp(min=-limit), up, limit)


def unclamped(gate: Tensor, up: Tensor, limit: float) -> Tensor:
    return plain_swiglu(gate, up)


def up_from_above_only(gate: Tensor, up: Tensor, limit: float) -> Tensor:
    return plain_swiglu(gate.clamp(max=limit), up.clamp(max=limit))


def clamped_after_silu(gate: Tensor, up: Tensor, limit: float) -> Tensor:
    return torch.nn.functional.silu(gate).clamp(max=limit) * up.clamp(-limit, limit)


def test_clamp() -> None:
    holds(inside_the_limit_nothing_is_clamped, seeds, clamped_swiglu)
    holds(outside_it_saturates, seeds, clamped_swiglu)


@pytest.mark.parametrize(
    ("law", "wrong"),
    [
        (inside_the_limit_nothing_is_clamped, both_sides),
        (outside_it_saturates, unclamped),
        (outside_it_saturates, up_from_above_only),
        (outside_it_saturates, clamped_after_silu),
    ],
)
def test_clamp_sees(law: Callable[..., None], wrong: Swiglu) -> None:
    refuted(law, seeds, wrong)


# ---- the module

Forward = Callable[[MoE, Tensor, Tensor], Tensor]


def forward(moe: MoE, x: Tensor, ids: Tensor) -> Tensor:
    return moe(x, ids, SITES)


def is_the_weighted_sum(of: Forward, case: tuple[int, int]) -> None:
    """Routed experts times their weights, plus the shared one, unweighted and clamped alike. Layer 0 is a hash layer."""
    seed, layer = case
    moe, x, ids = tiny_model().loader.block(layer).ffn, adversarial(seed, 5, TINY.hidden_size) / 8, tokens(5, seed)
    experts, weights = moe.route(x, ids, SITES)
    want = []
    for t in range(5):
        y = expert_by_hand(moe.shared, x[t], moe.limit)
        for e, w in zip(experts[t].tolist(), weights[t], strict=True):
            y = y + w * expert_by_hand(moe.expert(e), x[t], moe.limit)
        want.append(y)
    assert_within(rounding_bound(1000, torch.stack(want)), of(moe, x, ids), torch.stack(want))


def expert_by_hand(expert, x: Tensor, limit: float) -> Tensor:
    w1, w2, w3 = (linear.dense(torch.float64) for linear in (expert.w1, expert.w2, expert.w3))
    return w2 @ (plain_swiglu((w1 @ x).clamp(max=limit), (w3 @ x).clamp(-limit, limit)))


def shared_scaled(moe: MoE, x: Tensor, ids: Tensor) -> Tensor:
    return moe(x, ids, SITES) + (moe.scaling - 1) * moe.shared(x, None, moe.limit, SITES)


def shared_unclamped(moe: MoE, x: Tensor, ids: Tensor) -> Tensor:
    return moe(x, ids, SITES) + moe.shared(x, None, 1e9, SITES) - moe.shared(x, None, moe.limit, SITES)


def gate_and_up_swapped(moe: MoE, x: Tensor, ids: Tensor) -> Tensor:
    return replace(moe, shared=replace(moe.shared, w1=moe.shared.w3, w3=moe.shared.w1))(x, ids, SITES)


layers = st.tuples(seeds, st.sampled_from([0, 1]))


def test_module() -> None:
    holds(is_the_weighted_sum, layers, forward, examples=8)


@pytest.mark.parametrize("wrong", [shared_scaled, shared_unclamped, gate_and_up_swapped])
def test_module_sees(wrong: Forward) -> None:
    refuted(is_the_weighted_sum, layers, wrong, examples=8)


def test_hash_layers_route_by_token_alone() -> None:
    moe, ids = tiny_model().loader.block(0).ffn, tokens(8, 0)
    assert moe.tid2eid is not None
    for seed in range(3):
        experts, weights = moe.route(normal(seed, 8, TINY.hidden_size), ids, SITES)
        assert torch.equal(experts, moe.tid2eid[ids])
        assert_within(rounding_bound(8, weights), weights.sum(1), torch.full((8,), moe.scaling, dtype=torch.float64))


def test_scored_layers_ignore_the_token() -> None:
    moe, x = tiny_model().loader.block(1).ffn, normal(0, 8, TINY.hidden_size)
    for a, b in zip(moe.route(x, tokens(8, 0), SITES), moe.route(x, tokens(8, 1), SITES), strict=True):
        assert torch.equal(a, b)


def test_the_weight_multiplies_before_w2() -> None:
    """In exact arithmetic it may stand anywhere; under a quantiser it changes what w2's input rounds to."""
    seen: dict[str, Tensor] = {}
    moe, x = tiny_model().loader.block(1).ffn, normal(0, 2, TINY.hidden_size)
    sites = Sites(tap=lambda name, value: seen.update({name: value}))
    expert, weight = moe.expert(0), torch.tensor([0.3, 1.1], dtype=torch.float64)
    expert(x, None, moe.limit, sites)
    plain = seen["w2.input"]
    expert(x, weight, moe.limit, sites)
    assert_within(rounding_bound(2, plain), seen["w2.input"], plain * weight[:, None])
