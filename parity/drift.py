"""How far apart two evaluations of a layer are, and what their distance should grow to. Source: docs/drift.md §1 and §2."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

from reference.state import Batch

from . import metrics
from .judge import Places

Curve = Literal["rounding", "forced", "free", "reference"]
CHOICES = ("ffn.gate.experts", "attn.indexer.picks")  # taps
STEP = 2.0**-26  # of a finite difference, of the size of what is moved: the root of float64's unit roundoff


@dataclass(frozen=True)
class Side:
    """What one evaluation of a layer puts out in a phase: streams [t, s, D], chosen experts [t, k] and index entries [t, k]
    (-1: none), logits [b, v] of each sequence's last token where there is a head; `error` if it raised."""

    streams: Tensor
    experts: Tensor | None = None
    picks: Tensor | None = None
    logits: Tensor | None = None
    error: str = ""

    def of(self, tokens: Tensor, sequences: Tensor) -> Side:
        """Only these tokens, which are those of these sequences."""
        experts, picks = (None if x is None else x[tokens] for x in (self.experts, self.picks))
        return Side(self.streams[tokens], experts, picks, None if self.logits is None else self.logits[sequences], self.error)

    def double(self) -> Side:
        """The same numbers in float64."""
        return replace(self, streams=self.streams.double(), logits=None if self.logits is None else self.logits.double())


@dataclass(frozen=True)
class Drift:
    """Distance of streams behind a layer, side against reference; the worst token, and its sequence and position; `flips` of
    choices, as shares; `rounding`, the relative L2 of twin against truth for the same tokens; `predicted` relative L2 where
    there is a prediction. Of `forced`: the largest relative L2 of a token, and the largest rounding of one; `rows` that the
    layer left in the pool, by name their relative L2 and rounding; tokens whose choice is `unexplained`, as shares."""

    layer: int
    phase: str
    curve: Curve
    relative_l2: float
    cosine: float
    worst_token: int
    worst: Mapping[str, int]
    flips: Mapping[str, float]
    rounding: float | None = None
    predicted: float | None = None
    error: str = ""
    token_l2: float | None = None
    token_rounding: float | None = None
    rows: Mapping[str, Mapping[str, float | None]] = field(default_factory=dict)
    unexplained: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class LogitsDrift:
    """The same for the logits of the last token of each sequence."""

    layer: int
    phase: str
    curve: Curve
    relative_l2: float
    cosine: float
    worst_token: int
    worst: Mapping[str, int]
    kl_mean: float
    kl_p99: float
    kl_max: float
    top1: float
    overlap: float
    k: int


@dataclass(frozen=True)
class Seat:
    """Which layer and phase is looked at; the numbers of its tokens, what they are, and which is last in each sequence."""

    layer: int
    phase: str
    tokens: Tensor
    places: Places
    last: Tensor

    @classmethod
    def of(cls, layer: int, phase: str, batch: Batch, sequences: Sequence[int]) -> Seat:
        """Of these sequences of a batch."""
        parts = [torch.arange(batch.bounds[b], batch.bounds[b + 1]) for b in sequences]
        sizes = torch.tensor([len(part) for part in parts])
        tokens = torch.cat(parts)
        labels = {"sequence": torch.tensor(sequences).repeat_interleave(sizes), "position": batch.positions[tokens]}
        return cls(layer, phase, tokens, Places(labels), sizes.cumsum(0) - 1)

    def at(self, row: int) -> tuple[int, dict[str, int]]:
        """Number of the token in a row, and what it is."""
        return int(self.tokens[row]), self.places.at(row)


def distances(
    seat: Seat, curve: Curve, side: Side, against: Side, rounding: float | None = None, predicted: float | None = None
) -> list[Drift | LogitsDrift]:
    """Of streams, and of logits where there are any."""
    c, t = side.streams, against.streams
    numbers = metrics.relative_l2(c, t), metrics.cosine(c, t), *seat.at(_worst_row(c, t))
    said = Drift(seat.layer, seat.phase, curve, *numbers, flips(side, against), rounding, predicted, side.error)
    logits = logits_drift(seat, curve, side, against)
    return [said, logits] if logits else [said]


