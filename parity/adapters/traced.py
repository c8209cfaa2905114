"""Another engine's trace as the candidate of a run: every op that it holds inputs and outputs of, replayed and judged.

Source: docs/single.md §6.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from optimized.cpu.fused import Products
from optimized.engine import FORMS
from reference.checkpoint.loader import Loader, dense_bytes
from reference.checkpoint.store import WeightStore
from reference.config import Config
from reference.errors import BadInput
from reference.rounding import profile

from ..budget.bounded import Arithmetic, Bounded, exact
from ..cases import Plan, SequencePlan, layer_kinds
from ..drift import Drift, LogitsDrift
from ..evaluation import Weights
from ..flow import EXPERT_MEMORY, NOTHING, Judged, raised
from ..judge import Codes, Dense, MismatchedShape, Stored, Verdict, judge
from ..ops import Op, Twin
from ..records import config_digest
from ..single.contract import ITEMS, LEFT_OUT, contract, tap
from ..single.given import GivenStep, step_of
from ..single.verdict import as_candidates_store, fitted
from ..trace import MANIFEST, Trace
from ..twins import Expectation, Expectations, bounded_table
from .feeding import Feed
from .layers import Layer
from .reading import NO, Missing, encoded, joined, plain
from .spans import WITHOUT_SCORES
from .tape import Held, Tape


class TracedStep(GivenStep):
    """A step of which the trace may hold the table of rotations; else it is known within its bound."""

    known: Mapping[str, Mapping[int, Tensor]] | None = None

    def table(self, positions: Tensor) -> tuple[Bounded, Bounded]:
        if self.known is None:
            return bounded_table(self, positions)
        lost = next((p for p in positions.tolist() if any(p not in rows for rows in self.known.values())), None)
        if lost is not None:
            raise Missing(f"the trace has no attn.rope.table of position {lost}")
        width = self.block.attn.rope.dim // 2
        cos, sin = (
            torch.stack([self.known[name][p] for p in positions.tolist()]) if len(positions) else torch.zeros(0, width)
            for name in ("cos", "sin")
        )
        return exact(cos), exact(sin)


@dataclass
class Traced:
    """Layers of a trace in order, as `Flow` runs those of a model."""

    store: WeightStore
    tape: Tape
    profile: str
    plan: Plan
    ops: Sequence[Op]
    how: Arithmetic
    loader: Loader
    whole: bool
    streams: None = None  # nothing is handed from layer to layer
    judged: list[Judged] = field(default_factory=list)
    drift: list[Drift | LogitsDrift] = field(default_factory=list)
    unfit: dict[int, str] = field(default_factory=dict)

    @classmethod
    def start(cls, store: WeightStore, trace: Trace, ops: Sequence[Op], how: Arithmetic, plan: Plan, whole: bool) -> Traced:
        """Raises BadInput for a trace of another model, or of a profile that ops are not judged by."""
        check(trace, store.config)
        tape = Tape.of(trace, store.config)
        products = Products() if dense_bytes(store, torch.float64) > EXPERT_MEMORY else None
        loader = Loader(store, torch.float64, EXPERT_MEMORY, products)
        return cls(store, tape, trace.profile.name, plan, ops, how, loader, whole)

    @property
    def config(self) -> Config:
        return self.store.config

    def run_layer(self, layer: int) -> Iterator[Judged]:
        """All phases of one layer; verdicts as they come."""
        weights = Weights.load(self.loader, self.config, layer)
        feed = Feed(self.tape, self.config, layer, self.profile, weights.block)
        for phase in self.plan.judged:
            steps = [k for k, s in enumerate(self.tape.segments) if s.phase == phase]
            for op in self.ops:
                if layer_kinds(self.config, layer) & set(op.kinds):
                    for result in judged(op, feed, weights, steps, self.how):
                        self.judged.append(result)
                        yield result
        try:
            self.drift += Layer(feed, weights).forced() if self.whole else []
        except (Missing, IndexError, RuntimeError, ValueError) as error:  # or tensors that do not fit
            self.unfit[layer] = str(error).split("\n")[0]
        self.tape.forget(layer)


def check(trace: Trace, config: Config) -> None:
    """Raises BadInput for a trace of another model, or of a profile that ops are not judged by."""
    if trace.config_sha256 != config_digest(config):
        raise BadInput(f"{trace.root / MANIFEST}: of another model: its config_sha256 is not that of the model's configuration")
    name = trace.profile.name
    if name not in FORMS or trace.profile != profile(name):
        raise BadInput(f"{trace.root / MANIFEST}: profile {name!r} is not one that ops are judged by: {', '.join(FORMS)}")


def plan_of(tape: Tape) -> Plan:
    """Requests, where they begin, and how many tokens they have in each phase; phases in the order in which they come."""
    requests = sorted({s.request for s in tape.segments})
    phases = tuple(dict.fromkeys(s.phase for s in tape.segments))
    mine = {r: [s for s in tape.segments if s.request == r] for r in requests}
    sequences = [
        SequencePlan(mine[r][0].start, {p: sum(len(s.positions) for s in mine[r] if s.phase == p) for p in phases})
        for r in requests
    ]
    return Plan(tuple(sequences), phases)


def judged(op: Op, feed: Feed, weights: Weights, steps: Sequence[int], how: Arithmetic) -> list[Judged]:
    """An op in all steps of a phase, each a sequence of its own: its verdicts, and why there is none on what is missing."""
    phase = feed.segment(steps[0]).phase
    if op.name in LEFT_OUT:
        return [Judged(op, feed.layer, phase, (), LEFT_OUT[op.name])]
    feed.spans.clear()
    try:
        return list(_judged(op, feed, weights, steps, how))
    except BadInput:
        raise
    except Exception as error:  # tensors of an engine that do not fit are its failure, as what a kernel raises is
        return [Judged(op, feed.layer, phase, (raised(op.name, error),))]


def _judged(op: Op, feed: Feed, weights: Weights, steps: Sequence[int], how: Arithmetic) -> Iterator[Judged]:
    phase = feed.segment(steps[0]).phase
    asked = Asked.of(op, feed, steps)
    able, lacking = _sorted_out(asked, feed, steps)
    if able:
        outputs = _outputs(able)
        c = contract(op.name, feed.config, feed.layer, FORMS[feed.profile].rows)
        absent = [NO.format(tap(op.name, n)) for n in c.outputs if n not in outputs and n not in c.optional]
        lacking += [reason for reason in absent for _ in steps]
        spans = "".join(f"; from {source}: {NO.format(name)}" for name, source in feed.spans.items())
        try:
            replayed = replay(asked, feed, weights, able, how)
            verdicts = tuple(_of_request(v, feed, list(able)) for v in replayed.verdicts())
            yield Judged(replace(op, bound=op.bound + spans), feed.layer, phase, verdicts, None if verdicts else NOTHING)
        except Missing as missing:
            lacking.insert(0, str(missing))
    for reason, n in Counter(lacking).items():
        yield Judged(op, feed.layer, phase, (), reason + (f", in {n} of {len(steps)} steps" if n < len(steps) and able else ""))


@dataclass(frozen=True)
class Asked:
    """An op, whose inputs it is given, and its twin: where the scores of a choice are not there, what they are made of."""

    op: Op
    inputs: str
    twin: Twin

    @classmethod
    def of(cls, op: Op, feed: Feed, steps: Sequence[int]) -> Asked:
        assert op.twin is not None
        scores, twin = WITHOUT_SCORES.get(op.name, ("", op.twin))
        if not scores or any(feed.tape.get(feed.layer, scores, k) for k in steps):
            return cls(op, op.name, op.twin)
        feed.spans[scores] = "what they are made of"
        return cls(op, scores, twin)


Both = tuple[dict[str, Tensor], dict[str, Held]]


def _sorted_out(asked: Asked, feed: Feed, steps: Sequence[int]) -> tuple[dict[int, Both], list[str]]:
    """Inputs and outputs of the steps that have both; what the others lack."""
    able, lacking = {}, []
    for k in steps:
        try:
            ids = feed.ids(k, (asked.op.name,))
            able[k] = {**feed.of_step(asked.inputs, k), "ids": ids}, feed.outputs(asked.op.name, k)
        except Missing as missing:
            lacking.append(str(missing))
    return able, lacking


def _outputs(able: Mapping[int, Both]) -> dict[str, list[Held]]:
    """What all of these steps hold."""
    put = [outputs for _, outputs in able.values()]
    return {name: [p[name] for p in put] for name in put[0] if all(name in p for p in put)}


@dataclass(frozen=True)
class Replayed:
    """An op's step, what was stored of it, and what the twin expects."""

    step: TracedStep
    stored: dict[str, Stored]
    expected: Expectations

    def verdicts(self) -> Iterator[Verdict]:
        """Raises MismatchedShape."""
        for name, e in self.expected.items():
            yield judge(name, self.stored[name], e.expected, self.step.how, e.places)


