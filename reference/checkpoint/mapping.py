"""One file in memory: mapped once, read ahead and let go by ranges of bytes. Source: docs/checkpoint.md §9."""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from ..errors import BadInput

Range = tuple[int, int]  # [begin, end) in bytes
_NORESERVE = 0x4000  # MAP_NORESERVE of Linux: a mapping larger than memory promises nothing


class MappedFile:
    """A file as bytes, read when touched; writing to `payload` changes a private copy, never the file.

    Views of `payload` keep the mapping alive. Raises BadInput for a file that cannot be mapped.
    """

    def __init__(self, path: Path) -> None:
        try:
            self._fd = os.open(path, os.O_RDONLY)
            weakref.finalize(self, os.close, self._fd)
            self._map = mmap.mmap(self._fd, 0, flags=mmap.MAP_PRIVATE | _NORESERVE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        except (OSError, ValueError) as error:
            raise BadInput(f"{path}: not readable: {error}") from None
        self.payload = np.frombuffer(self._map, dtype=np.uint8)

    def fetch(self, begin: int, end: int) -> None:
        """Start reading a range; returns when the disk has been asked, which takes long where it is behind."""
        os.posix_fadvise(self._fd, begin, end - begin, os.POSIX_FADV_WILLNEED)

    def drop(self, begin: int, end: int, from_cache: bool) -> None:
        """Whole pages of a range leave this process, and the system's cache too if asked: the next touch reads again.

        What was written to them is lost.
        """
        first, last = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE, end // mmap.PAGESIZE * mmap.PAGESIZE
        if first < last:
            self._map.madvise(mmap.MADV_DONTNEED, first, last - first)
            if from_cache:
                os.posix_fadvise(self._fd, first, last - first, os.POSIX_FADV_DONTNEED)


def joined(ranges: Iterable[Range]) -> list[Range]:
    """The same bytes in as few ranges as possible, in order."""
    parts: list[Range] = []
    for begin, end in sorted(ranges):
        if parts and begin <= parts[-1][1]:
            parts[-1] = parts[-1][0], max(end, parts[-1][1])
        else:
            parts.append((begin, end))
    return parts


def available_memory() -> int:
    """Bytes that the system can still give without swapping, the files it caches among them."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/meminfo has no MemAvailable")
