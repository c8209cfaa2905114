"""The first thing that is wrong in a run, in words: an op on its own inputs, a layer as a whole, or only what came in.

Source: docs/drift.md §3.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

Record = Mapping[str, Any]
APART = 2.0  # times as far from each other as the twin is from exact: what two right roundings can come to
DEPARTS = {"forced": APART, "free": 2 * APART}  # running freely, choices flip in one and not in the other
Cause = Literal["op", "layer", "inputs"]
ORDER = ("sequence", "position", "head", "group", "expert", "stream", "slot", "entry", "row", "page", "page_row")


@dataclass(frozen=True)
class Divergence:
    """`op`: an op is wrong on the inputs that it had. `layer`: every op of it is right on its own inputs, and the layer as a
    whole is not. `inputs`: every op and layer is right, and their inputs were different already. `place` names token, head
    or expert, channels, page and row; `pattern` is the kind of mistake, where that is clear. `alone`: a whole run judged no op
    of the layer."""

    cause: Cause
    layer_id: str
    phase: str
    op: str = ""
    output: str = ""
    place: str = ""
    pattern: str = ""
    alone: bool = False

    @property
    def words(self) -> str:
        """One line."""
        where = f"{self.layer_id}, {self.phase}" + (f", {self.place}" if self.place else "")
        if self.cause == "op":
            output = "output" if self.output in ("", self.op) else f"output {self.output}"
            said = f": {output} is {self.pattern}" if self.pattern else "" if output == "output" else f": {output}"
            return f"first wrong op: {self.op}, {where}{said}"
        if self.cause == "layer":
            what = f": {self.output}" if self.output else ""
            ops = "no op of it was judged" if self.alone else "every op is right on its own inputs"
            return f"first wrong layer: {where}: {ops}, the layer as a whole is not{' right' if self.alone else ''}{what}"
        return (f"no op and no layer is wrong on its own inputs; running freely, the streams are different from {where} on: "
                "what came in was different already")  # fmt: skip


def first_divergence(records: Sequence[Record]) -> Divergence | None:
    """In causal order: layers, in them phases, in them ops. None where all is right."""
    found = [(r, _of_op(r)) for r in records if r["record"] == "verdict" and r["verdict"] == "fail"]
    found += [(r, _of_curve(r, "layer")) for r in departures(records, "forced")]
    found = found or [(r, _of_curve(r, "inputs")) for r in departures(records, "free")]
    places = [{name: i for i, name in enumerate(records[0][key])} for key in ("layers", "phases")]

    def when(pair: tuple[Record, Divergence]) -> list[int]:
        return [known.get(pair[0][key], len(known)) for known, key in zip(places, ("layer_id", "phase"), strict=True)]

    if not found:
        return None
    first = min(found, key=when)[1]  # of equals the first: records are in order of ops
    judged = {r["layer_id"] for r in records if r["record"] == "verdict"}
    return replace(first, alone=records[-1]["record"] == "summary" and first.layer_id not in judged)


def headline(records: Sequence[Record]) -> str:
    """The first line of a report that has something to say; empty where all is right."""
    divergence = first_divergence(records)
    return divergence.words if divergence else ""


def departures(records: Sequence[Record], curve: str) -> list[Record]:
    """Drift of a curve, `forced` or `free`, that rounding does not explain, in streams, in rows left, or in choices: a right
    candidate rounds as the twin does, so it is as far from the truth, and the two are at most twice that apart."""
    drift = [r for r in records if r["record"] == "drift" and r.get("curve") == curve]
    return [r for r in drift if r.get("unexplained") or any(_far(x, curve) for x in _parts(r).values())]


def departure(r: Record) -> str:
    """In words, what of a whole layer departs: `layer_03, decode: streams 0.16 from the twin, rounding 0.0037`."""
    said = [f"{name} {_figure(x['relative_l2'])} from the twin, rounding {_figure(x.get('rounding'))}"
            for name, x in _parts(r).items() if _far(x, r["curve"])]  # fmt: skip
    said += [f"{name} of {share:.0%} of tokens that scores do not explain" for name, share in r.get("unexplained", {}).items()]
    return f"{r['layer_id']}, {r['phase']}: {'; '.join(said)}"


def _parts(r: Record) -> dict[str, Record]:
    """What of a layer is measured: streams of all tokens, of the worst one, rows left."""
    token = {"relative_l2": r.get("token_l2"), "rounding": r.get("token_rounding")}
    measured = {"streams": r, "streams of a token": token} if r.get("token_rounding") is not None else {"streams": r}
    return {**measured, **{f"{name} rows": x for name, x in r.get("rows", {}).items()}}


def _figure(x: float | None) -> str:
    return "not finite" if x is None else f"{x:.2g}"


def _far(x: Mapping[str, Any], curve: str) -> bool:
    """A distance against its rounding."""
    distance, rounding = x["relative_l2"], x.get("rounding")
    return distance is None or (rounding is not None and distance > DEPARTS[curve] * rounding)


def _of_op(r: Record) -> Divergence:
    output = next(o for o in r["outputs"] if o["verdict"] == "fail")
    pattern = (output.get("pattern") or {}).get("text", "")
    return Divergence("op", r["layer_id"], r["phase"], r["op"], output["output"], place(output["worst"]), pattern)


def _of_curve(r: Record, cause: Cause) -> Divergence:
    if any(_far(x, r["curve"]) for name, x in _parts(r).items() if name.startswith("streams")):
        return Divergence(cause, r["layer_id"], r["phase"], place=place(r.get("worst", {})))
    rows = [f"{name} rows that it left" for name, x in r.get("rows", {}).items() if _far(x, r["curve"])]
    choices = [f"{name} that scores do not explain" for name in r.get("unexplained", {})]
    return Divergence(cause, r["layer_id"], r["phase"], output=" and ".join([*rows, *choices]))


def place(worst: Mapping[str, Any]) -> str:
    """`sequence 2 position 257, head 5, channels 448..511`."""
    known = {name: worst[name] for name in ORDER if name in worst}
    parts = [f"{name.replace('_', ' ')} {at}" for name, at in known.items() if name not in ("sequence", "position")]
    token = " ".join(f"{name} {known[name]}" for name in ("sequence", "position") if name in known)
    if "channels" in worst:
        first, behind = worst["channels"]
        parts.append(f"channels {first}..{behind - 1}" if behind - first > 1 else f"channel {first}")
    elif "channel" in worst:
        parts.append(f"channel {worst['channel']}")
    return ", ".join([*([token] if token else []), *parts, *([worst["error"]] if "error" in worst else [])])