def replay(asked: Asked, feed: Feed, weights: Weights, able: Mapping[int, Both], how: Arithmetic) -> Replayed:
    """Raises Missing for what only the twin turns out to need, MismatchedShape for outputs that are not of the op's form."""
    inputs = feed.together(asked.inputs, list(able), [given for given, _ in able.values()])
    step = step_of(inputs, weights, how, TracedStep)
    cos, sin = (feed.tape.table(feed.layer, name) for name in ("cos", "sin"))
    step.known = {"cos": cos, "sin": sin} if cos and sin else None
    width = {"attn.indexer.scores": inputs.sizes.words["seen"], "attn.indexer.picks": feed.config.index_topk}
    parts = _outputs(able).items()
    put = {name: joined(x, width.get(name), -1 if name.endswith("picks") else 0) for name, x in parts}
    with _of_form():
        stored = as_candidates_store(step, {n: y for n, x in put.items() if (y := plain(x, ITEMS[n])) is not None})
    expected = asked.twin(step, asked.op.name, stored)
    with _of_form():
        for name, e in expected.items():
            if isinstance(e.expected, Codes) and name in put and name not in stored:
                stored[name] = encoded(put[name].numbers(), e.expected, name)
        stored, expected = fitted(stored, expected)
    return Replayed(step, stored, {name: _loosened(e, put.get(name)) for name, e in expected.items()})


