"""A trace of this project's own kernels, op by op: each is fed what the ones before it stored, as an engine's are.

Source: docs/single.md §5.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from optimized.engine import FORMS
from optimized.pool.geometry import pooled_tokens
from reference import formats
from reference.checkpoint.loader import Loader
from reference.checkpoint.store import WeightStore
from reference.config import Config
from reference.rounding import Profile

from ..budget.bounded import ACCUMULATE
from ..cases import layer_kinds, layer_name
from ..evaluation import Weights
from ..judge import Stored
from ..listening import steps
from ..ops import OPS, Op
from ..records import config_digest
from ..single.contract import ITEMS, LEFT_OUT, contract, tap
from ..single.files import config_json
from ..single.given import GivenStep, step_of
from ..step import Step
from ..trace import Trace, TraceTensor
from .feeding import Feed
from .reading import STORAGE
from .tape import Held, Segment, Tape

HOW = ACCUMULATE["fp32"]
ENGINE = "optimized, op by op"
Outputs = dict[str, Stored]


def begin(segments: Sequence[Segment], ids: Mapping[int, Tensor]) -> Tape:
    """A tape of these steps on which nothing is but token ids, those of each request from position 0 on."""
    tape = Tape(list(segments))
    for k, s in enumerate(tape.segments):
        tape.held[0, "ids", k] = Held(ids[s.request][s.start : s.end], "i64")
    return tape


class RunStep(GivenStep):
    """A step whose rows, where it is long, go into a payload first: a ring keeps the last of them only."""

    @property
    def direct(self) -> bool:
        return Step.direct.__get__(self)


@dataclass(frozen=True)
class Kernels:
    """Kernels of one layer, writing on a tape."""

    feed: Feed
    weights: Weights

    @classmethod
    def of(cls, tape: Tape, loader: Loader, profile: str, layer: int) -> Kernels:
        weights = Weights.load(loader, loader.config, layer)
        return cls(Feed(tape, loader.config, layer, profile, weights.block), weights)

    @property
    def ops(self) -> list[Op]:
        """What the layer has, in causal order."""
        kinds = layer_kinds(self.feed.config, self.feed.layer)
        return [op for op in OPS if op.name not in LEFT_OUT and kinds & set(op.kinds)]

    def run(self, op: Op, steps: Sequence[int], spoil: Callable[[Outputs], Outputs] = dict) -> None:
        """One op in these steps, as one batch; `spoil` may change what it stores."""
        for name, x in spoil(_outputs(op, self.feed, self.weights, steps)).items():
            _keep(self.feed, op.name, name, x, steps)


def kernels_trace(
    store: WeightStore, ids: Tensor, prefill: int, profile: Profile, name: str, memory: int
) -> tuple[Trace, Mapping[str, Tensor]]:
    """Every payload of one sequence as the kernels of `optimized` store it; the drafter aside, which needs one token more."""
    config = store.config
    tape = begin([Segment(0, phase, tuple(positions)) for phase, positions in steps(len(ids), prefill)], {0: ids})
    loader = Loader(store, torch.float64, memory)
    for layer in range(config.num_hidden_layers):
        kernels = Kernels.of(tape, loader, profile.name, layer)
        for k in range(len(tape.segments)):
            for op in kernels.ops:
                kernels.run(op, [k])
    found, values = entries(tape, config)
    return Trace(ENGINE, name, config_json(config), config_digest(config), profile, tuple(found)), values


def _outputs(op: Op, feed: Feed, weights: Weights, steps: Sequence[int]) -> dict[str, Stored]:
    """What the kernel puts out, by the contract's names."""
    assert op.candidate is not None
    step = step_of(feed.inputs(op.name, steps), weights, HOW, RunStep)
    if op.name in ("attn.q", "attn.kv"):
        step.capture = step.capture.filled(op.inputs)
    stored = op.candidate(step, op.name)
    if op.name in ("attn.indexer.scores", "attn.indexer.picks") and not stored:  # nobody sees a key yet
        width = 0 if op.name.endswith("scores") else feed.config.index_topk
        stored = {op.name: torch.full((len(step.batch.ids), width), -1)}
    return {n: stored[n] for n in contract(op.name, feed.config, feed.layer, FORMS[feed.profile].rows).outputs if n in stored}


def _keep(feed: Feed, op: str, name: str, x: Stored, steps: Sequence[int]) -> None:
    """What was stored of each step, on the tape."""
    rows = [_rows(feed, op, name, k) for k in steps]
    total, each = len(x[0] if isinstance(x, tuple) else x), sum(rows)
    rows = [n * total // each if each else 0 for n in rows]  # several rows a token: slots, streams
    packed = ITEMS[name].storage == "key" and FORMS[feed.profile].keys.form == "fp4"
    for k, part in zip(steps, _split(x, rows), strict=True):
        feed.tape.held[feed.layer, tap(op, name), k] = _held(part, packed)


def _rows(feed: Feed, op: str, name: str, k: int) -> int:
    """Rows of one step in an output: tokens, tokens that a ring keeps, groups that are complete, or the last token."""
    s = feed.segment(k)
    if name == "head.logits":
        return 1
    if name in ("values", "gates"):
        return min(len(s.positions), pooled_tokens(feed.config.ratio(feed.layer)))
    ratio = 1 if ITEMS[name].dims[0] == "t" or op == "attn.kv" else feed.config.ratio(feed.layer)
    return s.end // ratio - s.start // ratio


def _split(x: Stored, rows: Sequence[int]) -> list[Stored]:
    if isinstance(x, tuple):
        return list(zip(x[0].split(list(rows)), x[1].split(list(rows)), strict=True))
    return list(x.split(list(rows)))


def _held(x: Stored, packed: bool) -> Held:
    if isinstance(x, tuple):
        return Held(formats.e2m1_pack(x[0]), "e2m1x2", x[1]) if packed else Held(x[0], "e4m3", x[1])
    return Held(x, {torch.int32: "i32", torch.int64: "i64"}.get(x.dtype) or STORAGE[x.dtype])


def _dims(name: str, x: Tensor) -> str:
    """Axis letters: of what has a row a token; `c` where a step leaves rows of its own."""
    if name == "head.logits":
        return "bd"
    if name in ITEMS and len(ITEMS[name].dims) == x.ndim:
        return ITEMS[name].dims
    return "td" if name in ITEMS or name.startswith(("attn.kv.", "attn.rope.table.")) else "cd"


def entries(tape: Tape, config: Config) -> tuple[list[TraceTensor], dict[str, Tensor]]:
    """What is on a tape as tensors of a trace, step by step."""
    found: list[TraceTensor] = []
    values: dict[str, Tensor] = {}
    for (layer, name, k), held in sorted(tape.held.items(), key=lambda item: (item[0][2], item[0][0])):
        s = tape.segments[k]
        full = f"{layer_name(config, layer)}.{name}"
        dims = _dims(name, held.value)
        each = len(held.value) // len(s.positions) if dims[0] == "t" else 1
        positions = tuple(p for p in s.positions for _ in range(each))
        entry = TraceTensor(f"{k}.{full}", full, layer, s.phase, s.request, positions, dims, held.storage,
                            tuple(held.value.shape))  # fmt: skip
        found.append(entry)
        values[entry.key] = held.value.clone()
        if held.scale is not None:
            scale = replace(entry, key=f"{entry.key}.scale", tap=f"{full}.scale", storage="e8m0", shape=tuple(held.scale.shape))
            found.append(scale)
            values[scale.key] = held.scale
    return found, values
