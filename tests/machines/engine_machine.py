"""The engine under any schedule, one layer of each kind: what a sequence put out and left is what one step would have.

Sequences begin at made-up pasts near the edges of groups, rows and blocks, of which only what may be read is there; the rest
is NaN bytes. After every step streams are finite and nobody else's bytes have changed. In the end every history, also of
sequences that left, runs in one step of another engine: streams, logits, and every byte that a next token could read are the
same, bit for bit.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cache
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from engine_cases import equal, left_behind
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule
from slow_layout import POOLED, RATIOS, SlowLayout
from torch import Tensor

from optimized.engine import Engine
from optimized.pool import rows as codec
from optimized.pool.allocator import PoolFull, Prefix, Sequence, Snapshot
from optimized.pool.geometry import Geometry
from optimized.pool.index_rows import PAGE_ROWS, encode, key_order, scale_order
from reference.checkpoint.procedural import ProceduralStore
from reference.presets import preset

CONFIG = replace(
    preset("mini"), num_hidden_layers=3, compress_ratios=(0, 128, 4, 0), num_hash_layers=1, index_topk=3, hidden_size=128,
    num_attention_heads=2, o_groups=1, n_routed_experts=3, num_experts_per_tok=2, vocab_size=128,
)  # fmt: skip
LOOKAHEAD, BLOCKS, SLOTS = 2, 8, 4
EDGES = (0, 2, 125, 127, 253, 255)


def make_engine(blocks: int = BLOCKS, slots: int = SLOTS) -> Engine:
    return Engine(ProceduralStore(CONFIG), "pool-fp8", blocks=blocks, slots=slots, lookahead=LOOKAHEAD)


@cache
def judge() -> Engine:
    """The engine that runs all histories in one step."""
    return make_engine(slots=16, blocks=32)


@cache
def past(length: int) -> Snapshot:
    """A made-up past: random rows, keys and rings where a token at `length` may read, NaN bytes elsewhere."""
    engine, generator = make_engine(), torch.Generator().manual_seed(length)
    sequence = engine.allocator.open()
    engine.allocator.reserve([sequence], [length])
    at = SlowLayout(engine.geometry)
    for layer, kind in enumerate(engine.geometry.kinds):
        rows = [at.window(layer, sequence.slot, p) for p in range(max(0, length - at.ring), length)]
        entries = range(length // RATIOS[kind]) if RATIOS[kind] else range(0)
        rows += [at.compressed(layer, list(sequence.blocks), c) for c in entries]
        parts = codec.encode_2buff(torch.randn(len(rows), CONFIG.head_dim, generator=generator))
        for plane, part in zip(engine.memory.pool.planes, parts, strict=True):
            plane[rows] = part.view(torch.uint8)
    _keys(engine, sequence, length // 4, generator)
    _rings(engine, sequence, length, generator)
    engine.allocator.advance(sequence, length)
    return engine.allocator.snapshot(sequence)


def _keys(engine: Engine, sequence: Sequence, count: int, generator: torch.Generator) -> None:
    layout, width, entries = engine.memory.index.layout, CONFIG.index_head_dim, torch.arange(count)
    parts = encode(torch.randn(count, width, generator=generator), layout.form)
    block = torch.tensor(list(sequence.blocks), dtype=torch.long)[entries // PAGE_ROWS]
    places = (order(layout, width)[entries % PAGE_ROWS] for order in (key_order, scale_order))
    for plane, place, part in zip(engine.memory.index.pages(engine.geometry.kinds.index("csa")), places, parts, strict=True):
        plane[block[:, None], place] = part


def _rings(engine: Engine, sequence: Sequence, length: int, generator: torch.Generator) -> None:
    for name, ring in rings(engine.geometry, engine, sequence.slot):
        kind = "hca" if name.startswith("hca") else "csa"
        at = torch.arange(max(0, length - POOLED[kind]), length) % len(ring)
        ring[at] = torch.randn(len(at), ring.shape[1], generator=generator)


def rings(geometry: Geometry, engine: Engine, slot: int) -> list[tuple[str, Tensor]]:
    """Every compressor ring of a slot, by the name of its field."""
    kinds = geometry.kinds
    return [(f.name, engine.memory.pool.state(f.name, kinds.index("hca" if f.name.startswith("hca") else "csa"))[slot])
            for f in geometry.fields]  # fmt: skip


def readable(engine: Engine, sequence: Sequence) -> list[Tensor]:
    """Copies of all that the next token may read: window rows, compressed rows, index keys, rings."""
    geometry, at, length = engine.geometry, SlowLayout(engine.geometry), sequence.length
    out = []
    for layer, kind in enumerate(geometry.kinds[: CONFIG.num_hidden_layers]):
        rows = [at.window(layer, sequence.slot, p) for p in range(max(0, length - CONFIG.sliding_window + 1), length)]
        rows += [at.compressed(layer, list(sequence.blocks), c) for c in range(length // RATIOS[kind] if RATIOS[kind] else 0)]
        out += [plane[rows] for plane in engine.memory.pool.planes]
    entries, layout = torch.arange(length // 4), engine.memory.index.layout
    block = torch.tensor(list(sequence.blocks), dtype=torch.long)[entries // PAGE_ROWS]
    for plane, order in zip(engine.memory.index.pages(geometry.kinds.index("csa")), (key_order, scale_order), strict=True):
        out.append(plane[block[:, None], order(layout, CONFIG.index_head_dim)[entries % PAGE_ROWS]])
    for name, ring in rings(geometry, engine, sequence.slot):
        held = torch.arange(max(0, length - POOLED["hca" if name.startswith("hca") else "csa"]), length)
        out.append(ring[held % len(ring)])
    return out


@dataclass(eq=False)
class Story:
    """A sequence, the past it began with, its tokens since, and the streams that came of each."""

    sequence: Sequence
    start: int
    tokens: list[int] = field(default_factory=list)
    streams: list[Tensor] = field(default_factory=list)

    def branch(self, sequence: Sequence) -> Story:
        return Story(sequence, self.start, self.tokens[:], self.streams[:])


@dataclass(frozen=True)
class Told:
    """What a sequence left: its story and copies of the bytes that a next token could have read."""

    story: Story
    bytes: list[Tensor]


class EngineMachine(RuleBasedStateMachine):
    """`changes` (module, name, value) are in place while the machine's engine steps, not for the one that judges."""

    changes: tuple[tuple[ModuleType, str, Any], ...] = ()

    def __init__(self) -> None:
        super().__init__()
        self.engine = make_engine()
        self.allocator = self.engine.allocator
        self.live: list[Story] = []
        self.told: list[Told] = []
        self.kept: list[tuple[Prefix, Story]] = []

    def attempt(self, act: Callable[[], Any]) -> Any:
        """What an act returns, or None where there is no room."""
        try:
            return act()
        except PoolFull:
            return None

    def begin(self, sequence: Sequence | None, story: Story | None, start: int) -> None:
        if sequence is not None:
            self.live.append(story.branch(sequence) if story else Story(sequence, start))

    @precondition(lambda self: self.allocator.free_slots)
    @rule(length=st.sampled_from(EDGES))
    def add(self, length: int) -> None:
        self.begin(self.attempt(lambda: self.allocator.restore(past(length))), None, length)

    @precondition(lambda self: self.live)
    @rule(sizes=st.lists(st.sampled_from((1, 1, 2, 3, 4, 5, 7, 9, 18)), min_size=1, max_size=3), seed=st.integers(0, 9999))
    def mixed_step(self, sizes: list[int], seed: int) -> None:
        """Chunks and single tokens of some of the sequences, in any order."""
        members = random.Random(seed).sample(self.live, min(len(sizes), len(self.live)))
        self.step(members, sizes[: len(members)], seed)

    @precondition(lambda self: self.live)
    @rule(seed=st.integers(0, 9999))
    def decode_all(self, seed: int) -> None:
        self.step(self.live, [1] * len(self.live), seed)

    @precondition(lambda self: self.live)
    @rule(n=st.integers(1, LOOKAHEAD + 1), back=st.integers(1, LOOKAHEAD), seed=st.integers(0, 9999))
    def verify_and_reject(self, n: int, back: int, seed: int) -> None:
        story = self.live[seed % len(self.live)]
        if not self.step([story], [n], seed):
            return
        back = min(back, n)
        self.allocator.roll_back(story.sequence, back)
        del story.tokens[-back:], story.streams[-back:]

    @precondition(lambda self: self.live)
    @rule(which=st.integers(0, SLOTS))
    def fork(self, which: int) -> None:
        story = self.live[which % len(self.live)]
        self.begin(self.attempt(lambda: self.allocator.fork(story.sequence)), story, 0)

    @precondition(lambda self: self.live and len(self.kept) < 2)
    @rule(which=st.integers(0, SLOTS))
    def keep(self, which: int) -> None:
        story = self.live[which % len(self.live)]
        self.kept.append((self.allocator.keep(story.sequence), story.branch(story.sequence)))

    @precondition(lambda self: self.kept)
    @rule(which=st.integers(0, 2))
    def start_from_prefix(self, which: int) -> None:
        prefix, story = self.kept[which % len(self.kept)]
        self.begin(self.attempt(lambda: self.allocator.start(prefix)), story, 0)

    @precondition(lambda self: self.live)
    @rule(which=st.integers(0, SLOTS))
    def free(self, which: int) -> None:
        story = self.live.pop(which % len(self.live))
        self.tell(story)
        self.allocator.free(story.sequence)

    @precondition(lambda self: any(story.sequence.blocks for story in self.live))
    @rule(seed=st.integers(0, 9999))
    def permute_pages(self, seed: int) -> None:
        """Held blocks change places, bytes and numbers."""
        pool, index, holders = self.allocator.pool, self.allocator.index, [s.sequence for s in self.live]
        holders += [prefix for prefix, _ in self.kept]
        held = sorted({b for holder in holders for b in holder.blocks})
        to = dict(zip(held, random.Random(seed).sample(held, len(held)), strict=True))
        parts = {b: [part.clone() for part in (*pool.block(b), *index.block(b))] for b in held}
        owners = {b: self.allocator.owners[b] for b in held}
        for b in held:
            self.allocator.owners[to[b]] = owners[b]
            for place, part in zip((*pool.block(to[b]), *index.block(to[b])), parts[b], strict=True):
                place.copy_(part)
        for holder in holders:
            for i, b in enumerate(holder.blocks):
                holder.blocks[i] = to[b]

    def step(self, members: list[Story], sizes: list[int], seed: int) -> bool:
        """Whether there was room."""
        ids = torch.randint(0, CONFIG.vocab_size, (sum(sizes),), generator=torch.Generator().manual_seed(seed)).split(sizes)
        others = [s for s in self.live if s not in members]
        before = [left_behind(self.engine, s.sequence) for s in others]
        with ExitStack() as changed:
            for change in self.changes:
                changed.enter_context(mock.patch.object(*change))
            x = self.attempt(lambda: self.engine.step(list(ids), [s.sequence for s in members]))
        if x is None:
            return False
        assert x.isfinite().all(), "bytes that nobody wrote reached the streams"
        assert all(equal(left_behind(self.engine, s.sequence), kept) for s, kept in zip(others, before, strict=True))
        for story, new, streams in zip(members, ids, x.split(sizes), strict=True):
            story.tokens += new.tolist()
            story.streams += list(streams)
        return True

    def tell(self, story: Story) -> None:
        if story.tokens:
            self.told.append(Told(story, readable(self.engine, story.sequence)))

    def teardown(self) -> None:
        for story in self.live:
            self.tell(story)
        for first in range(0, len(self.told), 16):
            judge_all(self.told[first : first + 16])


def judge_all(told: list[Told]) -> None:
    """All histories from their pasts in one step: the same streams, logits and readable bytes."""
    engine = judge()
    again = [engine.allocator.restore(past(t.story.start)) for t in told]
    try:
        compare(engine, again, told)
    finally:
        for sequence in again:
            engine.allocator.free(sequence)


def compare(engine: Engine, again: list[Sequence], told: list[Told]) -> None:
    lengths = [len(t.story.tokens) for t in told]
    parts = engine.step([torch.tensor(t.story.tokens) for t in told], again).split(lengths)
    for sequence, t, streams, n in zip(again, told, parts, lengths, strict=True):
        assert equal(list(streams), t.story.streams), f"other streams: {n} tokens after {t.story.start}"
        assert equal(readable(engine, sequence), t.bytes), f"other bytes: {n} tokens after {t.story.start}"
    together = engine.logits(torch.stack([streams[-1] for streams in parts]))
    assert equal([together[:1]], [engine.logits(told[0].story.streams[-1][None])]), "other logits alone"
