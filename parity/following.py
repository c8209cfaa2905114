"""The twin's layer with the candidate's choices, wherever rounding explains that they are others. Source: docs/drift.md §1."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import pad

from reference.rounding import Sites

from .drift import CHOICES, Side
from .locate import APART

EXPERTS, PICKS = CHOICES
SCORES = {EXPERTS: "ffn.gate.scores", PICKS: "attn.indexer.scores"}  # taps of what each choice goes by


def explained(own: Tensor, other: Tensor, scores: Tensor, exact: Tensor) -> Tensor:
    """Tokens [t] whose choice rounding explains: own and other [t, k] (-1: none) among n, by scores [t, n] with rounding
    (-inf: not to be chosen) and without. Each exchange must be of two whose scores are near: both may be off by `APART`
    times the most that rounding moved a score of this token."""
    t, n = scores.shape
    moved = torch.where(scores.isfinite(), (scores - exact).abs(), 0.0)
    reach = 2 * APART * (moved.amax(1) if n else moved.new_zeros(t))
    mine, theirs = (_members(x, n) for x in (own, other))
    lost = scores.masked_fill(theirs | ~mine, -torch.inf)
    got = scores.masked_fill(mine | ~theirs, torch.inf)
    gap = lost.amax(1) - got.amin(1) if n else moved.new_zeros(t)
    return (gap <= reach) & (mine.sum(1) == theirs.sum(1)) & ((other >= 0).sum(1) == theirs.sum(1))


def _members(chosen: Tensor, n: int) -> Tensor:
    """Choices [t, k] as a mask [t, n]; numbers that there are none of choose nothing."""
    there = (chosen >= 0) & (chosen < n)
    mask = torch.zeros(len(chosen), n + 1, dtype=torch.bool)
    return mask.scatter_(1, torch.where(there, chosen.long(), n), True)[:, :n]


@dataclass
class Choices:
    """Another side's choices [t, k] by tap, not yet asked for."""

    other: dict[str, Tensor]

    @classmethod
    def of(cls, side: Side) -> Choices:
        """Those of a side, from the first token on."""
        given = zip(CHOICES, (side.experts, side.picks), strict=True)
        return cls({tap: x.long() for tap, x in given if x is not None})

    def hear(self, scores: Tensor) -> None:
        """What the next choice goes by, or a part of it."""

    def made(self, tap: str, own: Tensor) -> Tensor:
        """The choice of the next tokens, who would choose `own` [t, k]."""
        other, self.other[tap] = self.other[tap][: len(own)], self.other[tap][len(own) :]
        return pad(other, (0, max(0, own.shape[1] - other.shape[1])), value=-1)[:, : own.shape[1]]


@dataclass
class Explained(Choices):
    """Choices that are followed where rounding explains them. `exact`: the scores they go by in the same layer without
    rounding, part by part as taps show them; `bias` of the router, None where token ids choose; `visible`: how many compressed
    rows each token [t] may choose among. `unexplained` counts, by tap, the tokens whose choice rounding does not explain."""

    exact: dict[str, list[Tensor]]
    bias: Tensor | None
    visible: Tensor
    heard: list[Tensor] = field(default_factory=list)
    unexplained: dict[str, int] = field(default_factory=dict)

    def hear(self, scores: Tensor) -> None:
        self.heard.append(scores)

    def made(self, tap: str, own: Tensor) -> Tensor:
        """The other side's choice where rounding explains it, elsewhere their own."""
        right = explained(own, self.other[tap][: len(own)], *(self._by_score(own) if tap == EXPERTS else self._by_row(own)))
        self.unexplained[tap] = self.unexplained.get(tap, 0) + int((~right).sum())
        return torch.where(right[:, None], super().made(tap, own), own)

    def _by_score(self, own: Tensor) -> tuple[Tensor, Tensor]:
        """What experts were chosen by; where token ids choose, nothing is near."""
        scores, exact = self.heard.pop(), self.exact[EXPERTS].pop(0)
        if self.bias is None:
            return (_members(own, scores.shape[1]).double(),) * 2
        return scores + self.bias, exact + self.bias

    def _by_row(self, own: Tensor) -> tuple[Tensor, Tensor]:
        """What compressed rows were chosen by."""
        parts = [self.exact[PICKS].pop(0) for _ in self.heard]
        scores, exact = (torch.cat(x) for x in (self.heard, parts))
        self.heard.clear()
        visible, self.visible = self.visible[: len(own)], self.visible[len(own) :]
        hidden = torch.arange(scores.shape[1]) >= visible[:, None]
        return scores.masked_fill(hidden, -torch.inf), exact


@dataclass(frozen=True)
class Following(Sites):
    """Sites where choices are another side's; a tap still sees the own ones."""

    choices: Choices = field(kw_only=True)

    def __call__(self, site: str, x: Tensor, spare: int = 0) -> Tensor:
        x = super().__call__(site, x, spare)
        name = self.path + site
        if name in SCORES.values():
            self.choices.hear(x)
        return self.choices.made(name, x) if name in self.choices.other else x
