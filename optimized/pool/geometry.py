"""Where every row of the KV pool lives: one row space for all layers, in blocks that grow up and slots at the end.

A row is the KV of one token or compressed entry in one layer. A block holds the compressed rows of 256 tokens of all
layers (its envelope); a slot holds one request's float32 compressor rings and its window rows. Pure integers, valid
for Python ints and numpy arrays alike. Source: docs/pool.md §1 to §4.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from reference.config import Config, Kind
from reference.errors import BadInput

Build = Literal["2buff", "bf16"]
BLOCK_TOKENS = 256
SLOT_ALIGN = 2  # rows
FIELD_ALIGN = 256  # bytes, of a state field within its plane's part of a slot, and of a plane
SCALE_TILE = 64  # channels a scale of a 2buff row
KINDS: tuple[Kind, ...] = ("window", "hca", "csa")  # order of the window entries in a slot
RATIO: dict[Kind, int] = {"window": 0, "hca": 128, "csa": 4}


@dataclass(frozen=True)
class Field:
    """One float32 compressor ring array of a slot: [layers, ring, width] at `offset` bytes into the slot in `plane`."""

    name: str
    layers: int
    ring: int
    width: int
    plane: int
    offset: int

    @property
    def nbytes(self) -> int:
        return self.layers * self.ring * self.width * 4


def round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def pooled_tokens(ratio: int) -> int:
    """Tokens that one compressed row pools: two groups where windows overlap (ratio 4), else one."""
    return 2 * ratio if ratio == 4 else ratio


def visible(position: Any, ratio: int) -> Any:
    """Compressed rows a token at `position` may see: a group counts from its last token on."""
    return (position + 1) // ratio


@dataclass(frozen=True)
class Geometry:
    """The pool of one model and build. `lookahead` is the number of draft tokens that may have to be taken back;
    `drafter_blocks` counts the window-only blocks after the layers whose KV the pool also holds.

    Raises BadInput where the 2buff row has no form: it needs 64 rotary channels and a multiple of 64 others.
    """

    config: Config
    build: Build = "2buff"
    lookahead: int = 0
    drafter_blocks: int = 0

    def __post_init__(self) -> None:
        nope = self.config.head_dim - self.config.qk_rope_head_dim
        if self.build == "2buff" and (self.config.qk_rope_head_dim != 64 or nope % SCALE_TILE or not 0 < nope <= 2048):
            raise BadInput(f"no 2buff row for head_dim {self.config.head_dim}, rotary {self.config.qk_rope_head_dim}")

    @cached_property
    def kinds(self) -> tuple[Kind, ...]:
        """Kind of each layer in the pool."""
        return tuple(self.config.kind(i) for i in range(self.config.num_hidden_layers + self.drafter_blocks))

    @cached_property
    def row_bytes(self) -> tuple[int, ...]:
        """Bytes a row in each plane: codes and scales, then rotary bfloat16 (2buff); or all channels in bfloat16."""
        c = self.config
        return (c.head_dim, 2 * c.qk_rope_head_dim) if self.build == "2buff" else (2 * c.head_dim,)

    @property
    def ring(self) -> int:
        """Positions a window ring holds."""
        return self.config.sliding_window + self.lookahead

    def count(self, kind: Kind) -> int:
        """Layers of this kind."""
        return self.kinds.count(kind)

    def ordinal(self, layer: int) -> int:
        """Number of the layer among those of its kind."""
        return self.kinds[:layer].count(self.kinds[layer])

    def stride(self, kind: Kind) -> int:
        """Rows from one layer to the next of its kind; for compressed kinds also the rows of a block and layer."""
        return self.ring if kind == "window" else BLOCK_TOKENS // RATIO[kind]

    def anchor(self, kind: Kind) -> int:
        """Where the kind begins in an envelope: HCA first, then CSA."""
        return self.count("hca") * self.stride("hca") if kind == "csa" else 0

    @cached_property
    def envelope(self) -> int:
        """Rows of one block."""
        return self.anchor("csa") + self.count("csa") * self.stride("csa")

    def base(self, layer: int) -> int:
        """Row at which the view of a layer begins. Every index in a list is relative to it."""
        kind = self.kinds[layer]
        return self.anchor(kind) + self.ordinal(layer) * self.stride(kind)

    def compress_index(self, block: Any, r: Any) -> Any:
        """Row r of a block, relative to the base of any layer with a compressor."""
        return self.envelope * block + r

    def interleave(self, kind: Kind, position: Any) -> Any:
        """Window row of a position within its kind's entry, relative to the layer.

        Rings are cut in runs of `stride` rows and the runs of all layers of the kind lie side by side, because the
        layer's base already steps by `stride`.
        """
        q, s = position % self.ring, self.stride(kind)
        return q // s * (self.count(kind) * s) + q % s

    def entry_rows(self, kind: Kind) -> int:
        """Rows of the windows of all layers of a kind in one slot."""
        n = self.count(kind)
        return (n - 1) * self.stride(kind) + self.interleave(kind, self.ring - 1) + 1 if n else 0

    def ring_start(self, kind: Kind) -> int:
        before = KINDS[: KINDS.index(kind)]
        return self.arena_rows + sum(self.entry_rows(k) for k in before) - self.anchor(kind)

    def window_index(self, kind: Kind, slot: Any, position: Any) -> Any:
        """Window row of a position, relative to the base of any layer of the kind. `slot` counts from row 0."""
        return slot * self.slot_rows + self.ring_start(kind) + self.interleave(kind, position)

    @cached_property
    def fields(self) -> tuple[Field, ...]:
        """State fields, each placed in one plane so that the arena takes the fewest rows (first of equals)."""
        shapes = self._field_shapes()
        layouts = (self._place(shapes, planes) for planes in itertools.product(range(len(self.row_bytes)), repeat=6))
        return min(layouts, key=self._rows_of)

    def _field_shapes(self) -> list[tuple[str, int, int, int]]:
        c, k = self.config, self.lookahead
        csa, hca = self.count("csa"), self.count("hca")
        arrays = [
            ("csa_main", csa, pooled_tokens(4) + k, 2 * c.head_dim),
            ("csa_idx", csa, pooled_tokens(4) + k, 2 * c.index_head_dim),
            ("hca", hca, pooled_tokens(128) + k, c.head_dim),
        ]
        return [(f"{name}_{part}", *shape) for name, *shape in arrays for part in ("kv", "score")]  # type: ignore[misc]

    def _place(self, shapes: list[tuple[str, int, int, int]], planes: tuple[int, ...]) -> tuple[Field, ...]:
        end = [0] * len(self.row_bytes)
        placed = []
        for (name, layers, ring, width), plane in zip(shapes, planes, strict=True):
            placed.append(Field(name, layers, ring, width, plane, end[plane]))
            end[plane] += round_up(placed[-1].nbytes, FIELD_ALIGN)
        return tuple(placed)

    def _rows_of(self, fields: tuple[Field, ...]) -> int:
        return max(-(-(f.offset + f.nbytes) // self.row_bytes[f.plane]) for f in fields)

    @cached_property
    def arena_rows(self) -> int:
        """Rows at the front of a slot that its state fields take."""
        return self._rows_of(self.fields)

    @cached_property
    def slot_rows(self) -> int:
        return round_up(self.arena_rows + sum(map(self.entry_rows, KINDS)), SLOT_ALIGN)

    def plane_rows(self, blocks: int, slots: int) -> int:
        """Rows of a plane that holds this many blocks and slots, a whole number of slots."""
        return (slots + -(-blocks * self.envelope // self.slot_rows)) * self.slot_rows

    def slot_positions(self, plane_rows: int) -> int:
        """Positions a slot can have. Group g of requests takes position `slot_positions - 1 - g`: from the top down."""
        return plane_rows // self.slot_rows

    @property
    def bytes_per_token(self) -> float:
        """Compressed KV of one token in all layers."""
        return self.envelope * sum(self.row_bytes) / BLOCK_TOKENS

    def index_bytes_per_token(self, form: Literal["fp4", "fp8"]) -> float:
        """Index keys of one token in all CSA layers, with a scale byte per 32 (FP4) or four scale bytes a key (FP8)."""
        width = self.config.index_head_dim
        key = width // 2 + width // 32 if form == "fp4" else width + 4
        return self.count("csa") * key / RATIO["csa"]
