"""One layer at a time: truth, twin and candidate in every phase, judged, and the streams handed to the next layer.

Source: docs/judge.md §8.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from optimized.cpu.fused import Products
from reference.block import Block
from reference.checkpoint.loader import Loader, dense_bytes
from reference.checkpoint.store import WeightStore
from reference.config import Config
from reference.errors import BadInput
from reference.rounding import EXACT, Profile, Sites
from reference.state import Batch, LayerState

from . import cases, ops
from .alone import Listening
from .budget.bounded import Arithmetic
from .drift import CHOICES, Drift, LogitsDrift, Seat, Side, distances
from .evaluation import Evaluation, Weights, in_single
from .judge import MismatchedShape, Stored, Verdict, judge
from .step import Step
from .storage import Unfit
from .whole import Carried, Turn, Whole

EXPERT_MEMORY = 1 << 28  # bytes of experts kept within a layer
LEFT_OUT = "kernels were not asked to run in this layer"
NOTHING = "no token of these steps has any of it"

Judges = Callable[[ops.Op, str], bool]


@dataclass(frozen=True)
class Setting:
    """What is the same for all layers of a run."""

    store: WeightStore
    profile: Profile
    plan: cases.Plan
    ops: Sequence[ops.Op]
    how: Arithmetic
    seed: int
    judges: Judges = lambda op, phase: True  # which ops in which phase
    whole: bool = False  # whether the candidate runs whole layers too
    candidate: frozenset[int] | None = None  # layers that kernels run in (None: all); the others are evaluated only

    @property
    def config(self) -> Config:
        return self.store.config

    def asks(self, layer: int) -> bool:
        """Whether kernels run in this layer."""
        return self.candidate is None or layer in self.candidate


@dataclass(frozen=True)
class Judged:
    """One op of one layer in one phase: its verdicts, or why there are none."""

    op: ops.Op
    layer: int
    phase: str
    verdicts: tuple[Verdict, ...]
    missing: str | None = None


@dataclass
class Streams:
    """Residual streams [t, s, D] of every phase before a layer: the truth's, the twin's, and where streams run freely the
    reference's, in float32, and the candidate's own of its sampled sequences, with the error vector that is predicted for
    them."""

    truth: dict[str, Tensor]
    twin: dict[str, Tensor]
    reference: dict[str, Tensor] = field(default_factory=dict)
    free: dict[str, Tensor] = field(default_factory=dict)
    grown: dict[str, Tensor] = field(default_factory=dict)

    def carried(self, phase: str) -> Carried | None:
        return Carried(self.free[phase], self.grown[phase]) if phase in self.free else None


@dataclass
class Flow:
    """Runs layers in order. `streams` is what the next layer gets; without a layer before it they are synthetic."""

    setting: Setting
    loader: Loader
    single: Loader  # in float32
    ids: list[Tensor]
    streams: Streams | None = None
    judged: list[Judged] = field(default_factory=list)
    drift: list[Drift | LogitsDrift] = field(default_factory=list)
    unfit: dict[int, str] = field(default_factory=dict)  # layers that ran as no whole, and why
    listening: Listening | None = None

    @classmethod
    def start(cls, setting: Setting) -> Flow:
        """A model that fits into memory is held there dequantised; of a larger one the packed weights are multiplied."""
        store = setting.store
        products = Products() if dense_bytes(store, torch.float64) > EXPERT_MEMORY else None
        double, single = (Loader(store, dtype, EXPERT_MEMORY, products) for dtype in (torch.float64, torch.float32))
        ids = cases.token_ids(setting.plan, setting.config.vocab_size, setting.seed)
        return cls(setting, double, single, ids, listening=Listening(store, EXPERT_MEMORY) if setting.whole else None)

    def begin_with_tokens(self) -> None:
        """Streams of layer 0: each token's embedding, four times."""
        embedded = {phase: self.loader.embed(self.batch(phase).ids) for phase in self.setting.plan.phases()}
        wide = {phase: x[:, None].repeat(1, self.setting.config.hc_mult, 1) for phase, x in embedded.items()}
        self.streams = Streams(dict(wide), dict(wide), {phase: x.float() for phase, x in wide.items()})
        for phase, x in wide.items() if self.listening else ():
            if turn := Turn.of(0, phase, self.batch(phase), self.members(phase), self.setting.plan):
                self.streams.free[phase] = x[turn.seat.tokens]
                self.streams.grown[phase] = torch.zeros_like(self.streams.free[phase])

    def members(self, phase: str) -> list[int]:
        """Sequences that have tokens in a phase."""
        return [i for i, s in enumerate(self.setting.plan.sequences) if s.tokens.get(phase)]

    def batch(self, phase: str, shift: int = 0) -> Batch:
        """The ragged batch of a phase; with `shift` 1 its ids are those of the tokens after."""
        ids, positions, bounds = [], [], [0]
        for i in self.members(phase):
            plan = self.setting.plan.sequences[i]
            before = sum(plan.tokens.get(p, 0) for p in cases.PHASES[: cases.PHASES.index(phase)])
            count = plan.tokens[phase]
            ids.append(self.ids[i][before + shift : before + shift + count])
            positions.append(plan.start + before + torch.arange(count))
            bounds.append(bounds[-1] + count)
        return Batch(torch.cat(ids), torch.cat(positions), bounds)

    def run_layer(self, layer: int) -> Iterator[Judged]:
        """All phases of one layer; verdicts as they come."""
        setting, weights = self.setting, Weights.load(self.loader, self.setting.config, layer)
        truth, twin = (Evaluation(weights, p, self._states(layer, weights.block, p)) for p in (EXACT, setting.profile))
        streams, out = self.streams or self._synthetic(layer), Streams({}, {})
        single = self._single(truth) if streams.reference else None
        work = _Layer(self, weights, truth, twin, single, self._whole(twin, bool(streams.free)))
        for phase in setting.plan.phases():
            step = work.run(phase, streams, out)
            if phase in setting.plan.judged:
                chosen = [op for op in setting.ops if setting.judges(op, phase)]
                for result in judge_step(step, chosen) if setting.asks(layer) else left_out(step, chosen):
                    self.judged.append(result)
                    yield result
                work.earlier = last_tokens(step)
        if self.streams:
            self.streams = out if out.free.keys() == streams.free.keys() else Streams(out.truth, out.twin, out.reference)

    def _single(self, truth: Evaluation) -> Evaluation:
        """The reference as it generates, in float32, from the truth's states."""
        weights = Weights.load(self.single, self.setting.config, truth.weights.layer)
        return Evaluation(weights, EXACT, [in_single(state) for state in truth.states])

    def _whole(self, twin: Evaluation, own: bool) -> Whole | None:
        layer = twin.weights.layer
        if self.listening is None:
            return None
        if not self.setting.asks(layer):
            self.unfit[layer] = LEFT_OUT
            return None
        try:
            return Whole.start(self.listening, twin, self.setting.plan, self.setting.seed, own, same=layer == 0)
        except BadInput as error:
            self.unfit[layer] = str(error)
            return None

    def _states(self, layer: int, block: Block, profile: Profile) -> list[LayerState]:
        """What each sequence has behind it: nothing, or a synthetic past, the same draw for truth and twin."""
        sites = Sites(profile).block("").at("attn")
        return [
            cases.synthetic_state(block.attn, s.start, sites, _generator(self.setting.seed, layer, i))
            for i, s in enumerate(self.setting.plan.sequences)
        ]

    def _synthetic(self, layer: int) -> Streams:
        generator = _generator(self.setting.seed, layer, -1)
        made = {
            phase: cases.streams(self.setting.config, len(self.batch(phase).ids), generator)
            for phase in self.setting.plan.phases()
        }
        return Streams(dict(made), dict(made))


