"""From the word a user types to a store of weights. Source: docs/checkpoint.md §2."""

from __future__ import annotations

from pathlib import Path

from ..errors import BadInput
from .directory import DirectoryStore
from .procedural import ProceduralStore
from .store import WeightStore


def open_store(model: str) -> WeightStore:
    """Open `procedural:PRESET[@seed][/gN]` (N the generator), or the directory of that name.

    Raises BadInput for anything unfit.
    """
    if not model.startswith("procedural:"):
        return DirectoryStore(Path(model))
    rest, slash, version = model.removeprefix("procedural:").partition("/g")
    name, at, seed = rest.partition("@")
    for mark, number, what in ((at, seed, "seed after @"), (slash, version, "generator after /g")):
        if mark and not (number.isascii() and number.isdigit()):
            raise BadInput(f"{model}: the {what} must be a whole number")
    return ProceduralStore(name, int(seed or 0), int(version) if slash else None)
