"""The calls that `optimized/kernels/costs.py` prices, on operands drawn from a seed: one closure a call.

Names are those of `layer_costs`. A closure is made when it is asked for and owns its operands, so that only one call's
weights are in memory.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from optimized.kernels.costs import Step
from optimized.kernels.embed import embed
from optimized.kernels.expert_plan import plan_experts
from optimized.kernels.expert_sum import sum_experts
from optimized.kernels.experts import block_height, expert_down, expert_gate_up
from optimized.kernels.gemm_bf16 import gemm_bf16, grouped_gemm
from optimized.kernels.gemm_fp8 import gemm_fp8
from optimized.kernels.hyper_connection import hc_head, hc_post, hc_post_pre, hc_pre
from optimized.kernels.inverse_rope import inverse_rope
from optimized.kernels.mtp_streams import mtp_streams
from optimized.kernels.norm import rms_norm, rms_norm_quantize
from optimized.kernels.quantize import quantize_activation
from optimized.kernels.router import choose_experts, look_up_experts, router_scores
from optimized.kernels.swiglu import swiglu_quantize
from optimized.weights import whole_blocks
from reference.config import Config

from .draws import Draw
from .paged_calls import paged_calls

Call = Callable[[], object]
Make = Callable[[], Call]
Weights = Callable[[int, int, int], tuple[torch.Tensor, torch.Tensor]]  # experts, n, k -> codes and scales


def layer_calls(config: Config, step: Step, device: str, seed: int) -> dict[str, Make]:
    """Name of each call -> what draws its operands and returns it."""
    draw = Draw(device, seed)
    return {
        **_streams(config, step, draw),
        **_products(config, step.tokens, step.sequences, draw),
        **_experts(config, step.tokens, draw),
        **paged_calls(config, step, draw),
    }


def _streams(c: Config, s: Step, draw: Draw) -> dict[str, Make]:
    t, n, d, eps = s.tokens, c.hc_mult, c.hidden_size, (c.hc_eps, c.rms_norm_eps)
    mixes = (2 + n) * n

    def weights(rows: int, scales: int) -> tuple[torch.Tensor, ...]:
        return draw.f32(rows, n * d) * (n * d) ** -0.5, draw.f32(rows), draw.f32(scales)

    def embedding() -> Call:
        table, ids = draw.bf16(c.vocab_size, d), draw.order(c.vocab_size).repeat(-(-t // c.vocab_size))[:t]
        return lambda: embed(table, ids, n)

    def pre() -> Call:
        x, w = draw.bf16(t, n, d), weights(mixes, 3)
        return lambda: hc_pre(x, *w, c.hc_sinkhorn_iters, *eps)

    def post() -> Call:
        z, x, gate, comb = draw.bf16(t, d), draw.bf16(t, n, d), draw.f32(t, n), draw.f32(t, n, n)
        return lambda: hc_post(z, x, gate, comb)

    def post_pre() -> Call:
        z, x, gate, comb, w = draw.bf16(t, d), draw.bf16(t, n, d), draw.f32(t, n), draw.f32(t, n, n), weights(mixes, 3)
        return lambda: hc_post_pre(z, x, gate, comb, *w, c.hc_sinkhorn_iters, *eps)

    def head() -> Call:
        x, w = draw.bf16(s.sequences, n, d), weights(n, 1)
        return lambda: hc_head(x, *w, *eps)

    def mtp() -> Call:
        e, h = draw.bf16(t, d), draw.bf16(t, n, d)
        return lambda: mtp_streams(e, h)

    def norm() -> Call:
        x, w = draw.bf16(s.sequences, d), draw.f32(d)
        return lambda: rms_norm(x, w, c.rms_norm_eps)

    def norm_quantize(width: int) -> Make:
        def make() -> Call:
            x, w = draw.bf16(t, width), draw.f32(width)
            return lambda: rms_norm_quantize(x, w, c.rms_norm_eps)

        return make

    def quantize() -> Call:
        x = draw.bf16(t, c.o_groups * c.o_lora_rank)
        return lambda: quantize_activation(x)

    return {"embed": embedding, "hc_pre": pre, "hc_post": post, "hc_post_pre": post_pre, "hc_head": head,
            "mtp.streams": mtp, "norm": norm, "attn_norm": norm_quantize(d), "attn.q_norm": norm_quantize(c.q_lora_rank),
            "attn.wo_b.input": quantize}  # fmt: skip


def _products(c: Config, t: int, last: int, draw: Draw) -> dict[str, Make]:
    def fp8(n: int, k: int, dtype: torch.dtype = torch.bfloat16) -> Make:
        def make() -> Call:
            x, w = draw.fp8_rows(t, k), draw.fp8_weight(n, k)
            return lambda: gemm_fp8(*x, *w, dtype=dtype)

        return make

    def bf16(tokens: int, n: int) -> Make:
        def make() -> Call:
            x, w = draw.bf16(tokens, c.hidden_size), draw.bf16(n, c.hidden_size)
            return lambda: gemm_bf16(x, w)

        return make

    def grouped() -> Call:
        x, w = draw.bf16(t, c.o_groups, heads // c.o_groups), draw.fp8_weight(groups, heads // c.o_groups)
        return lambda: grouped_gemm(x, *w)

    def turn_back() -> Call:
        x, turn = draw.bf16(t, c.num_attention_heads, c.head_dim), draw.turns(t)
        return lambda: inverse_rope(x, *turn)

    d, i, rank, heads = c.hidden_size, c.moe_intermediate_size, c.q_lora_rank, c.num_attention_heads * c.head_dim
    groups, both = c.o_groups * c.o_lora_rank, 2  # a compressor projects values and scores
    overlapping = both * 2 * (c.head_dim + c.index_head_dim)
    return {
        "attn.qkv_a": fp8(whole_blocks(rank) + c.head_dim, d),
        "attn.wq_b": fp8(heads, rank),
        "attn.indexer.wq_b": fp8(c.index_n_heads * c.index_head_dim, rank),
        "attn.wo_b": fp8(d, groups),
        "attn.wo_a": grouped,
        "ffn.shared.gate_up": fp8(whole_blocks(i) + i, d),
        "ffn.shared.down": fp8(d, i, torch.float32),
        "attn.from_x csa": bf16(t, overlapping + c.index_n_heads),
        "attn.from_x hca": bf16(t, both * c.head_dim),
        "head": bf16(last, c.vocab_size),
        "inverse_rope": turn_back,
    }


def _experts(c: Config, t: int, draw: Draw) -> dict[str, Make]:
    d, i, e, k = c.hidden_size, c.moe_intermediate_size, c.n_routed_experts, c.num_experts_per_tok
    evenly = draw.order(e).repeat(-(-t * k // e))[: t * k].view(t, k).int()

    def scores() -> Call:
        x, gate = draw.bf16(t, d), draw.bf16(e, d) * d**-0.5
        return lambda: router_scores(x, gate)

    def choose() -> Call:
        s, bias = draw.f32(t, e).abs(), draw.f32(e)
        return lambda: choose_experts(s, bias, k, c.routed_scaling_factor)

    def look_up() -> Call:
        s, table = draw.f32(t, e).abs(), draw.f32(c.vocab_size, e).argsort(1)[:, :k].contiguous()
        ids = draw.order(c.vocab_size).repeat(-(-t // c.vocab_size))[:t]
        return lambda: look_up_experts(s, table, ids, c.routed_scaling_factor)

    def gate_up(weights: Weights) -> Call:
        x, w1, w3 = draw.fp8_rows(t, d), weights(e, i, d), weights(e, i, d)
        share, plan = draw.f32(t, k).abs(), plan_experts(evenly, e, block_height())
        return lambda: expert_gate_up(*x, *w1, *w3, share, plan, c.swiglu_limit)

    def down(weights: Weights) -> Call:
        h, w2, plan = draw.fp8_rows(t * k, i), weights(e, d, i), plan_experts(evenly, e, block_height())
        return lambda: expert_down(*h, *w2, plan)

    def total() -> Call:
        y, shared, plan = draw.f32(t * k, d), draw.f32(t, d), plan_experts(evenly, e, block_height())
        return lambda: sum_experts(y, plan.summands, shared)

    def swiglu() -> Call:
        gate, up = draw.bf16(t, i), draw.bf16(t, i)
        return lambda: swiglu_quantize(gate, up, c.swiglu_limit)

    calls: dict[str, Make] = {"ffn.gate": scores, "choose_experts": choose, "look_up_experts": look_up, "ffn.sum": total,
                              "ffn.shared.swiglu": swiglu}  # fmt: skip
    for form, weights in (("fp4", draw.fp4_weights), ("fp8", draw.fp8_weights)):
        calls[f"ffn.experts.gate_up {form}"] = partial(gate_up, weights)
        calls[f"ffn.experts.down {form}"] = partial(down, weights)
    return calls