def _generator(seed: int, layer: int, sequence: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed * 1_000_003 + layer * 1009 + sequence + 1)


@dataclass
class _Layer:
    """Everybody's evaluation of one layer, between phases."""

    flow: Flow
    weights: Weights
    truth: Evaluation
    twin: Evaluation
    single: Evaluation | None
    whole: Whole | None
    earlier: dict[str, Stored] = field(default_factory=dict)

    def run(self, phase: str, streams: Streams, out: Streams) -> Step:
        """All take a phase's tokens, and their distances are noted; the twin's payloads are kept for replay."""
        flow, setting, w, members = self.flow, self.flow.setting, self.weights, self.flow.members(phase)
        batch, before = flow.batch(phase, int(w.mtp is not None)), self.twin.of(members)
        capture = w.capture(ops.wanted_taps(setting.ops) | set(CHOICES))
        truth = self.truth.run(streams.truth[phase], batch, members, w.capture(set(CHOICES)))
        twin = self.twin.run(streams.twin[phase], batch, members, capture)
        out.truth[phase], out.twin[phase] = truth.streams, twin.streams
        step = Step(setting.config, w.layer, phase, w.block, w.mtp, batch, streams.twin[phase], flow.loader.embed, w.head,
                    capture, before, self.twin.of(members), Sites(setting.profile), setting.how, setting.seed,
                    earlier=self.earlier)  # fmt: skip
        seat = Seat.of(w.layer, phase, batch, range(len(members)))
        flow.drift += distances(seat, "rounding", twin, truth)
        if turn := Turn.of(w.layer, phase, batch, members, setting.plan):
            self._run_whole(turn, streams, twin, truth, out)
        if self.single:
            single = self.single.run(streams.reference[phase], batch, members, w.capture(set(CHOICES)))
            out.reference[phase] = single.streams
            flow.drift += distances(seat, "reference", single.double(), truth)
        return step

    def _run_whole(self, turn: Turn, streams: Streams, twin: Side, truth: Side, out: Streams) -> None:
        """The candidate's layer, unless its weights turn out to be none that a kernel takes."""
        if self.whole is None:
            return
        phase, tokens = turn.seat.phase, turn.seat.tokens
        twin, truth = (side.of(tokens, turn.sequences) for side in (twin, truth))
        try:
            said, own = self.whole.run(turn, streams.twin[phase][tokens], twin, truth, streams.carried(phase))
        except BadInput as error:
            self.whole, self.flow.unfit[turn.seat.layer] = None, str(error)
            return
        self.flow.drift += said
        if own:
            out.free[phase], out.grown[phase] = own.streams, own.error


