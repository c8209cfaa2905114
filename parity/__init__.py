"""Who is right: kernels against the reference, by bounds derived from formats and accumulation.

`parity.judge_op(name, function)` judges one op of anybody's kernel. Source: docs/single.md §1.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

# Before anything loads torch: threads that wait for the next loop look for it a few tenths of a millisecond long, then
# sleep. Looking on, they take the cores from each other and from everybody else; asleep at once, they are woken beside
# the thread that wakes them, on its core.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("GOMP_SPINCOUNT", "20000")

if TYPE_CHECKING:
    from .single.calling import judge_op as judge_op


def __getattr__(name: str) -> object:
    """`judge_op`, loaded when it is asked for: kernels come with it."""
    if name == "judge_op":
        from .single.calling import judge_op

        return judge_op
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
