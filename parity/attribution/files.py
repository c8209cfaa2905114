"""`attribution.jsonl`: the records of an attribution in a directory of its own, or beside those of a run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from reference.errors import BadInput

from ..records import SCHEMA_VERSION, Record, read_lines, write_lines

FILE = "attribution.jsonl"


def write(directory: Path, records: Sequence[Record]) -> None:
    write_lines(directory / FILE, records)


def read(directory: Path) -> list[Record]:
    """None where there is no such file. Raises BadInput for a damaged or foreign one."""
    path = directory / FILE
    if not path.exists():
        return []
    found = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        try:
            record = json.loads(line)
        except ValueError as error:
            raise BadInput(f"{path}, line {number}: not JSON: {error}") from None
        if not isinstance(record, dict) or record.get("record") != "attribution" or record.get("schema") != SCHEMA_VERSION:
            raise BadInput(f"{path}, line {number}: no attribution of schema version {SCHEMA_VERSION}")
        found.append(record)
    return found


def joined(run: Path) -> list[Record]:
    """Records of a run directory, with the attributions beside them before the summary."""
    *records, summary = read_lines(run)
    return [*records, *read(run), summary]
