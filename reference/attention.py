"""Attention over a window of raw rows and a set of compressed rows, in one softmax with a sink.

One row per token serves as key and value of every head. Source: docs/model.md §4.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .compressor import Compressor
from .indexer import Indexer
from .linear import Linear, apply_parts, project, project_all
from .norm import head_norm, rms_norm
from .rope import Rope, rotate
from .rounding import Sites
from .state import Batch, CompressorState, LayerState

QUERY_BLOCK = 256  # tokens whose queries and outputs are held at a time
QUERY_STEP = 64  # tokens that share one stretch of window rows: longer stretches waste products, shorter ones calls
CORE_ELEMENTS = 1 << 24  # scores, and gathered row elements, held at a time


def sink_attention(q: Tensor, shared: Tensor, hidden: Tensor, picked: Tensor, absent: Tensor, sink: Tensor,
                   sites: Sites) -> Tensor:  # fmt: skip
    """One softmax over two sets of rows, plus a sink that only takes mass.

    q [t, h, d]; shared [k, d] rows offered to all queries with hidden [t, k] true where one must not look; picked
    [t, n, d] rows of each query's own with absent [t, n]; sink [h]. -> [t, h, d]. Every query sees at least one row.
    The maximum runs over real rows only, which is where the official kernel puts it.
    """
    n = len(shared)
    scores = torch.einsum("thd,kd->thk", q, shared).masked_fill_(hidden[:, None], -torch.inf)
    if picked.shape[1]:
        more = torch.einsum("thd,tnd->thn", q, picked).masked_fill_(absent[:, None], -torch.inf)
        scores = torch.cat([scores, more], dim=-1)  # [t, h, k+n]
    largest = scores.mul_(q.shape[-1] ** -0.5).amax(-1, keepdim=True)
    p = scores.sub_(largest).exp_()
    denominator = p.sum(-1, keepdim=True) + torch.exp(sink[:, None] - largest)  # the sink is not scaled
    p = sites("p", p)
    out = torch.einsum("thk,kd->thd", p[..., :n], shared)
    if picked.shape[1]:
        out += torch.einsum("thn,tnd->thd", p[..., n:], picked)
    return out.div_(denominator)


@dataclass(frozen=True)
class Rows:
    """What one sequence offers its queries in this step, by kind of layer: raw rows [n, d] from position `first` on,
    compressed rows [c, d], and index keys [c, d_index] where an indexer chooses among them."""

    raw: Tensor
    first: int
    compressed: Tensor | None
    keys: Tensor | None


@dataclass(frozen=True)
class Attention:
    """Weights of one attention, and by kind of layer its compressor and indexer; `sink` [h]."""

    wq_a: Linear
    wq_b: Linear
    wkv: Linear
    wo_a: Linear
    wo_b: Linear
    q_norm: Tensor
    kv_norm: Tensor
    sink: Tensor
    compressor: Compressor | None
    indexer: Indexer | None
    rope: Rope
    n_heads: int
    head_dim: int
    n_groups: int
    sliding_window: int
    eps: float

    def initial_state(self) -> LayerState:
        return LayerState(window=self.kv_norm.new_empty(0, self.head_dim))

    def __call__(
        self, x: Tensor, batch: Batch, states: list[LayerState], sites: Sites
    ) -> tuple[Tensor, list[LayerState]]:
        """Inputs x [t, D] of a ragged batch, one state per sequence -> output [t, D] and the states after the step."""
        table = self.rope.table(batch.positions, x.dtype, sites)
        q, kv = project_all([self.wq_a, self.wkv], [x, x], [sites, sites], ["wq_a", "wkv"])
        qr = sites("q_norm", rms_norm(q, self.q_norm, self.eps))
        kv = self.window_rows(kv, table, sites)
        states, rows = self.extend(x, kv, batch, states, sites)
        y = torch.cat([self.attend(x, qr, table, batch, rows, block, sites) for block in batch.blocks(QUERY_BLOCK)])
        return project(self.wo_b, y, sites, "wo_b"), states

    def window_rows(self, kv: Tensor, table: tuple[Tensor, Tensor], sites: Sites) -> Tensor:
        """The raw row of each token [t, d], given its projection: norm, RoPE, quantise (the rotated channels spared)."""
        kv = sites("kv_norm", rms_norm(kv, self.kv_norm, self.eps))
        return sites("kv", rotate(kv, table), spare=self.rope.dim)

    def extend(self, x: Tensor, kv: Tensor, batch: Batch, states: list[LayerState],
               sites: Sites) -> tuple[list[LayerState], list[Rows]]:  # fmt: skip
        """Take the new tokens into every sequence's state. A block is visible to its own last token, so this comes first."""
        keep = self.sliding_window - 1
        raw = [torch.cat([state.window, kv[s]]) for state, s in zip(states, batch.sequences(), strict=True)]
        windows = [rows[max(0, len(rows) - keep) :].clone() for rows in raw]  # a view would keep all of raw alive
        main = _advance(self.compressor, x, batch, [s.compressor for s in states], sites.at("compressor"))
        index = self.indexer.compressor if self.indexer else None
        keys = _advance(index, x, batch, [s.indexer for s in states], sites.at("indexer").at("compressor"))
        starts = [int(batch.positions[s.stop - 1]) + 1 - len(r) for r, s in zip(raw, batch.sequences(), strict=True)]
        rows = [Rows(*each) for each in zip(raw, starts, map(_rows, main), map(_rows, keys), strict=True)]
        return [LayerState(*each) for each in zip(windows, main, keys, strict=True)], rows

    def attend(self, x: Tensor, qr: Tensor, table: tuple[Tensor, Tensor], batch: Batch, rows: list[Rows],
               block: slice, sites: Sites) -> Tensor:  # fmt: skip
        """Queries, attention and the grouped half of the output projection for one block of tokens -> [t, g*r]."""
        x, qr, positions, here = x[block], qr[block], batch.positions[block], (table[0][block], table[1][block])
        q = project(self.wq_b, qr, sites, "wq_b").unflatten(-1, (self.n_heads, self.head_dim))  # [t, h, d]
        q = sites("q", rotate(head_norm(q, self.eps, sites.at("q_head_norm")), here))
        at = sites.at("indexer")
        if self.indexer:
            index_q, weights = self.indexer.queries(qr, here, at), self.indexer.weights(x, at)
        parts = []
        for b, part in batch.parts(block):
            picks, keys = None, rows[b].keys
            if self.indexer and keys is not None:
                picks = self.indexer.select(index_q[part], weights[part], keys, positions[part], at)
            parts.append(self.core(q[part], positions[part], rows[b], picks, sites))
        o = sites("o_rotated", rotate(sites("o", torch.cat(parts)), here, inverse=True))
        return self.group_output(o, sites)

    def core(self, q: Tensor, positions: Tensor, rows: Rows, picks: Tensor | None, sites: Sites) -> Tensor:
        """Queries [t, h, d] of one sequence at consecutive positions [t] -> [t, h, d], a few at a time."""
        _, h, d = q.shape
        compressed = 0 if rows.compressed is None else len(rows.compressed) if picks is None else picks.shape[1]
        elements = max(h * (self.sliding_window + QUERY_STEP + compressed), 0 if picks is None else compressed * d)
        step = max(1, min(QUERY_STEP, CORE_ELEMENTS // elements))
        out = []
        for i in range(0, len(q), step):
            few = slice(i, i + step)
            offer = self.offer(positions[few], rows, None if picks is None else picks[few])
            out.append(sink_attention(q[few], *offer, self.sink, sites))
        return torch.cat(out)

    def offer(self, positions: Tensor, rows: Rows, picks: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """What queries at consecutive positions [t] may look at: shared rows, hidden, picked rows, absent.

        The window reaches `sliding_window` rows back, the query's own included. HCA sees every finished row, CSA the
        indexer's picks [t, n] (-1 = none).
        """
        p = positions[:, None]  # [t, 1]
        begin, end = max(int(p[0]) - self.sliding_window + 1, rows.first), int(p[-1]) + 1
        at = torch.arange(begin, end, device=p.device)
        shared, hidden = rows.raw[begin - rows.first : end - rows.first], (at > p) | (at <= p - self.sliding_window)
        if rows.compressed is None or self.compressor is None:
            return shared, hidden, shared.new_empty(len(p), 0, self.head_dim), hidden[:, :0]
        if picks is not None:
            return shared, hidden, rows.compressed[picks.clamp_min(0)], picks < 0
        c = torch.arange(len(rows.compressed), device=p.device)
        hidden = torch.cat([hidden, c >= (p + 1) // self.compressor.ratio], dim=1)
        return torch.cat([shared, rows.compressed]), hidden, shared.new_empty(len(p), 0, self.head_dim), hidden[:, :0]

    def group_output(self, o: Tensor, sites: Sites) -> Tensor:
        """[t, h, d] -> [t, g*r]: each group of heads, concatenated, through its own slice of wo_a."""
        o = o.flatten(1).unflatten(1, (self.n_groups, -1))  # [t, g, h/g*d]
        return sites("wo_a", torch.cat(apply_parts(self.wo_a, list(o.unbind(1))), dim=-1))


def _advance(compressor: Compressor | None, x: Tensor, batch: Batch, states: list[CompressorState | None],
             sites: Sites) -> list[CompressorState | None]:  # fmt: skip
    """Project all tokens at once, then pool sequence by sequence."""
    if compressor is None:
        return states
    values, gates = compressor.project(x, batch.positions, sites)
    pairs = zip(states, batch.sequences(), strict=True)
    return [compressor.extend(values[s], gates[s], state or compressor.initial_state(), sites) for state, s in pairs]


def _rows(state: CompressorState | None) -> Tensor | None:
    return None if state is None else state.rows
