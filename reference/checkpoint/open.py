"""From the word a user types to a store of weights. Source: docs/checkpoint.md §2."""

from __future__ import annotations

from pathlib import Path

from ..errors import BadInput
from .directory import DirectoryStore
from .procedural import ProceduralStore
from .store import WeightStore


def open_store(model: str) -> WeightStore:
    """Open `procedural:PRESET[@seed]`, or the directory of that name. Raises BadInput for anything unfit."""
    if not model.startswith("procedural:"):
        return DirectoryStore(Path(model))
    name, _, seed = model.removeprefix("procedural:").partition("@")
    if "@" in model and not (seed.isascii() and seed.isdigit()):
        raise BadInput(f"{model}: the seed after @ must be a whole number")
    return ProceduralStore(name, int(seed or 0))
