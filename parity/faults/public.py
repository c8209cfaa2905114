"""What the usual public gates let through, on one fault of each of ten kinds, beside the verdict of a run.

Formulas and limits are those that public test suites use; docs/gates.md §1 names them. A gate gets what its own suite would
give it: an op's output, and a reference; for a product of codes that is the product of operands before quantisation. Source:
docs/gates.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from optimized.pool.geometry import BLOCK_TOKENS
from reference.checkpoint.open import open_store
from reference.model import Model
from reference.rounding import profile
from reference.state import SequenceState

from ..candidates import SOURCE, payload
from ..freerun import of_logits
from ..judge import Codes, Dense, Verdict, values
from ..metrics import relative_l2
from ..ops import Op
from ..run import PROFILES, one_thread
from ..step import Step
from . import BY_NAME
from .change import Both, Change, Wrap, turned_on
from .fault import Fault
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
PROMPT, TOKENS = 137, 139  # beyond every window, a CSA list, and the end of an HCA group


@dataclass(frozen=True)
class Figures:
    """One fault, or none: the output that is looked at, its relative L2, the figures of public gates by name, and what the
    whole model's logits were with it (None: it raised). `budget_used`: None where nothing excuses it; `words`: a report's first
    line."""

    fault: Fault | None
    output: str
    relative_l2: float
    gates: Mapping[str, float]
    logits: Mapping[str, Any] | None
    budget_used: float | None = None
    words: str = ""


def measure() -> list[tuple[Figures, Figures]]:
    """Each fault, and the same output without it."""
    right = _logits(None)
    return [_pair(BY_NAME[name], right) for name in TEN]


def _pair(fault: Fault, right: Mapping[str, Any] | None) -> tuple[Figures, Figures]:
    assert fault.cell is not None
    words, name, budget, c, t = _output(fault, fault.change, "")
    _, _, _, clean, exact = _output(fault, None, name)
    wrong = _figures(fault, name, c, t, _logits(fault.change))
    return replace(wrong, budget_used=budget, words=words), _figures(None, name, clean, exact, right)


def _figures(fault: Fault | None, name: str, c: Tensor, t: Tensor, logits: Mapping[str, Any] | None) -> Figures:
    return Figures(fault, name, relative_l2(c, t), {gate.name: gate.measure(c, t) for gate in GATES}, logits)


def _output(fault: Fault, change: Change | None, wanted: str) -> tuple[str, str, float | None, Tensor, Tensor]:
    """What the cell's report says first; name, budget used, candidate and reference of an output of the fault's op in it: the
    first that fails, or the one that is wanted."""
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
        outcome = run_cell(fault.cell, None)
    return outcome.words, *found[0]


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


@cache
def _twin() -> tuple[Tensor, Tensor]:
    """Token ids [n], and logits [n, V] of the twin in float64."""
    store = open_store(MODEL)
    ids = torch.randint(0, store.config.vocab_size, (TOKENS,), generator=torch.Generator().manual_seed(0))
    model = Model(store, torch.float64, profile(PROFILES[0]), memory=1 << 30)
    return ids, model.logits(model.forward([ids], [SequenceState()]))


def _logits(change: Change | None) -> dict[str, Any] | None:
    """The engine's logits against the twin's after each token of a prompt and of decoding; None if the engine raised."""
    from optimized.engine import Engine

    one_thread()
    ids, twin = _twin()
    with turned_on(change):
        try:
            engine = Engine(open_store(MODEL), PROFILES[0], blocks=-(-TOKENS // BLOCK_TOKENS), slots=1)
            sequence = engine.allocator.open()
            streams = [engine.step([part], [sequence]) for part in (ids[:PROMPT], *ids[PROMPT:].split(1))]
            return of_logits(engine.logits(torch.cat(streams)).double(), twin)
        except Exception:  # whatever a planted fault makes of the engine
            return None


def as_markdown(pairs: Sequence[tuple[Figures, Figures]]) -> str:
    """Three tables: what each gate says of an op's output, what a report says, and what is seen in the logits."""
    names = [gate.name for gate in GATES]
    lines = ["| fault | output | rel. L2 | " + " | ".join(names) + " | budget used |", "|---" * (len(names) + 4) + "|"]
    for wrong, right in pairs:
        assert wrong.fault is not None
        cells = [_cell(wrong.gates[g.name], right.gates[g.name], g.limit) for g in GATES]
        used = "**∞**" if wrong.budget_used is None else f"**{wrong.budget_used:.3g}**"
        lines.append(f"| `{wrong.fault.name}` | {wrong.output} | {wrong.relative_l2:.1e} | {' | '.join(cells)} | {used} |")
    lines += ["", "| fault | op | what a report says first |", "|---|---|---|"]
    lines += [f"| `{f.name}` | {f.op} | {wrong.words} |" for wrong, _ in pairs if (f := wrong.fault)]
    lines += ["", "| fault | KL, mean | NMSE of logits | top-1 agreement |", "|---|---|---|---|"]
    clean = pairs[0][1].logits
    lines += [_logits_row("none", clean, clean)]
    lines += [_logits_row(f"`{wrong.fault.name}`", wrong.logits, clean) for wrong, _ in pairs if wrong.fault]
    return "\n".join(lines) + "\n"


def _logits_row(name: str, logits: Mapping[str, Any] | None, clean: Mapping[str, Any] | None) -> str:
    """The whole model's logits beside the limit; a model that raises is caught by whoever runs it."""
    if logits is None or clean is None:
        return f"| {name} | **raises** | **raises** | **raises** |"
    nmse_said = _cell(logits["relative_l2"] ** 2, clean["relative_l2"] ** 2, LOGITS_NMSE)
    return f"| {name} | {logits['kl_mean']:.1e} | {nmse_said} | {logits['top1']:.0%} |"


def _cell(figure: float, clean: float, limit: float) -> str:
    """A figure in bold where the gate catches it and passes the right output; a gate that fails both says nothing."""
    if not clean <= limit:
        return f"{figure:.1e} (fails without it)"
    return f"**{figure:.1e}**" if not figure <= limit else f"{figure:.1e} passes"
