"""What kind of mistake a failing output shows: rows moved, scales off, signs, halves swapped, zeros. Nothing without proof.

An explanation says what the output should have been if that one mistake had been made; it is named if every wrong element is
then within its room, and if chance cannot be the reason. Source: docs/drift.md §4.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

BITS = 30.0  # chance of a wrong name 2^-30, the δ of the bounds
FACTOR_BITS = 32.0  # a free factor is one of as many float32 numbers
POWER_BITS = 8.0  # a power of two is one of 2^8
MOST_BITS = 64.0  # of one element
CHANNEL_BITS = 8.0  # fewer than 2^8 exchanges of channels are tried
BLOCKS = (128, 64, 32)  # channels that share a scale somewhere
MOST_ROWS = 4096  # wrong rows that are looked for among all rows, one by one

Field = int | float | str | list[int]


@dataclass(frozen=True)
class Pattern:
    """`kind` of mistake, in words that end the sentence "output is …", and its numbers."""

    kind: str
    text: str
    fields: dict[str, Field] = field(default_factory=dict)


@dataclass(frozen=True)
class Wrong:
    """A failing output as rows [n, d]: candidate, twin, and the room that a right value has around the twin's. `far` [n, d]
    marks what is outside; `shape` are the axes before the last, `axes` their names."""

    c: Tensor
    t: Tensor
    room: Tensor
    far: Tensor
    shape: tuple[int, ...]
    axes: Sequence[str]

    @property
    def rows(self) -> Tensor:
        """Numbers of rows with anything wrong."""
        return self.far.any(1).nonzero().flatten()

    def bits(self, would: Tensor, room: Tensor, whole: bool = False) -> float:
        """How much less likely chance is than the mistake that `would` [n, d] describes, in bits: for every wrong element,
        how far it is from the twin over the room it has around the explanation. -∞ if any is outside of that; `whole`:
        or any element at all."""
        off = (self.c - would).abs() <= room
        if not bool(off.all() if whole else off[self.far].all()):
            return -math.inf
        before = (self.c - self.t).abs()[self.far]
        return float(torch.log2(before / room[self.far]).clamp_max(MOST_BITS).sum())

    def of(self, rows: Tensor) -> Wrong:
        """Only these rows."""
        return Wrong(self.c[rows], self.t[rows], self.room[rows], self.far[rows], (len(rows),), ("row",))


def explain(c: Tensor, t: Tensor, room: Tensor, axes: Sequence[str], earlier: Tensor | None = None) -> Pattern | None:
    """The one mistake that turns t into c, or None.

    c, t, room float64 [..., d]: candidate, twin, and the largest error that a right output may have; `axes` name all
    dimensions but the last; `earlier` [m, d] are rows that the candidate stored in the step before.
    """
    if not c.numel():
        return None
    shape = tuple(c.shape[:-1]) or (1,)
    c, t, room = (x.reshape(-1, x.shape[-1]) for x in (c, t, room))
    far = ~((c - t).abs() <= room) & (c != t) & ~(c.isnan() & t.isnan())
    if not far.any():
        return None
    wrong = Wrong(c, t, room, far, shape, axes or ("row",))
    return next((found for find in FINDERS if (found := find(wrong))), None) or _stale(wrong, earlier)


def _nan(w: Wrong) -> Pattern | None:
    if not bool(w.c[w.far].isnan().all()):
        return None
    rest = "" if bool(w.far.all()) else ", and right elsewhere"
    return Pattern("nan", f"NaN {_where(w)}{rest}", {"elements": int(w.far.sum())})


def _zeros(w: Wrong) -> Pattern | None:
    if bool((w.c[w.far] != 0).any()) or w.bits(torch.zeros_like(w.t), w.room) < BITS:
        return None
    if not bool((w.c[w.rows] != 0).any()):
        return Pattern("zeros", f"zero in {_rows(w)}", {"rows": len(w.rows)})
    silent = (w.c[w.rows] == 0).all(0)  # channels
    first = len(silent) - int(silent.flip(0).long().cumprod(0).sum())
    if first <= _span(w)[0]:
        return Pattern("dropped_tail", f"zero from channel {first} on", {"channels": [first, len(silent)]})
    return Pattern("zeros", f"zero {_where(w)}", {"channels": _span(w)})


def _sign(w: Wrong) -> Pattern | None:
    if w.bits(-w.t, w.room) < BITS:
        return None
    return Pattern("sign_flipped", f"the expected one with its sign flipped {_where(w)}", {"channels": _span(w)})


def _factor(w: Wrong) -> Pattern | None:
    """All that is wrong is wrong by one factor; a power of two needs less proof."""
    factor = float((w.c[w.far] / w.t[w.far]).median())
    if not factor or not math.isfinite(factor):
        return None
    power = math.copysign(2.0 ** round(math.log2(abs(factor))), factor)
    fields: dict[str, Field] = {"channels": _span(w)}
    if w.bits(power * w.t, abs(power) * w.room) - POWER_BITS >= BITS:
        words = f"{'-' if factor < 0 else ''}2^{round(math.log2(abs(power)))}"
        return Pattern("scale_shifted", f"off by a factor of {words} {_where(w)}", fields | {"factor": power})
    room = 3 * abs(factor) * w.room  # a unit of the product may be twice as large, and the factor itself is off by some
    if w.bits(factor * w.t, room) - FACTOR_BITS >= BITS:
        return Pattern("scale_shifted", f"off by a factor of {factor:.3g} {_where(w)}", fields | {"factor": factor})
    return None


def _moved_rows(w: Wrong) -> Pattern | None:
    """Every wrong row is another row of the twin's."""
    n = len(w.c)
    for axis, name in enumerate(w.axes):
        for by in (1, -1):
            source, inside = _shifted(w, axis, by)
            if _from(w, source, w.rows[inside[w.rows]]) - math.log2(n) - 1 >= BITS:
                other = "before" if by == 1 else "after"
                return Pattern("row_permuted", f"the expected rows shifted by one {name}, each that of the {name} {other}, "
                               f"in {_rows(w)}", {"axis": name, "by": by})  # fmt: skip
    found = _nearest(w, w.t)
    if found is None or _from(w, found, w.rows) - len(w.rows) * math.log2(n) < BITS:
        return None
    return _moved(w, found)


