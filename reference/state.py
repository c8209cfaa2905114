"""What a sequence leaves behind for its next token.

Tensors in here are never changed in place: a step makes new ones. So a copy of the state is a copy of references,
and rolling back rejected tokens means keeping the state from before. Source: docs/model.md §4 and §5.1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise

from torch import Tensor

_COMPRESSED = ("values", "gates", "rows")


@dataclass(frozen=True)
class CompressorState:
    """values and gates [n, c*dh] of the tokens later rows still need, and the finished rows [c, dh].

    Unrounded, gates with their position bias. The tokens begin at the first block that is not finished, or, with
    overlapping windows, one block before it: a fresh state then holds one block of no tokens.
    """

    values: Tensor
    gates: Tensor
    rows: Tensor


@dataclass(frozen=True)
class LayerState:
    """window [n, d]: the rows of the last `sliding_window - 1` tokens, oldest first; by kind of layer the compressors."""

    window: Tensor
    compressor: CompressorState | None = None
    indexer: CompressorState | None = None


@dataclass
class SequenceState:
    """`length` tokens seen so far, and one state per layer (none before the first token)."""

    length: int = 0
    layers: list[LayerState] = field(default_factory=list)

    def copy(self) -> SequenceState:
        """A state that later steps of this one do not touch."""
        return replace(self, layers=list(self.layers))


def named_tensors(state: SequenceState) -> dict[str, Tensor]:
    """Every tensor of a state, `layers.3.window`, `layers.3.indexer.rows`: with `length` it is all there is."""
    named = {}
    for i, layer in enumerate(state.layers):
        named[f"layers.{i}.window"] = layer.window
        for part in ("compressor", "indexer"):
            compressor = getattr(layer, part)
            if compressor is not None:
                named |= {f"layers.{i}.{part}.{name}": getattr(compressor, name) for name in _COMPRESSED}
    return named


def from_tensors(length: int, named: Mapping[str, Tensor]) -> SequenceState:
    """The state of `length` tokens that `named_tensors` made this of. Raises KeyError for one that is missing."""

    def compressor(name: str) -> CompressorState | None:
        parts = {part: named[f"{name}.{part}"] for part in _COMPRESSED} if f"{name}.rows" in named else None
        return CompressorState(**parts) if parts else None

    layers = [
        LayerState(named[f"layers.{i}.window"], compressor(f"layers.{i}.compressor"), compressor(f"layers.{i}.indexer"))
        for i in range(sum(name.endswith(".window") for name in named))
    ]
    return SequenceState(length, layers)


@dataclass(frozen=True)
class Batch:
    """A ragged batch, flat: token ids [t] and positions [t] of all sequences one after the other; `bounds` [b+1]."""

    ids: Tensor
    positions: Tensor
    bounds: list[int]

    def sequences(self) -> list[slice]:
        return [slice(a, b) for a, b in pairwise(self.bounds)]

    def blocks(self, size: int) -> list[slice]:
        """The flat tokens in blocks of at most `size`."""
        return [slice(i, min(i + size, len(self.ids))) for i in range(0, len(self.ids), size)]

    def parts(self, block: slice) -> list[tuple[int, slice]]:
        """Which sequences a block holds, each with its tokens counted from the block's start."""
        cuts = [(b, max(s.start, block.start), min(s.stop, block.stop)) for b, s in enumerate(self.sequences())]
        return [(b, slice(start - block.start, stop - block.start)) for b, start, stop in cuts if start < stop]
