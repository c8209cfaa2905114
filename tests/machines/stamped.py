"""A step carried out by hand: the production plan is followed as kernels follow it, with rows that tell where they come from.

Every token has a stamp, an integer. Its window row in a layer is a random vector chosen by stamp and layer; a ring holds
layer and stamp; a compressed row and an index key are vectors chosen by the stamps that the ring and the step gave, in their
order. Vectors are exact in every format, so codecs give back what they got.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from typing import Any

import numpy as np
import torch
from slow_layout import BLOCK, POOLED, RATIOS, SlowLayout
from torch import Tensor

from optimized.pool import index_rows
from optimized.pool import rows as codec
from optimized.pool.pool import IndexPool, Pool
from reference.config import Kind

VECTORS = 4093
LAYERS = 8  # more than any pool of the tests has
RINGS = {"hca": ("hca",), "csa": ("csa_main", "csa_idx")}
_GENERATOR = torch.Generator().manual_seed(11)
_E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def _vectors(width: int) -> Tensor:
    """Values of E2M1 with a sign and a power of two for every 32 channels: exact in E2M1, E4M3 and bfloat16."""
    shape = VECTORS, width // 32, 32
    signs = 1 - 2.0 * torch.randint(0, 2, shape, generator=_GENERATOR)
    values = signs * _E2M1[torch.randint(0, 8, shape, generator=_GENERATOR)]
    return (values * torch.randint(-2, 3, (*shape[:2], 1), generator=_GENERATOR).exp2()).flatten(1)


ROW_VECTORS, KEY_VECTORS = _vectors(128), _vectors(64)


def window_vector(stamps: Any, layer: int) -> Any:
    """Number of the vector of a token's window row."""
    return (np.asarray(stamps, np.int64) * 2003 + layer * 509 + 7) % VECTORS


def pooled_vector(stamps: Any, layer: int) -> Any:
    """Number of the vector of a group, from the stamps [n, k] of its tokens, oldest first, 0 for none."""
    stamps = np.asarray(stamps, np.int64)
    return (stamps @ (np.arange(stamps.shape[-1]) * 97 + 31) + layer * 701 + 3) % VECTORS


