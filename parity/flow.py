"""One layer at a time: truth, twin and candidate in every phase, judged, and the streams handed to the next layer.

Source: docs/judge.md §8.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from reference.block import Block
from reference.checkpoint.loader import Loader
from reference.checkpoint.store import WeightStore
from reference.config import Config
from reference.hyper_connection import HyperHead
from reference.linear import Linear
from reference.mtp import MTP
from reference.rounding import EXACT, Profile, Sites
from reference.state import Batch, LayerState

from . import cases, ops
from .budget.bounded import Arithmetic
from .judge import MismatchedShape, Stored, Verdict, judge
from .metrics import cosine, relative_l2
from .step import Step
from .storage import Unfit
from .taps import Capture

EXPERT_MEMORY = 1 << 28  # bytes of experts kept within a layer


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

    @property
    def config(self) -> Config:
        return self.store.config


@dataclass(frozen=True)
class Judged:
    """One op of one layer in one phase: its verdicts, or why there are none."""

    op: ops.Op
    layer: int
    phase: str
    verdicts: tuple[Verdict, ...]
    missing: str | None = None


@dataclass(frozen=True)
class Drift:
    """How far the twin's streams are from the truth's after a layer: the price of rounding, not of errors."""

    layer: int
    phase: str
    relative_l2: float
    cosine: float
    worst_token: int


@dataclass
class Streams:
    """Residual streams [t, s, D] of every phase before a layer, of the truth and of the twin."""

    truth: dict[str, Tensor]
    twin: dict[str, Tensor]


@dataclass
class Flow:
    """Runs layers in order. `streams` is what the next layer gets; without a layer before it they are synthetic."""

    setting: Setting
    loader: Loader
    ids: list[Tensor]
    streams: Streams | None = None
    judged: list[Judged] = field(default_factory=list)
    drift: list[Drift] = field(default_factory=list)

    @classmethod
    def start(cls, setting: Setting) -> Flow:
        loader = Loader(setting.store, torch.float64, EXPERT_MEMORY)
        return cls(setting, loader, cases.token_ids(setting.plan, setting.config.vocab_size, setting.seed))

    def begin_with_tokens(self) -> None:
        """Streams of layer 0: each token's embedding, four times."""
        embedded = {phase: self.loader.embed(self.batch(phase).ids) for phase in self.setting.plan.phases()}
        wide = {phase: x[:, None].repeat(1, self.setting.config.hc_mult, 1) for phase, x in embedded.items()}
        self.streams = Streams(dict(wide), dict(wide))

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
        c, setting = self.setting.config, self.setting
        drafter = layer >= c.num_hidden_layers
        mtp = self.loader.mtp(layer - c.num_hidden_layers) if drafter else None
        block = mtp.block if mtp else self.loader.block(layer)
        work = _Layer(self, layer, block, mtp, self._states(layer, block, EXACT), self._states(layer, block, setting.profile))
        streams = self.streams or self._synthetic(layer)
        out = Streams({}, {})
        for phase in setting.plan.phases():
            step = work.run(phase, streams, out)
            self.drift.append(_drift(layer, phase, out))
            if phase in setting.plan.judged:
                for result in judge_step(step, [op for op in setting.ops if setting.judges(op, phase)]):
                    self.judged.append(result)
                    yield result
                work.earlier = last_tokens(step)
        if self.streams:
            self.streams = out

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
    """The weights of one layer and the states of both engines between phases."""

    flow: Flow
    layer: int
    block: Block
    mtp: MTP | None
    truth: list[LayerState]
    twin: list[LayerState]
    earlier: dict[str, Stored] = field(default_factory=dict)

    def run(self, phase: str, streams: Streams, out: Streams) -> Step:
        """Truth and twin take a phase's tokens; the twin's payloads are kept for replay."""
        flow, setting = self.flow, self.flow.setting
        batch, members = flow.batch(phase, int(self.mtp is not None)), flow.members(phase)
        name = cases.layer_name(setting.config, self.layer)
        capture = Capture([f"{name}.", f"{name.removesuffix('block')}"], ops.wanted_taps(setting.ops))
        out.truth[phase], after = self._step(streams.truth[phase], batch, [self.truth[i] for i in members], Sites())
        self._keep(self.truth, members, after)
        before = [self.twin[i] for i in members]
        sites = Sites(setting.profile, capture)
        out.twin[phase], after = self._step(streams.twin[phase], batch, before, sites)
        self._keep(self.twin, members, after)
        return Step(setting.config, self.layer, phase, self.block, self.mtp, batch, streams.twin[phase], flow.loader.embed,
                    self._head(), capture, before, after, Sites(setting.profile), setting.how, setting.seed,
                    earlier=self.earlier)  # fmt: skip

    def _head(self) -> tuple[HyperHead, Tensor, Linear] | None:
        """What stands behind this layer: the model's head, or the drafter's, which shares the output matrix."""
        if "head" not in cases.layer_kinds(self.flow.setting.config, self.layer):
            return None
        head = self.flow.loader.head()
        return (self.mtp.hc_head, self.mtp.norm, head[2]) if self.mtp else head

    def _step(self, x: Tensor, batch: Batch, states: list[LayerState], sites: Sites) -> tuple[Tensor, list[LayerState]]:
        """[t, s, D] -> [t, s, D]; MTP puts out what its head sees, [t, 1, D]."""
        if self.mtp is None:
            return self.block(x, batch, states, sites.block(cases.layer_name(self.flow.setting.config, self.layer)))
        embedded = sites("embed", self.flow.loader.embed(batch.ids))
        index = self.layer - self.flow.setting.config.num_hidden_layers
        y, after = self.mtp(x, embedded, batch, states, f"mtp.{index}", sites)
        return y[:, None], after

    @staticmethod
    def _keep(states: list[LayerState], members: list[int], after: list[LayerState]) -> None:
        for i, state in zip(members, after, strict=True):
            states[i] = state


def judge_step(step: Step, chosen: Sequence[ops.Op]) -> Iterator[Judged]:
    """Every chosen op that this layer has: run the candidate, replay the twin, compare."""
    for op in chosen:
        if cases.layer_kinds(step.config, step.layer) & set(op.kinds):
            missing = op.missing(step.phase)
            yield Judged(op, step.layer, step.phase, (), missing) if missing else _judged(step, op)


def _judged(step: Step, op: ops.Op) -> Judged:
    """Verdicts, or the reason why no kernel takes the op's weights."""
    try:
        return Judged(op, step.layer, step.phase, judge_op(step, op))
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


def _drift(layer: int, phase: str, out: Streams) -> Drift:
    truth, twin = out.truth[phase], out.twin[phase]
    by_token = (twin - truth).flatten(1).norm(dim=1) / truth.flatten(1).norm(dim=1).clamp_min(2.0**-1000)
    return Drift(layer, phase, relative_l2(twin, truth), cosine(twin, truth), int(by_token.argmax()))
