"""What the usual public gates let through, on one fault of each of ten kinds, beside the verdict of a run.

Formulas and limits are those that public test suites use; docs/gates.md §1 names them. A gate gets what its own suite would
give it: an op's output, and a reference; for a product of codes that is the product of operands before quantisation. Source:
docs/gates.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from reference.checkpoint.open import open_store
from reference.rounding import profile

from .. import ops
from ..candidates import SOURCE, payload
from ..drift import LogitsDrift
from ..flow import Flow, Setting
from ..judge import Codes, Dense, Verdict, values
from ..metrics import relative_l2
from ..ops import Op
from ..run import one_thread
from ..step import Step
from . import BY_NAME
from .change import Both, Change, Wrap, turned_on
from .fault import Cell, Fault
from .gates import MODEL, run_cell

TEN = (
    "indexer.weights-without-sign", "streams.comb-transposed", "attention.window-short", "compressor.lane-a-padded",
    "quantisation.one-exponent-low", "rope.yarn-in-window-layers", "experts.last-not-summed", "rope.half-split",
    "experts.limit-not-passed", "cache.window-untranslated",
)  # fmt: skip


def calc_diff(c: Tensor, t: Tensor) -> float:
    """|c - t|^2 / (|c|^2 + |t|^2): about half the square of the relative L2."""
    return float((c - t).square().sum() / (c.square().sum() + t.square().sum()))


def nmse(c: Tensor, t: Tensor) -> float:
    """|c - t|^2 / |t|^2."""
    return float((c - t).square().sum() / t.square().sum())


def cosine_diff(c: Tensor, t: Tensor) -> float:
    """1 - 2<c, t> / (|c|^2 + |t|^2)."""
    return 1 - float(2 * (c * t).sum() / (c.square().sum() + t.square().sum()))


def beyond(absolute: float, relative: float, both: bool) -> Callable[[Tensor, Tensor], float]:
    """Largest error over its limit: absolute plus relative, or where not `both` the larger of the two."""

    def used(c: Tensor, t: Tensor) -> float:
        size = relative * t.abs()
        return float(((c - t).abs() / (size + absolute if both else size.clamp_min(absolute))).max())

    return used


@dataclass(frozen=True)
class PublicGate:
    """A formula over a candidate's output and a reference; figures up to `limit` pass."""

    name: str
    measure: Callable[[Tensor, Tensor], float]
    limit: float


GATES = (
    PublicGate("calc_diff, FP8", calc_diff, 1e-3),
    PublicGate("calc_diff, FP4", calc_diff, 1e-2),
    PublicGate("cosine", cosine_diff, 5e-6),
    PublicGate("abs or rel", beyond(1e-3, 2.01 / 128, both=False), 1.0),
    PublicGate("allclose 1e-2", beyond(1e-2, 1e-2, both=True), 1.0),
    PublicGate("allclose 5e-2", beyond(5e-2, 1e-2, both=True), 1.0),
    PublicGate("NMSE", nmse, 5e-4),
)


LOGITS_NMSE = 1e-2
UNMEASURED = ("bytes", "i32", "none")  # storages of outputs that no distance is taken of
PROMPTS = Cell("mtp", ("prefill", "decode"), (36, 129), (255,), whole=True)  # through all layers


@dataclass(frozen=True)
class Figures:
    """One fault, or none: the output that is looked at, its relative L2, and the figures of public gates by name; of logits,
    where the whole model ran with it, KL, NMSE and top-1 agreement. `budget_used`: None where nothing excuses it."""

    fault: Fault | None
    output: str
    relative_l2: float
    gates: Mapping[str, float]
    kl: float
    logits_nmse: float
    top1: float
    budget_used: float | None = None


def measure() -> list[tuple[Figures, Figures]]:
    """Each fault, and the same output without it."""
    right = _logits(None)
    return [_pair(BY_NAME[name], right) for name in TEN]


def _pair(fault: Fault, right: LogitsDrift) -> tuple[Figures, Figures]:
    assert fault.cell is not None
    name, budget, c, t = _output(fault, fault.change, "")
    _, _, clean, exact = _output(fault, None, name)
    wrong = _figures(fault, name, c, t, _logits(fault.change))
    return replace(wrong, budget_used=budget), _figures(None, name, clean, exact, right)


