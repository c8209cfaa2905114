"""Shapley values of a game: how much of what all players reach together each of them is given.

A game is its value, a number for every coalition, 0 for the empty one. A player is given the mean of what it adds, over
all orders in which the players could come; whatever the game, that adds up to the value of all. Source:
docs/attribution.md §2.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import factorial, fsum, sqrt
from statistics import NormalDist, stdev

Coalition = frozenset[str]
Value = Mapping[Coalition, float]
CONFIDENCE = 0.95


@dataclass(frozen=True)
class Share:
    """What a player is given, the ends of its confidence interval, and the two figures that do not add: what it does
    alone, and what the whole lacks without it."""

    player: str
    share: float
    low: float
    high: float
    alone: float
    last: float


def subsets(players: Sequence[str]) -> list[Coalition]:
    """All coalitions, 2^n of them."""
    return [frozenset(c) for size in range(len(players) + 1) for c in combinations(players, size)]


def orders(players: Sequence[str], pairs: int, seed: int) -> list[tuple[str, ...]]:
    """Random orders of the players, each followed by its reverse: where effects meet in pairs only, as squares of sums
    do, what a player adds in the two has its exact share as the mean."""
    drawn = random.Random(seed)
    ordered = sorted(players)
    found: list[tuple[str, ...]] = []
    for _ in range(pairs):
        drawn.shuffle(ordered)
        found += [tuple(ordered), tuple(reversed(ordered))]
    return found


def asked(players: Sequence[str], walks: Sequence[Sequence[str]]) -> list[Coalition]:
    """Coalitions whose values `sampled` needs: all beginnings of the orders, every player alone, and all but one."""
    everybody = frozenset(players)
    found = dict.fromkeys([frozenset(), everybody, *(frozenset([p]) for p in players), *(everybody - {p} for p in players)])
    for walk in walks:
        found |= dict.fromkeys(frozenset(walk[:size]) for size in range(len(walk)))
    return list(found)


def exact(players: Sequence[str], value: Value) -> list[Share]:
    """Shares from the values of all subsets; the intervals have no width."""
    n = len(players)
    weight = [factorial(size) * factorial(n - size - 1) / factorial(n) for size in range(n)]

    def given(player: str) -> float:
        without = subsets([p for p in players if p != player])
        return fsum(weight[len(c)] * (value[c | {player}] - value[c]) for c in without)

    return [_share(player, players, value, given(player), 0.0) for player in players]


def sampled(players: Sequence[str], value: Value, walks: Sequence[Sequence[str]]) -> list[Share]:
    """Shares from the orders of `orders`: means over its pairs, with Student's intervals of 95 %."""
    added: dict[str, list[float]] = {p: [] for p in players}
    for walk in walks:
        for size, player in enumerate(walk):
            before = frozenset(walk[:size])
            added[player].append(value[before | {player}] - value[before])
    shares = []
    for player in players:
        pairs = [(a + b) / 2 for a, b in zip(added[player][::2], added[player][1::2], strict=True)]
        margin = student(len(pairs) - 1) * stdev(pairs) / sqrt(len(pairs))
        shares.append(_share(player, players, value, fsum(pairs) / len(pairs), margin))
    return shares


def _share(player: str, players: Sequence[str], value: Value, given: float, margin: float) -> Share:
    everybody = frozenset(players)
    last = value[everybody] - value[everybody - {player}]
    return Share(player, given, given - margin, given + margin, value[frozenset([player])], last)


def student(freedom: int, confidence: float = CONFIDENCE) -> float:
    """Quantile of Student's t, two-sided, for at least 3 degrees of freedom: Abramowitz and Stegun 26.7.5, four terms."""
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + fsum(term / freedom ** (i + 1) for i, term in enumerate(terms))
