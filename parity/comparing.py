"""Two traces side by side: how far each tap is apart, and where they first part by more than storage explains.

Source: docs/single.md §5.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from reference import formats
from reference.errors import BadInput

from .metrics import cosine, relative_l2
from .ops import OPS
from .trace import Trace, TraceTensor, local_tap

# Half the distance of neighbouring numbers, relative to the smaller: what one rounding of every element may cost.
UNIT = {"f64": 2.0**-53, "f32": 2.0**-24, "bf16": 2.0**-8, "e4m3": 2.0**-4, "e2m1x2": 2.0**-2}
Key = tuple[str, int]  # tap, request


@dataclass(frozen=True)
class Rows:
    """One tap of one request: a row a token at `positions`, or one tensor of no tokens; values, storage, and its layer."""

    layer: int
    storage: str
    positions: tuple[int, ...]
    values: Tensor


@dataclass(frozen=True)
class Apart:
    """One tap in both traces: distances over the tokens they share, the position of the worst, and whether this is more than
    one rounding to the coarser storage."""

    tap: str
    layer: int
    request: int
    tokens: int
    relative_l2: float
    cosine: float
    max_abs: float
    position: int | None
    differs: bool
    beyond: bool


def compare(a: Trace, b: Trace) -> tuple[list[Apart], list[str]]:
    """Distances in causal order, and the taps that only one trace has. Raises BadInput for traces of two models, or a tensor
    whose parts are not all there."""
    if a.config_sha256 != b.config_sha256:
        raise BadInput(f"{b.root}: another model than {a.root}: their configurations differ")
    left, right = gather(a), gather(b)
    both = sorted(left.keys() & right.keys(), key=lambda k: (left[k].layer, order(k[0]), k))
    return [d for k in both if (d := apart(k, left[k], right[k]))], sorted({k[0] for k in left.keys() ^ right.keys()})


def order(tap: str) -> int:
    """Place of a tap in a layer: that of the op that puts it out."""
    return _ORDER.get(local_tap(tap).removesuffix(".scale"), len(_ORDER))


_ORDER: dict[str, int] = {}
for _op in OPS:
    for _tap in _op.outputs:
        _ORDER.setdefault(_tap, len(_ORDER))


def gather(trace: Trace) -> dict[Key, Rows]:
    """Every tap of a request with all its tokens, shards and summands put together."""
    parts: dict[tuple[Key, tuple[int, ...]], list[TraceTensor]] = {}
    for t in trace.tensors:
        if not t.tap.endswith(".scale"):
            parts.setdefault(((t.tap, t.request), t.positions), []).append(t)
    steps: dict[Key, list[Rows]] = {}
    for (key, positions), tensors in parts.items():
        whole = merged(trace, tensors)
        of_tokens = () if tensors[0].dims.startswith("c") else positions  # rows of finished groups are compared in order
        if tensors[0].dims.startswith("b"):  # rows of a step's last tokens
            of_tokens = positions[len(positions) - len(whole) :]
        steps.setdefault(key, []).append(Rows(tensors[0].layer, tensors[0].storage, of_tokens, whole))
    return {key: joined(rows) for key, rows in steps.items()}


def joined(steps: list[Rows]) -> Rows:
    """Steps one after the other. Those of another width than the first (choices among few rows) are left out."""
    fitting = [r for r in steps if r.values.shape[1:] == steps[0].values.shape[1:]]
    positions = tuple(p for r in fitting for p in r.positions)
    return Rows(steps[0].layer, steps[0].storage, positions, torch.cat([r.values for r in fitting]))


def merged(trace: Trace, tensors: list[TraceTensor]) -> Tensor:
    """Shards side by side, partial sums added. Raises BadInput where one is missing or there twice."""
    first = tensors[0]
    if first.shard is None:
        if len(tensors) > 1:
            raise BadInput(f"{trace.root}: {first.tap} of request {first.request} is there {len(tensors)} times")
        return values(trace, first)
    ordered = sorted(tensors, key=lambda t: t.shard.index if t.shard else -1)
    if [t.shard.index if t.shard else -1 for t in ordered] != list(range(first.shard.count)):
        raise BadInput(f"{trace.root}: {first.tap} of request {first.request} has not all of its {first.shard.count} shards")
    each = [values(trace, t) for t in ordered]
    return torch.stack(each).sum(0) if first.partial_sum else torch.cat(each, first.dims.index(first.shard.axis))


def values(trace: Trace, t: TraceTensor) -> Tensor:
    """float64; codes by their scales where these are in the trace, else as the numbers of the codes."""
    x, of = trace.get(t), (f"{t.tap}.scale", t.request, t.positions)
    if t.storage not in ("e4m3", "e2m1x2"):
        return x.double()
    scale = next((s for s in trace.tensors if (s.tap, s.request, s.positions) == of), None)
    decoded = formats.e4m3_decode(x) if t.storage == "e4m3" else formats.e2m1_decode(formats.e2m1_unpack(x))
    if scale is None:
        return decoded.double()
    bytes_ = trace.get(scale)
    return formats.dequantize_blocks(decoded, bytes_, -(-decoded.shape[-1] // bytes_.shape[-1])).double()


def apart(key: Key, a: Rows, b: Rows) -> Apart | None:
    """Distance over the tokens that both have; None where there are none, or nothing in a row. Raises BadInput for two
    shapes."""
    at = {place: i for i, place in enumerate(occurrences(b.positions))}
    shared = [(i, at[place]) for i, place in enumerate(occurrences(a.positions)) if place in at]
    x, y = (a.values, b.values) if not a.positions else (a.values[[i for i, _ in shared]], b.values[[j for _, j in shared]])
    if x.shape != y.shape:
        raise BadInput(f"{key[0]}: {list(x.shape)} in one trace, {list(y.shape)} in the other")
    if not x.numel():
        return None
    agree = (x == y) | (x.isnan() & y.isnan())
    error = (x - y).abs().nan_to_num(nan=torch.inf).masked_fill(agree, 0.0)
    rows = error.reshape(len(error), -1).amax(1)
    numbers = bool(torch.isfinite(x).all() and torch.isfinite(y).all())
    far = relative_l2(x, y) if numbers else torch.inf if bool((error > 0).any()) else 0.0
    unit = max(UNIT.get(a.storage, 0.0), UNIT.get(b.storage, 0.0))
    position = a.positions[shared[int(rows.argmax())][0]] if a.positions else None
    return Apart(key[0], a.layer, key[1], len(x), far, cosine(x, y) if numbers else 0.0, float(error.amax()), position,
                 bool((error > 0).any()), far > unit)  # fmt: skip


def occurrences(positions: Iterable[int]) -> list[tuple[int, int]]:
    """Each position and how often it came before: a token may have several rows."""
    seen: Counter[int] = Counter()
    places = []
    for p in positions:
        places.append((p, seen[p]))
        seen[p] += 1
    return places


def first(found: Iterable[Apart]) -> Apart | None:
    """The first tap in causal order that is further apart than its storage explains."""
    return next((d for d in found if d.beyond), None)
