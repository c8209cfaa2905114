"""What the twin, or the engine, computes for given tokens, as a trace. Source: docs/single.md §5."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from reference.checkpoint.store import WeightStore
from reference.model import Model
from reference.rounding import Profile
from reference.state import SequenceState

from .ops import known_taps
from .records import config_digest
from .single.contract import ITEMS
from .single.files import config_json
from .trace import Trace, TraceTensor, block_tap

if TYPE_CHECKING:
    from optimized.engine import Engine

DIMS = {1: "t", 2: "td", 3: "tsd", 4: "tsdd"}
AFTER_LAYER = "hc_ffn.streams"
ROWS = ("attn.compressor.row", "attn.indexer.compressor.row")  # rows of groups that a step completes


@dataclass
class Recording:
    """Payloads of one sequence, step by step: every tap that has a row a token or a finished group, under its full name."""

    layers: int
    wanted: frozenset[str]
    entries: list[TraceTensor] = field(default_factory=list)
    values: dict[str, Tensor] = field(default_factory=dict)
    heard: dict[str, list[Tensor]] = field(default_factory=dict)

    def __call__(self, tap: str, x: Tensor) -> None:
        if block_tap(tap) in self.wanted:
            self.heard.setdefault(tap, []).append(x)

    def end_step(self, phase: str, positions: range) -> None:
        """Keep what was heard of the tokens at `positions`."""
        for tap, parts in self.heard.items():
            x = torch.cat(parts) if len({p.shape[1:] for p in parts}) == 1 else parts[0]
            if x.shape[0] == len(positions) or block_tap(tap) in ROWS:  # choices among few rows are narrower here and there
                self._keep(tap, exact_storage(x), phase, positions)
        self.heard.clear()

    def _keep(self, tap: str, stored: tuple[str, Tensor], phase: str, positions: range) -> None:
        storage, x = stored
        item, key = ITEMS.get(block_tap(tap)), f"{positions.start}.{tap}"
        dims = "cd" if block_tap(tap) in ROWS else item.dims if item and len(item.dims) == x.ndim else DIMS[x.ndim]
        self.entries.append(TraceTensor(key, tap, self._layer(tap), phase, 0, tuple(positions), dims, storage, tuple(x.shape)))
        self.values[key] = x

    def _layer(self, tap: str) -> int:
        """Number of a tap's layer: drafters after the last, the embedding with the first and the head with the last."""
        word, _, rest = tap.partition(".")
        if word == "layers":
            return int(rest.partition(".")[0])
        return self.layers + int(rest.partition(".")[0]) if word == "mtp" else 0 if tap in ("embed", "ids") else self.layers - 1


def exact_storage(x: Tensor) -> tuple[str, Tensor]:
    """The narrowest plain format that holds every value, and the values in it."""
    if not x.is_floating_point():
        return "i64", x.long()
    for name, dtype in (("bf16", torch.bfloat16), ("f32", torch.float32)):
        if torch.equal(x.to(dtype).to(x.dtype), x):
            return name, x.to(dtype)
    return "f64", x.double()


def steps(tokens: int, prefill: int) -> list[tuple[str, range]]:
    """The first `prefill` tokens at once, the others one by one."""
    return [("prefill", range(prefill)), *(("decode", range(i, i + 1)) for i in range(prefill, tokens))]


Recorded = tuple[Trace, Mapping[str, Tensor]]


def twin_trace(store: WeightStore, ids: Tensor, prefill: int, profile: Profile, name: str, memory: int) -> Recorded:
    """Every payload of the twin in float64."""
    heard = Recording(store.config.num_hidden_layers, frozenset(known_taps() | set(ROWS)))
    model, state = Model(store, torch.float64, profile, memory, heard), SequenceState()
    for phase, positions in steps(len(ids), prefill):
        heard("ids", ids[positions.start : positions.stop])
        model.logits(model.forward([ids[positions.start : positions.stop]], [state]))
        heard.end_step(phase, positions)
    return made("twin (float64)", store, profile, name, heard), heard.values


def engine_trace(engine: Engine, store: WeightStore, ids: Tensor, prefill: int, profile: Profile, name: str) -> Recorded:
    """The engine's streams after each layer, and its logits."""
    layers = store.config.num_hidden_layers
    heard = Recording(layers, frozenset({AFTER_LAYER, "head.logits"}))
    sequence = engine.allocator.open()

    def on_layer(i: int, x: Tensor) -> None:
        heard(f"layers.{i}.{AFTER_LAYER}", x.cpu())

    for phase, positions in steps(len(ids), prefill):
        x = engine.step([ids[positions.start : positions.stop]], [sequence], on_layer)
        heard("head.logits", engine.logits(x).cpu())
        heard.end_step(phase, positions)
    return made("optimized", store, profile, name, heard), heard.values


def made(engine: str, store: WeightStore, profile: Profile, name: str, heard: Recording) -> Trace:
    config = store.config
    return Trace(engine, name, config_json(config), config_digest(config), profile, tuple(heard.entries))
