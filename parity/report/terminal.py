"""A run's records as a table on the terminal. Source: docs/judge.md §9."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from math import isinf, isnan
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ..locate import departure, departures, headline
from ..options import show_bytes

Record = Mapping[str, Any]
COLUMNS = ("op", "layer", "kind", "phase", "budget used", "rel. L2", "verdict")


def share(x: float | None) -> str:
    """A share of the budget; one that nothing excuses is written as infinity."""
    return "∞" if x is None else f"{x:.3f}"


def scientific(x: float | None) -> str:
    return "–" if x is None else f"{x:.1e}"


def place(worst: Mapping[str, Any]) -> str:
    """`sequence 3, position 128, head 5, channels 448–512`."""
    parts = [f"{name} {'–'.join(map(str, at)) if isinstance(at, list) else at}" for name, at in worst.items()]
    return ", ".join(parts)


def failures(records: Sequence[Record]) -> list[tuple[Record, Record]]:
    """Every failing output with its verdict, in causal order of the run."""
    return [
        (r, o)
        for r in records if r["record"] == "verdict"
        for o in r["outputs"] if o["verdict"] == "fail"
    ]  # fmt: skip


def reproduce(run: Record, verdict: Record) -> str:
    """A command that judges just this op again, on the same numbers. Free-running streams need the layers before."""
    layer = "all" if run["streams"] == "free-running" else verdict["layer_id"].removeprefix("layer_")
    words = ["v4parity run", "--layers", layer, "--ops", f"'{verdict['op']}'", "--phases", verdict["phase"]]
    words += ["--accumulate", run["accumulate"]] if run["accumulate"] != "fp32" else []
    if trace := run.get("trace"):
        words += ["--candidate", shlex.quote(trace["argument"])]
        return " ".join([*words, *_model(run)])
    words += ["--ids-file", shlex.quote(run["ids"]["file"])] if run["ids"] else ["--lengths", _numbers(run["lengths"])]
    words += ["--start-pos", _numbers(run["start_pos"]), "--profile", run["profile"]["name"], "--seed", str(run["seed"])]
    return " ".join([*words, *_model(run)])


def _model(run: Record) -> list[str]:
    return ["--model", shlex.quote(run["model_argument"])] if run["model_argument"] else []


def _numbers(values: Sequence[int]) -> str:
    return f"'{','.join(map(str, values))}'"


def print_report(records: Sequence[Record], console: Console | None = None) -> None:
    """What is wrong first, table of verdicts, failures with their places, what was not run, and the outcome."""
    console = console or Console()
    if not console.is_terminal:
        console = Console(width=140, no_color=True)
    if said := headline(records):
        console.print(escape(said) + "\n", style="bold red", soft_wrap=True, highlight=False)
    table = Table(*COLUMNS, header_style="bold", box=None, pad_edge=False)
    for r in (r for r in records if r["record"] == "verdict"):
        style = "" if r["verdict"] == "pass" else "bold red"
        numbers = share(r["budget_used"]), scientific(r["relative_l2"])
        cells = (r["op"], r["layer_id"], r["kind"], r["phase"], *numbers, r["verdict"])
        table.add_row(*map(escape, cells), style=style)
    console.print(table)
    for verdict, output in failures(records):
        console.print(
            f"[bold red]FAIL[/] {verdict['layer_id']} {verdict['phase']} {escape(verdict['op'])}: output {output['output']}, "
            f"{output['failing_rows']} of {output['rows']} rows, worst at {place(output['worst'])}"
        )
        console.print(f"     {reproduce(records[0], verdict)}", soft_wrap=True, highlight=False)
    for r in departures(records, "forced"):
        console.print(f"[bold red]DEPARTS[/] {escape(departure(r))}", soft_wrap=True, highlight=False)
    _print_not_run(records, console)
    _print_layers(records, console)
    _print_summary(records[-1], console)


def print_drift(rows: Sequence[Record], console: Console | None = None) -> None:
    """What each output of a module costs by kind of layer: rows of `table.drift`."""
    console = console or Console(width=140, no_color=True)
    columns = ("op", "output", "kind", "verdicts", "budget used", "at", "median L2", "largest L2", "flips")
    table = Table(*columns, header_style="bold", box=None, pad_edge=False)
    for r in rows:
        distances = (scientific(None if isnan(r[name]) else r[name]) for name in ("median_l2", "largest_l2"))
        used = share(None if isinf(r["budget_used"]) else r["budget_used"])
        words = (r["op"], r["output"], r["kind"], str(r["verdicts"]), used, r["at"], *distances, str(r["flips"]))
        table.add_row(*map(escape, words))
    console.print(table)


def _print_not_run(records: Sequence[Record], console: Console) -> None:
    missing: dict[str, dict[str, None]] = {}
    for r in (r for r in records if r["record"] == "not_run"):
        missing.setdefault(r["reason"], {})[r["op"]] = None
    if missing:
        console.print("\nnot run:")
    for reason, ops in missing.items():
        console.print(f"  {escape(reason)}: {escape(', '.join(ops))}", highlight=False)


def _print_layers(records: Sequence[Record], console: Console) -> None:
    """Seconds of a layer, with kernels and without or of a trace, and the largest resident set."""
    layers, parts = [r for r in records if r["record"] == "layer"], []
    for candidate, words in ((False, "without kernels"), (True, "of the trace" if records[0].get("trace") else "with kernels")):
        seconds = [r["volatile"]["seconds"] for r in layers if r["candidate"] == candidate]
        if seconds:
            each = f"{min(seconds):.1f} to {max(seconds):.1f} s each, {sum(seconds):.0f} s together"
            parts.append(f"layers {words}: {len(seconds)}, {each}")
    if parts:
        peak = max(r["volatile"]["peak_rss"] for r in layers)
        console.print(f"\n{'; '.join(parts)}; peak RSS {show_bytes(peak)}", highlight=False, soft_wrap=True)


def _print_summary(summary: Record, console: Console) -> None:
    for note in summary["notes"]:
        console.print(f"  note: {escape(note)}", highlight=False)
    departed = f"whole layers that depart: {summary['departed']}; " if summary["departed"] else ""
    console.print(
        f"\n{summary['judged']} ops judged over {summary['elements']:,} values and bytes: {summary['passed']} passed, "
        f"{summary['failed']} failed; {departed}{summary['not_run']} ops not run; {summary['volatile']['seconds']} s; "
        f"exit {summary['exit_code']}"
    )  # fmt: skip
