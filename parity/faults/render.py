"""The kill matrix as JSON, Markdown and one HTML page. Pure functions of faults and results. Source: docs/faults.md §2."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from importlib import resources
from typing import Any

from . import OUT_OF_REACH
from .fault import OWN, Fault
from .matrix import Result, wrong

Row = dict[str, Any]
WORDS = {"op": "the verdict on an op", "layer": "the drift of a layer", "law": "a law", "test": "a test"}


def rows(faults: Sequence[Fault], results: Sequence[Result]) -> list[Row]:
    """A row a fault: what it is, where it was tried, and what came of it."""
    return [_row(fault, result) for fault, result in zip(faults, results, strict=True)]


def _row(fault: Fault, result: Result) -> Row:
    first = next((o for o in result.outcomes if o.caught), None)
    return {
        "fault": fault.name, "kind": fault.kind, "source": fault.source, "also": list(fault.also),
        "severity": fault.severity, "what": fault.what, "op": fault.op, "cell": fault.cell.text if fault.cell else "",
        "caught_by": list(result.by), "named": result.named, "wrong": wrong(result, fault),
        "budget_used": first.budget_used if first and first.gate == "op" else None,
        "words": first.words if first else "", "seconds": round(sum(o.seconds for o in result.outcomes), 2),
        "outcomes": [{"gate": o.gate, "caught": o.caught, "seconds": round(o.seconds, 2)} for o in result.outcomes],
    }  # fmt: skip


def totals(table: Sequence[Row]) -> Row:
    """How many faults, of whom, caught by what, and blamed on what."""
    judged = [r for r in table if r["named"]]
    gates = Counter(gate.split()[0] for r in table for gate in {g.split()[0] for g in r["caught_by"]})
    return {
        "faults": len(table), "own": sum(r["source"] == OWN for r in table), "out_of_reach": len(OUT_OF_REACH),
        "public": len({r["source"] for r in table} - {OWN}), "caught": sum(bool(r["caught_by"]) for r in table),
        "blamed": len(judged), "rightly": sum(r["named"] == r["op"] for r in judged), "gates": dict(sorted(gates.items())),
        "seconds": round(sum(r["seconds"] for r in table)),
    }  # fmt: skip


def as_json(table: Sequence[Row]) -> str:
    """Every outcome; a budget that nothing excuses is null."""
    finite = [r | {"budget_used": b if (b := r["budget_used"]) is not None and b < float("inf") else None} for r in table]
    return json.dumps({"totals": totals(table), "faults": finite}, indent=1) + "\n"


def budget(x: float | None) -> str:
    return "–" if x is None else "∞" if x == float("inf") else f"{x:.3g}"


def as_markdown(table: Sequence[Row]) -> str:
    """A line with the totals, then a table."""
    head = "| fault | from | kind | trigger | caught by | budget used | s |"
    lines = [f"{sentence(totals(table))}\n", head, "|---|---|---|---|---|---|---|"]
    for r in table:
        by = ", ".join(r["caught_by"]) or f"**{r['wrong']}**"
        if r["wrong"] and r["caught_by"]:
            by += f" (**{r['wrong']}**)"
        trigger = r["cell"] or "–"
        lines.append(f"| `{r['fault']}`: {r['what']} | {r['source']} | {r['kind']} | {trigger} | {by} | "
                     f"{budget(r['budget_used'])} | {r['seconds']:.0f} |")  # fmt: skip
    return "\n".join(lines) + "\n"


def sentence(t: Row) -> str:
    gates = ", ".join(f"{n} by {WORDS[gate]}" for gate, n in t["gates"].items())
    return (f"{t['faults']} faults, {t['faults'] - t['own']} of them from {t['public']} public threads: {t['caught']} caught "
            f"({gates}); of {t['blamed']} that a run caught, {t['rightly']} were blamed on the right op; "
            f"{t['seconds']} s of processor time.")  # fmt: skip


def as_html(table: Sequence[Row]) -> str:
    """One file without scripts; text is escaped."""
    from jinja2 import Environment

    template = resources.files("parity.faults").joinpath("matrix.html.j2").read_text()
    page = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(template)
    return page.render(rows=table, sentence=sentence(totals(table)), budget=budget, out_of_reach=OUT_OF_REACH)
