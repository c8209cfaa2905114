"""A whole layer of experts from the kernels, against the reference under the profile the kernels follow, and under another."""

from __future__ import annotations

import pytest
import torch
from expert_cases import down, fp4, gate_up, sum_experts, swiglu_quantize
from kernel_cases import on_device

from optimized.kernels import experts as experts_file
from optimized.kernels import gemm_fp8 as gemm_file
from optimized.kernels import router as router_file
from optimized.kernels.expert_plan import plan_experts
from optimized.kernels.quantize import quantize_activation
from reference.linear import Linear
from reference.moe import Expert, MoE
from reference.rounding import Sites, profile

T, K, E, D, I = 20, 3, 8, 256, 128
LIMIT, SCALING = 1.0, 2.5
gemm_fp8, router_scores = on_device(gemm_file.gemm_fp8), on_device(router_file.router_scores)
choose_experts, look_up_experts = on_device(router_file.choose_experts), on_device(router_file.look_up_experts)
Packed = tuple[torch.Tensor, torch.Tensor]


class Layer:
    """Weights as both sides take them: one expert layer, scored or by token id."""

    def __init__(self, hashed: bool) -> None:
        g = torch.Generator().manual_seed(7)
        self.w1, self.w3, self.w2 = fp4(g, E, I, D, 118, 124), fp4(g, E, I, D, 118, 124), fp4(g, E, D, I, 118, 124)
        self.shared = [self.fp8(g, I, D), self.fp8(g, I, D), self.fp8(g, D, I)]
        self.gate = (torch.randn(E, D, generator=g) / 16).bfloat16()
        self.bias = torch.randn(E, generator=g)
        self.table = torch.stack([torch.randperm(E, generator=g)[:K] for _ in range(50)]) if hashed else None
        self.x = torch.randn(T, D, generator=g).bfloat16()
        self.ids = torch.randint(0, 50, (T,), generator=g)

    @staticmethod
    def fp8(g: torch.Generator, outputs: int, depth: int) -> Packed:
        scales = torch.randint(120, 124, (-(-outputs // 128), -(-depth // 128)), generator=g).to(torch.uint8)
        return torch.randn(outputs, depth, generator=g).to(torch.float8_e4m3fn).view(torch.uint8), scales

    def by_kernels(self) -> torch.Tensor:
        x = quantize_activation(self.x)
        scores = router_scores(self.x, self.gate)
        if self.table is None:
            chosen, weights = choose_experts(scores, self.bias, K, SCALING)
        else:
            chosen, weights = look_up_experts(scores, self.table, self.ids, SCALING)
        plan = plan_experts(chosen, E, experts_file.block_height())
        routed = down(*gate_up(*x, *self.w1, *self.w3, weights, plan, LIMIT), *self.w2, plan)
        gate, up = (gemm_fp8(*x, *w) for w in self.shared[:2])
        shared = gemm_fp8(*swiglu_quantize(gate, up, LIMIT), *self.shared[2], dtype=torch.float32)
        return sum_experts(routed, plan.summands, shared)

    def by_reference(self, name: str) -> torch.Tensor:
        def of_fp4(w: Packed, e: int) -> Linear:
            return Linear(w[0][e].view(torch.int8), w[1][e].view(torch.float8_e8m0fnu))

        def of_fp8(w: Packed) -> Linear:
            return Linear(w[0].view(torch.float8_e4m3fn), w[1].view(torch.float8_e8m0fnu))

        w1, w3, w2 = (of_fp8(w) for w in self.shared)
        bias = None if self.table is not None else self.bias.double()
        moe = MoE(
            Linear(self.gate.double()), bias, self.table,
            lambda e: Expert(of_fp4(self.w1, e), of_fp4(self.w2, e), of_fp4(self.w3, e)),
            Expert(w1, w2, w3), K, SCALING, LIMIT,
        )  # fmt: skip
        return moe(self.x.double(), self.ids, Sites(profile(name)).at("ffn"))


@pytest.mark.parametrize("hashed", [False, True])
@pytest.mark.parametrize("name", ["pool-fp8", "pool-bf16"])
def test_kernels_are_the_reference_under_their_profile(hashed, name):
    """Nearly all bits: a float32 sum may fall on the other side of a bfloat16 or E4M3 edge, and does so rarely."""
    layer = Layer(hashed)
    assert (layer.by_kernels() == layer.by_reference(name)).double().mean() > 0.99


def test_another_profile_is_told_apart():
    """The official profile rounds the product of SwiGLU and the experts' outputs to bfloat16."""
    layer = Layer(hashed=False)
    assert (layer.by_kernels() == layer.by_reference("official")).double().mean() < 0.5
