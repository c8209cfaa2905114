"""How many threads a compiled loop gets: waking them costs more than a small tensor. Needs numba.

numba and torch share one OpenMP runtime, and numba's count would replace torch's: it is put back afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numba
import torch

ALONE_BELOW = 1 << 20  # bytes written; about a quarter of a millisecond of work


@contextmanager
def threads_for(nbytes: int) -> Iterator[None]:
    """Compiled loops inside that write `nbytes` bytes run on one thread if that is little, else on all allowed."""
    of_torch, allowed = torch.get_num_threads(), numba.get_num_threads()  # in this order: the second call changes the first
    wanted = 1 if nbytes < ALONE_BELOW else allowed
    if wanted != allowed:
        numba.set_num_threads(wanted)
    try:
        yield
    finally:
        if wanted != allowed:
            numba.set_num_threads(allowed)
        if torch.get_num_threads() != of_torch:
            torch.set_num_threads(of_torch)
