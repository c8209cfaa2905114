"""Router and experts: choice, weights, clamps, plan and sum."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from reference import formats

from ..change import edit, wrap
from ..fault import OWN, Fault, at

SCORES, CHOICE, H, W2, SHARED, SUM = (
    "ffn.gate.scores", "ffn.gate.experts", "ffn.experts.h", "ffn.experts.w2", "ffn.shared_experts.w2.input", "ffn.out",
)  # fmt: skip
ROUTER, EXPERTS, SWIGLU = "kernels.router", "kernels.experts", "kernels.swiglu"
PRODUCT = "clamped_swiglu(bf16_up(bf16_rn(gate)), bf16_up(bf16_rn(up)), limit)"
GATE = "gate = tl.where(gate > limit, limit, gate)"
UP = "up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))"
SILU = "return gate / (1.0 + tl.exp(-gate)) * up"
ROUTED = at("hca_scored", "decode", (3, 17))
Choose = Callable[..., tuple[Tensor, Tensor]]


def _gate_in_fp4(router_scores: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def coarse(x: Tensor, gate: Tensor, *rest: Any) -> Tensor:
        codes, scales = formats.quantize_e2m1(gate.float(), 32)
        return router_scores(x, formats.dequantize_blocks(formats.e2m1_decode(codes), scales, 32).bfloat16(), *rest)

    return coarse


def _without_bias(choose: Choose) -> Choose:
    return lambda scores, bias, *rest: choose(scores, 0 * bias, *rest)


def _one_more(choose: Choose) -> Choose:
    """A slot for the shared expert, which a routed one takes: weights are shared out over one more."""

    def wider(scores: Tensor, bias: Tensor, top_k: int, scaling: float) -> tuple[Tensor, Tensor]:
        experts, weights = choose(scores, bias, top_k + 1, scaling)
        return experts[:, :top_k].contiguous(), weights[:, :top_k].contiguous()

    return wider


def _weights_with_bias(choose: Choose) -> Choose:
    return lambda scores, bias, *rest: choose(scores + bias, torch.zeros_like(bias), *rest)


def _ids(change: Callable[[Tensor], Tensor]) -> Callable[[Choose], Choose]:
    return lambda look_up: lambda scores, table, ids, *rest: look_up(scores, table, change(ids), *rest)


def _without_shared(sum_experts: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda y, summands, shared, *rest, **kwargs: sum_experts(y, summands, 0 * shared, *rest, **kwargs)


FAULTS = (
    Fault("experts.limit-not-passed", "missing clamp", "vllm-project/vllm-ascend#14363", "S2",
          "routed experts run without the limit", H, edit(EXPERTS, (PRODUCT, PRODUCT.replace("limit", "1e30"))),
          at("hca_scored", "prefill", (36,)), also=("vllm-project/vllm-ascend#13615",)),
    Fault("experts.clamped-afterwards", "order", "vllm-project/vllm-ascend#9590", "S2",
          "the gate is clamped after its activation", H,
          edit(SWIGLU, (GATE, "pass"), (SILU, "gate = gate / (1.0 + tl.exp(-gate))\n"
                                              "    return tl.where(gate > limit, limit, gate) * up")),
          at("window", "prefill", (36,)), also=("vllm-project/vllm-ascend#9589",)),
    Fault("experts.gate-clamped-below", "missing clamp", "vllm-project/vllm-ascend#9590", "S2",
          "the gate is clamped on both sides", SHARED,
          edit(SWIGLU, (GATE, f"{GATE}; gate = tl.where(gate < -limit, -limit, gate)"), within=SWIGLU),
          at("window", "prefill", (36,))),
    Fault("experts.quantised-before-product", "order", "vllm-project/vllm-ascend#9590", "S2",
          "the activated gate is quantised before it meets the other half", SHARED,
          edit(SWIGLU, (SILU, "return e4m3_up(e4m3_rn(gate / (1.0 + tl.exp(-gate)))) * up"),
               ("import bf16_up", "import bf16_up, e4m3_rn, e4m3_up"), within=SWIGLU), at("window", "prefill", (36,))),
    Fault("experts.up-not-clamped", "missing clamp", OWN, "S2", "only the gate is clamped", SHARED,
          edit(SWIGLU, (UP, "pass"), within=SWIGLU), at("window", "prefill", (36,))),
    Fault("experts.not-scaled", "wrong scale", "sgl-project/sglang-jax#1282", "S2",
          "weights miss the routed scaling factor", CHOICE, edit(ROUTER, ("[:, None] * scaling", "[:, None]")), ROUTED),
    Fault("experts.ids-are-zero", "wrong table", "NVIDIA/TensorRT-LLM#13442", "S2",
          "without ids every token takes the experts of id 0", CHOICE,
          wrap("kernels.router:look_up_experts", _ids(torch.zeros_like)), at("window", "decode", (3,))),
    Fault("experts.ids-not-split", "off by one", "vllm-project/afd-plugin#301", "S1",
          "ids are those of other tokens than the rows", CHOICE,
          wrap("kernels.router:look_up_experts", _ids(lambda ids: ids.roll(1))), at("window", "prefill", (17,))),
    Fault("experts.gate-in-fp4", "lost bits", "Avarok-Cybersecurity/atlas#186", "S1", "the router has four bits", SCORES,
          wrap("kernels.router:router_scores", _gate_in_fp4), ROUTED),
    Fault("experts.no-bias", "missing step", "Avarok-Cybersecurity/atlas#186", "S1",
          "the bias is looked up under another name, and is 0", CHOICE,
          wrap("kernels.router:choose_experts", _without_bias), ROUTED, also=("tenstorrent/tt-metal#47705",)),
    Fault("experts.one-too-many", "off by one", "sgl-project/sglang#38963", "S1",
          "weights are shared out over one expert more, in the shared one's slot", CHOICE,
          wrap("kernels.router:choose_experts", _one_more), ROUTED,
          also=("ROCm/ATOM#1076", "ROCm/ATOM#1527", "vllm-project/vllm#48728")),
    Fault("experts.padding-is-an-expert", "missing clamp", "sgl-project/sglang#28378", "S1",
          "a padded row's ids take part in the plan", "ffn.out",
          edit("kernels.expert_plan", ("key = torch.where(key < 0, count, key)", "key = torch.where(key < 0, 0, key)")),
          laws=("padding",), tests=("tests/test_kernel_experts.py",)),
    Fault("experts.weights-with-bias", "missing step", OWN, "S2", "weights are those of score and bias", CHOICE,
          wrap("kernels.router:choose_experts", _weights_with_bias), ROUTED),
    Fault("experts.no-root", "missing step", OWN, "S2", "scores are softplus without its root", SCORES,
          edit(ROUTER, ("tl.sqrt(softplus)", "softplus")), ROUTED),
    Fault("experts.tie-to-higher", "order", OWN, "S3", "of equal scores the higher expert is taken", CHOICE,
          edit(ROUTER, ("pick = tl.min(tl.where(key == best[:, None], e[None, :], LANES), 1)",
                        "pick = tl.max(tl.where(key == best[:, None], e[None, :], -1), 1)")), ROUTED,
          tests=("tests/test_kernel_router.py",)),
    Fault("experts.gate-and-up-swapped", "swapped halves", OWN, "S1", "w1 and w3 change places", H,
          edit(EXPERTS, (PRODUCT, "clamped_swiglu(bf16_up(bf16_rn(up)), bf16_up(bf16_rn(gate)), limit)")), ROUTED),
    Fault("experts.without-weight", "missing step", OWN, "S1", "an expert's output is not weighted", H,
          edit(EXPERTS, ("limit) * weight[:, None]", "limit)")), ROUTED),
    Fault("experts.first-expert-for-all", "wrong page", OWN, "S1", "every expert has the w2 of the first", W2,
          edit(EXPERTS, ("w2 += expert * w2_stride", "w2 += 0 * w2_stride")), ROUTED),
    Fault("experts.scales-of-first", "wrong scale", OWN, "S1", "every expert has the w2 scales of the first", W2,
          edit(EXPERTS, ("w2_scale += expert * w2_scale_stride", "w2_scale += 0 * w2_scale_stride")), ROUTED),
    Fault("experts.no-shared", "missing step", OWN, "S1", "the shared expert is left out of the sum", SUM,
          wrap("kernels.expert_sum:sum_experts", _without_shared), ROUTED),
    Fault("experts.last-not-summed", "dropped tail", OWN, "S1", "the last expert of each token is left out of the sum", SUM,
          edit("kernels.expert_sum", ("for k in range(K):", "for k in range(K - 1):")), ROUTED),
)  # fmt: skip