@contextmanager
def _of_form() -> Iterator[None]:
    """An engine's output that cannot be what the op puts out is its failure, not damage."""
    try:
        yield
    except BadInput as error:
        raise MismatchedShape(str(error)) from None


def _loosened(e: Expectation, held: Held | None) -> Expectation:
    """The bound of a sum of partial sums holds what each of them was rounded by."""
    if held is None or held.slack is None or not isinstance(e.expected, Dense):
        return e
    t = e.expected.expected
    return replace(e, expected=replace(e.expected, expected=Bounded(t.value, t.bound + held.slack.view_as(t.bound))))


def _of_request(v: Verdict, feed: Feed, steps: Sequence[int]) -> Verdict:
    """A sequence is a step of a request: a verdict names the request."""
    number = v.worst.get("sequence")
    return v if not isinstance(number, int) else replace(v, worst={**v.worst, "sequence": feed.segment(steps[number]).request})


def again(store: WeightStore, trace: Trace, op: Op, layer: int, phase: str, how: Arithmetic) -> Replayed:
    """One op of a trace once more. Raises BadInput where it cannot be judged."""
    check(trace, store.config)
    weights = Weights.load(Loader(store, torch.float64, EXPERT_MEMORY), store.config, layer)
    feed = Feed(Tape.of(trace, store.config), store.config, layer, trace.profile.name, weights.block)
    steps = [k for k, s in enumerate(feed.tape.segments) if s.phase == phase]
    asked = Asked.of(op, feed, steps)
    able, lacking = _sorted_out(asked, feed, steps)
    try:
        if able:
            return replay(asked, feed, weights, able, how)
    except (Missing, MismatchedShape) as error:
        lacking = [str(error)]
    raise BadInput(f"{trace.root}: {op.name}, layer {layer}, {phase}: {', '.join(dict.fromkeys(lacking)) or 'no such step'}")
