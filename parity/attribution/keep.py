"""What an attribution keeps while it goes: the streams of every coalition behind a place, one file each.

`state/` holds `question.json`, what was asked, and `PLACE/NUMBER.safetensors`. A file is written under a temporary name and
renamed, so it is there or it is not. Source: docs/attribution.md §4.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from reference.errors import BadInput

from ..records import write_bytes

STATE = "state"


@dataclass(frozen=True)
class Kept:
    """The directory of an attribution that goes on."""

    directory: Path

    @classmethod
    def open(cls, out: Path, question: Mapping[str, Any], resume: bool) -> Kept:
        """Raises BadInput where another attribution is kept, or the same one and it is not to be resumed."""
        kept = cls(out / STATE)
        path = kept.directory / "question.json"
        if not path.exists():
            kept.directory.mkdir(parents=True, exist_ok=True)
            write_bytes(path, json.dumps(question).encode())
            return kept
        if not resume:
            raise BadInput(f"{out}: holds an attribution that did not end; --resume goes on with it")
        try:
            known = json.loads(path.read_bytes())
        except ValueError as error:
            raise BadInput(f"{path}: not JSON: {error}") from None
        asked = json.loads(json.dumps(question))
        for name in sorted(asked):
            if not isinstance(known, dict) or known.get(name) != asked[name]:
                raise BadInput(f"{path}: it began with another {name}; an attribution is resumed as it began")
        return kept

    def has(self, place: str, number: int) -> bool:
        return self._file(place, number).exists()

    def put(self, place: str, number: int, x: Tensor) -> None:
        path = self._file(place, number)
        path.parent.mkdir(exist_ok=True)
        write_bytes(path, save({"x": x.contiguous()}))

    def get(self, place: str, number: int) -> Tensor:
        """Raises BadInput for a damaged file."""
        path = self._file(place, number)
        try:
            return load(path.read_bytes())["x"]
        except (OSError, SafetensorError, KeyError) as error:
            raise BadInput(f"{path}: not readable: {error}") from None

    def finished(self, place: str) -> bool:
        return (self.directory / place / "finished").exists()

    def finish(self, place: str, before: str | None) -> None:
        """All of a place is kept; what lay before it is needed no more."""
        write_bytes(self.directory / place / "finished", b"")
        if before is not None:
            shutil.rmtree(self.directory / before, ignore_errors=True)

    def close(self) -> None:
        shutil.rmtree(self.directory, ignore_errors=True)

    def _file(self, place: str, number: int) -> Path:
        return self.directory / place / f"{number:06d}.safetensors"
