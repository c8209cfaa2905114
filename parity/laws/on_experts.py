"""Laws on the kernels of streams, norms, products and experts, to the bit. Source: docs/judge.md §13, docs/pool.md §9.

Kernels are called through the names of this module, so that a change of one is seen here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from optimized.kernels.expert_plan import in_ascending_order, plan_experts
from optimized.kernels.expert_sum import sum_experts
from optimized.kernels.experts import block_height, expert_gate_up
from optimized.kernels.gemm_fp8 import gemm_fp8
from optimized.kernels.hyper_connection import hc_post, hc_pre
from optimized.kernels.norm import rms_norm_quantize
from optimized.kernels.quantize import quantize_activation
from optimized.kernels.router import choose_experts, router_scores
from reference import formats

from . import statements as law
from .draws import bf16, f32, generator, order_of, planted_scores, uneven, whole
from .law import Call, Law, Operands

T, D, EPS = 5, 128, 2e-6


def before(x: Tensor, fn: Tensor, base: Tensor, scale: Tensor) -> tuple[Tensor, ...]:
    return hc_pre(x, fn, base, scale, 20, 3e-6, EPS)


def after(z: Tensor, x: Tensor, post: Tensor, comb: Tensor) -> tuple[Tensor, ...]:
    return (hc_post(z, x, post, comb),)


def before_operands(seed: int) -> Operands:
    fn, base, scale = f32(seed + 1, 24, 4 * D) * 0.05, f32(seed + 2, 24), f32(seed + 3, 3)
    return {"x": bf16(seed, T, 4, D), "fn": fn, "base": base, "scale": scale}


def after_operands(seed: int) -> Operands:
    """Small integers and halves: every sum is exact in bfloat16."""
    return {"z": whole(seed, -8, 8, T, D).bfloat16(), "x": whole(seed + 1, -8, 8, T, 4, D).bfloat16(),
            "post": whole(seed + 2, 0, 2, T, 4) / 2, "comb": whole(seed + 3, 0, 2, T, 4, 4) / 2}  # fmt: skip


def normed(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    return rms_norm_quantize(x, weight, EPS)


def product(codes: Tensor, scales: Tensor, w: Tensor, w_scales: Tensor) -> tuple[Tensor, ...]:
    return (gemm_fp8(codes, scales, w, w_scales, dtype=torch.float32),)


def product_of(seed: int) -> Operands:
    codes, scales = formats.quantize_e4m3(uneven(seed, T, 200), 128)
    w, _ = formats.quantize_e4m3(f32(seed + 1, 150, 200), 128)
    return {"codes": codes.contiguous(), "scales": scales, "w": w.contiguous(), "w_scales": whole(seed, 118, 124, 2, 2).byte()}


def quantised(x: Tensor) -> tuple[Tensor, ...]:
    return quantize_activation(x)


def stays(call: Call, ops: Operands) -> str | None:
    def value_of(x: Tensor) -> Tensor:
        codes, scales = call(x=x)
        return formats.dequantize_blocks(formats.e4m3_decode(codes), scales, 128).bfloat16()

    return law.idempotence(value_of, ops["x"])


def chosen(scores: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
    return choose_experts(scores, bias, 3, 1.7)


def planted_choice(seed: int) -> Operands:
    scores = planted_scores(seed)["scores"].nan_to_num(0.5, 2.0, 0.0).abs() + 0.25
    return {"scores": scores, "bias": f32(seed, 40).round()}


def sorted_choice(call: Call, ops: Operands) -> str | None:
    total, everyone = ops["scores"] + ops["bias"], torch.full((9,), 40)
    return law.selection(call(**ops)[0].sort(-1).values, total, everyone, 3)


def routed(x: Tensor, gate: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
    return choose_experts(router_scores(x, gate), bias, 3, 1.7)


def routed_operands(seed: int) -> Operands:
    return {"x": bf16(seed, T, D), "gate": bf16(seed + 1, 40, D) * 0.2, "bias": f32(seed + 2, 40)}


def gate_up(codes: Tensor, scales: Tensor, w1: Tensor, s1: Tensor, w3: Tensor, s3: Tensor, weights: Tensor,
            experts: Tensor) -> tuple[Tensor, ...]:  # fmt: skip
    return expert_gate_up(codes, scales, w1, s1, w3, s3, weights, plan_experts(experts, len(w1), block_height()), 3.0)


def expert_operands(seed: int) -> Operands:
    codes, scales = formats.quantize_e4m3(uneven(seed, T, D), 128)
    experts = torch.stack([torch.randperm(6, generator=generator(seed + t))[:2] for t in range(T)]).int()
    packed = {f"w{i}": whole(seed + i, 0, 255, 6, 32, D // 2).byte() for i in (1, 3)}
    bytes_of = {f"s{i}": whole(seed + 10 * i, 119, 123, 6, 32, D // 32).byte() for i in (1, 3)}
    return {"codes": codes, "scales": scales, **packed, **bytes_of, "weights": f32(seed, T, 2).abs(), "experts": experts}


def total(y: Tensor, experts: Tensor, shared: Tensor) -> tuple[Tensor, ...]:
    """`y` [t, k, d], experts [t, k]: -1 is nobody."""
    return (sum_experts(y.flatten(0, 1), in_ascending_order(experts), shared),)


def total_operands(seed: int) -> Operands:
    experts = torch.stack([torch.randperm(6, generator=generator(seed + t))[:3] for t in range(T)]).int()
    experts[1, 2] = -1
    return {"y": whole(seed, -8, 8, T, 3, D).float(), "experts": experts, "shared": whole(seed + 1, -8, 8, T, D).float()}


def nobody_sums(call: Call, ops: Operands) -> str | None:
    filler = {"y": torch.full((1, 3, D), torch.nan), "experts": torch.full((1, 3), -1, dtype=torch.int32),
              "shared": torch.zeros(1, D)}  # fmt: skip
    return law.padding(call, ops, filler, [torch.zeros(1, D, dtype=torch.bfloat16)], at=3)


def added(one: str, *names: str) -> Any:
    """Additivity in these operands, the second ones from seed 91."""
    draw = {"after": after_operands, "total": total_operands}[one]
    return lambda call, ops: law.linearity(call, ops, {name: draw(91)[name] for name in names})


NAMES = law.Renaming
_TOKENS = "tokens in another order put out the same in that order"
_SUM = "of a sum, the sum"


def tokens(
    name: str, op: str, draw: Any, call: Call, by_token: tuple[str, ...], outputs: int, fixed: tuple[str, ...] = ()
) -> Law:
    names = NAMES(dict.fromkeys(by_token, 0), out_axes=dict.fromkeys(range(outputs), 0))
    return Law(f"tokens.{name}", op, "kernel", _TOKENS, draw, call,
               lambda call, ops: law.relabelling(call, ops, names, order_of(T)), fixed)  # fmt: skip


LAWS = (
    Law("scaling.activation", "attn.wq_a.input", "kernel", "2^k times the input: the same codes, scale bytes k larger",
        lambda s: {"x": uneven(s, T, 200).bfloat16()}, quantised, lambda call, ops: law.scaling(call, ops, "x", 6, [1])),
    Law("idempotence.activation", "attn.wq_a.input", "kernel", "what was quantised once stays",
        lambda s: {"x": uneven(s, T, 256).bfloat16()}, quantised, stays),
    tokens("norm", "attn_norm", lambda s: {"x": uneven(s, T, 200).bfloat16(), "weight": f32(s, 200)}, normed, ("x",), 3),
    tokens("product", "attn.wq_a", product_of, product, ("codes", "scales"), 1),
    tokens("hc-pre", "hc_attn.pre", before_operands, before, ("x",), 3),
    tokens("router", "ffn.gate", routed_operands, routed, ("x",), 2),
    tokens("sum", "ffn.experts.out", total_operands, total, ("y", "experts", "shared"), 1, ("experts",)),
    Law("streams.post", "hc_attn.post", "kernel", "streams that go elsewhere are the same streams", after_operands, after,
        lambda call, ops: law.relabelling(call, ops, NAMES({"post": 1, "comb": 2}, out_axes={0: 1}), order_of(4))),
    Law("experts.router", "ffn.gate", "kernel", "experts under other numbers are chosen and weighted alike", routed_operands,
        routed, lambda call, ops: law.relabelling(call, ops, NAMES({"gate": 0, "bias": 0}, out_labels=(0,)), order_of(40))),
    Law("experts.gate-up", "ffn.experts.h", "kernel", "experts under other numbers put out the same", expert_operands, gate_up,
        lambda call, ops: law.relabelling(call, ops, NAMES(dict.fromkeys(("w1", "s1", "w3", "s3"), 0), labels=("experts",)),
                                          order_of(6))),
    Law("experts.sum", "ffn.experts.out", "kernel", "experts under other numbers have the same sum, where sums are exact",
        total_operands, total,
        lambda call, ops: law.relabelling(call, ops, NAMES({}, labels=("experts",)), order_of(6)), ("experts",)),
    Law("padding.sum", "ffn.experts.out", "kernel", "nobody between tokens sums to zero and changes nobody", total_operands,
        total, nobody_sums, ("experts",)),
    Law("linearity.combine", "hc_attn.post", "kernel", _SUM, after_operands, after, added("after", "z", "x")),
    Law("linearity.experts", "ffn.experts.out", "kernel", _SUM, total_operands, total,
        added("total", "y", "shared"), ("experts",)),
    Law("topk.experts", "ffn.gate", "kernel", "the k largest of score + bias, lower numbers first among equals", planted_choice,
        chosen, sorted_choice),
)  # fmt: skip
