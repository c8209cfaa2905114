"""What a step must tell its kernels, told slowly: one token at a time, in lists. Source: docs/pool.md §5 and §11."""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import Any

import numpy as np
from slow_layout import POOLED, RATIOS, SlowLayout

from optimized.pool.geometry import Geometry
from reference.config import Kind


@dataclass(frozen=True)
class Member:
    """A sequence's part of a step: `n` tokens from position `start` on."""

    slot: int
    blocks: list[int]
    start: int
    n: int


@dataclass(frozen=True)
class Token:
    """`number` counts the step's tokens, `j` those of the sequence `b`; `first` is the number of its first."""

    number: int
    b: int
    j: int
    first: int
    position: int


def tokens_of(members: Many[Member]) -> list[Token]:
    out: list[Token] = []
    for b, member in enumerate(members):
        first = len(out)
        out += [Token(first + j, b, j, first, member.start + j) for j in range(member.n)]
    return out


class SlowPlanner:
    """Plans of one geometry; each method says what one table of a step plan must hold."""

    def __init__(self, geometry: Geometry) -> None:
        self.geometry, self.at = geometry, SlowLayout(geometry)
        self.window, self.topk = geometry.config.sliding_window, geometry.config.index_topk

    def direct(self, members: Many[Member]) -> bool:
        return all(m.n <= self.geometry.lookahead + 1 for m in members)

    def complete(self, kind: Kind, members: Many[Member]) -> list[tuple[int, ...]]:
        done = [t for t in tokens_of(members) if t.position % RATIOS[kind] == RATIOS[kind] - 1]
        return [self._plan_row(kind, t) for t in done]

    def keep(self, kind: Kind, members: Many[Member]) -> list[tuple[int, ...]]:
        """Tokens that a group to come may pool, though `lookahead` tokens are taken back."""
        reach = POOLED[kind] + self.geometry.lookahead
        ends = [m.start + m.n for m in members]
        return [self._plan_row(kind, t) for t in tokens_of(members) if ends[t.b] - t.position <= reach]

    def _plan_row(self, kind: Kind, t: Token) -> tuple[int, ...]:
        from_ring = [q for q in range(POOLED[kind]) if t.j - q < 0]  # how many of the pooled tokens came before the step
        return t.number, t.b, t.position, len(from_ring)

    def destinations(self, kind: Kind, members: Many[Member]) -> list[int]:
        """Row of each token, -1 where a later token of the step takes the same row of the ring."""
        layer, rows = self.at.layers(kind)[0], []
        for t in tokens_of(members):
            m = members[t.b]
            later = m.start + m.n - 1 - t.position
            rows.append(-1 if later >= self.at.ring else self.at.window(layer, m.slot, t.position) - self.at.base(layer))
        return rows

    def entries(self, kind: Kind, t: Token, picks: Any) -> list[int]:
        """Compressed entries that a token attends to, ascending; of CSA the first of its picks that count."""
        seen = (t.position + 1) // RATIOS[kind] if RATIOS[kind] else 0
        if kind != "csa":
            return list(range(seen))
        return sorted(int(c) for c in picks[t.number][: min(seen, self.topk)])

    def lists(self, kind: Kind, members: Many[Member], picks: Any) -> list[list[int]]:
        """Of each token: rows of its compressed entries, then of its window; -1 - r for row r of this step's payload."""
        layer, direct, out = self.at.layers(kind)[0], self.direct(members), list[list[int]]()
        base = self.at.base(layer)
        for t in tokens_of(members):
            m = members[t.b]
            rows = [self.at.compressed(layer, m.blocks, c) - base for c in self.entries(kind, t, picks)]
            for p in range(max(0, t.position - self.window + 1), t.position + 1):
                of_step = p >= m.start and not direct
                rows.append(-1 - (t.first + p - m.start) if of_step else self.at.window(layer, m.slot, p) - base)
            out.append(rows)
        return out


def differences(plan: Any, csa_lists: Any, slow: SlowPlanner, members: Many[Member], picks: Any) -> list[str]:
    """What the production plan says otherwise. `csa_lists`: indices and indptr of CSA with these picks in place."""
    found = [] if plan.direct == slow.direct(members) else ["direct"]
    positions = [t.position for t in tokens_of(members)]
    found += [] if plan.positions.tolist() == positions else ["positions"]
    found += [] if plan.visible.tolist() == [(p + 1) // 4 for p in positions] else ["visible"]
    for kind, own in plan.kinds.items():
        indices, indptr = csa_lists if kind == "csa" else (own.indices.numpy(), own.indptr.numpy())
        want = slow.lists(kind, members, picks)
        ends = np.cumsum([0, *map(len, want)]).tolist()
        found += [] if indptr.tolist() == ends == own.indptr.tolist() else [f"{kind} ends of lists"]
        found += [] if indices.tolist() == [row for rows in want for row in rows] else [f"{kind} lists"]
        found += [] if own.longest == max(map(len, want)) else [f"{kind} longest list"]
        found += [] if own.destination.tolist() == slow.destinations(kind, members) else [f"{kind} destinations"]
        if own.compression is not None:
            tables = own.compression.complete.tolist(), own.compression.keep.tolist()
            wanted = slow.complete(kind, members), slow.keep(kind, members)
            found += [f"{kind} {name}" for name, got, rows in zip(("complete", "keep"), tables, wanted, strict=True)
                      if got != [list(r) for r in rows]]  # fmt: skip
    return found


def make_picks(batch: Many[Member], topk: int, seed: int) -> Any:
    """int32 [t, topk]: entries that each token sees, some of them, in any order, then -1."""
    rng = np.random.default_rng(seed)
    picks = np.full((sum(m.n for m in batch), topk), -1, np.int32)
    for t in tokens_of(batch):
        seen = (t.position + 1) // RATIOS["csa"]
        chosen = rng.permutation(seen)[: topk]
        picks[t.number, : len(chosen)] = chosen
    return picks
