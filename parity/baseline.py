"""Pinned drift: what a build's figures are, how much they vary from seed to seed, and which of them have moved.

A figure is an output's relative L2 in one kind of layer, an op's share of the budget, or how far the streams behind a layer,
or the logits, are from the truth's or the twin's. Source: docs/ci.md §3.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from reference.errors import BadInput

from .budget.bounded import LAMBDA
from .records import Record, write_bytes

SCHEMA = 1
MIN_SEEDS = 3
CHANCE = 1e-3  # that any figure of an unchanged build is said to have moved
UNIT = 2.0**-24  # float32's own rounding: a distance far below it is one of few roundings, or of none
SUMS = 2.0**-24  # a norm over 2**29 elements, summed in float64 in another order
FLIPPED_ROWS = 2 / LAMBDA  # the test of bias at four rows that were rounded the other way: a share too small to speak
SAME = ("model", "config_sha256", "accumulate", "engine", "streams", "layers", "phases", "lengths", "start_pos", "ids")
CURVES, ROUNDING = ("drift", "logits"), "rounding"  # records of a distance behind a layer; the curve that every run has
Key = tuple[str, str, str, str]  # metric, op, output, where


@dataclass(frozen=True)
class Figure:
    """`median` over seeds; `spread`, the standard deviation from seed to seed, of the logarithm for a relative L2, as it
    is for a budget; `freedom`, its degrees of freedom: kinds of layer are pooled."""

    metric: str
    op: str
    output: str
    where: str
    median: float
    spread: float
    freedom: int


@dataclass(frozen=True)
class Baseline:
    """Figures of one model, profile and plan over `seeds`."""

    identity: Mapping[str, Any]
    seeds: tuple[int, ...]
    figures: tuple[Figure, ...]


@dataclass(frozen=True)
class Move:
    """A figure that is further from its median than seeds explain: by `spreads`, where `limit` is what they explain."""

    figure: Figure
    now: float
    spreads: float
    limit: float

    @property
    def worse(self) -> bool:
        return self.now > self.figure.median

    def __str__(self) -> str:
        f = self.figure
        name = " ".join(filter(None, dict.fromkeys((f.op, f.output, f.where))))
        return (f"{name}: {f.metric} {'rose' if self.worse else 'fell'} from {f.median:.3g} to {self.now:.3g}, "
                f"{self.spreads:.1f} spreads; seeds explain {self.limit:.1f}")  # fmt: skip


def identity(records: Sequence[Record]) -> dict[str, Any]:
    """What two runs must share for their figures to be comparable."""
    header = records[0]
    rules = hashlib.sha256(json.dumps(header["profile"], sort_keys=True).encode()).hexdigest()
    return {**{name: header[name] for name in SAME}, "profile": header["profile"]["name"], "profile_sha256": rules}


def figures(records: Iterable[Record]) -> dict[Key, float]:
    """Figures of one run: relative L2 as a root mean square over layers of a kind and phases, budgets as the median over all
    layers and phases, since a right kernel's may be large now and then, where a value lies beside a midpoint."""
    squares: dict[Key, list[float]] = {}
    budgets: dict[Key, list[float]] = {}
    for r in records:
        if r["record"] in CURVES:
            key = ("relative_l2", f"{r['record']} {r.get('curve', ROUNDING)}", r["layer_id"], "")
            squares.setdefault(key, []).append(_number(r["relative_l2"]) ** 2)
        if r["record"] != "verdict":
            continue
        budgets.setdefault(("budget_used", r["op"], "", ""), []).append(_number(r["budget_used"]))
        for o in (o for o in r["outputs"] if o["distance"] is not None):
            key = ("relative_l2", r["op"], o["output"], r["kind"])
            squares.setdefault(key, []).append(_number(o["distance"]["relative_l2"]) ** 2)
    distances = {key: math.sqrt(statistics.fmean(s)) for key, s in squares.items()}
    return {**distances, **{key: statistics.median(shares) for key, shares in budgets.items()}}


def _number(x: float | None) -> float:
    return math.inf if x is None else x


def _scaled(metric: str, x: float) -> float:
    """Seeds multiply a distance, and add to a share."""
    return math.log(x + UNIT) if metric == "relative_l2" else x


def measure(runs: Sequence[Sequence[Record]]) -> Baseline:
    """The baseline of runs that differ in their seed only. Raises ValueError for too few, BadInput for runs that do not
    fit together or did not pass."""
    seeds = tuple(run[0]["seed"] for run in runs)
    if len(set(seeds)) < max(MIN_SEEDS, len(seeds)):
        raise ValueError(f"a spread needs runs of at least {MIN_SEEDS} seeds, each its own; these are of {list(seeds)}")
    for run in runs:
        _same(identity(runs[0]), identity(run), f"the run of seed {run[0]['seed']}")
        if run[-1]["exit_code"] != 0:
            raise BadInput(f"the run of seed {run[0]['seed']} ended with exit code {run[-1]['exit_code']}: nothing to pin")
    samples = [figures(run) for run in runs]
    pools: dict[tuple[str, str, str], list[float]] = {}
    for key in samples[0]:
        pools.setdefault(key[:3], []).append(statistics.variance(_scaled(key[0], s[key]) for s in samples))
    out = []
    for key in samples[0]:
        pool = pools[key[:3]]
        spread, freedom = math.sqrt(statistics.fmean(pool)), len(pool) * (len(runs) - 1)
        out.append(Figure(*key, statistics.median(s[key] for s in samples), spread, freedom))
    return Baseline(identity(runs[0]), seeds, tuple(out))


