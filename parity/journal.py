"""What a run keeps while it goes: finished layers and the streams that the next one gets, so that a killed run goes on.

`state/` in the run directory holds `run.json`, what was asked; for every finished layer `layer_02.json`, its records; and
`layer_02.safetensors`, the streams behind the last of them. Each file is written under a temporary name and renamed, the
records of a layer last, so a layer is finished or it is not. Source: docs/judge.md §9.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from reference.errors import BadInput

from .flow import Streams
from .records import FILE, Record, read_lines, write_bytes

STATE = "state"


@dataclass(frozen=True)
class Journal:
    """The run directory of a run that goes on."""

    directory: Path

    @classmethod
    def open(cls, directory: Path, resume: bool) -> Journal:
        """Raises BadInput for a directory that already holds a run, ended or not, unless it is to be resumed."""
        if not resume and (directory / FILE).exists():
            raise BadInput(f"{directory}: already holds a run")
        if not resume and (directory / STATE).exists():
            raise BadInput(f"{directory}: holds a run that did not end; --resume goes on with it")
        (directory / STATE).mkdir(parents=True, exist_ok=True)
        return cls(directory)

    def begin(self, header: Record) -> Record:
        """The header of the run in this directory: this one, or the one it began with. Raises BadInput where they differ."""
        path = self._state("run.json")
        if (self.directory / FILE).exists():
            path, known = self.directory / FILE, read_lines(self.directory)[0]
        elif path.exists():
            known = _read(path)
        else:
            write_bytes(path, json.dumps(header).encode())
            return header
        for name in sorted({*known, *header} - {"volatile"}):
            if known.get(name) != header.get(name):
                began, now = (_short(h.get(name)) for h in (known, header))
                raise BadInput(f"{path}: the run began with {name} {began}, not {now}; it is resumed as it began")
        return known

    def ended(self) -> list[Record] | None:
        """All records, of a run that has ended."""
        return read_lines(self.directory) if (self.directory / FILE).exists() else None

    def finished(self, layers: Sequence[str]) -> list[list[Record]]:
        """Records of the layers that are finished, in the order in which they run."""
        done = []
        for layer in layers:
            path = self._state(f"{layer}.json")
            if not path.exists():
                break
            done.append(_records(path))
        return done

    def keep(self, layer: str, said: Sequence[Record], streams: Streams | None) -> None:
        """A layer is finished: its records, and what the next one gets."""
        older = list((self.directory / STATE).glob("*.safetensors"))
        digest = None
        if streams is not None:
            payload = save({name: x.contiguous() for name, x in _named(streams).items()})
            digest = hashlib.sha256(payload).hexdigest()
            write_bytes(self._state(f"{layer}.safetensors"), payload)
        write_bytes(self._state(f"{layer}.json"), json.dumps({"records": said, "streams": digest}).encode())
        for path in older:
            path.unlink()

    def streams(self, layer: str) -> Streams:
        """What was kept behind a finished layer. Raises BadInput for a file that is not as it was written."""
        path = self._state(f"{layer}.safetensors")
        try:
            payload = path.read_bytes()
            if hashlib.sha256(payload).hexdigest() != _read(self._state(f"{layer}.json")).get("streams"):
                raise BadInput(f"{path}: not the streams that {layer}.json speaks of")
            return _parted(load(payload))
        except (FileNotFoundError, SafetensorError, KeyError) as error:
            raise BadInput(f"{path}: not readable: {error}") from None

    def close(self) -> None:
        """The run has ended, and its records are written: nothing is left to resume."""
        shutil.rmtree(self.directory / STATE, ignore_errors=True)

    def _state(self, name: str) -> Path:
        return self.directory / STATE / name


def _named(streams: Streams) -> dict[str, Tensor]:
    """Streams of every engine and phase as one table, `twin.decode`."""
    return {f"{f.name}.{phase}": x for f in fields(streams) for phase, x in getattr(streams, f.name).items()}


def _parted(table: Mapping[str, Tensor]) -> Streams:
    parts: dict[str, dict[str, Tensor]] = {f.name: {} for f in fields(Streams)}
    for name, x in table.items():
        engine, _, phase = name.partition(".")
        parts[engine][phase] = x
    return Streams(**parts)


def _read(path: Path) -> dict[str, Any]:
    """Raises BadInput for a damaged file."""
    try:
        table = json.loads(path.read_bytes())
    except ValueError as error:
        raise BadInput(f"{path}: not JSON: {error}") from None
    if not isinstance(table, dict):
        raise BadInput(f"{path}: no JSON object")
    return table


def _records(path: Path) -> list[Record]:
    said = _read(path).get("records")
    if not isinstance(said, list) or not all(isinstance(r, dict) and "record" in r for r in said):
        raise BadInput(f"{path}: no list of records")
    return said


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 70 else f"{text[:30]} … {text[-30:]}"
