"""Reference state into pool bytes, and back: any position without replaying the prompt. Source: docs/judge.md §8.

The pool is poisoned first, so that whatever nobody owns is NaN, and stays so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from optimized.engine import FORMS, Form
from optimized.pool.geometry import BLOCK_TOKENS, RATIO, Geometry
from optimized.pool.index_rows import PAGE_ROWS, Layout, encode, key_order, scale_order
from optimized.pool.pool import IndexPool, Pool
from reference.config import Config
from reference.state import CompressorState, LayerState

from . import row_forms
from .cases import MAX_DRAFT

NEIGHBOURS = 1  # layers to either side that share the pool: their rows lie between this layer's


@dataclass(frozen=True)
class PouredPool:
    """A pool with `layer` among its neighbours; `slots` [b] and `block_table` [b, blocks] place its sequences, out of
    order and with foreign blocks between."""

    pool: Pool
    layer: int
    slots: Tensor
    block_table: Tensor
    blocks: int

    def copy(self, device: str = "cpu") -> PouredPool:
        """The same bytes elsewhere, for an op to work on."""
        return self._with(self.pool.memory, device)

    def difference(self, other: PouredPool) -> PouredPool:
        """A pool whose bytes are 0 where these two agree, and 1 where not."""
        return self._with((self.pool.memory != other.pool.memory).view(torch.uint8))

    def _with(self, memory: Tensor, device: str = "cpu") -> PouredPool:
        pool = Pool(self.geometry, self.blocks, len(self.slots) + 1, device)
        pool.memory.copy_(memory)
        return replace(self, pool=pool)

    def planes(self) -> dict[str, Tensor]:
        """uint8 [rows, bytes] of each plane, under the names they have in verdicts."""
        names = (f"pool.{name}" for name in row_forms.PLANES[self.geometry.build])
        return dict(zip(names, self.pool.planes, strict=True))

    def rows(self) -> row_forms.Planes:
        """Rows of the layer, as kernels take them."""
        return row_forms.planes(self.pool, self.layer)

    @property
    def geometry(self) -> Geometry:
        return self.pool.geometry

    def compressed_at(self, sequence: int, entries: Tensor) -> Tensor:
        """Rows, relative to the layer's base, of compressed entries [c] of a sequence."""
        per_block = BLOCK_TOKENS // RATIO[self.geometry.kinds[self.layer]]
        blocks = self.block_table[sequence].long()[entries // per_block]
        return torch.as_tensor(self.geometry.compress_index(blocks, entries % per_block))

    def window_at(self, sequence: int, positions: Tensor) -> Tensor:
        """Rows, relative to the layer's base, of raw rows at positions [n] of a sequence."""
        kind = self.geometry.kinds[self.layer]
        return torch.as_tensor(self.geometry.window_index(kind, int(self.slots[sequence]), positions))

    def read(self, rows: Tensor) -> Tensor:
        """Rows [n] of the layer as values [n, d] (float64): the bytes as any reader of the format takes them."""
        return row_forms.decode(row_forms.take(self.rows(), rows))


@dataclass(frozen=True)
class PouredKeys:
    """Index keys of the CSA layers of a `PouredPool`, a page a block; `layer` among its neighbours."""

    pool: IndexPool
    layer: int
    blocks: int

    def copy(self, device: str = "cpu") -> PouredKeys:
        pool = IndexPool(self.pool.geometry, self.blocks, self.pool.layout, device)
        pool.memory.copy_(self.pool.memory)
        return replace(self, pool=pool)

    def page_bytes(self, blocks: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Places in the memory, int64 [n, key bytes] and [n, bytes of scales], of keys in rows [n] of pages `blocks` [n]."""
        layout, width = self.pool.layout, self.pool.geometry.config.index_head_dim
        place, ordinal = torch.arange(self.pool.memory.numel()), self.pool.geometry.ordinal(self.layer)
        planes = self.pool.keys[ordinal], self.pool.scales[ordinal].view(torch.uint8)
        keys, scales = (place.as_strided(x.shape, x.stride(), x.storage_offset()) for x in planes)
        blocks, size = blocks.long()[:, None], self.pool.scales.itemsize
        each = scale_order(layout, width)[rows][:, :, None] * size + torch.arange(size)  # [n, scales, bytes of one]
        return keys[blocks, key_order(layout, width)[rows]], scales[blocks, each.flatten(1)]

    def read(self, blocks: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Codes, one a byte, and scale bytes of keys in these places."""
        keys, scales = (self.pool.memory[place] for place in self.page_bytes(blocks, rows))
        return row_forms.key_codes(keys, scales.view(self.pool.scales.dtype), self.pool.layout.form)

    def write(self, blocks: Tensor, rows: Tensor, values: Tensor) -> None:
        """Quantise keys [n, d] into their places."""
        places = self.page_bytes(blocks, rows)
        for place, stored in zip(places, encode(values.float(), self.pool.layout.form), strict=True):
            self.pool.memory[place] = stored.view(torch.uint8)


def pour_keys(poured: PouredPool, states: Sequence[LayerState], layout: Layout) -> PouredKeys:
    """Pages, poisoned first, that hold the finished index keys of each sequence, in the blocks of its rows."""
    keys = PouredKeys(IndexPool(poured.geometry, poured.blocks, layout), poured.layer, poured.blocks)
    keys.pool.poison()
    for b, state in enumerate(states):
        if state.indexer is None:  # nothing behind it
            continue
        entries = torch.arange(len(state.indexer.rows))
        keys.write(poured.block_table[b].long()[entries // PAGE_ROWS], entries % PAGE_ROWS, state.indexer.rows)
    return keys


def neighbourhood(config: Config, layer: int) -> tuple[Config, int]:
    """A model of a few layers around `layer`, and its number there: rows of other layers lie between its own, in a pool
    that does not need all of them."""
    first = max(0, layer - NEIGHBOURS)
    ratios = config.compress_ratios[first : layer + NEIGHBOURS + 1]
    small = replace(config, num_hidden_layers=len(ratios), compress_ratios=ratios, num_hash_layers=0, dspark=None)
    return small, layer - first


def pour(
    config: Config,
    layer: int,
    states: Sequence[LayerState],
    window: Sequence[tuple[int, Tensor]],
    lengths: Sequence[int],
    room: Sequence[int],
    seed: int,
    form: Form = FORMS["pool-fp8"],
) -> PouredPool:
    """A pool holding, for each sequence, raw rows `window` = (position of the first, rows [n, d]) and the compressor
    state and rows of `states`, which has seen `lengths` tokens; with blocks for `room` tokens."""
    small, at = neighbourhood(config, layer)
    geometry = Geometry(small, form.rows, lookahead=MAX_DRAFT)
    poured = _place(geometry, at, room, seed)
    for b, (state, (first, raw)) in enumerate(zip(states, window, strict=True)):
        ring = geometry.ring
        positions = torch.arange(first, first + len(raw))[-ring:]
        _write(poured, poured.window_at(b, positions), raw[-ring:])
        if state.compressor is not None:
            entries = torch.arange(len(state.compressor.rows))
            _write(poured, poured.compressed_at(b, entries), state.compressor.rows)
    _pour_rings(poured, states, lengths)
    return poured


def _place(geometry: Geometry, layer: int, room: Sequence[int], seed: int) -> PouredPool:
    """Blocks in random order with one block in four nobody's; slots from the top."""
    generator = torch.Generator().manual_seed(seed)
    needed = [-(-end // BLOCK_TOKENS) for end in room]
    total = sum(needed) + -(-sum(needed) // 3)
    order = torch.randperm(total, generator=generator).to(torch.int32)
    table = torch.zeros(len(room), max(needed), dtype=torch.int32)
    for b, (begin, n) in enumerate(zip(np.cumsum([0, *needed[:-1]]), needed, strict=True)):
        table[b, :n] = order[begin : begin + n]
    pool = Pool(geometry, total, len(room) + 1)
    pool.poison()
    slots = torch.tensor([pool.slot_position(b) for b in range(len(room))], dtype=torch.int32)
    return PouredPool(pool, layer, slots[torch.randperm(len(room), generator=generator)], table, total)


def _write(poured: PouredPool, rows: Tensor, values: Tensor) -> None:
    for plane, stored in zip(poured.rows(), row_forms.encode(values, poured.geometry.build), strict=True):
        if plane is not None and stored is not None:
            plane[rows] = stored


def rings(poured: PouredPool, indexer: bool) -> tuple[Tensor, Tensor]:
    """State rings of the layer in all slots, values and gates float32 [slots, ring, w]."""
    kind = poured.geometry.kinds[poured.layer]
    field = "hca" if kind == "hca" else "csa_idx" if indexer else "csa_main"
    return poured.pool.state(f"{field}_kv", poured.layer), poured.pool.state(f"{field}_score", poured.layer)


def _pour_rings(poured: PouredPool, states: Sequence[LayerState], lengths: Sequence[int]) -> None:
    for b, (state, end) in enumerate(zip(states, lengths, strict=True)):
        for held, indexer in ((state.compressor, False), (state.indexer, True)):
            if held is not None:
                values, gates = rings(poured, indexer)
                known = min(len(held.values), end)  # an overlapping state begins with a block of nothing
                at = torch.arange(end - known, end) % values.shape[1]
                values[poured.slots[b], at] = held.values[len(held.values) - known :].float()
                gates[poured.slots[b], at] = held.gates[len(held.gates) - known :].float()


def draw(poured: PouredPool, sequence: int, end: int, indexer: bool, held: int) -> CompressorState:
    """Back from the pool: the last `held` tokens of a compressor's ring at position `end`, and (main compressor) the
    finished rows. float64, exact."""
    values, gates = rings(poured, indexer)
    at = torch.arange(end - held, end) % values.shape[1]
    slot = int(poured.slots[sequence])
    ratio = RATIO[poured.geometry.kinds[poured.layer]]
    entries = torch.arange(0 if indexer else end // ratio)
    rows = poured.read(poured.compressed_at(sequence, entries))
    return CompressorState(values[slot, at].double(), gates[slot, at].double(), rows)
