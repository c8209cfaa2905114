"""A run's records as one self-contained HTML file: no network, works from file://. Source: docs/judge.md §9."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, select_autoescape

from ..locate import departure, departures, headline
from ..records import write_bytes
from .attribution import bars, of_drift
from .curves import choices, panels
from .terminal import failures, place, reproduce, scientific, share

Record = Mapping[str, Any]
MOST = 20  # failing outputs that are spelt out
CLOSEST = 8  # verdicts that passed with the most of their budget used
LIMITS = (0.0, 0.03, 0.1, 0.3, 1.0)  # of the budget, between the colour steps of the map


def write_html(records: Sequence[Record], path: Path) -> None:
    """Render and write, to a temporary name first."""
    write_bytes(path, render(records).encode())


def render(records: Sequence[Record]) -> str:
    """The whole page. A record of a kind that this page does not know is left out."""
    run, verdicts = records[0], _of(records, "verdict")
    return environment().get_template("report.html.j2").render(
        run=run, summary=records[-1], headline=headline(records), failures=failures(records), most=MOST,
        closest=closest(verdicts), reproduce=partial(reproduce, run), missing=missing(records),
        heat=heatmap(run, verdicts), panels=panels(_of(records, "drift")), choices=choices(_of(records, "drift")),
        logits=_of(records, "logits"), attributions=bars(_of(records, "attribution")),
        departed=[departure(r) for r in departures(records, "forced")],
        broken=[r for r in _of(records, "drift") if r.get("error")], flips=flips(verdicts), data=data(run, verdicts),
    )  # fmt: skip


def environment() -> Environment:
    """Templates of pages: every text is escaped."""
    made = Environment(loader=PackageLoader("parity", "report"), autoescape=select_autoescape(default=True),
                       trim_blocks=True, lstrip_blocks=True)  # fmt: skip
    made.filters.update(share=share, scientific=scientific, place=place, percent=percent, of_drift=of_drift)
    return made


def _of(records: Sequence[Record], kind: str) -> list[Record]:
    return [r for r in records if r["record"] == kind]


def percent(x: float) -> str:
    """Two significant digits; what is not nothing never reads as nothing."""
    return f"{100 * x:.2g} %" if x < 0.1 else f"{100 * x:.0f} %"


def closest(verdicts: Sequence[Record]) -> list[Record]:
    passed = [r for r in verdicts if r["verdict"] == "pass" and r["budget_used"]]
    return sorted(passed, key=lambda r: -r["budget_used"])[:CLOSEST]


def missing(records: Sequence[Record]) -> list[dict[str, Any]]:
    """What was not run: one entry a reason and set of phases, its ops in order, those that were required apart."""
    phases: dict[tuple[str, str, bool], list[str]] = {}
    for r in _of(records, "not_run"):
        phases.setdefault((r["op"], r["reason"], r["required"]), []).append(r["phase"])
    found: dict[tuple[str, tuple[str, ...], bool], list[str]] = {}
    for (op, reason, required), where in phases.items():
        found.setdefault((reason, tuple(where), required), []).append(op)
    return [{"reason": why, "phases": where, "required": required, "ops": ops} for (why, where, required), ops in found.items()]


def heatmap(run: Record, verdicts: Sequence[Record]) -> dict[str, Any]:
    """Ops by layers, both in the run's order: the largest share over phases, as a colour step and in words. A layer that
    does not have an op has no cell; an op without any verdict is a row of none."""
    kinds = {r["layer_id"]: r["kind"] for r in verdicts}
    worst: dict[str, dict[str, tuple[float, Record]]] = {op: {} for op in run["ops"]}
    for r in verdicts:
        cells, used = worst.setdefault(r["op"], {}), strain(r)
        if r["layer_id"] not in cells or used > cells[r["layer_id"]][0]:
            cells[r["layer_id"]] = used, r
    rows = [
        {"op": op, "cells": [_cell(*cells[layer]) if layer in cells else None for layer in kinds] if cells else None}
        for op, cells in worst.items()
    ]
    return {"rows": rows, "layers": list(kinds.items())}


def strain(verdict: Record) -> float:
    """The share used, beyond 1 for whatever failed."""
    used = math.inf if verdict["budget_used"] is None else float(verdict["budget_used"])
    return used if verdict["verdict"] == "pass" else max(used, math.nextafter(1.0, 2.0))


def _cell(used: float, verdict: Record) -> dict[str, Any]:
    words = f"{verdict['op']}, {verdict['layer_id']}: {share(verdict['budget_used'])} of the budget, {verdict['verdict']}"
    return {"step": step(used), "words": words}


def step(used: float) -> int:
    """0: nothing used; 1 to 4: up to 3 %, 10 %, 30 %, the whole budget; 5: beyond."""
    return sum(used > limit for limit in LIMITS)


def flips(verdicts: Sequence[Record]) -> list[dict[str, Any]]:
    """Outputs with legal flips, over layers and phases: how many of how many, the largest share first."""
    found: dict[tuple[str, str, str], list[int]] = {}
    for r in verdicts:
        for o in r["outputs"]:
            count = found.setdefault((r["op"], o["output"], o["storage"]), [0, 0])
            count[0] += o["flips"]
            count[1] += o["elements"]
    rows = [{"op": op, "output": name, "storage": storage, "flips": n, "elements": total, "share": n / total}
            for (op, name, storage), (n, total) in found.items() if n]  # fmt: skip
    return sorted(rows, key=lambda row: -row["share"])


def data(run: Record, verdicts: Sequence[Record]) -> dict[str, Any]:
    """What the page's script shows on request: verdicts as rows of numbers into tables of words, and the command that
    repeats one, with blanks for op, layer and phase."""
    words: dict[str, dict[str, int]] = {name: {} for name in ("op", "layer_id", "phase", "bound")}

    def number(r: Record, name: str) -> int:
        return words[name].setdefault(r[name], len(words[name]))

    rows = [
        [*(number(r, name) for name in words), int(r["verdict"] == "pass"), _figure(r["budget_used"]),
         _figure(r["relative_l2"]), r["flips"], r["elements"], [_output(o) for o in r["outputs"]]]
        for r in verdicts
    ]  # fmt: skip
    blank = {"op": "{op}", "layer_id": "layer_{layer}", "phase": "{phase}"}
    kinds = {r["layer_id"]: r["kind"] for r in verdicts}
    return {"words": {name: list(known) for name, known in words.items()}, "kinds": kinds, "command": reproduce(run, blank),
            "verdicts": rows}  # fmt: skip


def _output(o: Record) -> list[Any]:
    tests = ", ".join(f"{name} {share(x)}" for name, x in o["tests"].items())
    return [o["output"], o["storage"], int(o["verdict"] == "pass"), o["rows"], o["failing_rows"], o["flips"],
            _figure(o["budget_used"]), tests, place(o["worst"]), (o.get("pattern") or {}).get("text", "")]  # fmt: skip


def _figure(x: float | None) -> float | None:
    """JSON has no infinity and no NaN."""
    return x if x is not None and math.isfinite(x) else None
