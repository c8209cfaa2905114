"""A run's records in Markdown, short enough for the summary of a CI step: failures first. Source: docs/judge.md §9."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from ..locate import headline
from .terminal import failures, place, reproduce, scientific, share

Record = Mapping[str, Any]
MOST = 20  # failures that are spelt out
CLOSEST = 5  # verdicts that used most of their budget


def render(records: Sequence[Record]) -> str:
    """Outcome, failures with their places and one command, the fullest budgets, what was not run."""
    run, summary = records[0], records[-1]
    parts = [f"### v4parity: {_outcome(summary)}", *(f"**{text(said)}**" for said in [headline(records)] if said),
             f"{text(run['model'])} · {text(run['engine'])} · profile {run['profile']['name']} · seed {run['seed']}",
             *_failures(records), *_closest(records), *_missing(records), *map(text, summary["notes"])]  # fmt: skip
    return "\n\n".join(parts) + "\n"


def _outcome(summary: Record) -> str:
    if summary["failed"]:
        said = f"{summary['failed']} of {summary['judged']} verdicts failed"
    elif summary["departed"]:
        said = f"all {summary['judged']} verdicts passed; whole layers that depart: {summary['departed']}"
    else:
        passed = f"all {summary['judged']} verdicts passed"
        said = "incomplete, something requested was not judged" if summary["exit_code"] else passed
    return f"{said} ({summary['elements']:,} values and bytes, {summary['not_run']} ops not run)"


def _failures(records: Sequence[Record]) -> list[str]:
    bad = failures(records)
    if not bad:
        return []
    rows = [
        (v["layer_id"], v["phase"], v["op"], o["output"], share(o["budget_used"]), f"{o['failing_rows']} of {o['rows']}",
         place(o["worst"]))
        for v, o in bad[:MOST]
    ]  # fmt: skip
    more = [f"… and {len(bad) - MOST} more outputs."] if len(bad) > MOST else []
    table = _table(("layer", "phase", "op", "output", "budget used", "rows", "worst at"), rows)
    return [table, *more, f"The first again:\n\n```\n{reproduce(records[0], bad[0][0])}\n```"]


def _closest(records: Sequence[Record]) -> list[str]:
    passed = [r for r in records if r["record"] == "verdict" and r["verdict"] == "pass"]
    fullest = sorted(passed, key=lambda r: -r["budget_used"])[:CLOSEST]
    if not fullest:
        return []
    rows = [(r["layer_id"], r["phase"], r["op"], share(r["budget_used"]), scientific(r["relative_l2"])) for r in fullest]
    return ["Passed, with the most of its budget used:", _table(("layer", "phase", "op", "budget used", "rel. L2"), rows)]


def _missing(records: Sequence[Record]) -> list[str]:
    reasons: dict[str, dict[str, None]] = {}
    for r in (r for r in records if r["record"] == "not_run"):
        reasons.setdefault(r["reason"], {})[r["op"]] = None
    lines = [f"* {text(reason)}: {text(', '.join(ops))}" for reason, ops in reasons.items()]
    return ["Not run:\n\n" + "\n".join(lines)] if lines else []


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *([text(cell) for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def text(words: str) -> str:
    """Words that mean nothing in Markdown or HTML, on one line."""
    return re.sub(r"([\\`*_\[\]<>|&#~])", r"\\\1", " ".join(words.split()))
