"""The pool behind generator 2: FP8 and FP4 codes drawn once, of which every quantised weight is a view.

Source: docs/checkpoint.md §5. Needs numba.
"""

from __future__ import annotations

import hashlib
from functools import cache

import numpy as np
import torch
from torch import Tensor

from .. import formats
from . import drawing, laws

POOL_BYTES = 1 << 31  # of each storage: together 4 GiB, more than caches hold and than one token of V4-Pro reads twice
SEGMENT = 1 << 25  # drawn at a time, when a view first touches it
_ROW_WORDS = 512  # of the rows in which a pool is drawn; any multiple of 128 elements
_PLAIN = np.zeros(16, dtype=np.int64)


class NoisePool:
    """Normal codes of one storage, every 128th element from a distribution four times as wide. Seeded, drawn lazily."""

    def __init__(self, seed: int, tag: str) -> None:
        self._tag = tag
        digest = hashlib.sha256(f"2/{seed}/pool/{tag}".encode()).digest()
        self._key = np.uint64(int.from_bytes(digest[:8], "little"))
        self._bytes = torch.empty(POOL_BYTES, dtype=torch.uint8)  # pages come when they are written
        self._drawn: set[int] = set()

    def view(self, place: int, nbytes: int) -> Tensor:
        """`nbytes` bytes (uint8) that begin at a word that the number `place` picks: a view, not to be written to."""
        begin = place % ((POOL_BYTES - nbytes) // 8 + 1) * 8
        for segment in range(begin // SEGMENT, -(-(begin + nbytes) // SEGMENT)):
            if segment not in self._drawn:
                self._draw(segment)
        return self._bytes[begin : begin + nbytes]

    def _draw(self, segment: int) -> None:
        from .threads import threads_for

        words = self._bytes[segment * SEGMENT : (segment + 1) * SEGMENT].numpy().view(np.uint64).reshape(-1, _ROW_WORDS)
        bits = 4 if self._tag == "I8" else 8
        columns = np.arange(int(self._key) % laws.COLUMN_PERIOD, _ROW_WORDS * 64 // bits, laws.COLUMN_PERIOD)
        sign = np.uint64(sum(1 << at for at in range(bits - 1, 64, bits)))
        with threads_for(SEGMENT):
            drawing.fill(self._key, segment * len(words), _table(self._tag), _PLAIN, sign, columns, bits, words)
        self._drawn.add(segment)


@cache
def pool(seed: int, tag: str) -> NoisePool:
    """One pool a seed and storage, whoever opens the model."""
    return NoisePool(seed, tag)


@cache
def _table(tag: str) -> np.ndarray[tuple[int, ...], np.dtype[np.uint64]]:
    """[5, 2048] words of magnitudes: plain four times, outliers last, of root mean square `CODE_STD` in all."""
    n = drawing.TABLE_WORDS * (16 if tag == "I8" else 8)
    law = laws.Law(std=laws.CODE_STD[tag], factors=(1.0, 1.0, 1.0, 1.0))
    values = torch.from_numpy(np.outer(law.widths(), law.quantiles(n)[drawing.order(n)])).float()
    codes = formats.e2m1_pack(formats.e2m1_encode(values)) if tag == "I8" else formats.e4m3_encode(values)
    return codes.contiguous().numpy().view(np.uint64)
