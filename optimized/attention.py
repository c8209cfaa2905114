"""Attention of one layer on the pool. Wiring of kernels only. Source: docs/pool.md §6 and §11."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from .kernels.compress import compress
from .kernels.compress_index import compress_index
from .kernels.decode_attention import decode_attention
from .kernels.gemm_bf16 import gemm_bf16, grouped_gemm
from .kernels.gemm_fp8 import gemm_fp8
from .kernels.index_logits import index_logits
from .kernels.indexer import index_query
from .kernels.norm import rms_norm_quantize
from .kernels.prefill_attention import prefill_attention
from .kernels.qk_norm_rope import payload_like, qk_norm_rope
from .kernels.quantize import quantize_activation
from .kernels.state_write import write_state
from .kernels.topk import topk
from .kernels.translate import translate
from .kernels.window_write import write_window
from .pool.geometry import BLOCK_TOKENS
from .pool.pool import IndexPool, Pool
from .step import Compression, StepPlan
from .tiles import ModelTiles
from .weights import AttentionWeights, CompressorWeights, whole_blocks


@dataclass(frozen=True)
class Memory:
    """Where a model's KV is: rows and rings in the pool, index keys in pages. `tiles`: what the model's kernels run on."""

    pool: Pool
    index: IndexPool
    tiles: ModelTiles


def attention(
    x: Tensor, codes: Tensor, scales: Tensor, w: AttentionWeights, layer: int, plan: StepPlan, memory: Memory
) -> Tensor:
    """Normed input bfloat16 [t, D] and its quantised form -> bfloat16 [t, D]. The layer's rows, keys and rings move on."""
    config, kind = memory.pool.geometry.config, memory.pool.geometry.kinds[layer]
    own = plan.kinds[kind]
    at_kv = whole_blocks(config.q_lora_rank)
    a = gemm_fp8(codes, scales, w.qkv_a.codes, w.qkv_a.scales)  # [t, q_lora | gap | d]
    _, q_codes, q_scales = rms_norm_quantize(a[:, : config.q_lora_rank], w.q_norm, config.rms_norm_eps)
    q = gemm_fp8(q_codes, q_scales, w.wq_b.codes, w.wq_b.scales)
    q = q.unflatten(1, (config.num_attention_heads, config.head_dim))  # [t, h, d]
    if w.compressor is not None and w.from_x is not None and own.compression is not None:
        projected = gemm_bf16(x, w.from_x)  # float32 [t, w | w | w' | w' | h']
        _compress(projected, w.compressor, layer, plan, own.compression, memory)
        if w.index_compressor is not None and w.index_wq_b is not None:
            projected = projected[:, 2 * w.compressor.width :]
            _compress_index(projected, w.index_compressor, layer, plan, own.compression, memory)
            index_q = gemm_fp8(q_codes, q_scales, w.index_wq_b.codes, w.index_wq_b.scales)
            head_weights = projected[:, 2 * w.index_compressor.width :]
            _pick(index_q, head_weights, layer, plan, memory)
    o = _attend(q, a[:, at_kv:], w, layer, plan, memory)
    o = o.view(o.shape[0], config.o_groups, -1)  # [t, g, h/g * d]
    o_codes, o_scales = quantize_activation(grouped_gemm(o, w.wo_a.codes, w.wo_a.scales))
    return gemm_fp8(o_codes, o_scales, w.wo_b.codes, w.wo_b.scales)


def _attend(q: Tensor, kv: Tensor, w: AttentionWeights, layer: int, plan: StepPlan, memory: Memory) -> Tensor:
    """Queries and rows of this step from their projections, and the attention of the one to all rows listed."""
    geometry = memory.pool.geometry
    own, eps, scale = plan.kinds[geometry.kinds[layer]], geometry.config.rms_norm_eps, geometry.config.head_dim**-0.5
    rows = _planes(memory.pool, layer)
    if plan.direct:
        q = qk_norm_rope(q, kv, w.kv_norm, eps, *own.turn, *rows, own.destination)
        return decode_attention(
            q, *rows, own.indices, own.indptr, w.sink, *own.turn, scale=scale, longest=own.longest, tiles=memory.tiles.attention
        )
    payload = payload_like(kv, geometry.build)
    q = qk_norm_rope(q, kv, w.kv_norm, eps, *own.turn, *payload)
    o = prefill_attention(
        q, *rows, *payload, own.indices, own.indptr, w.sink, *own.turn,
        scale=scale, longest=own.longest, tiles=memory.tiles.attention,
    )  # fmt: skip
    write_window(*payload, *rows, own.destination)  # what the ring held until now was needed above
    return o


def _compress(
    projected: Tensor, w: CompressorWeights, layer: int, plan: StepPlan, group: Compression, memory: Memory
) -> None:
    """Rows of the groups that this step completes; then the rings take its projections."""
    geometry, pool = memory.pool.geometry, memory.pool
    kv, score = projected[:, : w.width], projected[:, w.width : 2 * w.width]
    field = "hca" if geometry.kinds[layer] == "hca" else "csa_main"
    rings = pool.state(f"{field}_kv", layer), pool.state(f"{field}_score", layer)
    ratio = w.ape.shape[0]
    compress(
        kv, score, *rings, group.complete, plan.slots, w.ape, w.norm, geometry.config.rms_norm_eps, *group.turn,
        *_planes(pool, layer), plan.block_table,
        ratio=ratio, envelope=geometry.envelope, block_rows=BLOCK_TOKENS // ratio,
    )  # fmt: skip
    write_state(kv, score, *rings, group.keep, plan.slots, w.ape)


def _compress_index(
    projected: Tensor, w: CompressorWeights, layer: int, plan: StepPlan, group: Compression, memory: Memory
) -> None:
    pool, eps = memory.pool, memory.pool.geometry.config.rms_norm_eps
    kv, score = projected[:, : w.width], projected[:, w.width : 2 * w.width]
    rings = pool.state("csa_idx_kv", layer), pool.state("csa_idx_score", layer)
    compress_index(
        kv, score, *rings, group.complete, plan.slots, w.ape, w.norm, eps, *group.turn,
        *memory.index.pages(layer), plan.block_table, order=memory.index.layout.order,
    )  # fmt: skip
    write_state(kv, score, *rings, group.keep, plan.slots, w.ape)


def _pick(index_q: Tensor, head_weights: Tensor, layer: int, plan: StepPlan, memory: Memory) -> None:
    """Choose compressed rows for every token and write them into the lists."""
    geometry, layout = memory.pool.geometry, memory.index.layout
    config, own = geometry.config, plan.kinds["csa"]
    q = index_q.unflatten(1, (config.index_n_heads, config.index_head_dim))
    codes, scales, weights = index_query(q, head_weights, *own.turn, form=layout.form)
    logits = index_logits(
        codes, scales, weights, *memory.index.pages(layer), plan.block_table, plan.batch_ids, plan.visible,
        columns=plan.columns, order=layout.order, tiles=memory.tiles.index_logits,
    )  # fmt: skip
    picks = topk(logits, plan.visible, config.index_topk, tiles=memory.tiles.topk)
    translate(
        picks, plan.positions, plan.batch_ids, plan.block_table, own.indptr, own.indices,
        window=config.sliding_window, envelope=geometry.envelope, block_rows=geometry.stride("csa"),
    )  # fmt: skip


def _planes(pool: Pool, layer: int) -> tuple[Tensor, Tensor | None]:
    rows = pool.layer_rows(layer)
    return rows[0], rows[1] if len(rows) > 1 else None
