"""The engine under any schedule, one layer of each kind: what a sequence put out and left is what one step would have.

Sequences begin at made-up pasts near the edges of groups, rows and blocks (`engine_past.py`), of which only what may be read is
there; the rest is NaN bytes. Most blocks and all slots lie behind 2 GiB of their plane. After every step streams are finite and
nobody else's bytes have changed. In the end every history, also of sequences that left, runs in one step of another engine:
streams, logits, and every byte that a next token could read are the same, bit for bit; and that step is what the twin says, as
near as rounding allows (`engine_twin.py`).
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cache
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from engine_cases import equal, left_behind
from engine_past import CONFIG, LOOKAHEAD, SLOTS, far_engine, make_engine, past, readable
from engine_twin import Witness
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule
from torch import Tensor

from optimized.engine import Engine
from optimized.pool.allocator import PoolFull, Prefix, Sequence, copy_bytes

EDGES = (0, 2, 125, 127, 253, 255)
SIZES = (1, 1, 2, 3, 4, 5, 7, 12)  # of a step: up to `LOOKAHEAD + 1` its rows go straight into rings, 12 fill a ring and more


@cache
def judge() -> Engine:
    """The engine that runs all histories in one step."""
    return make_engine(slots=16, blocks=32)


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
    """`changes` (module, name, value) are in place while its engine is made and steps, not for the one that judges."""

    changes: tuple[tuple[ModuleType, str, Any], ...] = ()

    def __init__(self) -> None:
        super().__init__()
        with self.changed():
            self.engine = far_engine()
        self.allocator = self.engine.allocator
        self.live: list[Story] = []
        self.told: list[Told] = []
        self.kept: list[tuple[Prefix, Story]] = []

    def changed(self) -> ExitStack:
        stack = ExitStack()
        for change in self.changes:
            stack.enter_context(mock.patch.object(*change))
        return stack

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
    @rule(sizes=st.lists(st.sampled_from(SIZES), min_size=1, max_size=3), seed=st.integers(0, 9999))
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

    @precondition(lambda self: self.kept)
    @rule(which=st.integers(0, 2))
    def release(self, which: int) -> None:
        self.allocator.release(self.kept.pop(which % len(self.kept))[0])

    @rule(blocks=st.sampled_from((2, 3, 5, None)), slots=st.integers(1, SLOTS))
    def move_boundary(self, blocks: int | None, slots: int) -> None:
        """To few blocks or to all that there are (None), also those between that nobody has touched."""
        self.attempt(lambda: self.allocator.move_boundary(blocks or len(self.allocator.owners), slots))

    @precondition(lambda self: any(story.sequence.blocks for story in self.live))
    @rule(seed=st.integers(0, 9999))
    def permute_pages(self, seed: int) -> None:
        """Held blocks change places, bytes and numbers, with each other and with free ones at the far end."""
        allocator, holders = self.allocator, [s.sequence for s in self.live] + [prefix for prefix, _ in self.kept]
        held = sorted({b for holder in holders for b in holder.blocks})
        places = held + heapq.nlargest(len(held), allocator._free_blocks)
        to = dict(zip(held, random.Random(seed).sample(places, len(held)), strict=True))
        parts = {b: [part.clone() for part in allocator._block(b)] for b in held}
        owners = {b: allocator.owners[b] for b in held}
        for b in held:
            allocator.owners[b] = 0
            allocator._poison(allocator._block(b))
        for b in held:
            allocator.owners[to[b]] = owners[b]
            copy_bytes(parts[b], allocator._block(to[b]))
        allocator._free_blocks = sorted({*allocator._free_blocks, *held} - set(to.values()))
        for holder in holders:
            for i, b in enumerate(holder.blocks):
                holder.blocks[i] = to[b]

    def step(self, members: list[Story], sizes: list[int], seed: int) -> bool:
        """Whether there was room."""
        ids = torch.randint(0, CONFIG.vocab_size, (sum(sizes),), generator=torch.Generator().manual_seed(seed)).split(sizes)
        others = [s for s in self.live if s not in members]
        before = [left_behind(self.engine, s.sequence) for s in others]
        with self.changed():
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
    tokens = [torch.tensor(t.story.tokens) for t in told]
    witness = Witness(engine, again, tokens)
    parts = witness.step().split([len(ids) for ids in tokens])
    for sequence, t, streams in zip(again, told, parts, strict=True):
        after = f"{len(streams)} tokens after {t.story.start}"
        assert equal(list(streams), t.story.streams), f"other streams: {after}"
        assert equal(readable(engine, sequence), t.bytes), f"other bytes: {after}"
    logits = engine.logits(torch.stack([streams[-1] for streams in parts]))
    assert equal([logits[:1]], [engine.logits(told[0].story.streams[-1][None])]), "other logits alone"
    witness.check(logits)