def _shifted(w: Wrong, axis: int, by: int) -> tuple[Tensor, Tensor]:
    """For every row its neighbour along an axis, and whether there is one: what came in at the end is anybody's guess."""
    number = torch.arange(len(w.c)).view(w.shape)
    place = torch.arange(w.shape[axis])
    inside = (place >= 1) if by == 1 else (place < w.shape[axis] - 1)
    shape = [-1 if i == axis else 1 for i in range(len(w.shape))]
    return number.roll(by, axis).flatten(), inside.view(shape).expand(w.shape).flatten()


def _moved(w: Wrong, source: Tensor) -> Pattern:
    """Words for rows that hold others': exchanged among themselves, or one row twice."""
    rows, of = w.rows.tolist(), source[w.rows].tolist()
    first = {"row": rows[0], "holds": of[0]}
    here, there = _index(w, rows[0]), _index(w, of[0])
    if sorted(rows) != sorted(of):
        return Pattern("stale", f"another row's in {_rows(w)}: {here} holds {there}", dict(first))
    if len(rows) == 2:
        return Pattern("row_permuted", f"the expected rows with two exchanged: {here} and {there}", dict(first))
    return Pattern("row_permuted", f"the expected rows in another order ({len(rows)} moved): {here} holds {there}",
                   {**first, "moved": len(rows)})  # fmt: skip


def _from(w: Wrong, source: Tensor, rows: Tensor) -> float:
    """Bits for these rows being the twin's rows `source`."""
    return w.of(rows).bits(w.t[source[rows]], w.room[source[rows]], whole=True)


def _nearest(w: Wrong, rows: Tensor) -> Tensor | None:
    """For every wrong row the number of the nearest of `rows`, and 0 elsewhere; None where that is too much to ask."""
    at = w.rows
    if len(at) > MOST_ROWS or len(rows) > 16 * MOST_ROWS or not bool(w.c[at].isfinite().all() & rows.isfinite().all()):
        return None
    sizes, found = rows.square().sum(1), torch.zeros(len(w.c), dtype=torch.int64)
    for some in at.split(256):
        found[some] = (sizes - 2 * w.c[some] @ rows.T).argmin(1)
    return found


def _moved_channels(w: Wrong) -> Pattern | None:
    """Halves exchanged, pairs side by side instead of half a span apart, or the reverse, or neighbours exchanged."""
    for first, width in _spans(w):
        for kind, words, order in _orders(width):
            index = torch.arange(w.c.shape[1])
            index[first : first + width] = first + order
            if _whole(w, index) - CHANNEL_BITS >= BITS:
                text = f"the expected one with {words} channels {first}–{first + width - 1}"
                return Pattern(kind, text, {"channels": [first, first + width]})
    return None


