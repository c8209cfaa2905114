"""What all layers of one step share: tokens, places, plans, lists and rotary tables, on the device.

Made once a step on the host; a layer then picks what its kind needs. Source: docs/pool.md §5 and §11.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from reference.config import Config, Kind

from .pool import plans
from .pool.allocator import Sequence
from .pool.geometry import RATIO, Geometry, visible
from .rope import rope_table

Table = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Compression:
    """Of one ratio: which tokens complete a group (`complete`), which projections the rings keep (`keep`), both int32
    [n, 4], and cos and sin [n, 32] at the first position of each completed group."""

    complete: Tensor
    keep: Tensor
    turn: Table


@dataclass(frozen=True)
class KindPlan:
    """Of one kind of layer: its lists in CSR, with room for the picks in CSA, their longest slice, the window row of each
    token (-1 where a later one takes it), and cos and sin [t, 32] at each token's position."""

    indices: Tensor
    indptr: Tensor
    longest: int
    destination: Tensor
    turn: Table
    compression: Compression | None


@dataclass(frozen=True)
class StepPlan:
    """ids int64 [t]; positions, batch_ids, visible (CSA keys) int32 [t]; slots int32 [b], block_table int32 [b, n].

    `columns`: index keys that the farthest token sees, at least 1. `direct`: no token needs a window row that this step
    overwrites, so rows go straight into the pool; else attention reads them from the step's payload, and they are written
    afterwards.
    """

    ids: Tensor
    positions: Tensor
    batch_ids: Tensor
    visible: Tensor
    slots: Tensor
    block_table: Tensor
    columns: int
    direct: bool
    kinds: dict[Kind, KindPlan]


@dataclass(frozen=True)
class _Places:
    """Host side of a step, numpy: where each sequence starts and each token stands."""

    start: plans.Ints
    extend: plans.Ints
    positions: plans.Ints
    batch_ids: plans.Ints
    slots: plans.Ints
    block_table: plans.Ints

    @property
    def end(self) -> plans.Ints:
        return self.start + self.extend

    @property
    def first(self) -> plans.Ints:
        """Number of each sequence's first token in the step."""
        return np.cumsum(self.extend) - self.extend


def plan_step(
    geometry: Geometry, kinds: set[Kind], ids: Many[Tensor], sequences: Many[Sequence], starts: Many[int], device: str
) -> StepPlan:
    """Plan for the next `ids[b]` of each sequence from position `starts[b]` on, through layers of these kinds. Blocks are
    there already."""
    places = _places(ids, sequences, starts)
    direct = int(places.extend.max()) <= geometry.lookahead + 1
    seen = visible(places.positions, RATIO["csa"])

    def there(x: plans.Ints, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(x)).to(device, dtype)

    return StepPlan(
        ids=torch.cat(list(ids)).long().to(device),
        positions=there(places.positions),
        batch_ids=there(places.batch_ids),
        visible=there(seen),
        slots=there(places.slots),
        block_table=there(places.block_table),
        columns=max(1, int(seen.max())),
        direct=direct,
        kinds={kind: _kind_plan(geometry, kind, places, direct, device) for kind in kinds},
    )


def _places(ids: Many[Tensor], sequences: Many[Sequence], starts: Many[int]) -> _Places:
    extend, start = np.array([len(i) for i in ids]), np.array(starts)
    batch_ids = np.repeat(np.arange(len(ids)), extend)
    table = np.zeros((len(sequences), max(1, *(len(s.blocks) for s in sequences))), np.int32)
    for row, sequence in zip(table, sequences, strict=True):
        row[: len(sequence.blocks)] = sequence.blocks
    positions = np.arange(extend.sum()) - (np.cumsum(extend) - extend)[batch_ids] + start[batch_ids]
    return _Places(start, extend, positions, batch_ids, np.array([s.slot for s in sequences]), table)


def _kind_plan(geometry: Geometry, kind: Kind, places: _Places, direct: bool, device: str) -> KindPlan:
    config, at = geometry.config, geometry.kinds.index(kind)  # any layer of the kind turns alike
    picks = config.index_topk if kind == "csa" else None  # room, filled in layer by layer
    indices, indptr = plans.attention_lists(
        geometry, kind, places.positions, places.batch_ids, places.slots, places.block_table, picks,
        None if direct else (places.first, places.start),
    )  # fmt: skip
    rows = geometry.window_index(kind, places.slots.astype(np.int64)[places.batch_ids], places.positions)
    overwritten = places.positions + geometry.ring < places.end[places.batch_ids]
    return KindPlan(
        indices=torch.from_numpy(indices).to(device),
        indptr=torch.from_numpy(indptr).to(device),
        longest=int(np.diff(indptr).max()),
        destination=torch.from_numpy(np.where(overwritten, -1, rows)).to(device),
        turn=_table(config, at, places.positions, device),
        compression=_compression(geometry, at, places, device) if RATIO[kind] else None,
    )


def _compression(geometry: Geometry, layer: int, places: _Places, device: str) -> Compression:
    ratio = RATIO[geometry.kinds[layer]]
    complete = plans.compress_plan(places.extend, places.end, ratio)
    keep = plans.write_plan(places.extend, places.end, ratio, geometry.lookahead)
    turn = _table(geometry.config, layer, complete[:, 2] // ratio * ratio, device)
    return Compression(torch.from_numpy(complete).to(device), torch.from_numpy(keep).to(device), turn)


def _table(config: Config, layer: int, positions: plans.Ints, device: str) -> Table:
    cos, sin = rope_table(config, layer, torch.from_numpy(np.ascontiguousarray(positions)))
    return cos.contiguous().to(device), sin.contiguous().to(device)
