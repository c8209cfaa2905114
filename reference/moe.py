"""Mixture of experts: routing by score or by token id, clamped SwiGLU experts, one shared expert.

Source: docs/model.md §7.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import silu, softplus

from .linear import Linear, project_all
from .rounding import Sites

TOGETHER = 8  # experts whose products are one call: enough for all threads, few enough to be held at once


def router_scores(logits: Tensor) -> Tensor:
    """sqrt(softplus(x · gateᵀ)), given the product [t, e]."""
    return torch.sqrt(softplus(logits))


def choose_experts(scores: Tensor, bias: Tensor, k: int) -> Tensor:
    """[t, k] experts with the largest score + bias; the lower number wins a tie. The bias chooses, and does no more."""
    return torch.sort(scores + bias, dim=-1, descending=True, stable=True).indices[:, :k]


def routing_weights(scores: Tensor, experts: Tensor, scaling: float) -> Tensor:
    """[t, k]: the unbiased scores of the chosen experts, normalised to sum to `scaling`."""
    chosen = scores.gather(1, experts)
    return chosen / chosen.sum(-1, keepdim=True) * scaling


def clamped_swiglu(gate: Tensor, up: Tensor, limit: float) -> Tensor:
    """silu(gate) * up with the gate clamped from above only and up on both sides."""
    return silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)


@dataclass(frozen=True)
class Expert:
    """w1 (gate) and w3 (up) [I, D], w2 (down) [D, I]."""

    w1: Linear
    w2: Linear
    w3: Linear

    def __call__(self, x: Tensor, weight: Tensor | None, limit: float, sites: Sites) -> Tensor:
        """x [t, D] -> [t, D]. The routing weight [t] multiplies before w2, where it changes what w2's input rounds to."""
        return run_experts([self], [x], [weight], limit, [sites])[0]


def run_experts(experts: Sequence[Expert], xs: Sequence[Tensor], weights: Sequence[Tensor | None], limit: float,
                sites: Sequence[Sites]) -> list[Tensor]:  # fmt: skip
    """Each expert on its own tokens: x [t, D] and routing weights [t] -> [t, D]. Products of all are called together."""
    n = len(experts)
    into = [w for e in experts for w in (e.w1, e.w3)]
    wide = project_all(into, [x for x in xs for _ in range(2)], [at for at in sites for _ in range(2)], ["w1", "w3"] * n)
    hs = []
    for i, at in enumerate(sites):
        h, weight = clamped_swiglu(wide[2 * i], wide[2 * i + 1], limit), weights[i]
        hs.append(at("h", h if weight is None else h * weight[:, None]))
    return project_all([e.w2 for e in experts], hs, sites, ["w2"] * n)


@dataclass(frozen=True)
class MoE:
    """gate [e, D] with bias [e] (scored layers) or tid2eid [vocab, k] (hash layers); experts are fetched by number.

    `expect` hears the numbers of all experts of a call before the first is fetched.
    """

    gate: Linear
    bias: Tensor | None
    tid2eid: Tensor | None
    expert: Callable[[int], Expert]
    shared: Expert
    top_k: int
    scaling: float
    limit: float
    expect: Callable[[Sequence[int]], None] = lambda numbers: None

    def route(self, x: Tensor, ids: Tensor, sites: Sites) -> tuple[Tensor, Tensor]:
        """Inputs x [t, D] and token ids [t] -> experts and their weights, both [t, k]."""
        scores = sites("gate.scores", router_scores(self.gate.apply(x)))
        if self.tid2eid is not None:
            experts = self.tid2eid[ids]
        else:
            assert self.bias is not None
            experts = choose_experts(scores, self.bias, self.top_k)
        experts = sites("gate.experts", experts)
        return experts, sites("gate.weights", routing_weights(scores, experts, self.scaling))

    def __call__(self, x: Tensor, ids: Tensor, sites: Sites) -> Tensor:
        """x [t, D] -> [t, D]: routed experts summed in ascending number, the shared one last."""
        experts, weights = self.route(x, ids, sites)
        y = torch.zeros_like(x)
        chosen, counts = experts.unique(return_counts=True)
        numbers, places = chosen.tolist(), experts.flatten().argsort(stable=True)  # t·k + slot, by expert
        self.expect(numbers)
        of_expert = list(zip(numbers, places.split(counts.tolist()), strict=True))
        for i in range(0, len(numbers), TOGETHER):
            some = of_expert[i : i + TOGETHER]
            tokens = [at // self.top_k for _, at in some]
            xs = [x if len(token) == len(x) == 1 else x[token] for token in tokens]  # a single token is packed once for all
            of, sites_of = [weights.flatten()[at] for _, at in some], [sites.at("experts", e) for e, _ in some]
            outs = run_experts([self.expert(e) for e, _ in some], xs, of, self.limit, sites_of)
            for token, out in zip(tokens, outs, strict=True):
                y.index_add_(0, token, out)
        y += self.shared(x, None, self.limit, sites.at("shared_experts"))
        return sites("out", y)
