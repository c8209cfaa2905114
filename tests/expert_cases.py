"""What the tests of experts share: cases with FP4 or FP8 weights, the definition of the layer in float64, legal codes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from kernel_cases import E4M3_VALUES, gamma, illegal_e4m3, on_device, scale_byte, scale_value, uneven
from torch import Tensor

from optimized.kernels import expert_sum as sum_file
from optimized.kernels import experts as experts_file
from optimized.kernels import swiglu as swiglu_file
from optimized.kernels.expert_plan import ExpertPlan, plan_experts
from optimized.kernels.quantize import quantize_activation

LIMIT = 3.0
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64)
swiglu_quantize = on_device(swiglu_file.swiglu_quantize)
sum_experts = on_device(sum_file.sum_experts)


def moved(plan: ExpertPlan, device: torch.device) -> ExpertPlan:
    return ExpertPlan(plan.rows.to(device), plan.block_expert.to(device), plan.summands.to(device))


def with_plan(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """The wrapper as `on_device` carries it; the plan goes where the first tensor is."""

    def carried(*args: Any, **kwargs: Any) -> Any:
        return kernel(*[moved(a, args[0].device) if isinstance(a, ExpertPlan) else a for a in args], **kwargs)

    return on_device(carried)


gate_up, down = with_plan(experts_file.expert_gate_up), with_plan(experts_file.expert_down)


@dataclass(frozen=True)
class Case:
    """x [t, d] as codes and scales, stacked weights, experts and weights [t, k]."""

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
    def w2_depth(self) -> int:
        """i, the width between the products."""
        return self.w1[0].shape[1]

    @property
    def up_args(self) -> tuple[Any, ...]:
        return *self.x, *self.w1, *self.w3, self.weights, self.plan, LIMIT

    def rows(self, which: list[int]) -> Case:
        part = self.x[0][which], self.x[1][which]
        return replace(self, x=part, experts=self.experts[which].contiguous(), weights=self.weights[which].contiguous())


def fp4(generator: torch.Generator, count: int, outputs: int, depth: int, low: int, high: int) -> tuple[Tensor, Tensor]:
    """All bytes; a scale byte of its own for each row and 32 channels."""
    packed = torch.randint(0, 256, (count, outputs, depth // 2), generator=generator).to(torch.uint8)
    return packed, torch.randint(low, high, (count, outputs, -(-depth // 32)), generator=generator).to(torch.uint8)


def fp8(generator: torch.Generator, count: int, outputs: int, depth: int, low: int, high: int) -> tuple[Tensor, Tensor]:
    """Codes of few bits; a scale byte of its own for each 128 x 128."""
    codes = torch.randint(-6, 7, (count, outputs, depth), generator=generator).float().to(torch.float8_e4m3fn)
    shape = (count, -(-outputs // 128), -(-depth // 128))
    return codes.view(torch.uint8), torch.randint(low, high, shape, generator=generator).to(torch.uint8)


def case(
    tokens: int, slots: int, count: int, width: int, inner: int, exact: bool = True, seed: int = 0,
    weight: Callable[..., tuple[Tensor, Tensor]] = fp4,
) -> Case:  # fmt: skip
    """If exact, x has few bits and scales are near each other: every sum over d fits float32."""
    g = torch.Generator().manual_seed(seed)
    experts = torch.stack([torch.randperm(count, generator=g)[:slots] for _ in range(tokens)]).int()
    experts[3::5] = -1
    if exact:
        values = torch.randint(-8, 9, (tokens, width), generator=g).float()
        scales = torch.randint(124, 128, (tokens, -(-width // 128)), generator=g).to(torch.uint8)
        x = values.to(torch.float8_e4m3fn).view(torch.uint8), scales
        w1, w3 = (weight(g, count, inner, width, 120, 123) for _ in range(2))
    else:
        x = quantize_activation(uneven(g, tokens, width).bfloat16())
        w1, w3 = (weight(g, count, inner, width, 105, 120) for _ in range(2))
    weights = torch.rand(tokens, slots, generator=g) * 2.5
    return Case(x, w1, w3, weight(g, count, width, inner, 110, 130), experts, weights, exact)


def values_fp8(codes: Tensor, scales: Tensor) -> Tensor:
    return E4M3_VALUES[codes.int()] * scale_value(scales).repeat_interleave(128, -1)[..., : codes.shape[-1]]


def values_of(codes: Tensor, scales: Tensor) -> Tensor:
    """A weight's values: FP4 has a scale a row, FP8 one for 128 rows."""
    if scales.shape[-2] == codes.shape[-2]:
        return values_fp4(codes, scales)
    return values_fp8(codes, scales.repeat_interleave(128, -2)[..., : codes.shape[-2], :])


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
