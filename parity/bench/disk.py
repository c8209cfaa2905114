"""What a disk gives: bytes a second of a checkpoint's files, as they lie there and as the system holds them.

Source: docs/checkpoint.md §9.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

REGION, PIECE = 64 << 20, 4 << 20  # bytes in a row; of one read
THREADS = 4
WARM = 2 << 30  # bytes that are read again
SECONDS = 1.0  # a measurement reads regions until so much time has passed
Region = tuple[Path, int, int]  # a file, and bytes [begin, end) of it


def shards(directory: Path) -> list[Path]:
    """The files that hold the weights, links followed."""
    return sorted(path.resolve() for path in directory.glob("*.safetensors"))


def regions(files: Sequence[Path], seed: int) -> list[Region]:
    """All of the files in regions, in random order: what was read lately is a small part of what comes first."""
    cut = [(f, begin, min(begin + REGION, f.stat().st_size)) for f in files for begin in range(0, f.stat().st_size, REGION)]
    random.Random(seed).shuffle(cut)
    return cut


def drop(files: Sequence[Path]) -> None:
    """The system's cache forgets them, but for pages that a process has mapped. Needs no rights."""
    for file in files:
        with file.open("rb") as opened:
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def cold(files: Sequence[Path], seconds: float = SECONDS, nbytes: int = 0) -> float:
    """Bytes a second from the disk, of regions that the cache has just forgotten and forgets again: `seconds` long, and
    `nbytes` at least. The same ones each time, so what a hypervisor or the disk caches of them, it caches of a model too."""
    drop(files)
    rate = _rate(regions(files, seed=0), seconds, nbytes)
    drop(files)
    return rate


def warm(files: Sequence[Path], seconds: float = SECONDS) -> float:
    """Bytes a second from the system's cache into a buffer, of regions read once before; they stay there."""
    parts = regions(files, seed=0)[: max(1, WARM // REGION)]
    _rate(parts, 0.0, WARM)
    return _rate(parts, seconds, 0)


def bytes_from_disk() -> int:
    """Bytes that this process and its threads have made the disk read so far."""
    for line in Path("/proc/self/io").read_text().splitlines():
        if line.startswith("read_bytes:"):
            return int(line.split()[1])
    raise OSError("/proc/self/io has no read_bytes")


def _rate(parts: Sequence[Region], seconds: float, nbytes: int) -> float:
    """Bytes a second of reading regions in turn, each with all threads, until both are reached."""
    buffers = [bytearray(PIECE) for _ in range(THREADS)]
    done, began = 0, time.perf_counter()
    with ThreadPoolExecutor(THREADS) as pool:
        for file, begin, end in parts:
            with file.open("rb", buffering=0) as opened:
                work = [pool.submit(_read, opened.fileno(), begin, end, i, buffer) for i, buffer in enumerate(buffers)]
                done += sum(piece.result() for piece in work)
            if time.perf_counter() - began >= seconds and done >= nbytes:
                break
    return done / (time.perf_counter() - began)


def _read(fd: int, begin: int, end: int, first: int, buffer: bytearray) -> int:
    """One thread's pieces of a region -> bytes read."""
    view, done = memoryview(buffer), 0
    for at in range(begin + first * PIECE, end, THREADS * PIECE):
        done += os.preadv(fd, [view[: min(PIECE, end - at)]], at)
    return done