def compare(baseline: Baseline, records: Sequence[Record]) -> list[Move]:
    """Every figure of a run that has moved, those that moved most first. Raises BadInput for a run of something else."""
    _same(baseline.identity, identity(records), "the run")
    return _moves(baseline, figures(records))


def repinned(older: Baseline, newer: Baseline) -> list[Move]:
    """Medians that a new baseline puts further off than the old one's seeds explain."""
    return _moves(older, {_key(f): f.median for f in newer.figures})


def _moves(baseline: Baseline, now: Mapping[Key, float]) -> list[Move]:
    moves = [_move(f, now[_key(f)], baseline) for f in baseline.figures if _key(f) in now]
    return sorted((m for m in moves if m.spreads > m.limit), key=lambda m: -m.spreads / m.limit)


def lost(baseline: Baseline, records: Sequence[Record]) -> list[Figure]:
    """Figures of the run's ops that it does not have."""
    now, header = figures(records), records[0]
    asked = {*header["ops"], f"{CURVES[0]} {ROUNDING}"}
    whole = CURVES if header.get("drift") else ()
    return [f for f in baseline.figures if (f.op in asked or f.op.startswith(whole)) and _key(f) not in now]


def _key(f: Figure) -> Key:
    return f.metric, f.op, f.output, f.where


def _move(f: Figure, now: float, baseline: Baseline) -> Move:
    """A prediction: the run's own variation beside the median's, which is that of a mean times π/2."""
    limit = student(f.freedom, CHANCE / (2 * len(baseline.figures))) * math.sqrt(1 + math.pi / 2 / len(baseline.seeds))
    least = SUMS if f.metric == "relative_l2" else FLIPPED_ROWS / limit
    away = abs(_scaled(f.metric, now) - _scaled(f.metric, f.median))
    if f.metric == "relative_l2" and f.median and abs(now - f.median) <= UNIT / 2:
        away = 0.0  # another processor's sine is another rounding
    return Move(f, now, away / max(f.spread, least), limit)


def _same(one: Mapping[str, Any], other: Mapping[str, Any], what: str) -> None:
    for name in one:
        if one[name] != other[name]:
            raise BadInput(f"{what} has {name} {other[name]}, the baseline {one[name]}")


@lru_cache
def student(freedom: int, tail: float) -> float:
    """t that Student's distribution exceeds with probability `tail`, by halving."""
    low, high = 0.0, 1.0
    while beyond(freedom, high) > tail:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if beyond(freedom, middle) > tail else (low, middle)
    return high


def beyond(freedom: int, t: float) -> float:
    """P(T > t) for t >= 0: the finite sum in cos² of the angle whose tangent is t/√freedom (Abramowitz and Stegun 26.7.3)."""
    angle = math.atan(t / math.sqrt(freedom))
    square = math.cos(angle) ** 2
    odd = freedom % 2
    term, total = 1.0, 0.0 if freedom == 1 else 1.0
    for j in range(2 + odd, freedom - 1, 2):
        term *= square * (j - 1) / j
        total += term
    if odd:
        return (1 - 2 / math.pi * (angle + math.sin(angle) * math.cos(angle) * total)) / 2
    return (1 - math.sin(angle) * total) / 2


def file_of(directory: Path, records: Sequence[Record]) -> Path:
    """Where the baseline of a run's model and profile is pinned."""
    said = identity(records)
    return directory / (re.sub(r"[^A-Za-z0-9.]+", "-", f"{said['model']}-{said['profile']}") + ".json")


def write(baseline: Baseline, path: Path) -> None:
    """JSON, one figure a line, so that a change is read as one."""
    lines = ",\n  ".join(json.dumps(asdict(f)) for f in baseline.figures)
    head = json.dumps({"schema": SCHEMA, "identity": baseline.identity, "seeds": baseline.seeds}, indent=1)
    write_bytes(path, f'{head[:-2]},\n "figures": [\n  {lines}\n ]\n}}\n'.encode())


def read(path: Path) -> Baseline:
    """Raises BadInput for a file that is absent or damaged."""
    try:
        table = json.loads(path.read_text())
        if table["schema"] != SCHEMA:
            raise BadInput(f"{path}: expected a baseline of schema version {SCHEMA}")
        return Baseline(table["identity"], tuple(table["seeds"]), tuple(Figure(**f) for f in table["figures"]))
    except FileNotFoundError:
        raise BadInput(f"{path}: no baseline of this model and profile; `v4parity baseline update` makes one") from None
    except (ValueError, KeyError, TypeError) as error:
        raise BadInput(f"{path}: no baseline: {error}") from None
