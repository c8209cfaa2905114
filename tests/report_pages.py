"""Records for pages: the sample of the gallery, the same with failures, with every layer of V4, with hostile text."""

from __future__ import annotations

import copy
import math
from pathlib import Path

from parity.records import Record, read_lines

GALLERY = Path(__file__).parents[1] / "reports" / "gallery"
CURVES = {"rounding": 1e-2, "forced": 2e-4, "free": 3e-4}


def sample() -> list[Record]:
    return read_lines(GALLERY)


def of(records: list[Record], kind: str) -> list[Record]:
    return [r for r in records if r["record"] == kind]


def spoil(records: list[Record], op: str, layer: str, phase: str) -> Record:
    """Fails the first output of a verdict, in place, and counts it; infinite, at a place, with a pattern."""
    (verdict,) = [r for r in of(records, "verdict") if (r["op"], r["layer_id"], r["phase"]) == (op, layer, phase)]
    worst = {"token": 2, "head": 5, "sequence": 1, "position": 257, "channels": [48, 64]}
    pattern = {"kind": "row_permuted", "text": "the expected rows shifted by one token", "fields": {}}
    wrong = {"verdict": "fail", "budget_used": None}
    verdict["outputs"][0] |= {**wrong, "failing_rows": 3, "worst": worst, "pattern": pattern}
    verdict |= wrong
    summary = records[-1]
    summary |= {"failed": summary["failed"] + 1, "passed": summary["passed"] - 1, "exit_code": 1}
    return verdict


def lost(op: str, phase: str, reason: str, required: bool = False) -> Record:
    return {"record": "not_run", "op": op, "phase": phase, "reason": reason, "layers": 1, "required": required, "volatile": {}}


def failing() -> list[Record]:
    """Two wrong ops, the first of them in layer 3, and one that was not run."""
    records = sample()
    records.insert(-1, lost("dspark", "decode", "its forward is not defined here"))
    records[-1]["not_run"] += 1
    for layer in ("layer_04", "layer_03"):
        spoil(records, "attn.core", layer, "decode")
    return records


def attribution(drift: float = 4.0) -> Record:
    """An attribution with a negative share, an interval and a name that is markup."""
    shares = [{"player": "<b>x</b>", "switches": 2, "share": 5.0, "low": 4.0, "high": 6.0, "alone": 2.0, "last": 1.0},
              {"player": "y", "switches": 1, "share": -1.0, "low": -1.0, "high": -1.0, "alone": 0.5, "last": -2.0}]  # fmt: skip
    return {"record": "attribution", "schema": 1, "model": "m", "config_sha256": "0", "profile": "pool-fp8",
            "output": "streams", "behind": "layer_02", "rounding": [0, 1, 2], "whole": True, "tokens": 4,
            "seed": 0, "by": "op", "method": "orders", "permutations": 8, "coalitions": 9, "drift": drift,
            "relative_l2": 2.0, "alone": 2.5, "last": -1.0, "interaction": 1.5, "shares": shares, "volatile": {}}  # fmt: skip


def whole(layers: int = 61) -> list[Record]:
    """A page as large as a run of V4 with four phases: the sample's layers over and over, drift with every curve."""
    small = sample()
    run, summary, verdicts = small[0], small[-1], of(small, "verdict")
    run["phases"] = ["prefill", "decode", "verify", "chunk"]
    run["layers"] = [*(f"layer_{i:02d}" for i in range(layers)), "mtp_0"]
    source = ["layer_00", *("layer_02" if i % 2 == 0 else "layer_03" for i in range(1, layers - 1)), "layer_04", "mtp_0"]
    out = []
    for i, (name, like) in enumerate(zip(run["layers"], source, strict=True)):
        for r in (r for r in verdicts if r["layer_id"] == like):
            for phase in run["phases"][r["phase"] == "decode" :: 2]:
                out.append({**copy.deepcopy(r), "layer": i, "layer_id": name, "phase": phase})
    layers = list(enumerate(run["layers"]))
    drift = [_drift(i, name, phase, curve) for i, name in layers for phase in run["phases"] for curve in CURVES]
    summary |= {"judged": len(out), "passed": len(out)}
    return [run, *out, *drift, summary]


def _drift(layer: int, name: str, phase: str, curve: str) -> Record:
    size = CURVES[curve] * math.exp(layer / 30 * (curve != "forced"))
    return {"record": "drift", "layer": layer, "layer_id": name, "kind": "csa", "phase": phase, "curve": curve,
            "relative_l2": size, "cosine": 1.0, "worst_token": 0, "predicted": 0.8 * size if curve == "free" else None,
            "volatile": {}}  # fmt: skip
