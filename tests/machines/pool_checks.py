"""A pool, books kept beside it, and what must be true of the two after every rule."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import torch
from hypothesis.stateful import RuleBasedStateMachine, invariant
from slow_books import Books, Past
from slow_layout import POOLED, RATIOS
from slow_planner import SlowPlanner
from stamped import RINGS, Hand, groups, window_vector

from optimized import step as step_module
from optimized.pool import allocator as allocator_module
from optimized.pool import plans as plans_module
from optimized.pool.allocator import Prefix, Sequence, Snapshot
from optimized.pool.geometry import Build, Geometry
from optimized.pool.index_rows import LAYOUTS
from optimized.pool.pool import POISON, IndexPool, Pool
from reference.presets import preset

POISONED = int.from_bytes(bytes([POISON] * 8), "little", signed=True)
LOOKAHEAD, BLOCKS, SLOTS, MOST_BLOCKS = 2, 7, 3, 12
CONFIG = replace(preset("mini"), head_dim=128, index_head_dim=64, sliding_window=7, index_topk=5)


@dataclass(frozen=True)
class Parts:
    """What the machine tries: production modules, or mutants of them."""

    allocator: ModuleType = allocator_module
    step: ModuleType = step_module
    plans: ModuleType = plans_module
    build: Build = "2buff"
    layout: str = "fp4_natural"


class PoolChecks(RuleBasedStateMachine):
    """`live[i]` is the production sequence of `books.live[i]`; `kept` likewise; `shots` snapshots with their pasts."""

    parts = Parts()

    def __init__(self) -> None:
        super().__init__()
        geometry = Geometry(CONFIG, self.parts.build, LOOKAHEAD, drafter_blocks=1)
        self.pool, layout = Pool(geometry, BLOCKS, SLOTS), LAYOUTS[self.parts.layout]
        self.index = IndexPool(geometry, MOST_BLOCKS, layout)
        self.allocator = self.parts.allocator.Allocator(self.pool, self.index, BLOCKS, SLOTS)
        self.books = Books(geometry, BLOCKS, SLOTS, self.pool.slots, MOST_BLOCKS)
        self.hand, self.slow = Hand(self.pool, self.index), SlowPlanner(geometry)
        self.live: list[Sequence] = []
        self.kept: list[Prefix] = []
        self.shots: list[tuple[Snapshot, Past]] = []
        self.stamp = 0

    def everything(self) -> list[torch.Tensor]:
        """Bytes of rows [rows, bytes] and of pages [layers, blocks, bytes]."""
        pages = self.index.keys, self.index.scales
        return [*(p.clone() for p in self.pool.planes), *(p.contiguous().view(torch.uint8).clone() for p in pages)]

    def touching(self, pasts: list[Past], act: Callable[[], Any]) -> Any:
        """Run a rule; nothing changes but slots and unshared blocks that `pasts`, or new sequences, hold before or after."""
        others = [p for p in (*self.books.live, *self.books.kept) if p not in pasts]
        before, slots, blocks = self.everything(), {p.slot for p in pasts}, {b for p in pasts for b in p.blocks}
        done = act()
        new = [p for p in self.books.live if p not in others]
        slots, blocks = slots | {p.slot for p in new}, blocks | {b for p in new for b in p.blocks}
        blocks -= {b for p in others for b in p.blocks}
        self.unchanged(before, slots, blocks)
        return done

    def unchanged(self, before: list[torch.Tensor], slots: set[int], blocks: set[int]) -> None:
        geometry, planes, rows = self.pool.geometry, len(self.pool.planes), self.pool.plane_rows
        mine = rows_of(slots, geometry.slot_rows, rows) | rows_of(blocks, geometry.envelope, rows)
        for old, plane in zip(before, self.pool.planes, strict=False):
            moved = (words(old) != words(plane)).any(1) & ~mine
            assert not moved.any(), f"rows {moved.nonzero().flatten().tolist()[:4]} changed, which nobody of this rule holds"
        pages = [b for b in range(MOST_BLOCKS) if b not in blocks]
        for old, new in zip(before[planes:], self.everything()[planes:], strict=True):
            assert torch.equal(old[:, pages], new[:, pages]), "a page changed that nobody of this rule holds"

    @invariant()
    def books_agree(self) -> None:
        allocator, books = self.allocator, self.books
        for sequence, past in zip((*self.live, *self.kept), (*books.live, *books.kept), strict=True):
            assert list(sequence.blocks) == past.blocks
            assert (sequence.length, sequence.reached, sequence.drafted) == (len(past.tokens), past.reached, len(past.drafts))
        assert [s.slot for s in self.live] == [p.slot for p in books.live]
        assert list(allocator.owners) == [len(books.holders(b)) for b in range(MOST_BLOCKS)]
        assert (allocator.free_blocks, allocator.free_slots) == (len(books.free_blocks()), len(books.free_slots()))
        assert (allocator.blocks, allocator.slots) == (books.blocks, books.slots)

    @invariant()
    def what_nobody_holds_is_poison(self) -> None:
        geometry, books = self.pool.geometry, self.books
        held = {b for p in (*books.live, *books.kept) for b in p.blocks}
        rows = self.pool.plane_rows
        free = ~(rows_of({p.slot for p in books.live}, geometry.slot_rows, rows) | rows_of(held, geometry.envelope, rows))
        assert all((words(plane)[free] == POISONED).all() for plane in self.pool.planes), "bytes of a row that nobody holds"
        free_pages = [b for b in range(MOST_BLOCKS) if b not in held]
        for b in free_pages:
            assert all((part == POISON).all() for part in self.index.block(b)), f"page {b} is not poison"

    @invariant()
    def everyone_finds_their_window_rows(self) -> None:
        """Of every position that the ring still holds."""
        geometry, live = self.pool.geometry, self.books.live
        for layer in range(len(geometry.kinds)):
            drafter = layer == CONFIG.num_hidden_layers
            rows, want = [], []
            for past in live:
                stamps, reached = (past.drafts, past.draft_reached) if drafter else (past.tokens, past.reached)
                held = range(max(0, reached - geometry.ring), len(stamps))
                rows += [self.slow.at.window(layer, past.slot, p) for p in held]
                want += window_vector([stamps[p] for p in held], layer).tolist()
            assert self.hand.rows(rows) == want, f"layer {layer} window rows"

    @invariant()
    def everyone_finds_their_groups(self) -> None:
        """Compressed rows, index keys, and what the rings hold of groups to come."""
        hand, live = self.hand, self.books.live
        for layer, kind in enumerate(self.pool.geometry.kinds):
            if not RATIOS[kind]:
                continue
            vectors = [groups(past.tokens, layer, kind) for past in live]
            want = [v for of_past in vectors for v in of_past]
            pairs = [(past, c) for past, of_past in zip(live, vectors, strict=True) for c in range(len(of_past))]
            rows = [self.slow.at.compressed(layer, past.blocks, c) for past, c in pairs]
            assert hand.rows(rows) == want, f"layer {layer} rows"
            if kind == "csa":
                assert hand.keys(layer, [(past.blocks[c // 64], c % 64) for past, c in pairs]) == want, f"layer {layer} keys"
            needed = [(past, p) for past in live for p in range(max(0, len(past.tokens) - POOLED[kind]), len(past.tokens))]
            stamps = [past.tokens[p] for past, p in needed]
            for name in RINGS[kind]:
                assert hand.ring(name, layer, [(past.slot, p) for past, p in needed]) == stamps, f"layer {layer} ring {name}"


def rows_of(numbers: set[int], size: int, rows: int) -> torch.Tensor:
    """Which of so many rows lie in blocks, or slots, of these numbers."""
    mine = torch.zeros(rows, dtype=torch.bool)
    for i in numbers:
        mine[i * size : (i + 1) * size] = True
    return mine


def words(plane: torch.Tensor) -> torch.Tensor:
    """Bytes of rows, eight at a time."""
    return plane.view(torch.int64)
