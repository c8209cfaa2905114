"""Owner of the pool: blocks up, slots down, nothing left behind, nothing lost when there is no room."""

from __future__ import annotations

import random
from types import ModuleType

import pytest
import torch
from kernel_cases import mutant

from optimized.pool import allocator as module
from optimized.pool.geometry import Geometry
from optimized.pool.index_rows import LAYOUTS
from optimized.pool.pool import POISON, IndexPool, Pool
from reference.presets import preset

LOOKAHEAD = 2


def make(blocks: int = 6, slots: int = 3, source: ModuleType = module, joined: bool = False) -> module.Allocator:
    geometry = Geometry(preset("mini"), lookahead=LOOKAHEAD, drafter_blocks=1)
    layout = LAYOUTS["fp8_linear" if joined else "fp4_natural"]
    return source.Allocator(Pool(geometry, blocks, slots), IndexPool(geometry, blocks, layout), blocks, slots)


def grow(a: module.Allocator, sequence: module.Sequence, tokens: int) -> None:
    a.reserve([sequence], [tokens])
    a.advance(sequence, tokens)


def fill(a: module.Allocator, sequence: module.Sequence, tag: int) -> None:
    """Mark every byte the sequence owns."""
    for part in held(a, sequence):
        part.fill_(tag)


def held(a: module.Allocator, sequence: module.Sequence) -> list[torch.Tensor]:
    blocks = [part for b in sequence.blocks for part in (*a.pool.block(b), *a.index.block(b))]
    return [*a.pool.slot(sequence.slot), *blocks]


def bytes_of(a: module.Allocator, sequence: module.Sequence) -> list[torch.Tensor]:
    return [part.clone() for part in held(a, sequence)]


def everything(a: module.Allocator) -> tuple[torch.Tensor, torch.Tensor, list[int], int, int]:
    return a.pool.memory.clone(), a.index.memory.clone(), list(a.owners), a.free_blocks, a.free_slots


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(torch.equal(x, y) for x, y in zip(one, other, strict=True))


def test_blocks_come_from_the_bottom_and_slots_from_the_top() -> None:
    a = make()
    one, two = a.open(), a.open()
    assert (one.slot, two.slot) == (a.pool.slots - 1, a.pool.slots - 2)
    grow(a, one, 257)
    grow(a, two, 1)
    assert (list(one.blocks), list(two.blocks)) == ([0, 1], [2])
    a.free(one)
    grow(a, two, 256)
    assert list(two.blocks) == [2, 0]  # the lowest free one first
    assert a.open().slot == a.pool.slots - 1


@pytest.mark.parametrize("joined", [False, True])
def test_what_is_handed_out_or_given_back_is_poison(joined: bool) -> None:
    a = make(joined=joined)
    one = a.open()
    grow(a, one, 300)
    assert all((part == POISON).all() for b in one.blocks for part in (*a.pool.block(b), *a.index.block(b)))
    assert (a.pool.state("hca_score", 1)[one.slot] == -torch.inf).all()
    assert (a.pool.state("csa_main_kv", 2)[one.slot] == 0).all()
    fill(a, one, 7)
    parts = held(a, one)
    a.free(one)
    assert all((part == POISON).all() for part in parts)
    assert a.free_blocks == 6 and a.free_slots == 3


def test_a_mistake_that_leaves_bytes_behind_is_seen(tmp_path: pytest.TempPathFactory) -> None:
    broken = mutant(module, tmp_path, ("            self._poison(self._block(block))\n            heapq", "            heapq"))
    a = make(source=broken)
    one = a.open()
    grow(a, one, 1)
    fill(a, one, 7)
    block = a.pool.block(one.blocks[0])[0]
    a.free(one)
    assert (block == 7).all()


@pytest.mark.parametrize("case", ["blocks", "second of two", "copies", "slots", "fork", "restore", "start"])
def test_without_room_nothing_changes(case: str) -> None:
    a = make(blocks=3, slots=2)
    one = a.open()
    grow(a, one, 300)
    two = a.open() if case != "restore" else a.fork(one)
    if case == "copies":
        a.free(two)
        two = a.fork(one)
        third = 256 * 2 - 300  # fills the shared block: one copy each, and one block is free
        grow(a, one, third)
    if case == "restore":
        snapshot = a.snapshot(two)
        a.free(two)
        two = a.open()
        a.free(two)
    if case == "start":
        prefix = a.keep(one)
    before = everything(a)
    lengths = [(s.length, list(s.blocks)) for s in (one, two)]
    with pytest.raises(module.PoolFull):
        if case == "blocks":
            a.reserve([two], [512])
        elif case == "second of two":
            a.reserve([one, two], [1, 512])
        elif case == "copies":
            a.reserve([one, two], [1, 1])
        elif case == "slots":
            a.open()
        elif case == "fork":
            a.fork(one)
        elif case == "start":
            a.start(prefix)
        else:
            a.restore(snapshot)
    after = everything(a)
    assert torch.equal(before[0], after[0]) and torch.equal(before[1], after[1]) and before[2:] == after[2:]
    assert lengths == [(s.length, list(s.blocks)) for s in (one, two)]