def judge_step(step: Step, chosen: Sequence[ops.Op]) -> Iterator[Judged]:
    """Every chosen op that this layer has: run the candidate, replay the twin, compare."""
    for op in chosen:
        if _has(step, op):
            missing = op.missing(step.phase)
            yield Judged(op, step.layer, step.phase, (), missing) if missing else _judged(step, op)


def left_out(step: Step, chosen: Sequence[ops.Op]) -> Iterator[Judged]:
    """Every chosen op of a layer that kernels do not run in."""
    for op in chosen:
        if _has(step, op):
            yield Judged(op, step.layer, step.phase, (), op.missing(step.phase) or LEFT_OUT)


def _has(step: Step, op: ops.Op) -> bool:
    return bool(cases.layer_kinds(step.config, step.layer) & set(op.kinds))


def _judged(step: Step, op: ops.Op) -> Judged:
    """Verdicts, or the reason why no kernel takes the op's weights."""
    try:
        verdicts = judge_op(step, op)
        return Judged(op, step.layer, step.phase, verdicts, None if verdicts else NOTHING)
    except Unfit as error:
        return Judged(op, step.layer, step.phase, (), str(error))


def last_tokens(step: Step) -> dict[str, Stored]:
    """What the candidate stored for the last token of each sequence, of outputs with a row a token."""
    last = torch.tensor(step.batch.bounds[1:]) - 1

    def rows(x: Tensor) -> Tensor | None:
        return x[last].clone() if x.ndim > 1 and len(x) == len(step.batch.ids) else None

    kept: dict[str, Stored] = {}
    for name, stored in step.stored.items():
        parts = [rows(x) for x in (stored if isinstance(stored, tuple) else (stored,))]
        if all(part is not None for part in parts):
            kept[name] = (parts[0], parts[1]) if len(parts) > 1 else parts[0]  # type: ignore[assignment]
    return kept


def judge_op(step: Step, op: ops.Op) -> tuple[Verdict, ...]:
    """Verdicts of one op's outputs. What the candidate stored is kept for the ops it feeds. Raises Unfit."""
    assert op.candidate is not None and op.twin is not None
    try:
        stored = op.candidate(step, op.name)
    except Unfit:
        raise
    except Exception as error:  # whatever a kernel raises is its failure, not the judge's
        return (raised(op.name, error),)
    step.stored |= stored
    expected = op.twin(step, op.name, stored)
    try:
        return tuple(
            judge(name, stored[name], e.expected, step.how, e.places, step.earlier.get(name)) for name, e in expected.items()
        )
    except MismatchedShape as error:
        return (raised(op.name, error),)


def raised(output: str, error: Exception) -> Verdict:
    """The verdict on a candidate that puts out nothing, or not what the op puts out."""
    words = f"{type(error).__name__}: {error}".split("\n")[0]
    return Verdict(output, 0, 0, 0, {"raised": math.inf}, {"error": words[:200]}, None, "none")
