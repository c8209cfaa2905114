"""How many threads a compiled loop gets: waking them costs more than a small tensor. Needs numba."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numba

ALONE_BELOW = 1 << 20  # bytes written; about a quarter of a millisecond of work


@contextmanager
def threads_for(nbytes: int) -> Iterator[None]:
    """Compiled loops inside that write `nbytes` bytes run on one thread if that is little, else on all allowed."""
    allowed = numba.get_num_threads()
    numba.set_num_threads(1 if nbytes < ALONE_BELOW else allowed)
    try:
        yield
    finally:
        numba.set_num_threads(allowed)
