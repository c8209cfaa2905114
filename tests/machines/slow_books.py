"""Who holds what, told slowly: every holder's tokens and blocks are written down, and what is free is whatever nobody holds.

Source: docs/pool.md §10.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass, field, replace

from optimized.pool.geometry import Geometry

BLOCK = 256


class Full(Exception):
    """What the production allocator must answer with PoolFull."""


@dataclass(eq=False)
class Past:
    """A sequence, or a kept prefix (slot -1): the stamp of each token in the pool and of each drafted one, oldest first;
    `reached` and `draft_reached` are the largest lengths so far."""

    slot: int
    tokens: list[int] = field(default_factory=list)
    drafts: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    reached: int = 0
    draft_reached: int = 0

    def copy(self, slot: int) -> Past:
        return replace(self, slot=slot, tokens=self.tokens[:], drafts=self.drafts[:], blocks=self.blocks[:])


def blocks_for(tokens: int) -> int:
    return -(-tokens // BLOCK)


class Books:
    """Live sequences, kept prefixes and the boundary between `blocks` and `slots`."""

    def __init__(self, geometry: Geometry, blocks: int, slots: int, positions: int, most_blocks: int) -> None:
        self.geometry, self.blocks, self.slots = geometry, blocks, slots
        self.positions, self.most_blocks = positions, most_blocks
        self.live: list[Past] = []
        self.kept: list[Past] = []

    def holders(self, block: int) -> list[Past]:
        return [past for past in (*self.live, *self.kept) if block in past.blocks]

    def free_blocks(self) -> list[int]:
        held = {b for past in (*self.live, *self.kept) for b in past.blocks}
        return [b for b in range(self.blocks) if b not in held]

    def free_slots(self) -> list[int]:
        """Positions, highest first."""
        highest = self.positions - 1
        return [highest - g for g in range(self.slots) if highest - g not in {past.slot for past in self.live}]

    def open(self, past: Past | None = None) -> Past:
        """A new sequence, with this past if one is given."""
        if not self.free_slots():
            raise Full
        slot = self.free_slots()[0]
        self.live.append(past.copy(slot) if past else Past(slot))
        return self.live[-1]

    def reserve(self, pasts: Many[Past], counts: Many[int]) -> None:
        wanted = sum(len(self._to_copy(p, n)) + self._missing(p, n) for p, n in zip(pasts, counts, strict=True))
        if wanted > len(self.free_blocks()):
            raise Full
        for past, n in zip(pasts, counts, strict=True):
            for at in self._to_copy(past, n):
                past.blocks[at] = self.free_blocks()[0]
            for _ in range(self._missing(past, n)):
                past.blocks.append(self.free_blocks()[0])

    def _missing(self, past: Past, n: int) -> int:
        return max(0, blocks_for(len(past.tokens) + n) - len(past.blocks))

    def _to_copy(self, past: Past, n: int) -> list[int]:
        """Places of blocks that the next `n` tokens write into while somebody else holds them."""
        touched = range(len(past.tokens) // BLOCK, len(past.blocks)) if n else []
        return [at for at in touched if len(self.holders(past.blocks[at])) > 1]

    def extend(self, past: Past, stamps: Many[int]) -> None:
        past.tokens += stamps
        past.reached = max(past.reached, len(past.tokens))

    def draft(self, past: Past, stamps: Many[int]) -> None:
        past.drafts += stamps
        past.draft_reached = max(past.draft_reached, len(past.drafts))

    def may_take_back(self, past: Past) -> int:
        return len(past.tokens) - max(0, past.reached - self.geometry.lookahead)

    def take_back(self, past: Past, n: int) -> None:
        del past.tokens[len(past.tokens) - n :]
        del past.drafts[len(past.tokens) :]
        del past.blocks[blocks_for(len(past.tokens)) :]

    def keep(self, past: Past) -> Past:
        self.kept.append(past.copy(-1))
        del self.kept[-1].blocks[blocks_for(len(past.tokens)) :]
        return self.kept[-1]

    def restore(self, past: Past) -> Past:
        """From a snapshot: the same past in blocks of its own."""
        if len(past.blocks) > len(self.free_blocks()) or not self.free_slots():
            raise Full
        taken = self.free_blocks()[: len(past.blocks)]
        back = self.open(past)
        back.blocks = taken
        return back

    def move_boundary(self, blocks: int, slots: int) -> None:
        """Raises ValueError where the new boundary does not fit into the pool, Full where what would vanish is in use."""
        room = (self.positions - slots) * self.geometry.slot_rows
        if slots > self.positions or blocks * self.geometry.envelope > room or blocks > self.most_blocks:
            raise ValueError
        held = {b for past in (*self.live, *self.kept) for b in past.blocks}
        groups = {self.positions - 1 - past.slot for past in self.live}
        if any(b >= blocks for b in held) or any(g >= slots for g in groups):
            raise Full
        self.blocks, self.slots = blocks, slots
