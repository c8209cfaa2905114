"""Ops around the attention core: queries, window rows, attention with its inverse rotation, and plain products.

Candidate and twin side by side. Source: docs/judge.md §7.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from optimized.kernels.decode_attention import decode_attention, tiles_for_heads
from optimized.kernels.gemm_bf16 import BLOCK, gemm_bf16, grouped_gemm
from optimized.kernels.gemm_bf16 import tiles_for_width as product_tiles
from optimized.kernels.launch import INTERPRETER
from optimized.kernels.prefill_attention import prefill_attention
from optimized.kernels.qk_norm_rope import payload_like, qk_norm_rope
from optimized.kernels.window_write import last_writes, write_window
from optimized.pool import plans
from optimized.pool.geometry import BLOCK_TOKENS, RATIO
from optimized.rope import rope_table
from reference.config import Config, Kind
from reference.linear import Linear

from . import row_forms
from .budget import spans
from .budget.bounded import Bounded, exact
from .candidates import DEVICE, back, compressor_of, picks, tall, there
from .judge import Bytes, Dense, Places, Stored
from .step import Step
from .storage import in_bf16, packed
from .twins import Expectation, Expectations, StoredOutputs, product, rows_expected, untouched, visible_rows

ATTENTION_ROWS = 32  # rows a step: lists here are short, and a tile costs the interpreter what it holds
EVERY = 5  # tokens judged by attention where a step has many: no multiple of a group, so that all places in one occur


def _turn(step: Step, tokens: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The candidate's own cos and sin at the tokens' positions."""
    positions = step.batch.positions if tokens is None else step.batch.positions[tokens]
    cos, sin = rope_table(step.config, step.layer, positions)
    return cos.contiguous(), sin.contiguous()


def _projections(step: Step) -> tuple[Tensor, Tensor]:
    """Queries [t, h, d] and rows [t, d] before their norms, bfloat16."""
    q = step.capture["attn.wq_b"].unflatten(1, (step.block.attn.n_heads, -1))
    return q.to(torch.bfloat16), step.capture["attn.wkv"].to(torch.bfloat16)


def queries(step: Step, op: str) -> dict[str, Stored]:
    q, kv = _projections(step)
    q, kv, weight, cos, sin = there(q, kv, step.block.attn.kv_norm.float(), *_turn(step))
    payload = payload_like(kv, step.pool_before.geometry.build)
    return {op: qk_norm_rope(q, kv, weight, step.block.attn.eps, cos, sin, *payload).cpu()}


def queries_expected(step: Step, op: str, stored: StoredOutputs) -> Expectations:
    """Norm of each head, without a weight, and rotation by the candidate's own table."""
    q, _ = _projections(step)
    attn = step.block.attn
    normed = spans.rms_norm(exact(q), torch.ones(attn.head_dim, dtype=torch.float64), attn.eps, step.how)
    turned = spans.rotate(normed, *step.table(step.batch.positions), step.how)
    return {op: Expectation(Dense(turned, "bf16", "thd"), step.places)}


def window_places(step: Step) -> Tensor:
    """Pool row of every token's window row, int64 [t], from the layer's base."""
    pool = step.pool_before
    parts = [pool.window_at(b, step.batch.positions[where]) for b, where in enumerate(step.batch.sequences())]
    return torch.cat(parts)