def forced_distances(seat: Seat, side: Side, twin: Side, own: Tensor, smooth: Tensor) -> list[Drift | LogitsDrift]:
    """Of a whole layer on the twin's streams. What it rounds is the twin's streams `own`, on its own choices, against those
    without rounding on the same choices."""
    said = distances(seat, "forced", side, twin, metrics.relative_l2(own, smooth))
    far, rounding = largest(side.streams, twin.streams), largest(own, smooth)
    return [replace(d, token_l2=far, token_rounding=rounding) if isinstance(d, Drift) else d for d in said]


def largest(c: Tensor, t: Tensor) -> float:
    """Relative L2 of the row that is furthest off for its size."""
    return float(_by_row(c, t).amax())


def flips(side: Side, against: Side) -> dict[str, float]:
    """Share of the choices of `against` that are not those of `side`, of experts and index entries, where both have some."""
    pairs = ("experts", side.experts, against.experts), ("picks", side.picks, against.picks)
    return {name: missing_share(b, a) for name, a, b in pairs if a is not None and b is not None}


def logits_drift(seat: Seat, curve: Curve, side: Side, against: Side) -> LogitsDrift | None:
    """None without a head on both sides."""
    c, t = side.logits, against.logits
    if c is None or t is None:
        return None
    kl, k = metrics.kl(c, t), min(metrics.TOP, t.shape[1])
    token, place = seat.at(int(seat.last[_worst_row(c, t)]))
    tail = float(kl.sort().values[max(0, math.ceil(0.99 * len(kl)) - 1)])
    return LogitsDrift(
        seat.layer, seat.phase, curve, metrics.relative_l2(c, t), metrics.cosine(c, t), token, place,
        float(kl.mean()), tail, float(kl.max()), metrics.top_overlap(c, t, 1), metrics.top_overlap(c, t, k), k,
    )  # fmt: skip


def same_choices(side: Side, against: Side) -> bool:
    """Whether each token has the same entries on both sides, as often, in any order."""
    pairs = (side.experts, against.experts), (side.picks, against.picks)
    return all(_same_rows(a.long(), b.long()) for a, b in pairs if a is not None and b is not None)


def _same_rows(a: Tensor, b: Tensor) -> bool:
    """-1 is none."""
    width = max(a.shape[1], b.shape[1])
    a, b = (torch.nn.functional.pad(x, (0, width - x.shape[1]), value=-1).sort(1).values for x in (a, b))
    return torch.equal(a, b)


def _by_row(c: Tensor, t: Tensor) -> Tensor:
    """Relative L2 of each row; infinite for one that is not finite."""
    error, size = (x.flatten(1).norm(dim=1) for x in (c - t, t))
    return torch.nan_to_num(error / size.clamp_min(2.0**-1000), nan=torch.inf)


def _worst_row(c: Tensor, t: Tensor) -> int:
    """The row that is furthest off for its size; one that is not finite is further than any."""
    return int(_by_row(c, t).argmax())


def missing_share(chosen: Tensor, there: Tensor) -> float:
    """Share of chosen [t, k] (-1: none) that is not among there [t, k'], row by row; 0 of nothing."""
    missing = sum(int((~torch.isin(a[a >= 0], b)).sum()) for a, b in zip(chosen.long(), there.long(), strict=True))
    return missing / max(1, int((chosen >= 0).sum()))


def grown(pushed: Tensor, local: Tensor) -> Tensor:
    """Errors behind a layer: what it made of those before it, `pushed`, and its own. Lengths add as legs of a right angle;
    the direction is that of the sum."""
    together = pushed + local
    length, size = math.hypot(float(pushed.norm()), float(local.norm())), float(together.norm())
    return together * (length / size) if size else pushed


def pushed(layer: Callable[[Tensor], Tensor], x: Tensor, base: Tensor, d: Tensor) -> Tensor:
    """What a smooth layer makes of a small change d of its input x; `base` is layer(x). NaN for what is not finite."""
    if not bool(d.isfinite().all()):
        return torch.full_like(base, torch.nan)
    size = float(d.norm())
    step = STEP * float(x.norm()) / size if size else 0.0
    y = layer(x + step * d)  # also without a direction: a layer has a state
    return (y - base) / step if step else torch.zeros_like(base)
