"""A run's records as one self-contained HTML file: no network, works from file://. Source: docs/judge.md §9."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, select_autoescape

from .terminal import failures, place, reproduce, scientific, share

Record = Mapping[str, Any]
WIDTH, HEIGHT, MARGIN = 640, 220, 44
CELL = 14


def write_html(records: Sequence[Record], path: Path) -> None:
    """Render and write, to a temporary name first."""
    temporary = path.with_name(path.name + ".partial")
    try:
        temporary.write_text(render(records))
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def render(records: Sequence[Record]) -> str:
    environment = Environment(loader=PackageLoader("parity", "report"), autoescape=select_autoescape(default=True),
                              trim_blocks=True, lstrip_blocks=True)  # fmt: skip
    environment.filters.update(share=share, scientific=scientific, place=place)
    verdicts = [r for r in records if r["record"] == "verdict"]
    return environment.get_template("report.html.j2").render(
        run=records[0], summary=records[-1], verdicts=verdicts, failures=failures(records), reproduce=reproduce,
        missing=_missing(records), heat=heatmap(verdicts), drift=curves(records),
    )  # fmt: skip


def _missing(records: Sequence[Record]) -> list[dict[str, Any]]:
    """Ops not run, one entry an op and reason, with its phases."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for r in (r for r in records if r["record"] == "not_run"):
        empty = {"op": r["op"], "reason": r["reason"], "phases": [], "required": False}
        entry = found.setdefault((r["op"], r["reason"]), empty)
        entry["phases"].append(r["phase"])
        entry["required"] |= r["required"]
    return list(found.values())


def heatmap(verdicts: Sequence[Record]) -> dict[str, Any]:
    """Ops by layers: the largest share over phases. Colour steps 0..4 by the share, 5 for a failure."""
    ops, layers = (list(dict.fromkeys(r[key] for r in verdicts)) for key in ("op", "layer_id"))
    worst: dict[tuple[str, str], float] = {}
    for r in verdicts:
        at = (r["op"], r["layer_id"])
        used = math.inf if r["budget_used"] is None else r["budget_used"]
        worst[at] = max(worst.get(at, 0.0), used if r["verdict"] == "pass" else max(used, 1.1))
    cells = [
        {"x": layers.index(layer) * CELL, "y": ops.index(op) * CELL, "step": step(used), "op": op, "layer": layer,
         "share": share(None if math.isinf(used) else used)}
        for (op, layer), used in worst.items()
    ]  # fmt: skip
    return {"ops": ops, "layers": layers, "cells": cells, "cell": CELL, "width": len(layers) * CELL, "height": len(ops) * CELL}


def step(used: float) -> int:
    """0: nothing used; 1 to 4: up to 3 %, 10 %, 30 %, the whole budget; 5: beyond."""
    return sum(used > limit for limit in (0.0, 0.03, 0.1, 0.3, 1.0))


def curves(records: Sequence[Record]) -> dict[str, Any] | None:
    """Relative L2 of twin against truth by layer, one polyline a phase, logarithmic."""
    drift = [r for r in records if r["record"] == "drift" and r["relative_l2"]]
    if not drift:
        return None
    layers = list(dict.fromkeys(r["layer_id"] for r in drift))
    logs = [math.log10(r["relative_l2"]) for r in drift]
    low, high = math.floor(min(logs)), math.floor(max(logs)) + 1
    across, down = (WIDTH - 2 * MARGIN) / max(1, len(layers) - 1), (HEIGHT - 2 * MARGIN) / (high - low)

    def at(r: Record) -> tuple[float, float]:
        return MARGIN + layers.index(r["layer_id"]) * across, MARGIN + (high - math.log10(r["relative_l2"])) * down

    lines: dict[str, list[tuple[float, float]]] = {}
    for r in drift:
        lines.setdefault(r["phase"], []).append(at(r))
    return {
        "width": WIDTH, "height": HEIGHT, "margin": MARGIN, "first": layers[0], "last": layers[-1],
        "lines": [
            {"phase": phase, "points": " ".join(f"{x:.1f},{y:.1f}" for x, y in points),
             "dots": [(f"{x:.1f}", f"{y:.1f}") for x, y in points]}
            for phase, points in lines.items()
        ],
        "decades": [(MARGIN + (high - e) * down, e) for e in range(low, high + 1)],
    }  # fmt: skip
