"""Whole layers of a trace: the twin's layer on the trace's own streams against the streams that the trace has behind it.

Source: docs/single.md §6 and docs/drift.md §1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from reference.rounding import EXACT, Sites, profile
from reference.state import Batch, LayerState

from ..drift import CHOICES, Drift, LogitsDrift, Seat, Side, forced_distances, same_choices
from ..evaluation import Evaluation, Weights
from ..following import SCORES, Choices, Explained, Following
from ..judge import Places
from ..taps import Capture
from .feeding import Feed
from .reading import Missing, joined
from .tape import Held


@dataclass(frozen=True)
class Sides:
    """What a step came to: the trace's side, the twin's with the trace's choices where rounding explains them; streams of the
    twin on its `own` choices and without rounding on the same; how many tokens have a choice that rounding does not explain."""

    traced: Side
    twin: Side
    own: Tensor
    smooth: Tensor
    unexplained: Mapping[str, int] = field(default_factory=dict)


@dataclass
class Layer:
    """One layer of a trace. `states` of each request after each length that a step ended at."""

    feed: Feed
    weights: Weights
    states: dict[tuple[int, int], tuple[LayerState, LayerState]] = field(default_factory=dict)

    def forced(self) -> list[Drift | LogitsDrift]:
        """Distances, one a phase. Raises Missing where streams, or steps that later ones build on, are not there."""
        segments = self.feed.tape.segments
        sides = [self._step(k) for k in range(len(segments))]
        phases: dict[str, list[int]] = {}
        for k, s in enumerate(segments):
            phases.setdefault(s.phase, []).append(k)
        return [d for phase, steps in phases.items() for d in self._distances(phase, steps, sides)]

    def _step(self, k: int) -> Sides:
        """The twin with and without its rounding on the trace's streams."""
        s, feed, w = self.feed.segment(k), self.feed, self.weights
        x, traced = feed.streams(k), self._traced(k)
        if x.shape != (len(s.positions), *self._streams_of_a_token):
            raise Missing(f"streams before the layer are {list(x.shape)} in {s.phase}, request {s.request}")
        if not bool(x.isfinite().all()):
            raise Missing(f"streams before the layer are not finite in {s.phase}, request {s.request}")
        batch = Batch(feed.ids(k), torch.tensor(s.positions), [0, len(s.positions)])
        fresh = w.block.attn.initial_state()
        before = (fresh, fresh) if s.start == 0 else self.states.get((s.request, s.start))
        if before is None:
            raise Missing(f"no step of request {s.request} ends before position {s.start}: whole layers need what came before")
        twin, smooth = Evaluation(w, profile(feed.profile), [before[0]]), Evaluation(w, EXACT, [before[1]])
        own, exact = w.capture(set(CHOICES)), w.capture({*SCORES, *SCORES.values()})
        said, same = twin.run(x, batch, [0], own), smooth.run(x, batch, [0], exact)
        self.states[s.request, s.end] = twin.states[0], smooth.states[0]
        base = same.streams
        if not same_choices(same, said):  # what rounding costs is measured with the twin's choices
            base = _followed(Evaluation(w, EXACT, [before[1]]), x, batch, Choices.of(said))
        sides = Sides(traced, said, said.streams, base)
        if same_choices(traced, said):
            return sides
        return self._explained(sides, x, batch, Evaluation(w, twin.profile, [before[0]]), exact)

    def _explained(self, sides: Sides, x: Tensor, batch: Batch, again: Evaluation, exact: Capture) -> Sides:
        """The twin once more with the trace's choices, where rounding explains them."""
        visible = (batch.positions + 1) // (self.feed.config.ratio(self.feed.layer) or 1)
        other = Choices.of(sides.traced).other
        choices = Explained(other, {tap: list(exact.parts(SCORES[tap])) for tap in other}, self.weights.block.ffn.bias, visible)
        y = _followed(again, x, batch, choices)
        twin = replace(sides.twin, streams=y, logits=again.logits(y, batch))
        return replace(sides, twin=twin, unexplained={tap.split(".")[-1]: n for tap, n in choices.unexplained.items() if n})

    @property
    def _streams_of_a_token(self) -> tuple[int, int]:
        return self.feed.config.hc_mult, self.feed.config.hidden_size

    def _traced(self, k: int) -> Side:
        """What the trace has behind the layer: of a drafter, what its head sees. Raises Missing without streams, or for
        streams of another shape."""
        drafter, s = self.weights.mtp is not None, self.feed.segment(k)
        y = self.feed.need("norm" if drafter else "hc_ffn.streams", k).numbers()
        if y.shape != (len(s.positions), *(self._streams_of_a_token[drafter:])):
            raise Missing(f"streams behind the layer are {list(y.shape)} in {s.phase}, request {s.request}")
        experts, picks, logits = (self.feed.tape.get(self.feed.layer, tap, k) for tap in (*CHOICES, "head.logits"))
        chosen = None if picks is None else joined([picks], self.feed.config.index_topk, -1).numbers()
        last = None if logits is None or not self.weights.has_head else logits.numbers()[-1:]
        return Side(y[:, None] if drafter else y, None if experts is None else experts.numbers(), chosen, last)

    def _distances(self, phase: str, steps: Sequence[int], sides: Sequence[Sides]) -> list[Drift | LogitsDrift]:
        mine, segments = [sides[k] for k in steps], [self.feed.segment(k) for k in steps]
        sizes = torch.tensor([len(s.positions) for s in segments])
        requests = torch.tensor([s.request for s in segments]).repeat_interleave(sizes)
        positions = torch.tensor([p for s in segments for p in s.positions])
        places = Places({"sequence": requests, "position": positions})
        seat = Seat(self.feed.layer, phase, torch.arange(len(positions)), places, sizes.cumsum(0) - 1)
        traced, twin = (_together([getattr(x, name) for x in mine]) for name in ("traced", "twin"))
        own, smooth = (torch.cat([getattr(x, name) for x in mine]) for name in ("own", "smooth"))
        said = forced_distances(seat, traced, twin, own, smooth)
        names = sorted({name for x in mine for name in x.unexplained})
        shares = {name: sum(x.unexplained.get(name, 0) for x in mine) / len(positions) for name in names}
        return [replace(d, unexplained=shares) if isinstance(d, Drift) else d for d in said]


def _followed(who: Evaluation, x: Tensor, batch: Batch, choices: Choices) -> Tensor:
    sites: Sites = Following(who.profile, choices=choices)
    return who.streams(x, batch, [0], sites)


def _together(sides: Sequence[Side]) -> Side:
    """Steps one after the other."""

    def table(name: str, fill: int | None) -> Tensor | None:
        parts = [x for side in sides if (x := getattr(side, name)) is not None]
        if len(parts) < len(sides):
            return None
        width = None if fill is None else max(x.shape[1] for x in parts)
        return joined([Held(x, "") for x in parts], width, fill or 0).value

    streams = torch.cat([side.streams for side in sides])
    return Side(streams, table("experts", None), table("picks", -1), table("logits", None))
