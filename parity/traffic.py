"""What a generation moved and multiplied, beside what the machine allows: progress while it runs, bounds at its end.

Source: docs/cpu.md §5, docs/checkpoint.md §9.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from .bench.limits import SHARE_OF_PEAK, Limits, bounds


class Work(NamedTuple):
    """Bytes of weights touched, multiply-adds, bytes that came from the disk: of a step, or so far."""

    touched: int
    multiply_adds: int
    disk: int = 0

    def since(self, before: Work) -> Work:
        return Work(*(now - then for now, then in zip(self, before, strict=True)))


@dataclass(frozen=True)
class Machine:
    """Limits of memory and arithmetic, and bytes a second of the disk where weights come from one."""

    limits: Limits
    disk: float | None = None

    def seconds(self, work: Work) -> dict[str, float]:
        """By what limits it: the least time this work takes."""
        b = bounds(work.touched, work.multiply_adds, self.limits)
        by = {"memory": b.memory, "arithmetic": b.arithmetic}
        return by | ({"disk": work.disk / self.disk} if self.disk else {})

    def line(self) -> str:
        peak = f"{self.limits.fma / 1e9:.0f} G multiply-adds/s ({SHARE_OF_PEAK:.0%} granted)"
        disk = f", disk {self.disk / 1e9:.2f} GB/s" if self.disk else ""
        read = f"read {self.limits.read / 1e9:.1f} GB/s (one thread {self.limits.read_one / 1e9:.1f})"
        return f"limits          {read}{disk}, {peak}"


@dataclass
class Meter:
    """Reads `work` after each layer and each token. `machine` is None where nothing is streamed."""

    work: Callable[[], Work]
    machine: Machine | None
    seconds: list[float] = field(default_factory=list)  # of each token
    steps: list[Work] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._before, self._began = self.work(), time.perf_counter()

    def token(self) -> None:
        """A token is there."""
        now = self.work()
        self.seconds.append(time.perf_counter() - self._began)
        self.steps.append(now.since(self._before))
        self._before, self._began = now, time.perf_counter()

    def now(self) -> str:
        """The step at hand: bytes, bytes a second, and the share of what the binding limit allows."""
        work, took = self.work().since(self._before), time.perf_counter() - self._began
        if self.machine is None:
            return f"{work.touched / 1e9:.2f} GB"
        by = self.machine.seconds(work)
        binds = max(by, key=lambda what: by[what])
        nbytes = work.disk if binds == "disk" else work.touched
        of_disk = f", {work.disk / 1e9:.2f} from disk" if self.machine.disk else ""
        return f"{work.touched / 1e9:.2f} GB{of_disk}, {nbytes / took / 1e9:.2f} GB/s, {by[binds] / took:.0%} of {binds}"


def bound_lines(seconds: list[float], steps: list[Work], machine: Machine) -> list[str]:
    """The prompt's and the mean later token's time beside its bounds."""
    lines, later = [machine.line()], steps[1:]
    parts = [("prompt bound", seconds[0], steps[0])] if steps else []
    if later:
        mean = Work(*(sum(column) // len(later) for column in zip(*later, strict=True)))
        parts.append(("token bound", sum(seconds[1:]) / len(later), mean))
    for what, took, work in parts:
        by = machine.seconds(work)
        binds = max(by, key=lambda what: by[what])
        disk = f", {by['disk']:.2f} s by disk ({work.disk / 1e9:.1f} GB)" if "disk" in by else ""
        lines.append(f"{what:15} {by['memory']:.2f} s by memory ({work.touched / 1e9:.1f} GB), {by['arithmetic']:.2f} s by "
                     f"arithmetic{disk}: {binds} binds, took {took / by[binds]:.1f}x")  # fmt: skip
    return lines
