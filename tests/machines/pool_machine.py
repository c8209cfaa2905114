"""Everything that can happen to a pool, at random, beside books that are kept slowly.

Allocator, plans and codecs are the production ones; what kernels would do is done by hand (`stamped.py`). After every rule:
each sequence finds each row, key and ring entry that it may still read; what nobody holds is NaN bytes; only bytes of the
sequences that the rule names have changed (`pool_checks.py`).
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule
from pool_checks import CONFIG, LOOKAHEAD, Parts, PoolChecks
from slow_books import Full, Past
from slow_planner import Member, differences, make_picks, tokens_of
from stamped import groups, window_vector

from optimized.pool.allocator import Sequence

# So many tokens; or up to the next multiple of a group, a row or a block, or one to either side of it.
few = st.integers(1, 12)
sizes = st.one_of(few, few, st.integers(13, 140), st.tuples(st.sampled_from([4, 128, 256]), st.integers(-1, 1)))
Size = int | tuple[int, int]
some = st.integers(0, 11)
seeds = st.integers(0, 1 << 16)


class PoolMachine(PoolChecks):
    """What may happen."""

    # What a rule does to one side it does to the other; both refuse, or neither.

    def both(self, ours: Callable[[], Any], theirs: Callable[[], Any]) -> tuple[Any, Any] | None:
        """What the books and the production side return, or None if both have no room."""
        try:
            want = ours()
        except Full:
            before = self.everything()
            refused(theirs, self.parts.allocator.PoolFull)
            assert all(torch.equal(a, b) for a, b in zip(before, self.everything(), strict=True)), "a refusal changed bytes"
            return None
        return want, theirs()

    def one(self, which: int) -> tuple[Sequence, Past]:
        at = which % len(self.live)
        return self.live[at], self.books.live[at]

    def add(self, made: tuple[Any, Any] | None) -> None:
        if made is not None:
            self.live.append(made[1])

    @precondition(lambda self: self.books.free_slots())
    @rule()
    def open(self) -> None:
        self.add(self.touching([], lambda: self.both(self.books.open, self.allocator.open)))
        for field in self.pool.geometry.fields:
            start = -torch.inf if field.name.endswith("score") else 0.0
            layers = [i for i, kind in enumerate(self.pool.geometry.kinds) if field.name.startswith(kind)]
            assert all((self.pool.state(field.name, i)[self.live[-1].slot] == start).all() for i in layers), "a ring is not new"

    @precondition(lambda self: self.live)
    @rule(which=some, n=sizes, seed=seeds)
    def prefill_chunk(self, which: int, n: Size, seed: int) -> None:
        self.step([which % len(self.live)], [n], seed)

    @precondition(lambda self: self.live)
    @rule(seed=seeds)
    def decode_all(self, seed: int) -> None:
        self.step(list(range(len(self.live))), [1] * len(self.live), seed)

    @precondition(lambda self: self.live)
    @rule(ns=st.lists(sizes, min_size=1, max_size=3), seed=seeds)
    def mixed_batch(self, ns: list[Size], seed: int) -> None:
        """Some of the sequences, in any order."""
        members = random.Random(seed).sample(range(len(self.live)), min(len(ns), len(self.live)))
        self.step(members, ns[: len(members)], seed)

    @precondition(lambda self: self.live)
    @rule(which=some, n=st.integers(1, 300))
    def reserve_for_a_step_that_fails(self, which: int, n: int) -> None:
        sequence, past = self.one(which)
        act = lambda: self.both(lambda: self.books.reserve([past], [n]), lambda: self.allocator.reserve([sequence], [n]))  # noqa: E731
        self.touching([past], act)

    @precondition(lambda self: self.live)
    @rule(which=some, drafts=st.booleans(), n=st.integers(1, LOOKAHEAD + 1), back=st.integers(0, LOOKAHEAD + 1), seed=seeds)
    def verify_and_reject(self, which: int, drafts: bool, n: int, back: int, seed: int) -> None:
        at = which % len(self.live)
        if drafts:
            self.draft(which, 10_000)
        self.step([at], [n], seed)
        sequence, past = self.one(at)
        if back > self.books.may_take_back(past):
            refused(lambda: self.allocator.roll_back(sequence, back), ValueError)
            return
        self.touching([past], lambda: (self.books.take_back(past, back), self.allocator.roll_back(sequence, back)))

    @precondition(lambda self: self.live)
    @rule(which=some, n=st.sampled_from([1, 2, 3, 9, 10_000, 10_000]))
    def draft(self, which: int, n: int) -> None:
        """MTP's own window, up to `lookahead - 1` positions past the model's tokens."""
        sequence, past = self.one(which)
        n = min(n, len(past.tokens) + LOOKAHEAD - 1 - len(past.drafts))
        if n < 1:
            return
        start = len(past.drafts)

        def act() -> None:
            self.books.draft(past, self.new_stamps(n))
            member = Member(past.slot, past.blocks, start, n)
            ids = [torch.zeros(n, dtype=torch.long)]
            plan = self.parts.step.plan_step(self.pool.geometry, {"window"}, ids, [sequence], [start], "cpu")
            assert differences(plan, None, self.slow, [member], None) == []
            layer = CONFIG.num_hidden_layers
            read = self.hand.step(plan, None, np.array(past.drafts[start:]), [layer])
            rows, window = window_vector(past.drafts, layer).tolist(), CONFIG.sliding_window
            want = [v for p in range(start, start + n) for v in rows[max(0, p - window + 1) : p + 1]]
            assert read == [want], "MTP reads rows that are not its own last ones"
            sequence.drafted += n

        self.touching([past], act)

    @precondition(lambda self: self.live)
    @rule(which=some, room=st.booleans())
    def fork(self, which: int, room: bool) -> None:
        self.make_room(room and len(self.live) > 1)
        sequence, past = self.one(which)
        self.add(self.touching([], lambda: self.both(lambda: self.books.open(past), lambda: self.allocator.fork(sequence))))

    def make_room(self, wanted: bool) -> None:
        if wanted and not self.books.free_slots() and self.live:
            self.free(0)

    @precondition(lambda self: self.live)
    @rule(which=some)
    def free(self, which: int) -> None:
        sequence, past = self.one(which)
        del self.live[which % len(self.live)]
        self.touching([past], lambda: (self.books.live.remove(past), self.allocator.free(sequence)))

    @precondition(lambda self: self.live and len(self.kept) < 3)
    @rule(which=some, reserved=st.booleans())
    def keep(self, which: int, reserved: bool) -> None:
        """Also when there is room for a step that has not run."""
        if reserved:
            self.reserve_for_a_step_that_fails(which, 256)
        sequence, past = self.one(which)
        self.touching([], lambda: (self.books.keep(past), self.kept.append(self.allocator.keep(sequence))))

    @precondition(lambda self: self.kept)
    @rule(which=some, room=st.booleans())
    def start_from_prefix(self, which: int, room: bool) -> None:
        self.make_room(room)
        at = which % len(self.kept)
        past, prefix = self.books.kept[at], self.kept[at]
        self.add(self.touching([], lambda: self.both(lambda: self.books.open(past), lambda: self.allocator.start(prefix))))

    @precondition(lambda self: self.kept)
    @rule(which=some)
    def release(self, which: int) -> None:
        past, prefix = self.books.kept[which % len(self.kept)], self.kept.pop(which % len(self.kept))
        self.touching([past], lambda: (self.books.kept.remove(past), self.allocator.release(prefix)))
        if past.tokens:
            refused(lambda: self.allocator.start(prefix), ValueError)

    @precondition(lambda self: self.live and len(self.shots) < 2)
    @rule(which=some)
    def snapshot(self, which: int) -> None:
        sequence, past = self.one(which)
        self.shots.append((self.allocator.snapshot(sequence), past.copy(-1)))

    @precondition(lambda self: self.shots)
    @rule(which=some, room=st.booleans())
    def restore(self, which: int, room: bool) -> None:
        self.make_room(room)
        shot, past = self.shots[which % len(self.shots)]
        self.add(self.touching([], lambda: self.both(lambda: self.books.restore(past), lambda: self.allocator.restore(shot))))

    @rule(more_blocks=st.sampled_from([-1, 0, 1, 3, 7]), more_slots=st.sampled_from([-1, 0, 1, 2]))
    def move_boundary(self, more_blocks: int, more_slots: int) -> None:
        """To so many more than are in use, or one less."""
        blocks = max(0, 1 + max((b for p in (*self.books.live, *self.books.kept) for b in p.blocks), default=-1) + more_blocks)
        slots = max(0, max((self.pool.slots - p.slot for p in self.books.live), default=0) + more_slots)
        ours, theirs = (lambda side=side: side.move_boundary(blocks, slots) for side in (self.books, self.allocator))
        try:
            self.touching([], lambda: self.both(ours, theirs))
        except ValueError:
            refused(theirs, ValueError)

    @precondition(lambda self: self.books.live and any(p.blocks for p in self.books.live))
    @rule(seed=seeds)
    def permute_pages(self, seed: int) -> None:
        """Held blocks change places, bytes and numbers; nobody can tell."""
        holders = [*self.books.live, *self.books.kept]
        held = sorted({b for past in holders for b in past.blocks})
        to = dict(zip(held, random.Random(seed).sample(held, len(held)), strict=True))

        def act() -> None:
            bytes_of = {b: [part.clone() for part in (*self.pool.block(b), *self.index.block(b))] for b in held}
            for b, parts in bytes_of.items():
                for place, part in zip((*self.pool.block(to[b]), *self.index.block(to[b])), parts, strict=True):
                    place.copy_(part)
            owners = {to[b]: self.allocator.owners[b] for b in held}
            for b, n in owners.items():
                self.allocator.owners[b] = n
            for holder in (*holders, *self.live, *self.kept):
                for i, b in enumerate(holder.blocks):
                    holder.blocks[i] = to[b]

        self.touching(holders, act)

    # A step: room, plan, bytes.

    def new_stamps(self, n: int) -> list[int]:
        self.stamp += n
        return list(range(self.stamp - n + 1, self.stamp + 1))

    def step(self, members: list[int], sizes: list[Size], seed: int) -> None:
        sequences, pasts = [self.live[i] for i in members], [self.books.live[i] for i in members]
        ns = [resolve(size, len(past.tokens)) for size, past in zip(sizes, pasts, strict=True)]
        self.touching(pasts, lambda: self._step(sequences, pasts, ns, seed))

    def _step(self, sequences: list[Sequence], pasts: list[Past], ns: list[int], seed: int) -> None:
        reserve = self.both(lambda: self.books.reserve(pasts, ns), lambda: self.allocator.reserve(sequences, ns))
        if reserve is None:
            return
        starts, geometry = [len(p.tokens) for p in pasts], self.pool.geometry
        batch = [Member(p.slot, p.blocks, start, n) for p, start, n in zip(pasts, starts, ns, strict=True)]
        picks = make_picks(batch, CONFIG.index_topk, seed)
        plan, csa_lists = self.plan(sequences, starts, ns, picks)
        assert differences(plan, csa_lists, self.slow, batch, picks) == []
        self.far_plan(batch, picks, seed)
        for past, n in zip(pasts, ns, strict=True):
            self.books.extend(past, self.new_stamps(n))
        stamps = np.array([s for p, start in zip(pasts, starts, strict=True) for s in p.tokens[start:]], np.int64)
        layers = range(CONFIG.num_hidden_layers)
        for layer, read in zip(layers, self.hand.step(plan, csa_lists, stamps, layers), strict=True):
            want = self.seen(pasts, layer, batch, picks)
            assert read == want, f"layer {layer} ({geometry.kinds[layer]}) reads {wrong(read, want)}"
        for sequence, n in zip(sequences, ns, strict=True):
            self.allocator.advance(sequence, n)

    def plan(self, sequences: list[Sequence], starts: list[int], ns: list[int], picks: Any) -> tuple[Any, Any]:
        """The production plan of a step, and its CSA lists with these picks in place."""
        geometry, ids = self.pool.geometry, [torch.zeros(n, dtype=torch.long) for n in ns]
        plan = self.parts.step.plan_step(geometry, set(geometry.kinds), ids, sequences, starts, "cpu")
        first = np.cumsum(ns) - ns
        tables = (x.numpy() for x in (plan.positions, plan.batch_ids, plan.slots, plan.block_table))
        of_step = None if plan.direct else (first, np.array(starts))
        return plan, self.parts.plans.attention_lists(geometry, "csa", *tables, picks, of_step)

    def far_plan(self, batch: list[Member], picks: Any, seed: int) -> None:
        """The same step where blocks and slots have numbers near the end of what 32 bits hold."""
        rng = random.Random(seed)
        most = (2**31 - 1) // self.pool.geometry.envelope
        numbers = iter(rng.sample(range(most - 4096, most), sum(len(m.blocks) for m in batch)))
        top = (2**31 - 1) // self.pool.geometry.slot_rows - 1
        far = [Member(top - i, [next(numbers) for _ in m.blocks], m.start, m.n) for i, m in enumerate(batch)]
        plan, lists = self.plan([Sequence(m.slot, m.blocks) for m in far], [m.start for m in far], [m.n for m in far], picks)
        assert differences(plan, lists, self.slow, far, picks) == []

    def seen(self, pasts: list[Past], layer: int, batch: list[Member], picks: Any) -> list[int]:
        """Vectors that the tokens of a step read in a layer, in order."""
        kind, window, out = self.pool.geometry.kinds[layer], CONFIG.sliding_window, list[int]()
        rows = [groups(past.tokens, layer, kind) for past in pasts]
        windows = [window_vector(past.tokens, layer).tolist() for past in pasts]
        for t in tokens_of(batch):
            out += [rows[t.b][c] for c in self.slow.entries(kind, t, picks)]
            out += windows[t.b][max(0, t.position - window + 1) : t.position + 1]
        return out


def resolve(size: Size, length: int) -> int:
    """How many tokens a size means behind `length` tokens."""
    if isinstance(size, int):
        return size
    multiple, beside = size
    return max(1, -(-(length + 1) // multiple) * multiple + beside - length)


def refused(act: Callable[[], Any], error: type[Exception]) -> None:
    try:
        act()
    except error:
        return
    raise AssertionError(f"no {error.__name__}")


def wrong(read: list[int], want: list[int]) -> str:
    at = next((i for i, (a, b) in enumerate(zip(read, want, strict=False)) if a != b), len(want))
    return f"{len(read)} vectors for {len(want)}, the first wrong one at {at}"


def machine(parts: Parts) -> type[PoolMachine]:
    """The machine on these parts."""
    return type("PoolMachine", (PoolMachine,), {"parts": parts})
