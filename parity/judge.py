"""The verdict: is every element of a candidate's output within what rounding can explain, and if not, where.

Each kind of stored output is turned into one tensor, the share of its budget that every element needs: up to 1 is
legal, infinite is what no rounding explains. Source: docs/judge.md §1 and §6.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from .budget import codes as code_rules
from .budget.bounded import LAMBDA, Arithmetic, Bounded
from .metrics import Distance, anomalies, distance, round_to, ulp
from .patterns import Pattern, explain

MOST_BYTES = 1 << 22  # of an output of bytes that patterns are looked for in
MIN_ROWS = 2  # fewer rows with an error say nothing about its sign


@dataclass(frozen=True)
class Dense:
    """Expected output in a plain format, `f32` or `bf16`: unrounded value and bound. `dims` are the axis letters.
    `fair`: errors of different rows have nothing in common, so their sign may be tested."""

    expected: Bounded
    form: str
    dims: str
    fair: bool = True


@dataclass(frozen=True)
class Codes:
    """Expected codes, one a byte, and scale bytes: the unrounded value and bound they quantise, the block, the amax floor
    and the format."""

    expected: Bounded
    block: int
    floor: float
    dims: str
    grid: code_rules.Grid = code_rules.E4M3


@dataclass(frozen=True)
class Selection:
    """Expected choice of the `k` largest of expected[t, :visible[t]]: [t, k] numbers without repetition, -1 at the end."""

    expected: Bounded
    visible: Tensor
    k: int
    dims: str = "tk"


@dataclass(frozen=True)
class Bytes:
    """Expected bytes, to the bit."""

    expected: Tensor
    dims: str


@dataclass(frozen=True)
class Unchanged:
    """Bytes that differ from before, those aside that were to be written: none may."""

    dims: str


Expected = Dense | Codes | Bytes | Unchanged | Selection
Stored = Tensor | tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Verdict:
    """What one output of one op came to. `tests` holds the share of its limit that each test used; `budget_used` is the
    largest. `worst` names the place of the worst element, `pattern` what kind of mistake a failing output shows, where that
    is clear. Empty output passes with nothing judged (`elements` 0)."""

    output: str
    elements: int
    rows: int
    failing_rows: int
    tests: Mapping[str, float]
    worst: Mapping[str, int | str | list[int]]
    distance: Distance | None
    storage: str
    flips: int = 0
    pattern: Pattern | None = None

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


class MismatchedShape(ValueError):
    """A candidate's output has another shape than the twin's."""


def judge(
    output: str, stored: Stored, expected: Expected, how: Arithmetic, places: Places, earlier: Stored | None = None
) -> Verdict:
    """Compare one stored output with what the twin expects; `earlier` is what the candidate stored of it in the step
    before. Raises MismatchedShape where shapes differ."""
    verdict = _compare(output, stored, expected, how, places)
    if verdict.passed or isinstance(expected, Selection | Unchanged):
        return verdict
    return replace(verdict, pattern=_pattern(stored, expected, earlier))


def _compare(output: str, stored: Stored, expected: Expected, how: Arithmetic, places: Places) -> Verdict:
    if isinstance(expected, Codes):
        assert isinstance(stored, tuple)
        return _judge_codes(output, *stored, expected, places)
    assert isinstance(stored, Tensor)
    if isinstance(expected, Bytes):
        _same_shape(output, stored, expected.expected)
        return _judge_bytes(output, stored != expected.expected, expected.dims, places)
    if isinstance(expected, Selection):
        return _judge_selection(output, stored, expected, places)
    if isinstance(expected, Unchanged):
        return _judge_bytes(output, stored, expected.dims, places)
    return _judge_dense(output, stored, expected, how, places)


def _pattern(stored: Stored, expected: Dense | Codes | Bytes, earlier: Stored | None) -> Pattern | None:
    """What kind of mistake this is, if that is clear."""
    if isinstance(expected, Bytes) and expected.expected.numel() > MOST_BYTES:
        return None
    axes = [AXES[letter] for letter in expected.dims[:-1]]
    t, room = _room(expected)
    return explain(values(stored, expected), t, room, axes, None if earlier is None else values(earlier, expected))


def values(stored: Stored, expected: Dense | Codes | Bytes) -> Tensor:
    """What is stored, as numbers in float64."""
    if isinstance(expected, Codes):
        assert isinstance(stored, tuple)
        return code_rules.dequantize(*stored, expected.block, expected.grid)
    assert isinstance(stored, Tensor)
    return stored.double()


def _room(expected: Dense | Codes | Bytes) -> tuple[Tensor, Tensor]:
    """The twin's values, and how far from them a right output may be: its bound, and half a unit or the whole bin of the
    format."""
    if isinstance(expected, Bytes):
        return expected.expected.double(), torch.full(expected.expected.shape, 0.5, dtype=torch.float64)
    t = expected.expected
    if isinstance(expected, Dense):
        return t.value, t.bound + ulp(t.largest, expected.form) / 2
    return t.value, t.bound + code_rules.bin_width(t.value, expected.block, expected.floor, expected.grid)


def _same_shape(output: str, c: Tensor, t: Tensor) -> None:
    if c.shape != t.shape:
        raise MismatchedShape(f"{output}: the candidate has shape {list(c.shape)}, the twin {list(t.shape)}")


def _judge_bytes(output: str, wrong: Tensor, dims: str, places: Places) -> Verdict:
    """Right or wrong; a pool has too many bytes to give each a share."""
    if not wrong.any():
        rows = wrong[..., 0].numel() if wrong.numel() else 0
        return Verdict(output, wrong.numel(), rows, 0, {"bytes": 0.0}, {}, None, "bytes")
    return _verdict(output, {"bytes": torch.where(wrong != 0, torch.inf, 0.0)}, dims, places, None, "bytes")


def _judge_dense(output: str, stored: Tensor, expected: Dense, how: Arithmetic, places: Places) -> Verdict:
    t, form = expected.expected, expected.form
    _same_shape(output, stored, t.value)
    c = stored.double()
    hidden: dict[str, Tensor | float] = {}
    flips = 0
    if c.numel():
        errors = Errors.of(c, t, form)
        hidden["row_rms"] = errors.rms_used()
        if expected.fair and not how.truncates:
            hidden["bias"] = errors.bias_used()
        flips = int((errors.beyond != 0).sum())
    tests = {"element": element_used(c, t, form)}
    return _verdict(output, tests, expected.dims, places, distance(c, t.value, form), form, hidden, flips)


def element_used(c: Tensor, t: Bounded, form: str) -> Tensor:
    """max(0, |c - t| - ½ulp) / A. The half ulp is that of the largest value the bound allows: past a power of two the
    grid is coarser. An anomaly (NaN, infinity) on one side only is infinite; on both, agreement."""
    used = torch.zeros_like(t.value)
    error = (c - t.value).abs_()
    suspect = ~(error <= ulp(t.value, form) / 2)  # few; NaN included
    if not suspect.any():
        return used
    c, t, error = c[suspect], t[suspect], error[suspect]
    excess = (error - ulp(t.largest, form) / 2).clamp_min(0)
    share = torch.where(excess <= 0, 0.0, excess / t.bound)  # NaN is not below
    agree = ~anomalies(c, t.value) & ~torch.isfinite(c)
    used[suspect] = torch.where(agree, 0.0, torch.nan_to_num(share, nan=torch.inf, posinf=torch.inf))
    return used


@dataclass(frozen=True)
class Errors:
    """Error and bound of every element, [rows, d], 0 where something is not finite; `perfect` is what rounding t itself
    loses, `beyond` how many ulps the candidate is from that rounding, `negative` where t is below zero."""

    error: Tensor
    bound: Tensor
    perfect: Tensor
    beyond: Tensor
    negative: Tensor

    @classmethod
    def of(cls, c: Tensor, t: Bounded, form: str) -> Errors:
        c, value, bound = (x.reshape(-1, x.shape[-1]) for x in (c, t.value, t.bound))
        finite = torch.isfinite(c) & torch.isfinite(value) & torch.isfinite(bound)
        if not finite.all():
            c, value, bound = (torch.where(finite, x, 0.0) for x in (c, value, bound))
        step, nearest = ulp(value, form), round_to(value, form)
        return cls(c - value, bound, nearest - value, (c - nearest).div_(step), value < 0)

    def rms_used(self) -> Tensor:
        """Per row: how much of the room between a perfect rounding and the bound its error takes.

        c is the nearest number to some t + e with |e| <= A, so |c - t| <= |r| + 2A where r is what a perfect rounding of
        t loses; hence rms(c - t) <= rms(r) + 2 rms(A). An error of less than half an ulp everywhere shows here.
        """
        error, perfect, bound = (x.norm(dim=-1) for x in (self.error, self.perfect, self.bound))
        excess = (error - perfect * (1 + 2.0**-40)).clamp_min(0)
        return torch.where(excess > 0, excess / (2 * bound), 0.0)

    def bias_used(self) -> float:
        """|z| / λ of the signed errors, towards plus and away from zero, rows as units.

        What a candidate has beyond a perfect rounding of t is mostly 0. A right kernel's is as often up as down, so its
        sum over all rows, divided by the root of the rows' squares, stays below λ (Hoeffding for fair signs). The
        elements of one row may share a cause; rows do not.
        """
        outward = torch.where(self.negative, -self.beyond, self.beyond)
        return max(_fair(self.beyond.sum(-1)), _fair(outward.sum(-1))) / LAMBDA


def _fair(x: Tensor) -> float:
    size = x.norm().item()
    return abs(x.sum().item()) / size if int((x != 0).sum()) >= MIN_ROWS and size else 0.0


def _judge_codes(output: str, codes: Tensor, scales: Tensor, expected: Codes, places: Places) -> Verdict:
    t, block, grid = expected.expected, expected.block, expected.grid
    _same_shape(output, codes, t.value)
    with_scale = code_rules.scale_used(scales, t, block, expected.floor, grid)
    tests = {
        "scale": with_scale.repeat_interleave(block, -1)[..., : codes.shape[-1]],
        "code": torch.nan_to_num(code_rules.code_used(codes, scales, t, block, grid), nan=torch.inf, posinf=torch.inf),
    }
    value = values((codes, scales), expected)
    own, own_scales = grid.quantize(t.value.float(), block, expected.floor)
    flips = int((codes != own).sum()) + int((scales != own_scales).sum())
    return _verdict(output, tests, expected.dims, places, distance(value, t.value, "f32"), f"{grid.name}_{block}", flips=flips)


def _judge_selection(output: str, picks: Tensor, expected: Selection, places: Places) -> Verdict:
    """Each pick needs the gap to the best one left out, over the sum of their bounds; a wrong count, a repetition or what
    is not visible is infinite."""
    t, visible = expected.expected, expected.visible
    count = visible.clamp_max(min(expected.k, t.value.shape[1]))[:, None]
    slot = torch.arange(picks.shape[1])
    _same_shape(output, picks, picks.new_empty(len(visible), expected.k))
    wanted = slot < count
    fits = torch.where(wanted, (picks >= 0) & (picks < visible[:, None]), picks == -1)
    at = picks.clamp(0, max(0, t.value.shape[1] - 1)).long()
    taken = torch.zeros(t.value.shape, dtype=torch.int32).scatter_add_(1, at, (wanted & fits).int())
    left = (taken == 0) & (torch.arange(t.value.shape[1]) < visible[:, None])
    used = torch.zeros(picks.shape, dtype=torch.float64)
    for k in range(int(count.max()) if len(count) else 0):
        value, bound = (x.gather(1, at[:, k : k + 1]) for x in (t.value, t.bound))
        gap = torch.where(left, t.value - value, 0.0)
        used[:, k] = torch.where(gap > 0, gap / (t.bound + bound), 0.0).amax(1)
    repeated = taken.gather(1, at) > 1
    used = torch.where(fits & ~(wanted & repeated), torch.where(wanted, used, 0.0), torch.inf)
    flips = int((used > 0).sum())
    return _verdict(output, {"gap": used}, expected.dims, places, None, "i32", flips=flips)


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
