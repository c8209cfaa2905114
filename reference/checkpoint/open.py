"""From the word a user types to a store of weights. Source: docs/checkpoint.md §2."""

from __future__ import annotations

from ..errors import BadInput
from .procedural import ProceduralStore
from .store import WeightStore


def open_store(model: str) -> WeightStore:
    """Open `procedural:PRESET[@seed]`. Raises BadInput for anything unfit."""
    if not model.startswith("procedural:"):
        raise BadInput(f"{model}: directories are not readable yet")
    name, _, seed = model.removeprefix("procedural:").partition("@")
    if seed and not seed.isdecimal():
        raise BadInput(f"{model}: the seed after @ must be a whole number")
    return ProceduralStore(name, int(seed or 0))
