"""One layer on the pool: attention and experts, each inside a mix of the residual streams. Source: docs/pool.md §11."""

from __future__ import annotations

from torch import Tensor

from .attention import Memory, attention
from .kernels.hyper_connection import hc_post, hc_post_pre, hc_pre
from .kernels.norm import rms_norm_quantize
from .moe import moe
from .step import StepPlan
from .weights import HyperWeights, LayerWeights, Weights


def block(x: Tensor, layer: LayerWeights, number: int, plan: StepPlan, memory: Memory, weights: Weights) -> Tensor:
    """Streams bfloat16 [t, s, D] through layer `number` -> streams after it; its part of the memory moves on."""
    config = weights.config

    def mix(w: HyperWeights) -> tuple[Tensor, Tensor, Tensor, int, float, float]:
        return w.fn, w.base, w.scale, config.hc_sinkhorn_iters, config.hc_eps, config.rms_norm_eps

    tiles = memory.tiles.streams
    u, post, comb = hc_pre(x, *mix(layer.hc_attn), tiles)
    normed = rms_norm_quantize(u, layer.attn_norm, config.rms_norm_eps)
    z = attention(*normed, layer.attn, number, plan, memory)
    x, u, post, comb = hc_post_pre(z, x, post, comb, *mix(layer.hc_ffn), tiles)
    normed = rms_norm_quantize(u, layer.ffn_norm, config.rms_norm_eps)
    z = moe(*normed, plan.ids, layer, weights, memory.tiles)
    return hc_post(z, x, post, comb, tiles)