def test_a_fork_shares_full_blocks_and_copies_what_it_writes() -> None:
    a = make()
    one = a.open()
    grow(a, one, 300)
    fill(a, one, 5)
    two = a.fork(one)
    assert two.blocks == one.blocks and two.slot != one.slot and a.free_blocks == 4
    assert same(bytes_of(a, one), bytes_of(a, two))
    a.reserve([two], [1])
    assert two.blocks[0] == one.blocks[0] and two.blocks[1] != one.blocks[1]
    assert same(bytes_of(a, one), bytes_of(a, two))
    fill(a, two, 9)
    assert (a.pool.block(one.blocks[1])[0] == 5).all()
    a.free(one)
    assert (a.pool.block(two.blocks[0])[0] == 9).all() and a.owners[two.blocks[0]] == 1


def test_a_fork_that_wrote_into_shared_blocks_is_seen(tmp_path: pytest.TempPathFactory) -> None:
    a = make(source=mutant(module, tmp_path, ("if self.owners[sequence.blocks[i]] > 1]", "if False]")))
    one = a.open()
    grow(a, one, 300)
    two = a.fork(one)
    a.reserve([two], [1])
    assert two.blocks[1] == one.blocks[1]  # the assertion above would fail


def test_a_prefix_keeps_its_blocks_until_it_is_released() -> None:
    a = make()
    one = a.open()
    grow(a, one, 300)
    fill(a, one, 5)
    prefix = a.keep(one)
    grow(a, one, 1)  # into a copy: the prefix's last block is not full
    assert one.blocks[0] == prefix.blocks[0] and one.blocks[1] != prefix.blocks[1]
    fill(a, one, 6)
    a.free(one)
    two, three = a.start(prefix), a.start(prefix)
    assert (two.length, two.drafted, two.reached) == (300, 0, 300) and two.blocks == three.blocks == prefix.blocks
    assert all((part == 5).all() for s in (two, three) for part in a.pool.slot(s.slot))
    assert (a.pool.block(two.blocks[1])[0] == 5).all() and [a.owners[b] for b in two.blocks] == [3, 3]
    with pytest.raises(module.PoolFull):
        a.move_boundary(1, 2)  # the prefix's second block would vanish
    a.free(two)
    a.release(prefix)
    a.release(prefix)  # a second time gives nothing back
    assert a.free_blocks == 4 and (a.pool.block(three.blocks[1])[0] == 5).all()
    with pytest.raises(ValueError, match="300 tokens was released"):
        a.start(prefix)
    a.free(three)
    assert a.free_blocks == 6 and a.free_slots == 3


@pytest.mark.parametrize(
    "edit",
    [
        ("        copy_bytes(slot, self.pool.slot(sequence.slot))\n", ""),  # blocks alone: no window, no rings
        ("            self.owners[block] += 1\n        return blocks[:]", "            pass\n        return blocks[:]"),
        ("tuple(part.clone() for part in self.pool.slot(sequence.slot))\n        return Prefix",
         "self.pool.slot(sequence.slot)\n        return Prefix"),  # the slot itself, which goes on changing
    ],
)  # fmt: skip
def test_a_prefix_that_is_not_kept_whole_is_seen(tmp_path: pytest.TempPathFactory, edit: tuple[str, str]) -> None:
    a = make(source=mutant(module, tmp_path, edit))
    one = a.open()
    grow(a, one, 300)
    fill(a, one, 5)
    prefix = a.keep(one)
    a.free(one)
    held_now = held(a, a.start(prefix))
    assert not all((part == 5).all() for part in held_now)


