"""Where things lie, told a second time and slowly, from docs/pool.md §3 and by what a place means rather than by offsets
from a base: block, kind, layer, row; or slot, kind, run of the ring, layer, row of the run."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property

from optimized.pool.geometry import Geometry
from reference.config import Kind

BLOCK = 256  # tokens
ROWS_OF_BLOCK = {"hca": 2, "csa": 64}
RATIOS = {"window": 0, "hca": 128, "csa": 4}
POOLED = {"hca": 128, "csa": 8}


@dataclass(eq=False)
class SlowLayout:
    """Rows of the row space. Sizes of the state arena and of a slot are taken from the geometry, which its own tests check."""

    geometry: Geometry

    @cache  # noqa: B019 - a run of a machine has one
    def layers(self, kind: Kind) -> list[int]:
        return [i for i, k in enumerate(self.geometry.kinds) if k == kind]

    @property
    def ring(self) -> int:
        return self.geometry.config.sliding_window + self.geometry.lookahead

    @cached_property
    def block_rows(self) -> int:
        return sum(ROWS_OF_BLOCK.get(kind, 0) for kind in self.geometry.kinds)

    @cache  # noqa: B019
    def base(self, layer: int) -> int:
        """Where the layer's view begins: behind the rows, in a block, of the layers before it, HCA layers first."""
        kind = self.geometry.kinds[layer]
        before = self.layers(kind).index(layer)
        if kind == "window":
            return before * self.ring
        return before * ROWS_OF_BLOCK[kind] + (2 * len(self.layers("hca")) if kind == "csa" else 0)

    def compressed(self, layer: int, blocks: list[int], entry: int) -> int:
        """Row of a sequence's compressed entry in a layer."""
        rows = ROWS_OF_BLOCK[self.geometry.kinds[layer]]
        return blocks[entry // rows] * self.block_rows + self.base(layer) + entry % rows

    def window(self, layer: int, slot: int, position: int) -> int:
        """Row of a position's window row in a layer."""
        kind = self.geometry.kinds[layer]
        before = sum(self._entry_rows(k) for k in ("window", "hca", "csa")[: ("window", "hca", "csa").index(kind)])
        start = slot * self.geometry.slot_rows + self.geometry.arena_rows + before
        return start + self._in_entry(kind, self.layers(kind).index(layer), position)

    def _in_entry(self, kind: Kind, layer: int, position: int) -> int:
        run = self.ring if kind == "window" else ROWS_OF_BLOCK[kind]
        which, at = divmod(position % self.ring, run)
        return which * run * len(self.layers(kind)) + layer * run + at

    @cache  # noqa: B019
    def _entry_rows(self, kind: Kind) -> int:
        layers = range(len(self.layers(kind)))
        return max((self._in_entry(kind, i, p) + 1 for i in layers for p in range(self.ring)), default=0)
