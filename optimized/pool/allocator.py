"""Who owns what in the pool: blocks from the bottom, slots from the top, sequences that grow, fork, roll back and leave.

What is handed out or given back is filled with NaN bytes, so that nobody computes with what another left behind. An
operation that does not fit raises PoolFull before it changes anything. Source: docs/pool.md §10.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Sequence as Many
from dataclasses import dataclass, field

from torch import Tensor

from .geometry import BLOCK_TOKENS
from .pool import POISON, IndexPool, Pool


class PoolFull(RuntimeError):
    """There are not enough free blocks or slots."""


def _no_blocks() -> array[int]:
    return array("i")


@dataclass(eq=False)
class Sequence:
    """One request: its slot position, its blocks in order (int32, so that a step takes them as they lie), `length` tokens in
    the pool, and `drafted` tokens in the windows of the drafter block. `reached` is the largest length so far: what rings
    no longer hold hangs on it."""

    slot: int
    blocks: array[int] = field(default_factory=_no_blocks)
    length: int = 0
    drafted: int = 0
    reached: int = 0


@dataclass(eq=False)
class Prefix:
    """The past of a sequence that others may start from: shares of its blocks, and a copy of its slot's bytes (window and
    rings) outside of the pool, plane by plane."""

    slot: tuple[Tensor, ...]
    blocks: array[int]
    length: int
    drafted: int
    reached: int


@dataclass(frozen=True)
class Snapshot:
    """A sequence outside of the pool: copies of its slot's and its blocks' bytes, plane by plane."""

    slot: tuple[Tensor, ...]
    blocks: tuple[tuple[Tensor, ...], ...]
    length: int
    drafted: int
    reached: int


class Allocator:
    """Owner of the blocks and slots of a pool and of its index keys. `blocks` and `slots` say how many of each there may be.

    Blocks are shared by counting; a sequence that writes into a shared one gets a copy first.
    """

    def __init__(self, pool: Pool, index: IndexPool, blocks: int, slots: int) -> None:
        self.pool, self.index = pool, index
        self.blocks, self.slots = blocks, slots
        self._check_boundary(blocks, slots)
        self.owners = [0] * index.keys.shape[1]
        self._free_blocks = list(range(blocks))
        self._free_slots = list(range(slots))  # groups, counted from the top
        pool.poison()
        index.poison()

    @property
    def free_blocks(self) -> int:
        return len(self._free_blocks)

    @property
    def free_slots(self) -> int:
        return len(self._free_slots)

    def open(self) -> Sequence:
        """A sequence without tokens. Raises PoolFull."""
        if not self._free_slots:
            raise PoolFull(f"all {self.slots} slots are taken")
        sequence = Sequence(self.pool.slot_position(heapq.heappop(self._free_slots)))
        self._poison(self.pool.slot(sequence.slot))
        self.pool.open_slot(sequence.slot)
        return sequence

    def reserve(self, sequences: Many[Sequence], extend: Many[int]) -> None:
        """Blocks for `extend[i]` more tokens of each sequence, and copies of shared blocks that they will be written into.

        Raises PoolFull; then no sequence has got anything.
        """
        wanted = [self._missing(s, n) + len(self._shared_tail(s, n)) for s, n in zip(sequences, extend, strict=True)]
        if sum(wanted) > self.free_blocks:
            raise PoolFull(f"{sum(wanted)} blocks are needed, {self.free_blocks} of {self.blocks} are free")
        for sequence, n in zip(sequences, extend, strict=True):
            for at in self._shared_tail(sequence, n):
                sequence.blocks[at] = self._own_copy(sequence.blocks[at])
            sequence.blocks.extend([self._take_block() for _ in range(self._missing(sequence, n))])

    def advance(self, sequence: Sequence, tokens: int) -> None:
        """The sequence has `tokens` more tokens in the pool."""
        sequence.length += tokens
        sequence.reached = max(sequence.reached, sequence.length)

    def roll_back(self, sequence: Sequence, tokens: int) -> None:
        """Take back the last tokens. Raises ValueError for more than the rings still allow: `lookahead` below the largest
        length so far."""
        length = sequence.length - tokens
        lowest = max(0, sequence.reached - self.pool.geometry.lookahead)
        if tokens < 0 or length < lowest:
            raise ValueError(f"{tokens} of {sequence.length} tokens cannot be taken back: the rings reach down to {lowest}")
        keep = -(-length // BLOCK_TOKENS)
        for block in sequence.blocks[keep:]:
            self._drop_block(block)
        del sequence.blocks[keep:]
        sequence.length = length
        sequence.drafted = min(sequence.drafted, length)

    def fork(self, sequence: Sequence) -> Sequence:
        """A second sequence with the same past: blocks shared, slot copied. Raises PoolFull."""
        twin = self._start(sequence, self.pool.slot(sequence.slot))
        twin.blocks = self._share(sequence.blocks)
        return twin

    def keep(self, sequence: Sequence) -> Prefix:
        """What others may start from where the sequence now ends; its blocks stay until it is released."""
        blocks = self._share(sequence.blocks[: -(-sequence.length // BLOCK_TOKENS)])
        slot = tuple(part.clone() for part in self.pool.slot(sequence.slot))
        return Prefix(slot, blocks, sequence.length, sequence.drafted, sequence.reached)

    def start(self, prefix: Prefix) -> Sequence:
        """A new sequence that continues a prefix, as often as wanted. Raises PoolFull, and ValueError for one released."""
        if len(prefix.blocks) * BLOCK_TOKENS < prefix.length:
            raise ValueError(f"a prefix of {prefix.length} tokens was released")
        sequence = self._start(prefix, prefix.slot)
        sequence.blocks = self._share(prefix.blocks)
        return sequence

    def release(self, prefix: Prefix) -> None:
        """Give the blocks of a prefix back; sequences that started from it keep theirs."""
        for block in prefix.blocks:
            self._drop_block(block)
        del prefix.blocks[:]

    def free(self, sequence: Sequence) -> None:
        """Give everything back; the sequence must not be used again."""
        for block in sequence.blocks:
            self._drop_block(block)
        self._poison(self.pool.slot(sequence.slot))
        heapq.heappush(self._free_slots, self.pool.slots - 1 - sequence.slot)
        del sequence.blocks[:]
        sequence.slot = -1

    def snapshot(self, sequence: Sequence) -> Snapshot:
        slot = tuple(part.clone() for part in self.pool.slot(sequence.slot))
        blocks = tuple(tuple(part.clone() for part in self._block(b)) for b in sequence.blocks)
        return Snapshot(slot, blocks, sequence.length, sequence.drafted, sequence.reached)

    def restore(self, snapshot: Snapshot) -> Sequence:
        """A new sequence from a snapshot, as often as wanted, in this pool or in another of the same geometry.
        Raises PoolFull."""
        if len(snapshot.blocks) > self.free_blocks:
            raise PoolFull(f"{len(snapshot.blocks)} blocks are needed, {self.free_blocks} of {self.blocks} are free")
        sequence = self._start(snapshot, snapshot.slot)
        for held in snapshot.blocks:
            sequence.blocks.append(self._take_block())
            copy_bytes(held, self._block(sequence.blocks[-1]))
        return sequence

    def move_boundary(self, blocks: int, slots: int) -> None:
        """Other numbers of blocks and slots; no address changes. Raises PoolFull where one that would vanish is in use,
        ValueError where they do not fit."""
        self._check_boundary(blocks, slots)
        used_blocks = max((b + 1 for b, n in enumerate(self.owners) if n), default=0)
        used_slots = max(set(range(self.slots)) - set(self._free_slots), default=-1) + 1
        if blocks < used_blocks or slots < used_slots:
            raise PoolFull(f"{blocks} blocks and {slots} slots do not hold the {used_blocks} and {used_slots} in use")
        self._free_blocks = [b for b in range(blocks) if not self.owners[b]]
        taken = set(range(self.slots)) - set(self._free_slots)
        self._free_slots = [g for g in range(slots) if g not in taken]
        self.blocks, self.slots = blocks, slots

    def _check_boundary(self, blocks: int, slots: int) -> None:
        geometry = self.pool.geometry
        room = (self.pool.slots - slots) * geometry.slot_rows
        if not 0 <= slots <= self.pool.slots or blocks * geometry.envelope > room or blocks > self.index.keys.shape[1]:
            raise ValueError(f"{blocks} blocks and {slots} slots do not fit into this pool")

    def _start(self, past: Sequence | Prefix | Snapshot, slot: tuple[Tensor, ...]) -> Sequence:
        """A sequence with these bytes in its slot and the lengths of a past, still without its blocks."""
        sequence = self.open()
        copy_bytes(slot, self.pool.slot(sequence.slot))
        sequence.length, sequence.drafted, sequence.reached = past.length, past.drafted, past.reached
        return sequence

    def _share(self, blocks: array[int]) -> array[int]:
        for block in blocks:
            self.owners[block] += 1
        return blocks[:]

    def _missing(self, sequence: Sequence, extend: int) -> int:
        return max(0, -(-(sequence.length + extend) // BLOCK_TOKENS) - len(sequence.blocks))

    def _shared_tail(self, sequence: Sequence, extend: int) -> list[int]:
        """Places of blocks that others hold too and that new tokens will write into."""
        if not extend:
            return []
        return [i for i in range(sequence.length // BLOCK_TOKENS, len(sequence.blocks)) if self.owners[sequence.blocks[i]] > 1]

    def _take_block(self) -> int:
        block = heapq.heappop(self._free_blocks)
        self._poison(self._block(block))
        self.owners[block] = 1
        return block

    def _own_copy(self, block: int) -> int:
        own = self._take_block()
        copy_bytes(self._block(block), self._block(own))
        self.owners[block] -= 1
        return own

    def _drop_block(self, block: int) -> None:
        self.owners[block] -= 1
        if not self.owners[block]:
            self._poison(self._block(block))
            heapq.heappush(self._free_blocks, block)

    def _block(self, block: int) -> tuple[Tensor, ...]:
        return *self.pool.block(block), *self.index.block(block)

    def _poison(self, parts: tuple[Tensor, ...]) -> None:
        for part in parts:
            part.fill_(POISON)


def copy_bytes(source: tuple[Tensor, ...], target: tuple[Tensor, ...]) -> None:
    for here, there in zip(source, target, strict=True):
        there.copy_(here)