@pytest.mark.parametrize("length", [0, 255, 256, 257])
def test_a_prefix_holds_no_block_beyond_its_length(length: int) -> None:
    a = make()
    one = a.open()
    grow(a, one, length)
    a.reserve([one], [256])  # room for a step that has not run
    prefix = a.keep(one)
    assert len(prefix.blocks) == -(-length // 256)
    assert a.start(prefix).length == length


def test_rolling_back_gives_blocks_back_and_ends_where_rings_end() -> None:
    a = make()
    one = a.open()
    grow(a, one, 258)
    one.drafted = 258
    a.roll_back(one, 2)
    assert (one.length, one.drafted, list(one.blocks)) == (256, 256, [0])
    assert (a.pool.block(1)[0] == POISON).all() and a.free_blocks == 5
    with pytest.raises(ValueError, match="cannot be taken back"):
        a.roll_back(one, 1)
    grow(a, one, 1)
    with pytest.raises(ValueError, match="cannot be taken back"):
        a.roll_back(one, 2)  # 258 tokens were there: the rings do not reach below 256
    a.roll_back(one, 1)
    grow(a, one, 4)
    a.roll_back(one, 2)
    assert one.length == 258


def test_a_snapshot_comes_back_byte_for_byte_here_and_elsewhere() -> None:
    a = make()
    one = a.open()
    grow(a, one, 300)
    generator = torch.Generator().manual_seed(0)
    for part in held(a, one):
        part.copy_(torch.randint(0, 256, part.shape, generator=generator))
    want, snapshot = bytes_of(a, one), a.snapshot(one)
    a.free(one)
    grow(a, a.open(), 1)
    for target in (a, a, make(blocks=9, slots=2)):
        back = target.restore(snapshot)
        assert same(want, bytes_of(target, back)) and back.length == 300


def test_moving_the_boundary_moves_no_address() -> None:
    geometry = Geometry(preset("mini"), lookahead=LOOKAHEAD, drafter_blocks=1)
    per_slot = geometry.slot_rows // geometry.envelope
    most = 4 + per_slot
    pool, index = Pool(geometry, 4, 3), IndexPool(geometry, most, LAYOUTS["fp4_natural"])
    a = module.Allocator(pool, index, 4, 3)
    one = a.open()
    grow(a, one, 600)
    fill(a, one, 3)
    before = bytes_of(a, one)
    a.move_boundary(4 + per_slot, 2)
    assert same(before, bytes_of(a, one)) and a.free_blocks == 1 + per_slot and a.free_slots == 1
    a.open()
    with pytest.raises(module.PoolFull):
        a.move_boundary(4, 1)
    with pytest.raises(module.PoolFull):
        a.move_boundary(2, 2)
    with pytest.raises(ValueError, match="do not fit"):
        a.move_boundary(most, 3)
    a.move_boundary(3, 3)
    assert a.free_blocks == 0 and a.free_slots == 1 and same(before, bytes_of(a, one))


def some_act(
    a: module.Allocator, rng: random.Random, alive: dict[module.Sequence, int], kept: list[module.Prefix]
) -> module.Sequence | None:
    """One random request; the sequence that it made or touched."""
    act = rng.choice(["open", "grow", "grow", "grow", "fork", "free", "back", "snapshot", "keep", "start", "release"])
    some = rng.choice(list(alive)) if alive else None
    if act == "release" and kept:
        a.release(kept.pop(0))
        return None
    if act == "start" and kept:
        return a.start(kept[0])
    if some is None or act in ("open", "start", "release"):
        return a.open()
    if act == "free":
        del alive[some]
        a.free(some)
        return None
    if act == "fork":
        return a.fork(some)
    if act == "snapshot":
        return a.restore(a.snapshot(some))
    if act == "keep":
        kept.append(a.keep(some))
    elif act == "grow":
        grow(a, some, rng.randint(1, 300))
    else:
        a.roll_back(some, max(0, some.length - max(0, some.reached - LOOKAHEAD)))
    return some


@pytest.mark.parametrize("seed", range(5))
def test_any_history_keeps_the_books(seed: int) -> None:
    """Random requests; every sequence keeps its own bytes, owners are counted right, and nothing gets lost."""
    a, rng = make(blocks=9, slots=5), random.Random(seed)
    alive: dict[module.Sequence, int] = {}
    kept: list[module.Prefix] = []
    for turn in range(120):
        try:
            some = some_act(a, rng, alive, kept)
            if some is not None:
                alive[some] = turn + 1
                for part in a.pool.slot(some.slot):
                    part.fill_(turn + 1)
        except module.PoolFull:
            pass
        owners = [0] * 9
        for b in (b for s in (*alive, *kept) for b in s.blocks):
            owners[b] += 1
        assert owners == a.owners and a.free_blocks == owners.count(0) and a.free_slots == 5 - len(alive)
        assert len({s.slot for s in alive}) == len(alive)
        assert all((a.pool.block(b)[0] == POISON).all() for b, n in enumerate(owners) if not n)
        assert all((a.pool.slot(s.slot)[1] == tag).all() for s, tag in alive.items())
