"""What the engine computed in one step, beside the twin in float64: streams, logits and what is left, layer by layer.

Each layer of the twin gets the engine's own streams and starts from the numbers that the pool held, so that errors do not pile
up. A right engine rounds as the twin does, so it is as far from what no rounding would give, and the two are at most twice that
apart (docs/drift.md §3): the twin makes the engine's choices wherever rounding explains them, and what has no rounding makes
the twin's.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import Any
from unittest import mock

import torch
from engine_past import CONFIG, KINDS, PROFILE, STORE, drawn
from slow_layout import RATIOS, SlowLayout
from torch import Tensor

from optimized import engine as engine_module
from optimized.engine import Engine
from optimized.pool.allocator import Sequence
from optimized.step import StepPlan
from parity.drift import CHOICES, Side
from parity.following import SCORES, Choices, Explained, Following
from parity.locate import APART
from parity.taps import Capture
from reference.model import Model
from reference.rounding import EXACT, Sites, profile
from reference.state import Batch, LayerState, SequenceState, named_tensors


@cache
def model(rounding: str) -> Model:
    return Model(STORE, torch.float64, profile(rounding))


@dataclass
class Witness:
    """What sequences held before a step of an engine, and what each layer then put out and chose."""

    engine: Engine
    sequences: list[Sequence]
    tokens: list[Tensor]
    before: list[list[LayerState]] = field(init=False)
    starts: list[int] = field(init=False)
    plan: StepPlan | None = None
    sides: list[Side] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.before = [drawn(self.engine, s) for s in self.sequences]
        self.starts = [s.length for s in self.sequences]

    def step(self) -> Tensor:
        plan_step = engine_module.plan_step

        def kept(*args: Any) -> StepPlan:
            self.plan = plan_step(*args)
            return self.plan

        with mock.patch.object(engine_module, "plan_step", kept):
            return self.engine.step(self.tokens, self.sequences, self._hear)

    def _hear(self, layer: int, streams: Tensor) -> None:
        picks = self._picks(layer) if KINDS[layer] == "csa" else None
        self.sides.append(Side(streams.double(), self.engine.weights.chosen.long(), picks))

    def _picks(self, layer: int) -> Tensor:
        """Compressed entries that each token's list names [t, k], -1 behind them, -2 for a row that is none of its own."""
        assert self.plan is not None
        at, lists = SlowLayout(self.engine.geometry), self.plan.kinds["csa"]
        picks = torch.full((len(self.plan.ids), CONFIG.index_topk), -1)
        for b, sequence in enumerate(self.sequences):
            entries = range((self.starts[b] + len(self.tokens[b])) // RATIOS["csa"])
            entry = {at.compressed(layer, list(sequence.blocks), c) - at.base(layer): c for c in entries}
            for t in (self.plan.batch_ids == b).nonzero()[:, 0].tolist():
                first, n = int(lists.indptr[t]), min(int(self.plan.visible[t]), CONFIG.index_topk)
                picks[t, :n] = torch.tensor([entry.get(row, -2) for row in lists.indices[first : first + n].tolist()])
        return picks

    def batch(self) -> Batch:
        sizes = [len(ids) for ids in self.tokens]
        positions = [start + torch.arange(n) for start, n in zip(self.starts, sizes, strict=True)]
        return Batch(torch.cat(self.tokens), torch.cat(positions), [0, *torch.tensor(sizes).cumsum(0).tolist()])

    def check(self, logits: Tensor) -> None:
        """Every layer, what it left, and the logits [b, v] of each sequence's last token."""
        batch, after = self.batch(), [drawn(self.engine, s) for s in self.sequences]
        x = model(PROFILE).loader.embed(batch.ids)[:, None].repeat(1, CONFIG.hc_mult, 1)
        for layer, side in enumerate(self.sides):
            before, left = ([states[layer] for states in each] for each in (self.before, after))
            check_layer(layer, x, batch, before, side, left)
            x = side.streams
        last = x[torch.tensor(batch.bounds[1:]) - 1]
        near("logits", logits.double(), *(model(rounding).logits(last) for rounding in (PROFILE, "exact")))


def check_layer(
    layer: int, x: Tensor, batch: Batch, before: list[LayerState], side: Side, left: list[LayerState]
) -> None:
    """Streams x [t, s, D] through one layer of the twin, with its own choices and then with the engine's, and without rounding
    on the twin's choices; beside what the engine put out, chose and left."""
    block, name, rounding = model(PROFILE).loader.block(layer), f"layers.{layer}", profile(PROFILE)
    chosen, scores = (Capture([f"{name}."], taps) for taps in (CHOICES, SCORES.values()))
    block(x, batch, before, Sites(rounding, chosen).block(name))
    own = Side(x, chosen[CHOICES[0]], None if side.picks is None else chosen.table(CHOICES[1]))
    exact = block(x, batch, before, Following(EXACT, scores, choices=Choices.of(own)).block(name))
    other, visible = Choices.of(side).other, (batch.positions + 1) // (CONFIG.ratio(layer) or 1)
    choices = Explained(other, {tap: list(scores.parts(SCORES[tap])) for tap in other}, block.ffn.bias, visible)
    twin = block(x, batch, before, Following(rounding, choices=choices).block(name))
    assert not any(choices.unexplained.values()), f"layer {layer}: choices that rounding does not explain"
    near(f"streams of layer {layer}", side.streams, twin[0], exact[0])
    for got, mine, smooth in zip(*(tensors(states) for states in (left, twin[1], exact[1])), strict=True):
        near(f"{got[0]} of layer {layer}", got[1], mine[1], smooth[1])


def tensors(states: list[LayerState]) -> list[tuple[str, Tensor]]:
    """Everything that sequences hold of a layer, by name, joined along the sequences."""
    found: dict[str, list[Tensor]] = {}
    for state in states:
        for name, rows in named_tensors(SequenceState(layers=[state])).items():
            found.setdefault(name.removeprefix("layers.0."), []).append(rows)
    return [(name, torch.cat(parts)) for name, parts in found.items()]


def near(what: str, got: Tensor, twin: Tensor, exact: Tensor) -> None:
    """By norm; where the twin is not finite, before the first token, all three are the same."""
    there = twin.isfinite()
    assert torch.equal(got[~there], twin[~there]), f"the twin has no {what} there"
    off, allowed = float((got - twin)[there].norm()), APART * float((twin - exact)[there].norm())
    assert off <= allowed, f"{what}: {off:.3g} from the twin, where rounding explains {allowed:.3g}"
