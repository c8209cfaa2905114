"""What a run says, as lines of JSON: one record per judged op, layer and phase, and what was not run.

Every record has deterministic fields and one `volatile` object; two runs agree if all else is equal. The form is
`report/schema.json`. Source: docs/judge.md §9.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from importlib import resources
from pathlib import Path
from typing import Any

from reference.config import Config
from reference.errors import BadInput

from .cases import layer_id
from .drift import Drift, LogitsDrift
from .flow import Judged
from .judge import Verdict, finite_or_none

SCHEMA_VERSION = 1
FILE = "records.jsonl"

Record = dict[str, Any]


def config_digest(config: Config) -> str:
    """SHA-256 of the configuration, fields in order of name."""
    return hashlib.sha256(json.dumps(asdict(config), sort_keys=True).encode()).hexdigest()


def header(model: str, config: Config, **fields: Any) -> Record:
    """First record of a run: what was asked, of which weights, by which rules."""
    return {"record": "run", "schema": SCHEMA_VERSION, "model": model, "config_sha256": config_digest(config), **fields}


def verdict_record(config: Config, judged: Judged, seconds: float) -> Record:
    """One op of one layer in one phase: the outcome is that of its worst output."""
    worst = max(judged.verdicts, key=lambda v: v.budget_used)
    tests: dict[str, float] = {}
    for verdict in judged.verdicts:
        for name, share in verdict.tests.items():
            tests[name] = max(tests.get(name, 0.0), share)
    return {
        "record": "verdict", "op": judged.op.name, "layer": judged.layer, "layer_id": layer_id(config, judged.layer),
        "kind": config.kind(judged.layer), "phase": judged.phase,
        "verdict": "pass" if all(v.passed for v in judged.verdicts) else "fail",
        "elements": sum(v.elements for v in judged.verdicts), "flips": sum(v.flips for v in judged.verdicts),
        "budget_used": finite_or_none(worst.budget_used), "tests": {n: finite_or_none(s) for n, s in tests.items()},
        "relative_l2": _finite(_distance(judged.verdicts)), "bound": judged.op.bound,
        "outputs": [_output(v) for v in judged.verdicts], "volatile": {"seconds": round(seconds, 4)},
    }  # fmt: skip


def _distance(verdicts: Iterable[Verdict]) -> float | None:
    """Relative L2 of the op: of its first output that has values."""
    return next((v.distance.relative_l2 for v in verdicts if v.distance is not None), None)


def _finite(x: float | None) -> float | None:
    return None if x is None else finite_or_none(x)


def _output(v: Verdict) -> Record:
    distance = None if v.distance is None else {name: _finite(x) for name, x in asdict(v.distance).items()}
    return {
        "output": v.output, "storage": v.storage, "verdict": "pass" if v.passed else "fail", "elements": v.elements,
        "rows": v.rows, "failing_rows": v.failing_rows, "flips": v.flips, "budget_used": finite_or_none(v.budget_used),
        "tests": {name: finite_or_none(share) for name, share in v.tests.items()}, "worst": dict(v.worst),
        "distance": distance, "pattern": None if v.pattern is None else asdict(v.pattern),
    }  # fmt: skip


def missing_record(op: str, phase: str, reason: str, layers: int, required: bool) -> Record:
    """What was selected and not judged, in how many layers, and why."""
    return {"record": "not_run", "op": op, "phase": phase, "reason": reason, "layers": layers, "required": required,
            "volatile": {}}  # fmt: skip


def layer_record(config: Config, layer: int, candidate: bool, seconds: float, peak_rss: int) -> Record:
    """A layer is done: whether kernels ran in it, how long it took, and the process's largest resident set by then."""
    return {"record": "layer", "layer": layer, "layer_id": layer_id(config, layer), "kind": config.kind(layer),
            "candidate": candidate, "volatile": {"seconds": round(seconds, 2), "peak_rss": peak_rss}}  # fmt: skip


def merged(missing: Iterable[Record]) -> list[Record]:
    """One record for each op, phase and reason, with the number of layers they all concern."""
    found: dict[tuple[str, str, str], Record] = {}
    for r in missing:
        key = (r["op"], r["phase"], r["reason"])
        found[key] = {**r, "layers": r["layers"] + (found[key]["layers"] if key in found else 0)}
    return list(found.values())


def drift_record(config: Config, drift: Drift | LogitsDrift) -> Record:
    """A distance behind a layer: `drift` of the streams, `logits` behind the last one."""
    fields = {name: _finite(x) if isinstance(x, float) else x for name, x in asdict(drift).items()}
    kind = "drift" if isinstance(drift, Drift) else "logits"
    return {"record": kind, "layer_id": layer_id(config, drift.layer), "kind": config.kind(drift.layer), **fields,
            "volatile": {}}  # fmt: skip


def write_bytes(path: Path, content: bytes) -> None:
    """To a temporary name first. Raises OSError where the disk is full, leaving an older file as it was."""
    temporary = path.with_name(path.name + ".partial")
    try:
        temporary.write_bytes(content)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_lines(path: Path, records: Iterable[Record]) -> None:
    """All records of a run."""
    write_bytes(path, "".join(json.dumps(record, allow_nan=False) + "\n" for record in records).encode())


def read_lines(run: Path) -> list[Record]:
    """Records of a run directory. Raises BadInput for a missing, damaged or foreign file."""
    path = run / FILE
    try:
        lines = path.read_text().splitlines()
    except (FileNotFoundError, NotADirectoryError):
        raise BadInput(f"{path}: no such file; a run directory holds {FILE}") from None
    records = []
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
        except ValueError as error:
            raise BadInput(f"{path}, line {number}: not JSON: {error}") from None
        if not isinstance(record, Mapping) or "record" not in record:
            raise BadInput(f"{path}, line {number}: no record")
        records.append(dict(record))
    if not records or records[0].get("schema") != SCHEMA_VERSION:
        raise BadInput(f"{path}: the first record must be of schema version {SCHEMA_VERSION}")
    if records[-1]["record"] != "summary":
        raise BadInput(f"{path}: cut off after line {len(records)}: the last record must be the summary")
    return records


def deterministic(record: Record) -> Record:
    """A record without what may differ between two runs."""
    return {name: value for name, value in record.items() if name != "volatile"}


def schema() -> dict[str, Any]:
    """JSON schema of one record."""
    return json.loads(resources.files("parity.report").joinpath("schema.json").read_text())
