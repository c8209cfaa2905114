"""A verdict on one op in words: outcome, place, budget, bound. Source: docs/single.md §1."""

from __future__ import annotations

import math
from collections.abc import Mapping

from ..budget.bounded import Arithmetic
from ..judge import Verdict
from ..ops import BY_NAME
from .verdict import OpVerdict


def text(v: OpVerdict) -> str:
    """Several lines, the outcome first."""
    outcome = "FAIL" if not all(o.passed for o in v.outputs) else "PASS" if v.elements else "NOTHING JUDGED"
    lines = [f"{outcome} {v.op} (layer {v.layer}, {v.kind}, {v.phase}): budget used {share(v.budget_used)}, the gate is 1"]
    for output in v.outputs:
        lines += _output(v, output)
    lines.append(f"  bound   {BY_NAME[v.op].bound}; {arithmetic(v.how)}")
    if v.absent:
        lines.append(f"  not judged, as not handed in: {', '.join(v.absent)}")
    return "\n".join(lines)


def _output(v: OpVerdict, o: Verdict) -> list[str]:
    tests = ", ".join(f"{name} {share(used)}" for name, used in o.tests.items())
    rows = "" if o.passed else f", {o.failing_rows} of {o.rows} rows fail"
    lines = [f"  output  {o.output} ({o.storage}, {o.elements:,} values): {tests}{rows}"]
    if o.worst:
        lines.append(f"  worst   {place(o.worst)}")
    if o.output in v.worst:
        w = v.worst[o.output]
        lines.append(f"          candidate {w.candidate:.9g}, twin {w.twin:.9g}, bound {w.bound:.3g}")
    return lines


def share(x: float) -> str:
    return f"{x:.3f}" if math.isfinite(x) else "∞"


def place(worst: Mapping[str, object]) -> str:
    """`token 3, channel 71, sequence 1`; a list is a range."""
    return ", ".join(f"{name} {'–'.join(map(str, at)) if isinstance(at, list) else at}" for name, at in worst.items())


def arithmetic(how: Arithmetic) -> str:
    """Units and λ of the bound."""
    sums = f"sums {'truncated at ' if how.truncates else ''}2^{math.log2(how.accumulate):.0f}"
    operands = f", operands 2^{math.log2(how.operand):.0f}" if how.operand else ""
    return f"{how.name}: u = 2^{math.log2(how.u):.0f}, {sums}{operands}, λ = {how.lam:.2f}"
