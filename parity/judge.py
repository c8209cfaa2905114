"""The verdict: is every element of a candidate's output within what rounding can explain, and if not, where.

Each kind of stored output is turned into one tensor, the share of its budget that every element needs: up to 1 is
legal, infinite is what no rounding explains. Source: docs/judge.md §1 and §6.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from reference import formats

from .budget import codes as code_rules
from .budget.bounded import LAMBDA, Arithmetic, Bounded
from .metrics import Distance, anomalies, distance, round_to, ulp

MIN_ROWS = 2  # fewer rows with an error say nothing about its sign


@dataclass(frozen=True)
class Dense:
    """Expected output in a plain format, `f32` or `bf16`: unrounded value and bound. `dims` are the axis letters."""

    expected: Bounded
    form: str
    dims: str


@dataclass(frozen=True)
class Codes:
    """Expected E4M3 codes and scale bytes: the unrounded value and bound they quantise, the block and the amax floor."""

    expected: Bounded
    block: int
    floor: float
    dims: str


@dataclass(frozen=True)
class Bytes:
    """Expected bytes, to the bit."""

    expected: Tensor
    dims: str


Expected = Dense | Codes | Bytes
Stored = Tensor | tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Verdict:
    """What one output of one op came to. `tests` holds the share of its limit that each test used; `budget_used` is the
    largest. `worst` names the place of the worst element. Empty output passes with nothing judged (`elements` 0)."""

    output: str
    elements: int
    rows: int
    failing_rows: int
    tests: Mapping[str, float]
    worst: Mapping[str, int | str | list[int]]
    distance: Distance | None
    storage: str
    flips: int = 0

    @property
    def budget_used(self) -> float:
        return max(self.tests.values(), default=0.0)

    @property
    def passed(self) -> bool:
        return self.budget_used <= 1


@dataclass(frozen=True)
class Places:
    """What the first axis of an output counts: for each label (`sequence`, `position`, `page`, ...) one entry a row."""

    labels: Mapping[str, Tensor] = field(default_factory=dict)

    def at(self, row: int) -> dict[str, int]:
        return {label: int(values[row]) for label, values in self.labels.items()}


def judge(output: str, stored: Stored, expected: Expected, how: Arithmetic, places: Places) -> Verdict:
    """Compare one stored output with what the twin expects. Raises ValueError where shapes differ."""
    if isinstance(expected, Codes):
        assert isinstance(stored, tuple)
        return _judge_codes(output, *stored, expected, places)
    assert isinstance(stored, Tensor)
    if isinstance(expected, Bytes):
        _same_shape(output, stored, expected.expected)
        wrong = (stored != expected.expected).double()
        return _verdict(output, {"bytes": wrong * torch.inf if wrong.any() else wrong}, expected.dims, places, None, "bytes")
    return _judge_dense(output, stored, expected, how, places)


def _same_shape(output: str, c: Tensor, t: Tensor) -> None:
    if c.shape != t.shape:
        raise ValueError(f"{output}: the candidate has shape {list(c.shape)}, the twin {list(t.shape)}")


def _judge_dense(output: str, stored: Tensor, expected: Dense, how: Arithmetic, places: Places) -> Verdict:
    t, form = expected.expected, expected.form
    _same_shape(output, stored, t.value)
    c = stored.double()
    tests = {"element": element_used(c, t, form)}
    hidden: dict[str, Tensor | float] = {"row_rms": rms_used(c, t, form)} if c.numel() else {}
    if c.numel() and not how.truncates:
        hidden["bias"] = bias_used(c, t.value, form)
    flips = int((c != round_to(t.value, form)).sum())
    return _verdict(output, tests, expected.dims, places, distance(c, t.value, form), form, hidden, flips)


def element_used(c: Tensor, t: Bounded, form: str) -> Tensor:
    """max(0, |c - t| - ½ulp) / A. The half ulp is that of the largest value the bound allows: past a power of two the
    grid is coarser. An anomaly (NaN, infinity) on one side only is infinite; on both, agreement."""
    odd = anomalies(c, t.value)
    error = torch.nan_to_num((c - t.value).abs(), nan=0.0, posinf=0.0)
    excess = (error - ulp(torch.nan_to_num(t.largest, nan=0.0, posinf=0.0), form) / 2).clamp_min(0)
    used = torch.where(excess > 0, excess / t.bound, 0.0)
    return torch.where(odd | used.isnan(), torch.inf, used)


def rms_used(c: Tensor, t: Bounded, form: str) -> Tensor:
    """Per row of the last axis: how much of the room between a perfect rounding and the bound its error takes.

    c is the nearest number to some t + e with |e| <= A, so |c - t| <= |r| + 2A where r is what a perfect rounding of t
    loses; hence rms(c - t) <= rms(r) + 2 rms(A). An error of less than half an ulp everywhere shows here.
    """
    finite = torch.isfinite(c) & torch.isfinite(t.value) & torch.isfinite(t.bound)
    error, perfect, bound = (torch.where(finite, x, 0.0) for x in (c - t.value, round_to(t.value, form) - t.value, t.bound))
    rms_error, rms_perfect, rms_bound = (x.square().mean(-1).sqrt() for x in (error, perfect, bound))
    excess = (rms_error - rms_perfect * (1 + 2.0**-40)).clamp_min(0)
    return torch.where(excess > 0, excess / (2 * rms_bound), 0.0)


def bias_used(c: Tensor, t: Tensor, form: str) -> float:
    """|z| / λ of the signed errors, towards zero and towards plus, rows as units.

    What a candidate has beyond a perfect rounding of t is d, mostly 0. A right kernel's d is as often up as down, so the
    sum of a row's d over all rows, divided by the root of their squares, stays below λ (Hoeffding for fair signs). The
    elements of one row may share a cause; rows do not.
    """
    finite = torch.isfinite(c) & torch.isfinite(t)
    beyond = torch.where(finite, (c - round_to(t, form)) / ulp(t, form), 0.0).flatten(0, -2)  # [rows, d]
    signs = torch.where(torch.nan_to_num(t) < 0, -1.0, 1.0).flatten(0, -2)
    return max(_fair(beyond.sum(-1)), _fair((beyond * signs).sum(-1))) / LAMBDA


def _fair(x: Tensor) -> float:
    size = x.norm().item()
    return abs(x.sum().item()) / size if int((x != 0).sum()) >= MIN_ROWS and size else 0.0


def _judge_codes(output: str, codes: Tensor, scales: Tensor, expected: Codes, places: Places) -> Verdict:
    t, block = expected.expected, expected.block
    _same_shape(output, codes, t.value)
    with_scale = code_rules.scale_used(scales, t, block, expected.floor)
    tests = {
        "scale": with_scale.repeat_interleave(block, -1)[..., : codes.shape[-1]],
        "code": torch.nan_to_num(code_rules.code_used(codes, scales, t, block), nan=torch.inf, posinf=torch.inf),
    }
    value = code_rules.dequantize(codes, scales, block)
    own, own_scales = formats.quantize_e4m3(t.value.float(), block, expected.floor)
    flips = int((codes != own).sum()) + int((scales != own_scales).sum())
    return _verdict(output, tests, expected.dims, places, distance(value, t.value, "f32"), f"e4m3_{block}", flips=flips)


def _verdict(
    output: str,
    elements: Mapping[str, Tensor],
    dims: str,
    places: Places,
    apart: Distance | None,
    storage: str,
    hidden: Mapping[str, Tensor | float] | None = None,
    flips: int = 0,
) -> Verdict:
    """Largest share per test, and the place of the worst element; the tests by row only name a row."""
    used = torch.stack(list(elements.values())).amax(0)
    rows = used.flatten(0, -2) if used.ndim > 1 else used[:, None]
    tests = {name: float(share.max()) if share.numel() else 0.0 for name, share in elements.items()}
    by_row = torch.zeros(rows.shape[0], dtype=torch.float64)
    for name, share in (hidden or {}).items():
        if isinstance(share, Tensor):
            by_row = torch.maximum(by_row, share.flatten())
            tests[name] = float(share.max())
        else:
            tests[name] = share
    if not used.numel():
        return Verdict(output, 0, 0, 0, tests, {}, apart, storage)
    failing = torch.maximum(rows.amax(-1), by_row) > 1
    worst = _worst(used, dims, places, by_row if by_row.max() > max(1.0, float(used.max())) else None)
    return Verdict(output, used.numel(), len(rows), int(failing.sum()), tests, worst, apart, storage, flips)


def _worst(used: Tensor, dims: str, places: Places, by_row: Tensor | None) -> dict[str, int | str | list[int]]:
    """Axis letter -> number for the worst element, labels of its first axis, and the channels beyond the budget."""
    flat = int(by_row.argmax()) * used.shape[-1] if by_row is not None else int(used.argmax())
    index = [int(i) for i in torch.unravel_index(torch.tensor(flat), used.shape)]
    worst: dict[str, int | str | list[int]] = dict(zip((AXES[letter] for letter in dims), index, strict=True))
    worst.update(places.at(index[0]))
    beyond = (used[tuple(index[:-1])] > 1).nonzero().flatten()
    if by_row is not None:
        worst.pop(AXES[dims[-1]])
    elif len(beyond):
        worst["channels"] = [int(beyond[0]), int(beyond[-1]) + 1]
    return worst


AXES = {
    "b": "sequence", "t": "token", "h": "head", "d": "channel", "s": "stream", "c": "row", "e": "expert", "g": "group",
    "k": "slot",
}  # fmt: skip


def finite_or_none(x: float) -> float | None:
    """A share for a record: JSON has no infinity, so what nothing excuses is null."""
    return x if math.isfinite(x) else None
