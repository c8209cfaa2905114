"""Progress of long work: a bar on a terminal, plain lines otherwise, always on stderr."""

from __future__ import annotations

import sys
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar


class Progress:
    """A count of `total` steps of one kind. `write` puts results on stdout, `note` remarks on stderr."""

    def __init__(self, total: int, unit: str) -> None:
        self._console = Console(stderr=True)
        self._live = self._console.is_terminal
        self._bar = Bar(
            TextColumn(f"{unit}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
            TextColumn("{task.description}"), console=self._console, disable=not self._live, transient=True,
        )  # fmt: skip
        self._task = self._bar.add_task("", total=total)

    def __enter__(self) -> Progress:
        self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._bar.stop()

    def at(self, done: int, what: str = "") -> None:
        """`done` steps are finished; `what` names the one at hand."""
        self._bar.update(self._task, completed=done, description=what)

    def write(self, text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()

    def note(self, text: str) -> None:
        """A remark: into the bar's place on a terminal, a line of its own otherwise."""
        if self._live:
            self._bar.update(self._task, description=text)
        else:
            print(text, file=sys.stderr, flush=True)