class Hand:
    """Writes and reads a pool and its pages by plans. `layers` of each kind, drafter layers included."""

    def __init__(self, pool: Pool, index: IndexPool) -> None:
        self.pool, self.index, self.geometry = pool, index, pool.geometry
        self.at = SlowLayout(self.geometry)

    def step(self, plan: Any, csa_lists: Any, stamps: Any, layers: Many[int]) -> list[list[int]]:
        """One step through `layers`; stamps [t]. Of each layer the vectors that its lists read, in order, -1 for what is none
        of ours."""
        read = []
        for layer in layers:
            kind = self.geometry.kinds[layer]
            own = plan.kinds[kind]
            if own.compression is not None:
                self._compress(plan, own.compression, stamps, layer)
            mine, rows = self._encode(window_vector(stamps, layer)), own.destination.long()
            if plan.direct:
                self._write(layer, rows, mine)
            indices = csa_lists[0] if kind == "csa" else own.indices.numpy()
            read.append(self._read(layer, torch.from_numpy(np.ascontiguousarray(indices)).long(), mine))
            if not plan.direct:
                self._write(layer, rows, mine)
        return read

    def _encode(self, vectors: Any) -> tuple[Tensor, ...]:
        values = ROW_VECTORS[torch.from_numpy(np.asarray(vectors))]
        return codec.encode_2buff(values) if self.geometry.build == "2buff" else (values.bfloat16(),)

    def _write(self, layer: int, rows: Tensor, parts: tuple[Tensor, ...]) -> None:
        for plane, part in zip(self.pool.layer_rows(layer), parts, strict=True):
            plane[rows[rows >= 0]] = part[rows >= 0]

    def _read(self, layer: int, rows: Tensor, payload: tuple[Tensor, ...]) -> list[int]:
        """Vectors of rows of the pool, and of row r of the payload for -1 - r."""
        rows, place = rows.unique(return_inverse=True)
        ours = rows < 0
        parts = []
        for plane, part in zip(self.pool.layer_rows(layer), payload, strict=True):
            got = plane[rows.clamp_min(0)]
            got[ours] = part[-1 - rows[ours]]
            parts.append(got)
        return np.array(self._vectors_of(parts), np.int64)[place.numpy()].tolist()

    def _vectors_of(self, parts: Many[Tensor]) -> list[int]:
        values = codec.decode_2buff(*parts) if self.geometry.build == "2buff" else parts[0].float()
        return numbers(values, ROW_VECTORS)

    def _compress(self, plan: Any, group: Any, stamps: Any, layer: int) -> None:
        """Rows of completed groups from ring and step, then the rings: the order of docs/pool.md §5."""
        kind = self.geometry.kinds[layer]
        complete = group.complete.numpy().astype(np.int64)
        number, b, position, from_ring = complete.T
        k = np.arange(POOLED[kind])
        at = number[:, None] - POOLED[kind] + 1 + k  # tokens of the step
        positions = position[:, None] - POOLED[kind] + 1 + k
        slots = plan.slots.numpy()[b]
        for name in RINGS[kind]:
            kv, _ = self._ring(name, layer)
            old = kv[slots[:, None], positions % kv.shape[1]]  # [n, k, width]
            held = np.where(positions >= 0, _stamp(old, layer), 0)
            pooled = np.where(k < from_ring[:, None], held, stamps[np.clip(at, 0, len(stamps) - 1)])
            self._write_groups(name, layer, plan.block_table.numpy(), b, position // RATIOS[kind], pooled)
        number, b, position, _ = group.keep.long().T
        for name in RINGS[kind]:
            kv, score = self._ring(name, layer)
            value = (torch.from_numpy(stamps)[number] * LAYERS + layer).float()[:, None]
            place = plan.slots.long()[b], position % kv.shape[1]
            kv[place], score[place] = value.expand(-1, kv.shape[2]), -value.expand(-1, kv.shape[2])

    def _ring(self, name: str, layer: int) -> tuple[Tensor, Tensor]:
        return self.pool.state(f"{name}_kv", layer), self.pool.state(f"{name}_score", layer)

    def _write_groups(self, name: str, layer: int, table: Any, b: Any, entry: Any, pooled: Any) -> None:
        kind = self.geometry.kinds[layer]
        per_block = BLOCK // RATIOS[kind]
        block, r = table[b, entry // per_block], entry % per_block
        vectors = pooled_vector(pooled, layer)
        if name != "csa_idx":
            self._write(layer, torch.from_numpy(self.geometry.compress_index(block.astype(np.int64), r)), self._encode(vectors))
            return
        parts = index_rows.encode(KEY_VECTORS[torch.from_numpy(vectors)], self.index.layout.form)
        for plane, place, part in zip(self.index.pages(layer), self._places(r), parts, strict=True):
            plane[torch.from_numpy(block).long()[:, None], place] = part

    def _places(self, r: Any) -> tuple[Tensor, Tensor]:
        layout, width = self.index.layout, self.geometry.config.index_head_dim
        return index_rows.key_order(layout, width)[r], index_rows.scale_order(layout, width)[r]

    def rows(self, numbers: list[int]) -> list[int]:
        """Vectors of rows of the row space."""
        parts = [plane[numbers] for plane in self.pool.planes]
        if self.geometry.build == "2buff":
            return self._vectors_of([parts[0], parts[1].view(torch.bfloat16)])
        return self._vectors_of([parts[0].view(torch.bfloat16)])

    def keys(self, layer: int, places: list[tuple[int, int]]) -> list[int]:
        """Vectors of index keys, each given by its page and its row there."""
        block, row = torch.tensor(places, dtype=torch.long).view(-1, 2).T
        codes, scales = (p[block[:, None], at] for p, at in zip(self.index.pages(layer), self._places(row), strict=True))
        return numbers(index_rows.decode(codes, scales, self.index.layout.form), KEY_VECTORS)

    def ring(self, name: str, layer: int, places: list[tuple[int, int]]) -> list[int]:
        """Stamps in a compressor's ring, each given by slot and position; -1 where values and scores do not agree on one."""
        slot, position = torch.tensor(places, dtype=torch.long).view(-1, 2).T
        kv, score = (ring[slot, position % ring.shape[1]] for ring in self._ring(name, layer))
        return np.where((-score == kv).all(-1).numpy(), _stamp(kv, layer), -1).tolist()


def groups(tokens: list[int], layer: int, kind: Kind) -> list[int]:
    """Vectors of all finished groups of a sequence with these stamps in a layer."""
    ratio = RATIOS[kind]
    if not ratio or len(tokens) < ratio:
        return []
    k, stamps = POOLED[kind], np.array([0] * (POOLED[kind] - ratio) + tokens, np.int64)
    windows = np.stack([stamps[c * ratio : c * ratio + k] for c in range(len(tokens) // ratio)])
    return pooled_vector(windows, layer).tolist()


def _stamp(rows: Tensor, layer: int) -> Any:
    """Ring rows [..., width] -> stamps, -1 where channels differ, are not finite or come from another layer."""
    first = rows[..., 0]
    whole = (rows == first[..., None]).all(-1) & (first % LAYERS == layer)
    return torch.where(whole, first // LAYERS, -1.0).numpy().astype(np.int64)


def numbers(values: Tensor, vectors: Tensor) -> list[int]:
    """Which vector each row of values is, -1 for none."""
    book = _book(vectors)
    return [book.get(row.tobytes(), -1) for row in (values + 0.0).numpy()]  # + 0.0: no negative zeros


_BOOKS: dict[int, dict[bytes, int]] = {}


def _book(vectors: Tensor) -> dict[bytes, int]:
    if id(vectors) not in _BOOKS:
        _BOOKS[id(vectors)] = {row.tobytes(): i for i, row in enumerate((vectors + 0.0).numpy())}
    return _BOOKS[id(vectors)]
