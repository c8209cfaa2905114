"""Listening in on a model: which tap said what in one step. Source: docs/judge.md §7.

A tap's name is its checkpoint-like path (`layers.30.attn.q`), the same string in reference, optimized, traces and
reports; ops name taps inside their block (`attn.q`).
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from reference.errors import BadInput


class Capture:
    """Keeps what the wanted taps of one block show, in order: a tap that speaks per block of tokens or per sequence is
    put together along the first axis."""

    def __init__(self, prefixes: Iterable[str], wanted: Iterable[str]) -> None:
        """`prefixes` as in `layers.30.`, tried in order."""
        self._prefixes = tuple(prefixes)
        self._wanted = frozenset(wanted)
        self._parts: dict[str, list[Tensor]] = {}

    def __call__(self, tap: str, x: Tensor) -> None:
        name = next((tap.removeprefix(p) for p in self._prefixes if tap.startswith(p)), tap)
        if name in self._wanted:
            self._parts.setdefault(name, []).append(x)

    def parts(self, name: str) -> list[Tensor]:
        """Everything the tap showed, call by call. Raises BadInput for a tap that never spoke."""
        if name not in self._parts:
            raise BadInput(f"tap {self._prefixes[0]}{name} was not captured")
        return self._parts[name]

    def table(self, name: str) -> Tensor:
        """Choices [t, k] of a tap whose parts may be narrower, filled up with -1. Raises BadInput like `parts`."""
        parts = self.parts(name)
        width = max(p.shape[1] for p in parts)
        return torch.cat([torch.nn.functional.pad(p, (0, width - p.shape[1]), value=-1) for p in parts])

    def __getitem__(self, name: str) -> Tensor:
        return torch.cat(self.parts(name))
