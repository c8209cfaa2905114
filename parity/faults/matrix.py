"""The kill matrix: every fault before its gates, what they said, and whether that is right. Source: docs/faults.md §2."""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from reference.errors import BadInput

from ..laws import LAWS, Law
from ..records import write_bytes
from . import FAULTS
from .change import turned_on
from .fault import Fault
from .gates import Outcome, run_cell, run_law, run_tests

FILE = "results.jsonl"
EXPENSIVE = "test"  # gates of this kind are asked only where no other has spoken


@dataclass(frozen=True)
class Result:
    """What the gates said of one fault. `digest` is that of its entry: one that has changed is run again."""

    fault: str
    digest: str
    outcomes: tuple[Outcome, ...]

    @property
    def by(self) -> tuple[str, ...]:
        """Gates that caught it."""
        return tuple(o.gate for o in self.outcomes if o.caught)

    @property
    def named(self) -> str:
        """What the first run that failed blamed; empty where no run did."""
        return next((o.named for o in self.outcomes if o.caught and o.gate in ("op", "layer")), "")


def wrong(result: Result, fault: Fault) -> str:
    """Why a result is not what it should be; empty where it is."""
    if not result.by:
        return "not caught"
    return f"blamed on {result.named}" if result.named not in ("", fault.op) else ""


def select(patterns: Sequence[str]) -> list[Fault]:
    """Faults whose name, kind or source matches any shell pattern. Raises BadInput where one matches none."""
    for pattern in patterns:
        if not any(_matches(f, pattern) for f in FAULTS):
            raise BadInput(f"no fault matches {pattern!r}; v4parity faults --list names them")
    return [f for f in FAULTS if not patterns or any(_matches(f, p) for p in patterns)]


def _matches(fault: Fault, pattern: str) -> bool:
    return any(fnmatch(text, pattern) for text in (fault.name, fault.kind, fault.source))


def laws_of(fault: Fault) -> list[Law]:
    """Laws of its op on the kernels' side, and those that it names."""
    return [x for x in LAWS if x.side == "kernel" and (x.op == fault.op or x.name in fault.laws or x.family in fault.laws)]


def face(fault: Fault) -> Result:
    """The fault before its gates: its cell of a run, the laws of its op, and tests where all of these are silent."""
    outcomes = [run_cell(fault.cell, fault.change)] if fault.cell else []
    with turned_on(fault.change):
        outcomes += [run_law(law) for law in laws_of(fault)]
    if fault.tests and not any(o.caught for o in outcomes):
        outcomes.append(run_tests(fault.tests, fault.name))
    return Result(fault.name, digest(fault), tuple(outcomes))


def digest(fault: Fault) -> str:
    """Of everything that an entry says, functions by their names."""
    return hashlib.sha256(json.dumps(asdict(fault), default=lambda x: getattr(x, "__qualname__", repr(x))).encode()).hexdigest()


def run_all(faults: Iterable[Fault], directory: Path, listen: Callable[[Fault, Result], None]) -> list[Result]:
    """Results of these faults; those that `directory` holds already are not run again. Each is kept as it comes."""
    known = read_results(directory)
    for fault in faults:
        result = known.get(fault.name)
        if result is None or result.digest != digest(fault):
            with _quiet():
                result = known[fault.name] = face(fault)
            lines = (json.dumps(asdict(r), sort_keys=True) for r in known.values())
            write_bytes(directory / FILE, ("\n".join(lines) + "\n").encode())
        listen(fault, result)
    return [known[fault.name] for fault in faults]


def read_results(directory: Path) -> dict[str, Result]:
    """Results kept in a directory, by fault; none where there is no file. Raises BadInput for a damaged one."""
    path = directory / FILE
    if not path.exists():
        return {}
    return {r.fault: r for n, line in enumerate(path.read_text().splitlines(), 1) for r in [_result(line, path, n)]}


def _result(line: str, path: Path, number: int) -> Result:
    try:
        said: Mapping[str, Any] = json.loads(line)
        return Result(said["fault"], said["digest"], tuple(Outcome(**o) for o in said["outcomes"]))
    except (ValueError, KeyError, TypeError) as error:
        raise BadInput(f"{path}: line {number} is no result of a fault: {error}") from None


@contextmanager
def _quiet() -> Any:
    """Faults overflow and divide by zero; the interpreter's numpy says so at length."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