def window_rows(step: Step, op: str) -> dict[str, Stored]:
    """Rows straight into the rings, or into a payload first and then into the rings, as the engine does it in this step."""
    q, kv = _projections(step)
    work = step.pool_before.copy(DEVICE)
    q, kv, weight, cos, sin = there(q[:, :1], kv, step.block.attn.kv_norm.float(), *_turn(step))
    places, planes, eps = window_places(step), work.rows(), step.block.attn.eps
    if step.direct:
        qk_norm_rope(q, kv, weight, eps, cos, sin, *planes, *there(places.clone()))
        written = places
    else:
        payload = payload_like(kv, work.geometry.build)
        qk_norm_rope(q, kv, weight, eps, cos, sin, *payload)
        ends = torch.tensor(step.ends)[step.places.labels["sequence"]]
        written = last_writes(places, step.batch.positions, ends, work.geometry.ring)
        write_window(*payload, *planes, *there(written.clone()))
    poured, kept = back(work), written >= 0
    landed = row_forms.outputs(row_forms.take(poured.rows(), written[kept]))
    changed = poured.difference(step.pool_before)
    for plane in changed.pool.layer_rows(poured.layer):
        plane[written[kept]] = 0
    if step.direct:
        return {**landed, **changed.planes()}
    ring = {f"ring.{name}": stored for name, stored in row_forms.row_bytes(landed).items()}
    return {**row_forms.outputs(row_forms.to(payload, "cpu")), **ring, **changed.planes()}


def window_expected(step: Step, op: str, stored: StoredOutputs) -> Expectations:
    """Norm with a weight, rotation and quantiser as one span; the last rows of each sequence land in its ring, as bytes."""
    attn = step.block.attn
    normed = spans.rms_norm(exact(_projections(step)[1]), attn.kv_norm, attn.eps, step.how)
    row = spans.rotate(normed, *step.table(step.batch.positions), step.how)
    out = {**rows_expected(row, step, stored, "td", step.places), **untouched(stored)}
    if not step.direct:
        end = torch.tensor(step.ends)[step.places.labels["sequence"]]
        kept = (step.batch.positions >= end - step.pool_before.geometry.ring).nonzero().flatten()
        places = Places({name: values[kept] for name, values in step.places.labels.items()})
        for name, whole in row_forms.row_bytes(stored).items():
            out[f"ring.{name}"] = Expectation(Bytes(whole[kept], "td"), places)
    return out


def attending(step: Step) -> Tensor:
    """Tokens whose attention is judged: all in steps of a few tokens; else every `EVERY`-th, of each sequence the first and
    the last, and those at an edge of what a token sees."""
    count = len(step.batch.ids)
    if step.every_token:
        return torch.arange(count)
    chosen = [torch.tensor([s.start, s.stop - 1]) for s in step.batch.sequences()]
    edges = at_edge(step.config, step.kind, step.batch.positions).nonzero().flatten()
    return torch.cat([*chosen, edges, torch.arange(0, count, EVERY)]).unique()


def at_edge(config: Config, kind: Kind, positions: Tensor) -> Tensor:
    """Whether at a position something changes: the window is first full or first loses a row, an HCA group is complete,
    selection leaves out its first row, or a pool block begins; and the positions to either side."""
    seen = positions + 1  # tokens, with the token itself
    near = (seen - config.sliding_window).abs() <= 1
    near |= (seen + 1) % BLOCK_TOKENS <= 2
    if kind == "hca":
        near |= (seen + 1) % RATIO[kind] <= 2
    elif kind == "csa":
        near |= (seen - RATIO[kind] * (config.index_topk + 1)).abs() <= 1
    return near


def attention(step: Step, op: str) -> dict[str, Stored]:
    """Sparse attention over the pool's rows, and of a long step over its payload, by the lists that the host makes."""
    before = step.pool_to_attend if step.direct else step.pool_to_extend
    work, attn, tokens = before.copy(DEVICE), step.block.attn, attending(step)
    chosen = picks(step)
    own = (np.array(step.batch.bounds[:-1]), np.array(step.starts))
    lists = plans.attention_lists(
        work.geometry, step.kind, step.batch.positions[tokens].numpy(), step.places.labels["sequence"][tokens].numpy(),
        work.slots.numpy(), work.block_table.numpy(), None if chosen is None else chosen[tokens.numpy()],
        None if step.direct else own,
    )  # fmt: skip
    q = step.capture["attn.q"][tokens].to(torch.bfloat16)
    q, indices, indptr, sink, cos, sin = there(q, *map(torch.from_numpy, lists), attn.sink.float(), *_turn(step, tokens))
    tiles = replace(tiles_for_heads(attn.n_heads), ROWS=ATTENTION_ROWS) if INTERPRETER else None
    planes, scale = work.rows(), attn.head_dim**-0.5
    if step.direct:
        out = decode_attention(q, *planes, indices, indptr, sink, cos, sin, scale=scale, tiles=tiles)
    else:
        payload = row_forms.to(row_forms.encode(step.capture["attn.kv"], step.form.rows), DEVICE)
        out = prefill_attention(q, *planes, *payload, indices, indptr, sink, cos, sin, scale=scale, tiles=tiles)
    return {"attn.o_rotated": out.cpu(), **back(work).difference(before).planes()}


