"""What this machine can read and multiply, and what that makes of a step: its two bounds. Source: docs/cpu.md §5."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

LEAST, MOST = 1 << 30, 4 << 30  # bytes read to measure: eight last-level caches, within these
FMA_SIDE = 2048
SHARE_OF_PEAK = 0.6  # of the measured peak that a bound by arithmetic grants
REPEATS = 3


@dataclass(frozen=True)
class Limits:
    """Bytes a second that all threads read from memory, and one; multiply-adds a second in float32."""

    read: float
    read_one: float
    fma: float


@dataclass(frozen=True)
class Bounds:
    """Seconds that a step takes at least."""

    memory: float
    arithmetic: float

    @property
    def seconds(self) -> float:
        return max(self.memory, self.arithmetic)

    @property
    def binds(self) -> str:
        return "memory" if self.memory >= self.arithmetic else "arithmetic"


def bounds(nbytes: int, multiply_adds: int, limits: Limits) -> Bounds:
    """Bytes touched over the read limit; multiply-adds over `SHARE_OF_PEAK` of the peak."""
    return Bounds(nbytes / limits.read, multiply_adds / (SHARE_OF_PEAK * limits.fma))


def measure(most: int = sys.maxsize) -> Limits:
    """The best of `REPEATS` runs each; takes a second or two, and `MOST` or `most` bytes of memory at most."""
    threads = torch.get_num_threads()
    array = torch.ones(max(1, min(max(8 * last_level_cache(), LEAST), MOST, most) // 4))
    read, fma = array.nbytes / _best(array.sum), multiply_add_peak(torch.float32)
    torch.set_num_threads(1)
    try:
        one = array.nbytes / _best(array.sum)
    finally:
        torch.set_num_threads(threads)
    return Limits(read, one, fma)


def multiply_add_peak(dtype: torch.dtype) -> float:
    """Multiply-adds a second of the machine's own matrix product, all threads."""
    square = torch.ones(FMA_SIDE, FMA_SIDE, dtype=dtype)
    return FMA_SIDE**3 / _best(lambda: square @ square)


def last_level_cache() -> int:
    """Bytes; 0 where the system does not say."""
    sizes = [0]
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        with suppress(ValueError, OSError):
            sizes.append(int(path.read_text().strip().removesuffix("K")) * 1024)
    return max(sizes)


def _best(run: Callable[[], object]) -> float:
    seconds = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - began)
    return min(seconds)
