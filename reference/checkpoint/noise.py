"""The pools behind generator 2: codes and FP4 scales drawn once, of which every quantised weight is a view.

Source: docs/checkpoint.md §5. Needs numba.
"""

from __future__ import annotations

import hashlib
import math
from functools import cache

import numpy as np
import torch
from torch import Tensor

from .. import formats
from . import drawing, laws

POOL_BYTES = 1 << 31  # of each storage: together 4 GiB, more than caches hold and than one token of V4-Pro reads twice
SEGMENT = 1 << 25  # drawn at a time, when a view first touches it
SCALE_BYTES = 1 << 27  # of a pool of FP4 scales, at most
_ROW_WORDS = 512  # of the rows in which a pool is drawn; any multiple of 128 elements
_PLAIN = np.zeros(16, dtype=np.int64)
_FP4_ROWS = np.repeat(np.array([0, -2, 2]), [12, 3, 1])  # steps of whole rows: three of 16 narrow, one an outlier
_FEWEST = 8  # of 256 steps of a scale, those of +2, at least; four times the power takes 63


class NoisePool:
    """Normal codes of one storage, every 128th element from a distribution four times as wide. Seeded, drawn lazily."""

    def __init__(self, seed: int, tag: str) -> None:
        self._tag = tag
        self._key = _key(f"2/{seed}/pool/{tag}")
        self._bytes = torch.empty(POOL_BYTES, dtype=torch.uint8)  # pages come when they are written
        self._drawn: set[int] = set()

    def view(self, place: int, nbytes: int) -> Tensor:
        """`nbytes` bytes (uint8) that begin at a word that the number `place` picks: a view, not to be written to."""
        begin = place % ((POOL_BYTES - nbytes) // 8 + 1) * 8
        self.draw(begin, begin + nbytes)
        return self._bytes[begin : begin + nbytes]

    def draw(self, begin: int = 0, end: int = POOL_BYTES) -> None:
        """What is not there yet of these bytes."""
        for segment in range(begin // SEGMENT, -(-end // SEGMENT)):
            if segment not in self._drawn:
                self._draw(segment)

    def _draw(self, segment: int) -> None:
        from .threads import threads_for

        words = self._bytes[segment * SEGMENT : (segment + 1) * SEGMENT].numpy().view(np.uint64).reshape(-1, _ROW_WORDS)
        bits = 4 if self._tag == "I8" else 8
        columns = np.arange(int(self._key) % laws.COLUMN_PERIOD, _ROW_WORDS * 64 // bits, laws.COLUMN_PERIOD)
        sign = np.uint64(sum(1 << at for at in range(bits - 1, 64, bits)))
        with threads_for(SEGMENT):
            drawing.fill(self._key, segment * len(words), _table(self._tag), _PLAIN, sign, columns, bits, words)
        self._drawn.add(segment)


class ScalePool:
    """Rows of E8M0 bytes as `drawing.fill_scales` makes them, drawn lazily. Views begin at even rows."""

    def __init__(self, seed: int, width: int, exponent: int, wide: int) -> None:
        self._key = _key(f"2/{seed}/scales/{width}/{exponent}/{wide}")
        self._exponent, self._wide = exponent, wide
        self._rows = torch.empty(SCALE_BYTES // width, width, dtype=torch.uint8)
        self._chunk = SEGMENT // width
        self._drawn: set[int] = set()

    def view(self, place: int, rows: int) -> Tensor:
        """[rows, width] from an even row that the number `place` picks: a view, not to be written to."""
        begin = place % ((len(self._rows) - rows) // 2 + 1) * 2
        self.draw(begin, begin + rows)
        return self._rows[begin : begin + rows]

    def draw(self, begin: int = 0, end: int | None = None) -> None:
        """What is not there yet of these rows."""
        for chunk in range(begin // self._chunk, -(-(len(self._rows) if end is None else end) // self._chunk)):
            if chunk not in self._drawn:
                self._draw(chunk * self._chunk)
                self._drawn.add(chunk)

    def _draw(self, row: int) -> None:
        from .threads import threads_for

        out = self._rows[row : row + self._chunk]
        with threads_for(out.nbytes):
            fill_scales(self._key, row, self._exponent, self._wide, True, out)


@cache
def fitted(std: float, fp4: bool) -> tuple[int, int]:
    """Exponent and number of +2 among 256 steps with which scales times codes have this standard deviation."""
    tag, rows = ("I8", _FP4_ROWS) if fp4 else ("F8_E4M3", _PLAIN)
    power = (std / laws.CODE_STD[tag]) ** 2 / (float(np.mean(4.0**rows)) * (1 + 4) / 2)  # (1 + 4) / 2 for the two parities
    exponent = math.floor(math.log(power / _mean_power(_FEWEST), 4))
    return exponent, round((256 * power / 4.0**exponent - 136) / (16 - 1 / 16))


def _mean_power(wide: int) -> float:
    """Mean square of 256 scales of which 128 have step 0, `wide` step +2 and the others -2."""
    return (128 + (128 - wide) / 16 + 16 * wide) / 256


def fill_scales(key: np.uint64, start: int, exponent: int, wide: int, fp4: bool, out: Tensor) -> None:
    """Scale bytes of rows from `start` on into out [rows, n] (uint8)."""
    steps = np.repeat(np.array([0, -2, 2]), [128, 128 - wide, wide])
    drawing.fill_scales(key, start, 127 + exponent, steps, _FP4_ROWS if fp4 else _PLAIN, out.numpy())


def _key(text: str) -> np.uint64:
    return np.uint64(int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little"))


@cache
def scale_pool(seed: int, width: int, exponent: int, wide: int) -> ScalePool:
    """One pool for each width of scales and each law."""
    return ScalePool(seed, width, exponent, wide)


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
