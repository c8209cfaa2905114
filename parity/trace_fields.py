"""Types of what a trace's manifest says, before any of it is used. Source: docs/judge.md §11."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

Rule = tuple[str, Callable[[Any], bool]]  # what is expected, and whether it is there

MOST = 1 << 31  # of numbers that are kept as int32 somewhere


def _is_text(x: Any) -> bool:
    return isinstance(x, str) and bool(x) and "\0" not in x


def _is_number(x: Any) -> bool:
    return type(x) is int and 0 <= x < MOST


def _is_list(x: Any) -> bool:
    return isinstance(x, list | tuple) and all(_is_number(n) for n in x)


def _is_shard(x: Any) -> bool:
    fields = isinstance(x, Mapping) and set(x) == {"axis", "index", "count"}
    return x is None or (fields and isinstance(x["axis"], str) and _is_number(x["index"]) and _is_number(x["count"]))


TEXT: Rule = "text", _is_text
NUMBER: Rule = "a whole number from 0 on", _is_number
NUMBERS: Rule = "a list of whole numbers from 0 on", _is_list
SHARD: Rule = "null, or a letter `axis` and whole numbers `index` and `count`", _is_shard
TENSOR: dict[str, Rule] = {
    "key": TEXT, "tap": TEXT, "layer": NUMBER, "phase": TEXT, "request": NUMBER, "positions": NUMBERS,
    "dims": ("text", lambda x: isinstance(x, str)), "storage": TEXT, "shape": NUMBERS, "file": TEXT, "layout": TEXT,
    "shard": SHARD, "partial_sum": ("true or false", lambda x: isinstance(x, bool)),
}  # fmt: skip
OPTIONAL = frozenset({"file", "layout", "shard", "partial_sum"})
TOP: dict[str, Rule] = {
    "engine": TEXT, "model": TEXT, "config": ("an object", lambda x: isinstance(x, dict)), "config_sha256": TEXT,
    "profile": ("a table or a name", lambda x: isinstance(x, dict | str)), "tensors": ("a list", lambda x: isinstance(x, list)),
}  # fmt: skip


def mistyped(said: Mapping[str, Any], rules: Mapping[str, Rule]) -> str | None:
    """The first field that is not as it should be, and what it should be."""
    for name, (expected, fits) in rules.items():
        if name in said and not fits(said[name]):
            return f"{name}: expected {expected}, is {short(said[name])}"
    return None


def wrong_entry(entry: Any, longest: int) -> str | None:
    """What is wrong with the form of one entry of `tensors`, or None; positions end before `longest`."""
    if not isinstance(entry, Mapping):
        return f"expected an object, is {short(entry)}"
    absent = [name for name in TENSOR if name not in entry and name not in OPTIONAL]
    unknown = [name for name in entry if name not in TENSOR]
    if absent or unknown:
        return f"no {absent[0]}" if absent else f"unknown field {short(unknown[0])}"
    return mistyped(entry, TENSOR) or _wrong_positions(entry["positions"], longest)


def _wrong_positions(positions: list[int], longest: int) -> str | None:
    if positions and max(positions) >= longest:
        return f"positions: {max(positions)}, the model has {longest}"
    return None


def short(x: Any) -> str:
    """A value in few letters, on one line."""
    try:
        text = repr(x)
    except RecursionError:
        return "nested too deeply"
    return text if len(text) <= 60 else f"{text[:57]}..."
