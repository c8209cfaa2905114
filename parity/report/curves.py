"""Drift curves as lines of an inline SVG: one panel a phase, relative L2 on a logarithmic axis over layers.

Source: docs/judge.md §9.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Record = Mapping[str, Any]
WIDTH, HEIGHT = 440, 250
LEFT, RIGHT, TOP, BOTTOM = 46, 20, 10, 34
LABELS = 10  # layers named below the axis, at most
CURVES = {
    "rounding": "what rounding alone costs: the exact model with this build's rounding, no kernel, against the exact model",
    "forced": "each layer alone: the build's layer on the twin's streams, against the twin",
    "free": "running freely: the build on its own streams from the first layer, against the twin",
    "reference": "what float32 costs: the exact model as it generates, against the exact model in float64",
    "predicted": "predicted: each layer's own error, carried on by the measured gain of the layers behind it",
}


@dataclass(frozen=True)
class Axes:
    """Where a layer and a distance lie in every panel. Distances from 10^low to 10^high."""

    layers: tuple[str, ...]
    low: int
    high: int

    def x(self, layer: str) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * self.layers.index(layer) / max(1, len(self.layers) - 1)

    def y(self, decades: float) -> float:
        return TOP + (HEIGHT - TOP - BOTTOM) * (self.high - decades) / (self.high - self.low)

    def decades(self) -> list[tuple[float, str]]:
        every = -(-(self.high - self.low) // 8)
        return [(self.y(e), f"1e{e}") for e in range(self.high, self.low - 1, -every)]

    def ticks(self) -> list[tuple[float, str]]:
        every = -(-len(self.layers) // LABELS)
        return [(self.x(layer), short(layer)) for layer in self.layers[::every]]


def short(layer: str) -> str:
    """`layer_07` -> `7`, `mtp_0` -> `mtp 0`."""
    return str(int(layer.removeprefix("layer_"))) if layer.startswith("layer_") else layer.replace("_", " ")


def panels(drift: Sequence[Record]) -> dict[str, Any] | None:
    """Everything that the template draws: panels with their lines, the curves there are, and a table of the numbers.
    Zeros and infinities have no place on the axis and stand in the table only."""
    values = _values(drift)
    drawn = [math.log10(v) for v in values.values() if v and math.isfinite(v)]
    if not drawn:
        return None
    phases, layers, curves = (list(dict.fromkeys(key[i] for key in values)) for i in range(3))
    axes = Axes(tuple(layers), math.floor(min(drawn)), math.floor(max(drawn)) + 1)
    ordered = [curve for curve in CURVES if curve in curves]
    return {
        "width": WIDTH, "height": HEIGHT, "left": LEFT, "right": WIDTH - RIGHT, "bottom": HEIGHT - BOTTOM,
        "decades": axes.decades(), "ticks": axes.ticks(), "curves": {curve: CURVES[curve] for curve in ordered},
        "phases": {phase: [_line(axes, values, phase, curve) for curve in ordered] for phase in phases},
        "columns": [(phase, curve) for phase in phases for curve in ordered],
        "rows": [(layer, [values.get((phase, layer, curve)) for phase in phases for curve in ordered]) for layer in layers],
    }  # fmt: skip


def _values(drift: Sequence[Record]) -> dict[tuple[str, str, str], float | None]:
    """(phase, layer, curve) -> relative L2. Records without a curve are of rounding."""
    found: dict[tuple[str, str, str], float | None] = {}
    for r in drift:
        where = r["phase"], r["layer_id"]
        found[(*where, r.get("curve", "rounding"))] = r["relative_l2"]
        if r.get("predicted") is not None:
            found[(*where, "predicted")] = r["predicted"]
    return found


def _line(axes: Axes, values: Mapping[tuple[str, str, str], float | None], phase: str, curve: str) -> dict[str, Any]:
    points = []
    for layer in axes.layers:
        value = values.get((phase, layer, curve))
        if value and math.isfinite(value):
            points.append((f"{axes.x(layer):.1f}", f"{axes.y(math.log10(value)):.1f}", layer, value))
    return {"curve": curve, "points": " ".join(f"{x},{y}" for x, y, *_ in points), "dots": points}


def choices(drift: Sequence[Record]) -> list[dict[str, Any]]:
    """Experts and index entries that the two sides of a curve chose differently: one row a curve, phase and kind of choice,
    with the mean share over layers, the largest and its layer."""
    found: dict[tuple[str, str, str], list[tuple[float, str]]] = {}
    for r in drift:
        for name, value in r.get("flips", {}).items():
            found.setdefault((r["curve"], r["phase"], name), []).append((value, r["layer_id"]))
    return [
        {"curve": curve, "phase": phase, "choice": name, "mean": sum(v for v, _ in shares) / len(shares),
         "largest": max(shares)[0], "at": max(shares)[1]}
        for (curve, phase, name), shares in found.items()
    ]  # fmt: skip
