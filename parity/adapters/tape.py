"""What a trace holds, step by step: taps of a layer by request, the parts of several ranks put together.

Source: docs/single.md §6.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor

from reference import formats
from reference.config import Config
from reference.errors import BadInput

from ..cases import layer_name
from ..metrics import MANTISSA_BITS, ulp
from ..trace import MANIFEST, Trace, TraceTensor, block_tap

Key = tuple[int, str, int]  # layer, tap inside it, number of the step
CODED = ("e4m3", "e2m1x2", "e2m1")
TABLES = ("attn.rope.table.cos", "attn.rope.table.sin")  # rows belong to positions, and to no request


@dataclass(frozen=True)
class Segment:
    """The tokens of one request in one step: consecutive positions."""

    request: int
    phase: str
    positions: tuple[int, ...]

    @property
    def start(self) -> int:
        return self.positions[0]

    @property
    def end(self) -> int:
        """Tokens the request has after this step."""
        return self.positions[-1] + 1


@dataclass(frozen=True)
class Held:
    """One tap of one step as it is stored: numbers, or codes and their scale bytes, or rows of a cache in `layout` at `slots`.
    `slack`: what the roundings of partial sums can have come to, where `value` is the sum of some. `e2m1`: one code a byte."""

    value: Tensor
    storage: str
    scale: Tensor | None = None
    layout: str = "plain"
    slots: Tensor | None = None
    slack: Tensor | None = None

    @property
    def coded(self) -> bool:
        return self.storage in CODED

    def numbers(self) -> Tensor:
        """float64, codes times their scales; integers as they are."""
        if not self.coded:
            return self.value.double() if self.value.is_floating_point() else self.value.long()
        assert self.scale is not None
        codes = formats.e2m1_unpack(self.value) if self.storage == "e2m1x2" else self.value
        x = formats.e4m3_decode(codes) if self.storage == "e4m3" else formats.e2m1_decode(codes)
        scale = formats.e8m0_decode(self.scale) if self.scale.dtype == torch.uint8 else self.scale
        block = -(-x.shape[-1] // scale.shape[-1])
        return x.double() * scale.double().repeat_interleave(block, -1)[..., : x.shape[-1]]


@dataclass
class Tape:
    """Steps in the order in which they were taken, and what is held of each: read, or still in the trace."""

    segments: list[Segment]
    held: dict[Key, Held] = field(default_factory=dict)
    parts: Mapping[Key, list[TraceTensor]] = field(default_factory=dict)
    tables: Mapping[tuple[int, str], list[TraceTensor]] = field(default_factory=dict)
    read_tables: dict[tuple[int, str], dict[int, Tensor]] = field(default_factory=dict)
    trace: Trace | None = None

    @property
    def name(self) -> str:
        """Where this came from, for messages."""
        return "tape" if self.trace is None else str(self.trace.root / MANIFEST)

    @classmethod
    def of(cls, trace: Trace, config: Config) -> Tape:
        """Raises BadInput for a tensor of another layer than its tap's, of tokens that make no step, whose parts are not all
        there, or that is there twice."""
        where = f"{trace.root / MANIFEST}: "
        for t in trace.tensors:
            _check_layer(t, config, where)
        timed = [t for t in trace.tensors if block_tap(t.tap) not in (*TABLES, "positions", "bounds")]
        steps = {s: k for k, s in enumerate(segments(timed, where))}
        parts: dict[Key, list[TraceTensor]] = {}
        for t in timed:
            parts.setdefault((t.layer, block_tap(t.tap), _step(t, steps, where)), []).append(t)
        for tensors in parts.values():
            _check_parts(tensors, where)
        tables: dict[tuple[int, str], list[TraceTensor]] = {}
        for t in (t for t in trace.tensors if block_tap(t.tap) in TABLES):
            tables.setdefault((t.layer, block_tap(t.tap)), []).append(t)
        return cls(list(steps), parts=parts, tables=tables, trace=trace)

    def get(self, layer: int, tap: str, step: int) -> Held | None:
        """None where the trace has none. Raises BadInput for damage."""
        key = (layer, tap, step)
        if key not in self.held:
            if self.trace is None or key not in self.parts:
                return None
            self.held[key] = self._read(key)
        return self.held[key]

    def _read(self, key: Key) -> Held:
        assert self.trace is not None
        layer, tap, step = key
        first, (value, slack) = self.parts[key][0], merged(self.trace, self.parts[key])
        others = (self.get(layer, f"{tap}.{end}", step) for end in ("scale", "slots"))
        scale, slots = (None if x is None else x.value for x in others)
        if first.storage in CODED and scale is None:
            raise BadInput(f"{self.name}: {first.tap}: codes without scales")
        return Held(value, first.storage if slack is None else "f64", scale, first.layout, slots, slack)

    def table(self, layer: int, name: str) -> dict[int, Tensor] | None:
        """Rows of `cos` or `sin` by position; None where there is no table of this layer. Raises BadInput for damage, and for
        two rows of one position that differ: a row belongs to no request."""
        key = layer, f"attn.rope.table.{name}"
        if key not in self.tables or self.trace is None:
            return None
        if key not in self.read_tables:
            rows = [(t.positions, self.trace.get(t)) for t in self.tables[key]]
            known: dict[int, Tensor] = {}
            for p, row in ((p, row) for positions, x in rows for p, row in zip(positions, x, strict=True)):
                if not torch.equal(known.setdefault(p, row), row):
                    raise BadInput(f"{self.name}: {key[1]}, layer {layer}: two rows of position {p} differ")
            self.read_tables[key] = known
        return self.read_tables[key]

    def before(self, step: int) -> list[int]:
        """Earlier steps of the same request, the last one first."""
        request = self.segments[step].request
        return [k for k in reversed(range(step)) if self.segments[k].request == request]

    def forget(self, layer: int) -> None:
        """What was read of the layers before this one."""
        for key in [key for key in self.held if key[0] < layer and self.trace is not None]:
            del self.held[key]


def _check_layer(t: TraceTensor, config: Config, where: str) -> None:
    layers = config.num_hidden_layers + int(config.has_mtp)
    if not 0 <= t.layer < layers:
        raise BadInput(f"{where}tensor {t.key!r}: layer {t.layer} of {layers}")
    name, local = layer_name(config, t.layer), block_tap(t.tap)
    if t.tap not in (local, f"{name}.{local}", f"{name.removesuffix('.block')}.{local}"):
        raise BadInput(f"{where}tensor {t.key!r}: {t.tap} is no tap of layer {t.layer}")


def segments(tensors: Iterable[TraceTensor], where: str) -> list[Segment]:
    """Steps of all requests, in the order in which tensors with a row a token first name them. Raises BadInput for tokens that
    do not follow each other."""
    named = dict.fromkeys(_segment(t) for t in tensors if "t" in t.dims and t.positions)
    for s in named:
        if any(b != a + 1 for a, b in pairwise(s.positions)):
            raise BadInput(f"{where}request {s.request}, {s.phase}: positions from {s.start} on are not consecutive")
    return [s for s in named if not any(_inside(s, other) for other in named if other != s)]


def _segment(t: TraceTensor) -> Segment:
    return Segment(t.request, t.phase, tuple(dict.fromkeys(t.positions)))  # several rows of a token repeat its position


def _inside(a: Segment, b: Segment) -> bool:
    return (a.request, a.phase) == (b.request, b.phase) and b.start <= a.start and a.end <= b.end


def _step(t: TraceTensor, steps: Mapping[Segment, int], where: str) -> int:
    """The step that a tensor is of: with just its tokens, or with them among others."""
    mine = _segment(t)
    if mine in steps:
        return steps[mine]
    found = next((k for s, k in steps.items() if mine.positions and _inside(mine, s)), None)
    if found is None:
        raise BadInput(f"{where}tensor {t.key!r}: its positions are no step of request {t.request}, {t.phase}")
    return found


def _check_parts(tensors: Sequence[TraceTensor], where: str) -> None:
    """Raises BadInput where a shard is missing, something is there twice, or parts are not of one whole."""
    first, numbers = tensors[0], [t.shard.index if t.shard else -1 for t in tensors]
    name = f"{where}{first.tap} of request {first.request}, {first.phase}"
    if len(set(numbers)) < len(numbers):
        raise BadInput(f"{name}, is there {len(tensors)} times")
    if len(tensors) != (first.shard.count if first.shard else 1):
        raise BadInput(f"{name}, has not all of its {first.shard.count if first.shard else 1} shards")
    if len({_whole(t) for t in tensors}) > 1:
        raise BadInput(f"{name}: its shards are not parts of one tensor: {', '.join(str(list(t.shape)) for t in tensors)}")


def _whole(t: TraceTensor) -> tuple[object, ...]:
    """What all parts of a tensor have in common. Along the axis that they share they may be of several sizes, as the last
    part of a vocabulary is."""
    axis = None if t.shard is None or t.partial_sum else t.dims.index(t.shard.axis)
    shape = tuple(n for i, n in enumerate(t.shape) if i != axis)
    split = (t.shard.axis, t.shard.count) if t.shard else None
    return split, shape, t.dims, t.storage, t.layout, t.partial_sum, t.positions


def merged(trace: Trace, tensors: list[TraceTensor]) -> tuple[Tensor, Tensor | None]:
    """All shards side by side, or partial sums added in float64 with what their own roundings come to. Raises BadInput for
    damage, and codes to be added."""
    first = tensors[0]
    each = [trace.get(t) for t in sorted(tensors, key=lambda t: t.shard.index if t.shard else -1)]
    if first.shard is None:
        return each[0], None
    if not first.partial_sum:
        return torch.cat(each, first.dims.index(first.shard.axis)), None
    if not each[0].is_floating_point():
        raise BadInput(f"{trace.root}: {first.tap}: partial sums of {first.storage}")
    terms = [x.double() for x in each]
    slack = [ulp(x, first.storage) / 2 for x in terms] if first.storage in MANTISSA_BITS else [torch.zeros_like(terms[0])]
    return torch.stack(terms).sum(0), torch.stack(slack).sum(0)
