"""The drift of one output, split over sites, parts, layers or formats. Source: docs/attribution.md §1."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from math import fsum
from typing import Any

from ..records import SCHEMA_VERSION, Record, config_digest
from . import game
from .keep import Kept
from .players import Switches, gather, places, switches
from .walk import Twin, drifts, plan

Listen = Callable[[int, str], None]


@dataclass(frozen=True)
class Question:
    """`layers` are those that round, in order; `output` is `streams` behind the last of them, or `logits`; `whole` adds
    the sites of the embedding and of the head. `permutations` is the number of orders where orders are drawn."""

    twin: Twin
    layers: Sequence[int]
    whole: bool
    output: str
    ways: Sequence[str]
    permutations: int
    seed: int

    def asked(self) -> dict[str, Any]:
        """All that decides the result."""
        twin = self.twin
        return {
            "model": twin.store.identity, "config_sha256": config_digest(twin.store.config),
            "profile": twin.profile.to_json(), "prompts": [ids.tolist() for ids in twin.prompts],
            "layers": list(self.layers), "whole": self.whole, "output": self.output, "ways": list(self.ways),
            "permutations": self.permutations, "seed": self.seed,
        }  # fmt: skip

    def route(self) -> list[str]:
        config = self.twin.store.config
        logits = self.output == "logits"
        return self.twin.route(config.num_hidden_layers - 1 if logits else max(self.layers), logits)

    def splittings(self) -> list[Splitting]:
        config, route = self.twin.store.config, self.route()
        where = [place for place in places(config, self.layers, self.whole) if place in route]
        every = switches(config, self.twin.profile, where)
        return [Splitting(by, gather(every, self.twin.profile, by), self.permutations, self.seed) for by in self.ways]


@dataclass(frozen=True)
class Splitting:
    """One game: its players by name, each with its switches."""

    by: str
    players: dict[str, Switches]
    permutations: int
    seed: int

    @property
    def all_subsets(self) -> bool:
        """Whether all subsets cost no more than the orders would."""
        n = len(self.players)
        return 2**n <= self.permutations * n

    def orders(self) -> list[tuple[str, ...]]:
        return game.orders(list(self.players), self.permutations // 2, self.seed)

    def coalitions(self) -> list[game.Coalition]:
        names = list(self.players)
        return game.subsets(names) if self.all_subsets else game.asked(names, self.orders())

    def on(self, coalition: game.Coalition) -> Switches:
        return frozenset[tuple[str, str]]().union(*(self.players[name] for name in coalition))

    def shares(self, value: game.Value) -> list[game.Share]:
        names = list(self.players)
        found = game.exact(names, value) if self.all_subsets else game.sampled(names, value, self.orders())
        return sorted(found, key=lambda s: -s.share)


def coalitions(question: Question) -> list[Switches]:
    """All coalitions of all splittings as switches, each once; nobody first."""
    nobody: Switches = frozenset()
    wanted = (s.on(c) for s in question.splittings() for c in s.coalitions())
    return list(dict.fromkeys((nobody, *wanted)))


def steps(question: Question) -> int:
    """Layers to be computed, over all coalitions."""
    return sum(map(len, plan(question.route(), coalitions(question))[0]))


def split(question: Question, kept: Kept, listen: Listen) -> list[Record]:
    """One `attribution` record for each way of splitting."""
    wanted = coalitions(question)
    found = dict(zip(wanted, drifts(question.twin, question.route(), wanted, kept, listen), strict=True))
    return [_record(question, s, {c: found[s.on(c)] for c in s.coalitions()}) for s in question.splittings()]


def _record(question: Question, splitting: Splitting, value: game.Value) -> Record:
    shares = splitting.shares(value)
    drift = value[frozenset(splitting.players)]
    alone, last = (fsum(getattr(s, name) for s in shares) for name in ("alone", "last"))
    return {
        "record": "attribution", "schema": SCHEMA_VERSION, "model": question.twin.store.identity,
        "config_sha256": config_digest(question.twin.store.config), "profile": question.twin.profile.name,
        "output": question.output, "behind": question.route()[-1], "rounding": list(question.layers), "whole": question.whole,
        "tokens": sum(map(len, question.twin.prompts)), "seed": question.seed, "by": splitting.by,
        "method": "all subsets" if splitting.all_subsets else "orders",
        "permutations": 0 if splitting.all_subsets else question.permutations, "coalitions": len(value),
        "drift": drift, "relative_l2": drift**0.5, "alone": alone, "last": last, "interaction": drift - alone,
        "shares": [{**asdict(s), "switches": len(splitting.players[s.player])} for s in shares], "volatile": {},
    }  # fmt: skip
