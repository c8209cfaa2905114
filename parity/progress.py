"""Progress of long work: a bar on a terminal, a plain line now and then otherwise, always on stderr."""

from __future__ import annotations

import sys
import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

PLAIN_EVERY = 10.0  # seconds between plain lines


class Progress:
    """A count of `total` steps of one kind. `write` puts results on stdout, `note` remarks on stderr."""

    def __init__(self, total: int, unit: str) -> None:
        self._total, self._unit, self._spoke = total, unit, time.monotonic()
        console = Console(stderr=True)
        self._live = console.is_terminal
        columns = (TextColumn(unit), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
        self._bar = Bar(*columns, console=console, disable=not self._live, transient=True)
        self._task = self._bar.add_task("", total=total)

    def __enter__(self) -> Progress:
        self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._bar.stop()

    def at(self, done: int, what: str = "") -> None:
        """`done` steps are finished; `what` names the one at hand."""
        self._bar.update(self._task, completed=done, description=what)
        if not self._live and time.monotonic() - self._spoke > PLAIN_EVERY:
            self.note(f"{self._unit} {done} of {self._total} {what}".rstrip())

    def write(self, text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()

    def note(self, text: str) -> None:
        """A remark: into the bar's place on a terminal, a line of its own otherwise."""
        self._spoke = time.monotonic()
        if self._live:
            self._bar.update(self._task, description=text)
        else:
            print(text, file=sys.stderr, flush=True)