def _whole(w: Wrong, index: Tensor) -> float:
    part = w.of(w.rows)
    return part.bits(part.t[:, index], part.room[:, index], whole=True)


def _spans(w: Wrong) -> Iterator[tuple[int, int]]:
    """Spans of channels that hold all that is wrong: the smallest aligned power of two, the smallest at the end, all."""
    (first, last), d = _span(w), w.c.shape[1]
    width = 2
    while first // width != (last - 1) // width:
        width *= 2
    aligned = (first // width * width, width)
    tail = 1 << max(1, (d - first - 1).bit_length())
    for start, size in dict.fromkeys((aligned, (d - tail, tail), (0, d))):
        if start >= 0 and start + size <= d and size % 2 == 0:
            yield start, size


def _orders(width: int) -> Iterator[tuple[str, str, Tensor]]:
    """Kind, words, and for each place the channel that a mistaken reader finds there."""
    at = torch.arange(width)
    yield "swapped_halves", "the halves exchanged of", at.roll(width // 2)
    yield "interleaved", "pairs interleaved instead of split in", at.view(2, -1).T.flatten()
    yield "split", "pairs split instead of interleaved in", at.view(-1, 2).T.flatten()
    yield "swapped_neighbours", "neighbours exchanged in", at ^ 1


def _blocks(w: Wrong) -> Pattern | None:
    """Blocks of channels off by powers of two of their own, as with the scales of other blocks."""
    d = w.c.shape[1]
    for block in (b for b in BLOCKS if b < d):
        off = torch.zeros_like(w.t)
        count = 0
        for start in range(0, d, block):
            cut = slice(start, start + block)
            far, c, t = w.far[:, cut], w.c[:, cut], w.t[:, cut]
            ratio = (torch.where(far, c * t, 0.0).sum(1) / torch.where(far, t * t, 0.0).sum(1)).abs()
            known = far.any(1) & ratio.isfinite() & (ratio > 0)
            power = torch.where(known, torch.log2(torch.where(known, ratio, 1.0)).round(), 0.0)
            off[:, cut], count = power[:, None], count + int(far.any(1).sum())
        scale = torch.exp2(off)
        if w.bits(scale * w.t, scale * w.room) - count * POWER_BITS >= BITS:
            low, high = (int(x) for x in (off[w.far].min(), off[w.far].max()))
            return Pattern("scale_shifted", f"off by powers of two, 2^{low} to 2^{high}, in blocks of {block} channels",
                           {"block": block, "powers": f"{low}..{high}"})  # fmt: skip
    return None


def _stale(w: Wrong, earlier: Tensor | None) -> Pattern | None:
    """What the candidate stored in the step before."""
    if earlier is None or not len(earlier):
        return None
    rows = earlier.reshape(-1, w.c.shape[1])
    found = _nearest(w, rows)
    if found is None:
        return None
    held = rows[found[w.rows]]
    room = held.abs() * 2.0**-50  # to the bit, in float64
    if w.of(w.rows).bits(held, room, whole=True) - len(w.rows) * math.log2(len(rows) + 1) < BITS:
        return None
    fields: dict[str, Field] = {"rows": len(w.rows), "earlier": int(found[w.rows[0]])}
    return Pattern("stale", f"what the step before stored, in {_rows(w)}", fields)


FINDERS: tuple[Callable[[Wrong], Pattern | None], ...] = (
    _nan, _zeros, _sign, _factor, _moved_rows, _moved_channels, _blocks,
)  # fmt: skip


def _span(w: Wrong) -> list[int]:
    """First wrong channel, and the one after the last."""
    channels = w.far.any(0).nonzero().flatten()
    return [int(channels[0]), int(channels[-1]) + 1]


def _where(w: Wrong) -> str:
    first, behind = _span(w)
    span = f"channel {first}" if behind - first == 1 else f"channels {first}–{behind - 1}"
    return f"in {'' if (first, behind) == (0, w.c.shape[1]) else f'{span} of '}{_rows(w)}"


def _rows(w: Wrong) -> str:
    if len(w.rows) == len(w.c):
        return "all rows"
    return f"{len(w.rows)} of {len(w.c)} rows"


def _index(w: Wrong, row: int) -> str:
    """`token 3, head 5`."""
    at = torch.unravel_index(torch.tensor(row), w.shape)
    return ", ".join(f"{name} {int(i)}" for name, i in zip(w.axes, at, strict=True))
