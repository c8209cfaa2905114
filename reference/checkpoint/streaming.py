"""The traffic of a model that is read while it is used: its parts, which of them stay, and which come next.

A part is a layer without its routed experts, one routed expert, or the head. Source: docs/checkpoint.md §9.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable

import torch

from ..moe import TOGETHER
from .residency import Part, ReadAhead, Residency
from .store import DTYPE_OF_TAG, TensorInfo, WeightStore

HEAD = "head"
WINDOW = 1 << 30  # bytes on their way from the disk: what it delivers while a layer computes, several times over
_AS_STORED = ("wkv.weight", "gate.weight", "weights_proj.weight", "head.weight")  # BF16 that products read as it is


def part_of(name: str) -> str:
    """The part that a tensor belongs to: `layers.3`, `layers.3.ffn.experts.7`, `mtp.0`, `embed` or `head`."""
    layer, routed, rest = name.partition(".ffn.experts.")
    if routed:
        return f"{layer}{routed}{rest.partition('.')[0]}"
    words = name.split(".", 2)
    if words[0] in ("layers", "mtp"):
        return f"{words[0]}.{words[1]}"
    return "embed" if words[0] == "embed" else HEAD


def held_bytes(name: str, info: TensorInfo, dtype: torch.dtype) -> int:
    """Bytes that a tensor takes in a run of `dtype`: as stored, and for small ones a copy in that dtype beside it."""
    if info.dtype not in ("BF16", "F32") or DTYPE_OF_TAG[info.dtype] == dtype or name.endswith(_AS_STORED):
        return info.nbytes
    return info.nbytes + info.nbytes // DTYPE_OF_TAG[info.dtype].itemsize * dtype.itemsize


def _is_expert(part: str) -> bool:
    return ".experts." in part


class Streaming:
    """Who uses a part says so here, and hears what leaves for it. `touched` counts the stored bytes of all uses."""

    def __init__(self, store: WeightStore, dtype: torch.dtype, memory: int) -> None:
        self._store = store
        self._names: dict[str, list[str]] = {}
        self._stored: dict[str, int] = {}
        self._held: dict[str, int] = {}
        for name, info in store.tensors.items():
            part = part_of(name)
            self._names.setdefault(part, []).append(name)
            self._stored[part] = self._stored.get(part, 0) + info.nbytes
            self._held[part] = self._held.get(part, 0) + held_bytes(name, info, dtype)
        window = min(WINDOW, memory // 4)
        largest = max((n for part, n in self._held.items() if _is_expert(part)), default=0)
        self.residency = Residency(memory, window + TOGETHER * largest, TOGETHER)
        self.residency.hold(self._part(HEAD))
        self._dense = ReadAhead(self._prefetch, sys.maxsize)
        self._experts = ReadAhead(self._prefetch, window)  # of a long prompt all experts of a layer may be expected
        self.touched = 0

    def begin(self, parts: Iterable[str]) -> None:
        """A step begins, and will use these."""
        self._dense.clear()
        self._experts.clear()
        self.expect(parts)

    def expect(self, parts: Iterable[str]) -> None:
        """These will be used next; what is there need not come."""
        for name in parts:
            if name not in self.residency and name in self._names:
                self._ahead(name).expect([self._part(name)])

    def use(self, name: str) -> list[str]:
        """A part is used now -> the parts that leave for it; the store has been told."""
        self.touched += self._stored.get(name, 0)
        self._ahead(name).take(name)
        part = self._part(name)
        left = self.residency.use(part) if _is_expert(name) else self.residency.enter(part)
        for gone in left:
            self._store.release(self._names[gone])
        return left

    def _ahead(self, name: str) -> ReadAhead:
        return self._experts if _is_expert(name) else self._dense

    def _prefetch(self, name: str) -> None:
        self._store.prefetch(self._names[name])

    def _part(self, name: str) -> Part:
        return Part(name, self._held.get(name, 0))