def _figures(fault: Fault | None, name: str, c: Tensor, t: Tensor, logits: LogitsDrift) -> Figures:
    measured = {gate.name: gate.measure(c, t) for gate in GATES}
    l2 = relative_l2(c, t)
    return Figures(fault, name, l2, measured, logits.kl_mean, logits.relative_l2**2, logits.top1)


def _output(fault: Fault, change: Change | None, wanted: str) -> tuple[str, float | None, Tensor, Tensor]:
    """Name, budget used, candidate and reference of an output of the fault's op in its cell: the first that fails, or the one
    that is wanted."""
    assert fault.cell is not None
    found: list[tuple[str, float | None, Tensor, Tensor]] = []

    def listening(judge_op: Callable[[Step, Op], tuple[Verdict, ...]]) -> Callable[[Step, Op], tuple[Verdict, ...]]:
        def heard(step: Step, op: Op) -> tuple[Verdict, ...]:
            verdicts = judge_op(step, op)
            if op.name == fault.op and not found:
                seen = [v for v in verdicts if v.storage not in UNMEASURED and (v.output == wanted or not (wanted or v.passed))]
                found.extend(_seen(step, op, v) for v in seen)
            return verdicts

        return heard

    heard = Wrap("parity.flow", "judge_op", listening, ("parity.flow",))
    with turned_on(heard if change is None else Both((change, heard))):
        run_cell(fault.cell, None)
    return found[0]


def _seen(step: Step, op: Op, verdict: Verdict) -> tuple[str, float | None, Tensor, Tensor]:
    assert op.twin is not None
    expected = op.twin(step, op.name, step.stored)[verdict.output].expected
    assert isinstance(expected, Dense | Codes)
    t = expected.expected.value
    if op.name in SOURCE:  # what public suites of products compare with: operands before they were quantised
        t = payload(step, op.name).double() @ step.linear(op.name).dense(torch.float64).T
    budget = verdict.budget_used
    c = values(step.stored[verdict.output], expected)
    return verdict.output, budget if math.isfinite(budget) else None, c, t


def _logits(change: Change | None) -> LogitsDrift:
    """Logits of the model's last layer, the candidate running freely from the first, in the last phase."""
    one_thread()
    store = open_store(MODEL)
    setting = Setting(store, profile(PROMPTS.profile), PROMPTS.plan(), (), ops.ARITHMETIC, 0, whole=True)
    with turned_on(change):
        flow = Flow.start(setting)
        flow.begin_with_tokens()
        for layer in range(store.config.num_hidden_layers):
            list(flow.run_layer(layer))
    return next(d for d in reversed(flow.drift) if isinstance(d, LogitsDrift) and d.curve == "free")


def as_markdown(pairs: Sequence[tuple[Figures, Figures]]) -> str:
    """Two tables: what each gate says of an op's output, and of the logits."""
    names = [gate.name for gate in GATES]
    lines = ["| fault | output | rel. L2 | " + " | ".join(names) + " | budget used |", "|---" * (len(names) + 4) + "|"]
    for wrong, right in pairs:
        assert wrong.fault is not None
        cells = [_cell(wrong.gates[g.name], right.gates[g.name], g.limit) for g in GATES]
        used = "**∞**" if wrong.budget_used is None else f"**{wrong.budget_used:.3g}**"
        lines.append(f"| `{wrong.fault.name}` | {wrong.output} | {wrong.relative_l2:.1e} | {' | '.join(cells)} | {used} |")
    right = pairs[0][1]
    lines += ["", "| fault | KL, mean | NMSE of logits | top-1 agreement |", "|---|---|---|---|",
              f"| none | {right.kl:.1e} | {right.logits_nmse:.1e} | {right.top1:.0%} |"]  # fmt: skip
    for wrong, _ in pairs:
        assert wrong.fault is not None
        nmse_said = _cell(wrong.logits_nmse, right.logits_nmse, LOGITS_NMSE)
        lines.append(f"| `{wrong.fault.name}` | {wrong.kl:.1e} | {nmse_said} | {wrong.top1:.0%} |")
    return "\n".join(lines) + "\n"


def _cell(figure: float, clean: float, limit: float) -> str:
    """A figure in bold where the gate catches it and passes the right output; a gate that fails both says nothing."""
    if not clean <= limit:
        return f"{figure:.1e} (fails without it)"
    return f"**{figure:.1e}**" if not figure <= limit else f"{figure:.1e} passes"
