"""A run's records as a table: one row an output of a verdict, for CSV, and in groups for the drift of one module.

Source: docs/judge.md §9.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from .terminal import place

Record = Mapping[str, Any]
DISTANCES = ("relative_l2", "cosine", "max_abs", "ulp_median", "ulp_p99", "ulp_max")
FIRST = ("layer", "layer_id", "kind", "phase", "op")


def frame(records: Sequence[Record]) -> pd.DataFrame:
    """One row an output, in causal order: the op, its place, the verdict, every test's share, distances and the worst
    place in words. A share that nothing excuses is infinite."""
    rows = [_row(r, o) for r in records if r["record"] == "verdict" for o in r["outputs"]]
    tests = list(dict.fromkeys(name for row in rows for name in row if name.startswith("test_")))
    plain = [name for name in (rows[0] if rows else FIRST) if name not in tests]
    return pd.DataFrame(rows, columns=[*plain, *tests])


def _row(verdict: Record, output: Record) -> dict[str, Any]:
    shares = {f"test_{name}": _number(share) for name, share in output["tests"].items()}
    distance = {**dict.fromkeys(DISTANCES), **(output["distance"] or {})}
    counts = {name: output[name] for name in ("output", "storage", "verdict", "elements", "rows", "failing_rows", "flips")}
    return {**{name: verdict[name] for name in FIRST}, **counts, "budget_used": _number(output["budget_used"]), **distance,
            "worst": place(output["worst"]), **shares}  # fmt: skip


def _number(share: float | None) -> float:
    return math.inf if share is None else share


def csv(records: Sequence[Record]) -> str:
    return frame(records).to_csv(index=False)


def drift(records: Sequence[Record]) -> pd.DataFrame:
    """Price and use of each output by kind of layer, over layers and phases: number of verdicts, largest budget and where
    it was, median and largest relative L2, flips."""
    table = frame(records)
    groups = table.groupby(["op", "output", "kind"], sort=False)
    worst = table.loc[groups["budget_used"].idxmax()]
    out = groups.agg(verdicts=("op", "size"), budget_used=("budget_used", "max"), median_l2=("relative_l2", "median"),
                     largest_l2=("relative_l2", "max"), flips=("flips", "sum")).reset_index()  # fmt: skip
    return out.assign(at=(worst["layer_id"] + " " + worst["phase"]).to_numpy())


def of_module(records: Sequence[Record], module: str) -> list[Record]:
    """Records of the ops whose dotted name holds `module`, `compressor` or `attn.indexer`, with the summary counted again;
    the drift of streams is no module's. Raises ValueError where no op has it."""
    words = module.split(".")
    chosen = [r for r in records if r["record"] in ("verdict", "not_run") and _within(words, r["op"].split("."))]
    if not chosen:
        known = sorted({word for r in records if "op" in r for word in r["op"].split(".")})
        raise ValueError(f"no op of this run has {module!r} in its name; parts of names are {', '.join(known)}")
    header = {**records[0], "ops": [op for op in records[0]["ops"] if _within(words, op.split("."))]}
    return [header, *chosen, {**records[-1], **_counts(chosen)}]


def _within(words: list[str], name: list[str]) -> bool:
    return any(name[i : i + len(words)] == words for i in range(len(name)))


def _counts(chosen: Sequence[Record]) -> dict[str, int]:
    verdicts = [r for r in chosen if r["record"] == "verdict"]
    missing = [r for r in chosen if r["record"] == "not_run"]
    failed = sum(r["verdict"] == "fail" for r in verdicts)
    incomplete = not verdicts or any(r["required"] for r in missing)
    return {"exit_code": 1 if failed else 3 if incomplete else 0, "judged": len(verdicts), "passed": len(verdicts) - failed,
            "failed": failed, "departed": 0, "elements": sum(r["elements"] for r in verdicts),
            "not_run": len({r["op"] for r in missing} - {r["op"] for r in verdicts})}  # fmt: skip
