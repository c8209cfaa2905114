"""The candidate's whole layer beside the twin's: on the twin's streams, on its own, and what its errors should grow to.

Source: docs/drift.md §1 and §2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from reference.rounding import EXACT
from reference.state import Batch, LayerState

from .alone import Alone, Listening
from .cases import Plan
from .drift import Drift, LogitsDrift, Seat, Side, distances, forced_distances, grown, pushed, same_choices
from .evaluation import Evaluation
from .following import SCORES, Choices, Explained, Following
from .judge import finite_or_none
from .metrics import relative_l2
from .taps import Capture

EVERY = 5  # sequences that whole layers run: a kernel in an interpreter takes its time by the token


def sample(plan: Plan) -> list[int]:
    """Numbers of the sequences that whole layers run: every fifth, the last one among them."""
    return list(range(len(plan.sequences)))[::-1][::EVERY][::-1]


@dataclass(frozen=True)
class Turn:
    """A phase of the sampled sequences: `members` of the plan, their own batch, and where their tokens are in the whole."""

    batch: Batch
    members: list[int]
    seat: Seat
    sequences: Tensor

    @classmethod
    def of(cls, layer: int, phase: str, batch: Batch, members: Sequence[int], plan: Plan) -> Turn | None:
        """None where no sampled sequence has tokens."""
        chosen = [b for b, member in enumerate(members) if member in sample(plan)]
        if not chosen:
            return None
        seat = Seat.of(layer, phase, batch, chosen)
        own = Batch(batch.ids[seat.tokens], batch.positions[seat.tokens], [0, *(seat.last + 1).tolist()])
        return cls(own, [members[b] for b in chosen], seat, torch.tensor(chosen))


@dataclass(frozen=True)
class Carried:
    """What a phase of the candidate takes from layer to layer: its own streams [t, s, D], and the error they should have by
    now, a vector of the same shape."""

    streams: Tensor
    error: Tensor


@dataclass
class Whole:
    """One layer. `free` is `forced` itself where both have the same streams, `smooth` and `nudged` are the twin without its
    rounding, on its streams and a little beside them; without streams of its own there is only `forced`. `twin` has had each
    phase before the others; `before` are its states before that."""

    twin: Evaluation
    forced: Alone
    free: Alone | None
    smooth: Evaluation
    nudged: Evaluation
    before: list[LayerState] = field(init=False)

    def __post_init__(self) -> None:
        self.before = list(self.twin.states)

    @classmethod
    def start(cls, weights: Listening, twin: Evaluation, plan: Plan, seed: int, own: bool, same: bool) -> Whole:
        """Before the first phase; `own`: the candidate has streams of its own, `same`: they are the twin's still. Raises
        BadInput for weights that no kernel takes."""
        spans = {i: (s.start, s.start + sum(s.tokens.get(p, 0) for p in plan.phases())) for i, s in enumerate(plan.sequences)}
        here = {i: (twin.states[i], *spans[i]) for i in sample(plan)}

        def alone() -> Alone:
            return Alone.start(weights, twin.weights.layer, twin.weights.has_head, here, seed, twin.profile.name)

        forced = alone()
        return cls(twin, forced, (forced if same else alone()) if own else None, twin.fork(EXACT), twin.fork(EXACT))

    def run(
        self, turn: Turn, given: Tensor, twin: Side, truth: Side, own: Carried | None
    ) -> tuple[list[Drift | LogitsDrift], Carried | None]:
        """One phase, on the twin's streams `given` and on the candidate's own -> distances, and what the next layer gets.
        All are of the sampled tokens."""
        forced, spare = self.forced.run(given, turn.batch, turn.members), self.smooth.fork(EXACT)
        exact = self.twin.weights.capture({*SCORES, *SCORES.values()})
        smooth = self.smooth.run(given, turn.batch, turn.members, exact)
        same = smooth.streams if same_choices(smooth, twin) else _follow(spare, turn, given, Choices.of(twin))
        said = self._forced(turn, given, forced, twin, same, exact)
        self.before = list(self.twin.states)
        if own is None or self.free is None:
            return said, None
        free = forced if self.free is self.forced else self.free.run(own.streams, turn.batch, turn.members)
        before = pushed(lambda x: self.nudged.streams(x, turn.batch, turn.members), given, smooth.streams, own.error)
        error = grown(before, forced.streams - twin.streams)
        rounding, predicted = relative_l2(twin.streams, truth.streams), float(error.norm() / twin.streams.norm())
        return said + distances(turn.seat, "free", free, twin, rounding, predicted), Carried(free.streams, error)

    def _forced(
        self, turn: Turn, given: Tensor, forced: Side, twin: Side, same: Tensor, exact: Capture
    ) -> list[Drift | LogitsDrift]:
        """The whole layer's distance from the twin's, which follows the candidate's choices where rounding explains them."""
        own, unexplained = twin.streams, dict[str, float]()
        if not same_choices(forced, twin):
            twin, unexplained = self._followed(turn, given, forced, twin, exact)
        said = forced_distances(turn.seat, forced, twin, own, same)
        return [replace(d, rows=self._rows(turn), unexplained=unexplained) if isinstance(d, Drift) else d for d in said]

    def _followed(self, turn: Turn, given: Tensor, forced: Side, twin: Side, exact: Capture) -> tuple[Side, dict[str, float]]:
        """The twin once more with the candidate's choices, and the share of tokens whose choice rounding does not explain."""
        layer, batch, again = self.twin.weights, turn.batch, replace(self.twin, states=list(self.before))
        visible = (batch.positions + 1) // (layer.config.ratio(layer.layer) or 1)
        other = Choices.of(forced).other
        choices = Explained(other, {tap: list(exact.parts(SCORES[tap])) for tap in other}, layer.block.ffn.bias, visible)
        y = _follow(again, turn, given, choices)
        shares = {tap.split(".")[-1]: n / len(batch.ids) for tap, n in choices.unexplained.items() if n}
        return replace(twin, streams=y, logits=again.logits(y, batch)), shares

    def _rows(self, turn: Turn) -> dict[str, dict[str, float | None]]:
        """How far the rows of a phase are from the twin's, and those from rows without rounding; NaN was not written."""
        sides: dict[str, list[tuple[Tensor, Tensor, Tensor]]] = {}
        for member, tokens in zip(turn.members, turn.batch.sequences(), strict=True):
            n, end = tokens.stop - tokens.start, int(turn.batch.positions[tokens.stop - 1]) + 1
            twin, smooth = self.twin.left(member, n, end), self.smooth.left(member, n, end)
            for name, rows in self.forced.left(member, n).items():
                sides.setdefault(name, []).append((rows, twin[name], smooth[name]))
        joined = {name: [torch.cat(parts) for parts in zip(*found, strict=True)] for name, found in sides.items()}
        return {
            name: {"relative_l2": finite_or_none(relative_l2(c, t)), "rounding": finite_or_none(relative_l2(t, exact))}
            for name, (c, t, exact) in joined.items()
            if len(t)
        }


def _follow(evaluation: Evaluation, turn: Turn, given: Tensor, choices: Choices) -> Tensor:
    """Streams behind the layer with these choices, from the states before the phase."""
    return evaluation.streams(given, turn.batch, turn.members, Following(evaluation.profile, choices=choices))
