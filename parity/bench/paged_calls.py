"""Calls on the pool: a real pool of the model's geometry with its blocks in random order, lists as a step plans them.

Only the last layer of each kind is filled, and of it what the lists name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from optimized.kernels.compress import compress
from optimized.kernels.compress_index import compress_index
from optimized.kernels.costs import Step
from optimized.kernels.decode_attention import decode_attention
from optimized.kernels.index_logits import index_logits
from optimized.kernels.indexer import index_query
from optimized.kernels.prefill_attention import prefill_attention
from optimized.kernels.qk_norm_rope import payload_like, qk_norm_rope
from optimized.kernels.state_write import write_state
from optimized.kernels.topk import topk
from optimized.kernels.translate import translate
from optimized.kernels.window_write import write_window
from optimized.pool.allocator import Sequence
from optimized.pool.geometry import BLOCK_TOKENS, RATIO, Build, Geometry
from optimized.pool.index_rows import LAYOUTS
from optimized.pool.pool import IndexPool, Pool
from optimized.pool.rows import pack_2buff
from optimized.step import plan_step
from reference.config import Config, Kind

from .draws import Draw

Call = Callable[[], object]
Make = Callable[[], Call]
BUILDS: tuple[Build, ...] = ("2buff", "bf16")
KINDS: tuple[Kind, ...] = ("csa", "hca", "window")
PAGES = {"fp4": "fp4_natural", "flydsl": "fp4_flydsl", "fp8": "fp8_linear", "preshuffled": "fp8_preshuffled"}


def paged_calls(config: Config, step: Step, draw: Draw) -> dict[str, Make]:
    """As `layer_calls`."""
    scene = Scene(config, step, draw)
    calls: dict[str, Make] = {}
    for build in BUILDS:
        calls[f"qk_norm_rope {build}"] = partial(scene.qk_norm_rope, build)
        for kind in KINDS:
            calls[f"attention {kind} {build}"] = partial(scene.attention, kind, build)
            if RATIO[kind]:
                calls[f"compress {kind} {build}"] = partial(scene.compress, kind, build)
    for which in ("csa", "hca", "index"):
        calls[f"state_write {which}"] = partial(scene.state_write, which)
    for form in ("fp4", "fp8"):
        calls[f"index_query {form}"] = partial(scene.index_query, form)
        calls[f"compress index {form}"] = partial(scene.compress_index, PAGES[form])
    for name, pages in PAGES.items():
        calls[f"index_logits {name}"] = partial(scene.scores, pages)
    if not step.direct:
        calls["window_write"] = scene.window_write
    return calls | {"topk": scene.topk, "translate": scene.translate}


@dataclass(frozen=True)
class Paged:
    """A pool and the plan of one step on it."""

    geometry: Geometry
    pool: Pool
    plan: Any

    def layer(self, kind: Kind) -> int:
        """The last layer of a kind."""
        return max(i for i, k in enumerate(self.geometry.kinds) if k == kind)

    def planes(self, kind: Kind) -> tuple[Tensor, Tensor | None]:
        rows = self.pool.layer_rows(self.layer(kind))
        return rows[0], rows[1] if len(rows) > 1 else None


class Scene:
    """What the calls of a step share. The pool of one build is kept at a time."""

    def __init__(self, config: Config, step: Step, draw: Draw) -> None:
        self.config, self.step, self.draw = config, step, draw
        self.blocks = step.sequences * -(-step.end // BLOCK_TOKENS)
        self.paged = lru_cache(1)(self._paged)

    def _paged(self, build: Build) -> Paged:
        c, s = self.config, self.step
        geometry = Geometry(c, build, 0, int(c.has_mtp))
        pool = Pool(geometry, self.blocks, s.sequences, self.draw.device)
        blocks = self.draw.order(self.blocks).view(s.sequences, -1).tolist()
        sequences = [Sequence(pool.slot_position(b), blocks[b]) for b in range(s.sequences)]
        ids = [torch.zeros(s.new, dtype=torch.long)] * s.sequences
        starts = [s.end - s.new] * s.sequences
        return Paged(geometry, pool, plan_step(geometry, set(geometry.kinds), ids, sequences, starts, self.draw.device))

    def rows(self, n: int, build: Build) -> tuple[Tensor, Tensor | None]:
        """Rows of the pool, [n, ...] in each plane."""
        d = self.config.head_dim
        if build == "bf16":
            return self.draw.bf16(n, d), None
        packed = pack_2buff(self.draw.e4m3(n, d - 64), self.draw.scales(n, (d - 64) // 64), d)
        return packed, self.draw.bf16(n, 64)

    def picks(self, plan: Any) -> Tensor:
        """int32 [t, k]: what a token sees last, and others at random, ascending, then -1."""
        columns = torch.arange(plan.columns, device=self.draw.device)
        visible = plan.visible[:, None]
        order = torch.where(columns < visible, self.draw.f32(self.step.tokens, plan.columns), -torch.inf)
        order = torch.where(columns == visible - 1, torch.inf, order)
        value, column = order.topk(min(self.config.index_topk, plan.columns))
        column = torch.where(value > -torch.inf, column, plan.columns).sort().values
        picks = torch.full((self.step.tokens, self.config.index_topk), -1, dtype=torch.int32, device=self.draw.device)
        picks[:, : column.shape[1]] = torch.where(column < plan.columns, column, -1)
        return picks

    def translate(self, build: Build = "2buff") -> Call:
        paged, c = self.paged(build), self.config
        plan, lists = paged.plan, paged.plan.kinds["csa"]
        picks, rows, envelope = self.picks(plan), paged.geometry.stride("csa"), paged.geometry.envelope
        return lambda: translate(
            picks, plan.positions, plan.batch_ids, plan.block_table, lists.indptr, lists.indices,
            window=c.sliding_window, envelope=envelope, block_rows=rows,
        )  # fmt: skip

    def attention(self, kind: Kind, build: Build) -> Call:
        paged, c, t = self.paged(build), self.config, self.step.tokens
        if kind == "csa":
            self.translate(build)()
        lists = paged.plan.kinds[kind]
        planes = paged.planes(kind)
        named = lists.indices[lists.indices >= 0].long().unique()
        for plane, filled in zip(planes, self.rows(len(named), build), strict=True):
            if plane is not None and filled is not None:
                plane[named] = filled
        heads, scale = c.num_attention_heads, c.head_dim**-0.5
        q, sink = self.draw.bf16(t, heads, c.head_dim), self.draw.f32(heads)
        csr = (lists.indices, lists.indptr, sink, *lists.turn)
        if self.step.direct:
            return lambda: decode_attention(q, *planes, *csr, scale=scale, longest=lists.longest)
        payload = self.rows(t, build)
        return lambda: prefill_attention(q, *planes, *payload, *csr, scale=scale, longest=lists.longest)

    def qk_norm_rope(self, build: Build) -> Call:
        paged, c, t, draw = self.paged(build), self.config, self.step.tokens, self.draw
        own = paged.plan.kinds["csa"]
        q, kv, weight = draw.bf16(t, c.num_attention_heads, c.head_dim), draw.bf16(t, c.head_dim), draw.f32(c.head_dim)
        target = paged.planes("csa") if self.step.direct else payload_like(kv, build)
        place = own.destination if self.step.direct else torch.arange(t, device=draw.device)
        return lambda: qk_norm_rope(q, kv, weight, c.rms_norm_eps, *own.turn, *target, place)

    def window_write(self) -> Call:
        paged = self.paged("2buff")
        payload, planes, place = self.rows(self.step.tokens, "2buff"), paged.planes("csa"), paged.plan.kinds["csa"].destination
        return lambda: write_window(*payload, *planes, place)

    def _group(self, kind: Kind, build: Build, field: str, d: int) -> tuple[Paged, Any, list[Tensor], Tensor]:
        """The pool, which groups the step touches, their projections and filled rings, and ape."""
        paged = self.paged(build)
        group, ratio = paged.plan.kinds[kind].compression, RATIO[kind]
        width = d * (2 if ratio == 4 else 1)
        projected = self.draw.f32(self.step.tokens, 2 * width)
        rings = [paged.pool.state(f"{field}_{part}", paged.layer(kind)) for part in ("kv", "score")]
        for ring in rings:
            ring[paged.plan.slots.long()] = self.draw.f32(self.step.sequences, *ring.shape[1:])
        return paged, group, [projected[:, :width], projected[:, width:], *rings], self.draw.f32(ratio, width)

    def compress(self, kind: Kind, build: Build) -> Call:
        d = self.config.head_dim
        paged, group, tensors, ape = self._group(kind, build, "hca" if kind == "hca" else "csa_main", d)
        plan, planes, norm, rows = paged.plan, paged.planes(kind), self.draw.f32(d), BLOCK_TOKENS // RATIO[kind]
        return lambda: compress(
            *tensors, group.complete, plan.slots, ape, norm, self.config.rms_norm_eps, *group.turn, *planes,
            plan.block_table, ratio=RATIO[kind], envelope=paged.geometry.envelope, block_rows=rows,
        )  # fmt: skip

    def compress_index(self, pages: str) -> Call:
        d = self.config.index_head_dim
        paged, group, tensors, ape = self._group("csa", "2buff", "csa_idx", d)
        plan, norm, target = paged.plan, self.draw.f32(d), self.pages(paged, pages)
        return lambda: compress_index(
            *tensors, group.complete, plan.slots, ape, norm, self.config.rms_norm_eps, *group.turn, *target,
            plan.block_table, order=LAYOUTS[pages].order,
        )  # fmt: skip

    def state_write(self, which: str) -> Call:
        kind: Kind = "hca" if which == "hca" else "csa"
        field = {"csa": "csa_main", "hca": "hca", "index": "csa_idx"}[which]
        d = self.config.index_head_dim if which == "index" else self.config.head_dim
        paged, group, tensors, ape = self._group(kind, "2buff", field, d)
        return lambda: write_state(*tensors, group.keep, paged.plan.slots, ape)

    def pages(self, paged: Paged, pages: str) -> tuple[Tensor, Tensor]:
        """Keys and scales of the last CSA layer, filled."""
        pool = IndexPool(paged.geometry, self.blocks, LAYOUTS[pages], self.draw.device)
        keys, scales = pool.pages(paged.layer("csa"))
        fp4 = LAYOUTS[pages].form == "fp4"
        keys.copy_((self.draw.e2m1 if fp4 else self.draw.e4m3)(*keys.shape))
        byte = self.draw.scales(*scales.shape)
        scales.copy_(byte if fp4 else torch.ldexp(torch.ones_like(scales), byte.int() - 127))
        return keys, scales

    def index_query(self, form: Any) -> Call:
        c, t = self.config, self.step.tokens
        q, projected = self.draw.bf16(t, c.index_n_heads, c.index_head_dim), self.draw.f32(t, c.index_n_heads)
        turn = self.draw.turns(t)
        return lambda: index_query(q, projected, *turn, form=form)

    def scores(self, pages: str) -> Call:
        paged, c, t, draw = self.paged("2buff"), self.config, self.step.tokens, self.draw
        h, d, layout, plan = c.index_n_heads, c.index_head_dim, LAYOUTS[pages], paged.plan
        fp4 = layout.form == "fp4"
        codes = draw.e2m1(t, h, d // 2) if fp4 else draw.e4m3(t, h, d)
        query = codes, draw.scales(t, h, d // 32 if fp4 else 1), draw.f32(t, h)
        keys = self.pages(paged, pages)
        return lambda: index_logits(
            *query, *keys, plan.block_table, plan.batch_ids, plan.visible, columns=plan.columns, order=layout.order
        )

    def topk(self) -> Call:
        plan = self.paged("2buff").plan
        logits = self.draw.f32(self.step.tokens, plan.columns)
        return lambda: topk(logits, plan.visible, self.config.index_topk)
