"""Devices on paper, and the least time a call can take on one. Source: docs/kernels.md §1."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from optimized.kernels.costs import Cost, Step

# Decode: every compressor completes a group at this length. Prefill: more index keys than top-k.
DECODE, PREFILL = Step(128, 16384, 1), Step(1, 8192, 8192)


@dataclass(frozen=True)
class Device:
    """Bytes a second of memory, and dense flops a second by type of operand. `name` is part of the driver's name for it."""

    name: str
    target: str
    bandwidth: float
    peak: Mapping[str, float]

    def seconds(self, cost: Cost) -> float:
        """Memory and arithmetic each at its peak, overlapped completely."""
        return max(cost.moved / self.bandwidth, cost.flops / self.peak[cost.unit])

    def floor(self, kernels: Mapping[str, Cost]) -> float:
        """Of a call: its kernels run one after the other."""
        return sum(self.seconds(cost) for cost in kernels.values())


# Data sheets of NVIDIA (H200 SXM; its FP8 and BF16 figures are with sparsity, halved here) and AMD (Instinct MI355X, dense).
# fp32: vector units; MI355X reaches the same with its FP32 matrix instructions.
DEVICES = (
    Device("H200", "sm_90", 4.8e12, {"fp8": 1979e12, "bf16": 989.5e12, "fp32": 67e12}),
    Device("MI355X", "gfx950", 8e12, {"fp8": 5033e12, "bf16": 2516.5e12, "fp32": 157.3e12}),
)


def describe(step: Step) -> str:
    """A step in words."""
    what = "one token each" if step.direct else "from nothing"
    return f"{step.sequences} sequence{'s' * (step.sequences > 1)} to {step.end:,} tokens, {what}"
