"""Attributions as bars and as a table. Source: docs/attribution.md §5."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

Record = Mapping[str, Any]
WIDTH = 400.0  # of a bar's drawing
COLUMNS = ("player", "switches", "share", "of the drift", "95 % interval", "alone", "last")


def render(records: Sequence[Record]) -> str:
    """A page of its own, for attributions without a run."""
    from .html import environment

    return environment().get_template("attribution_page.html.j2").render(attributions=bars(records))


def bars(records: Sequence[Record]) -> list[dict[str, Any]]:
    """Each attribution with the ends of its bars, on one scale that holds all of its figures and zero."""
    return [{**r, "rows": [_row(s, *_scale(r), r["drift"]) for s in r["shares"]]} for r in records]


def _scale(record: Record) -> tuple[float, float]:
    """Least and largest figure, zero among them; never of no width."""
    figures = [0.0, *(s[name] for s in record["shares"] for name in ("share", "low", "high", "alone"))]
    low, high = min(figures), max(figures)
    return low, high if high > low else low + 1.0


def _row(share: Record, low: float, high: float, drift: float) -> dict[str, Any]:
    def at(x: float) -> float:
        return round(WIDTH * (x - low) / (high - low), 1)

    def bar(x: float) -> dict[str, float]:
        return {"x": min(at(0), at(x)), "width": round(abs(at(x) - at(0)), 1)}

    whisker = (at(share["low"]), at(share["high"])) if share["high"] > share["low"] else None
    return {**share, "zero": at(0), "share_bar": bar(share["share"]), "alone_bar": bar(share["alone"]), "whisker": whisker,
            "of_drift": of_drift(share["share"], drift)}  # fmt: skip


def of_drift(x: float, drift: float) -> str:
    """A figure in percent of the drift."""
    return f"{100 * x / drift:+.1f} %" if drift else "–"


def title(record: Record) -> str:
    what = "logits" if record["output"] == "logits" else f"streams behind {record['behind']}"
    return f"{what}, by {record['by']}"


def print_tables(records: Sequence[Record], console: Console | None = None) -> None:
    """One table an attribution: shares, their intervals, and beside them the figures that do not add."""
    console = console or Console()
    if not console.is_terminal:
        console = Console(width=140, no_color=True)
    for r in records:
        _print(r, console)


def _print(r: Record, console: Console) -> None:
    how = f"all {r['coalitions']} subsets" if r["method"] == "all subsets" else f"{r['permutations']} orders, seed {r['seed']}"
    table = Table(*COLUMNS, header_style="bold", box=None, pad_edge=False, title=f"{escape(title(r))} ({how})",
                  title_justify="left")  # fmt: skip
    drift = r["drift"]
    for s in r["shares"]:
        ends = "exact" if r["method"] == "all subsets" else f"{of_drift(s['low'], drift)} … {of_drift(s['high'], drift)}"
        figures = (f"{s['share']:.2e}", of_drift(s["share"], drift), ends, *(of_drift(s[n], drift) for n in ("alone", "last")))
        table.add_row(escape(s["player"]), str(s["switches"]), *figures)
    total = (f"{drift:.2e}", "100 %", "", of_drift(r["alone"], drift), of_drift(r["last"], drift))
    table.add_row("sum", str(sum(s["switches"] for s in r["shares"])), *total, style="bold")
    console.print(table)
    console.print(f"drift {drift:.3e}, relative L2 {r['relative_l2']:.3e}; interaction {of_drift(r['interaction'], drift)}, "
                  "what sites do together beyond what each does alone\n", highlight=False)  # fmt: skip
