"""The twin under every coalition of rounding sites, place by place: weights of a layer are read once, for all of them.

Coalitions that agree up to a place are one there. Source: docs/attribution.md §4.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from reference.block import Block
from reference.checkpoint.store import WeightStore
from reference.model import DEFAULT_MEMORY, Model
from reference.rounding import Profile, Sites
from reference.state import SequenceState

from ..cases import layer_id
from .keep import Kept
from .players import EMBED, HEAD, Switches

Listen = Callable[[int, str], None]  # finished steps, and the place at hand


@dataclass(frozen=True)
class Node:
    """One state of affairs behind a place: which one it came from, and the sites that round at the place."""

    parent: int
    sites: frozenset[str]


@dataclass(frozen=True)
class Twin:
    """A model in float64 on some prompts; `profile` says what a site does when it is on."""

    store: WeightStore
    profile: Profile
    prompts: Sequence[Tensor]
    memory: int = DEFAULT_MEMORY
    _blocks: dict[int, Block] = field(default_factory=dict)

    @cached_property
    def model(self) -> Model:
        return Model(self.store, torch.float64, memory=self.memory)

    def route(self, last: int, logits: bool) -> list[str]:
        """All places up to the streams behind layer `last`, or up to the logits."""
        inside = [layer_id(self.store.config, i) for i in range(last + 1)]
        return [EMBED, *inside, *[HEAD] * logits]

    def step(self, place: str, sites: frozenset[str], x: Tensor | None) -> Tensor:
        """What lies behind a place, of what lies before it: streams [t, s, D] float64, behind the head logits [t, vocab]."""
        model, batch = self.model, self.model.batch(self.prompts, [SequenceState() for _ in self.prompts])
        chosen = Sites(replace(self.profile, sites={s: r for s, r in self.profile.sites.items() if s in sites}))
        if x is None:
            return chosen("embed", model.loader.embed(batch.ids))[:, None].repeat(1, model.config.hc_mult, 1)  # [t, s, D]
        if place == HEAD:
            model.sites = chosen
            return model.logits(x)
        block = self._block(int(place.removeprefix("layer_")))
        return block(x, batch, [block.attn.initial_state() for _ in self.prompts], chosen)[0]

    def _block(self, layer: int) -> Block:
        """The layer at hand; an earlier one is let go."""
        if layer not in self._blocks:
            self._blocks.clear()
            self._blocks[layer] = self.model.loader.block(layer)
        return self._blocks[layer]


def plan(route: Sequence[str], wanted: Sequence[Switches]) -> tuple[list[list[Node]], list[int]]:
    """Nodes of every place, and which of the last place's belongs to each coalition."""
    here, nodes = [0] * len(wanted), []
    for place in route:
        on = [frozenset(site for at, site in switches if at == place) for switches in wanted]
        found: dict[Node, int] = {}
        here = [found.setdefault(Node(parent, sites), len(found)) for parent, sites in zip(here, on, strict=True)]
        nodes.append(list(found))
    return nodes, here


def drifts(twin: Twin, route: Sequence[str], wanted: Sequence[Switches], kept: Kept, listen: Listen) -> list[float]:
    """Squared relative L2 of what lies behind the route under each coalition, against that under the first: truth."""
    nodes, ends = plan(route, wanted)
    begun = max((i + 1 for i, place in enumerate(route) if kept.finished(place)), default=0)
    done = sum(map(len, nodes[:begun]))
    for i, place in list(enumerate(route))[begun:]:
        for number, node in enumerate(nodes[i]):
            if not kept.has(place, number):
                before = None if i == 0 else kept.get(route[i - 1], node.parent)
                kept.put(place, number, twin.step(place, node.sites, before))
            done += 1
            listen(done, place)
        kept.finish(place, route[i - 1] if i else None)
    truth = kept.get(route[-1], ends[0])
    behind = [squared(kept.get(route[-1], number), truth) for number in range(len(nodes[-1]))]
    return [behind[end] for end in ends]


def squared(x: Tensor, truth: Tensor) -> float:
    """|x - truth|² / |truth|²: of independent errors the squares add, the lengths do not."""
    return float((x - truth).square().sum() / truth.square().sum())