def attention_expected(step: Step, op: str, stored: StoredOutputs) -> Expectations:
    """One softmax over each token's own rows, taken from the reference's state and not from the candidate's lists, and the
    inverse rotation by the candidate's own table."""
    attn, tokens, parts = step.block.attn, attending(step), []
    for b, where in enumerate(step.batch.sequences()):
        here = tokens[(tokens >= where.start) & (tokens < where.stop)]
        some, absent = visible_rows(step, b, here)
        parts.append(spans.sink_attention(step.capture["attn.q"][here], some, absent, attn.sink, step.how))
    o = Bounded(torch.cat([p.value for p in parts]), torch.cat([p.bound for p in parts]))
    places = Places({name: values[tokens] for name, values in step.places.labels.items()})
    turned = spans.rotate(o, *step.table(step.batch.positions[tokens]), step.how, inverse=True)
    return {"attn.o_rotated": Expectation(Dense(turned, "bf16", "thd"), places), **untouched(stored)}


def _groups(step: Step) -> Tensor:
    """Attention output by groups of heads [t, g, h/g * d]."""
    return step.capture["attn.o_rotated"].flatten(1).unflatten(1, (step.block.attn.n_groups, -1))


def group_output(step: Step, op: str) -> dict[str, Stored]:
    weight = packed(step.linear(op))
    o = _groups(step).to(torch.bfloat16)
    rank = len(weight[0]) // o.shape[1]
    tiles = tall(product_tiles(rank, BLOCK), len(o), rank)
    o, codes, scales = there(o, *weight)
    return {op: grouped_gemm(o, codes, scales, tiles=tiles).cpu()}


def group_expected(step: Step, op: str, stored: StoredOutputs) -> Expectations:
    """Each group through its own rows of the weight; its input is not quantised."""
    o, linear = _groups(step), step.linear(op)
    rank = linear.out_features // o.shape[1]
    parts = [product(exact(o[:, g]), linear, step, g * rank, (g + 1) * rank) for g in range(o.shape[1])]
    y = Bounded(torch.cat([p.value for p in parts], 1), torch.cat([p.bound for p in parts], 1))
    return {op: Expectation(Dense(y, "bf16", "td"), step.places)}


def _from_input(step: Step, op: str) -> dict[str, Linear]:
    """The bfloat16 projections of an op, by the name of what they put out."""
    if op == "attn.indexer.weights":
        assert step.block.attn.indexer is not None
        return {"attn.indexer.weights_proj": step.block.attn.indexer.weights_proj}
    compressor, _ = compressor_of(step, op)
    return {op: compressor.wkv, op.replace("values", "scores"): compressor.wgate}


def projected(step: Step, op: str) -> dict[str, Stored]:
    """One product with all of them side by side; float32."""
    linears = _from_input(step, op)
    weight = torch.cat([in_bf16(linear) for linear in linears.values()])
    x = step.capture["attn_norm"].to(torch.bfloat16)
    tiles = tall(product_tiles(len(weight), step=512), len(x), min(len(weight), 2048))
    x, weight = there(x, weight)
    y = gemm_bf16(x, weight, tiles=tiles).cpu()
    return dict(zip(linears, y.split([linear.out_features for linear in linears.values()], 1), strict=True))


def projection_expected(step: Step, op: str, stored: StoredOutputs) -> Expectations:
    x = exact(step.capture["attn_norm"])
    return {
        name: Expectation(Dense(product(x, linear, step), "f32", "td"), step.places)
        for name, linear in _from_input(step, op).items()
    }
