"""Traces that hold what no op puts out: rows and experts that are not there, other shapes, damage. Never a traceback."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from traced_cases import CONFIG, judged, missing, right, written

from parity import trace
from parity.cli import main

TAP = "layers.2."


def changed(path: Path, name: str, change, phase: str = "chunk") -> Path:
    """The whole trace with another tensor of a tap in one phase."""

    def change_all(entries, values):
        for i, e in enumerate(entries):
            if e.tap == TAP + name and e.phase == phase:
                x = values[e.key] = change(values[e.key].clone()).contiguous()
                entries[i] = replace(e, shape=tuple(x.shape))
        return entries, values

    return written(right(), path, change=change_all)


def first_is(number: int):
    def change(x):
        x[0, 0] = number
        return x

    return change


FOREIGN = [
    ("attn.indexer.picks", first_is(400), "attn.core", "attn.indexer.picks: token 0 names 400 of 1"),
    ("attn.indexer.picks", first_is(-5), "attn.core", "attn.indexer.picks: token 0 names -5 of 1"),
    ("ffn.gate.experts", first_is(10**6), "ffn.experts.h", "ffn.gate.experts: token 0 names 1000000 of 8"),
    ("ffn.gate.experts", first_is(-5), "ffn.experts.h", "ffn.gate.experts: token 0 names -5 of 8"),
    ("ffn.gate.experts", lambda x: x[:, :-1], "ffn.experts.h", "ffn.gate.experts is [4, 2], expected [4, 3]"),
    ("attn.q", lambda x: x[:, :4], "attn.core", "attn.q is [4, 4, 512], expected [4, 8, 512]"),
    ("hc_attn.streams", lambda x: x[:, :3], "hc_ffn.pre", "hc_attn.streams is [4, 3, 256], expected [4, 4, 256]"),
]


@pytest.mark.parametrize(("name", "change", "reader", "reason"), FOREIGN, ids=[f"{n}-{i}" for i, (n, *_) in enumerate(FOREIGN)])
def test_what_is_no_output_of_the_op_fails_it_and_is_not_read(tmp_path, name, change, reader, reason):
    """Numbers of rows and experts that are not there, and other shapes: a verdict, and no traceback."""
    path = changed(tmp_path / "t", name, change)
    words = ["--no-drift", "--phases", "chunk", "--ops", f"{name},{reader}"]
    code, said = judged(path, tmp_path / "run", *words)
    assert code == 1 and [r["op"] for r in said if r.get("verdict") == "fail"] == [name]
    assert reason in missing(said)[reader]


@pytest.mark.parametrize(("name", "change"), [("hc_ffn.streams", lambda x: x[:, :3]), ("ffn.gate.experts", first_is(10**6))])
def test_whole_layers_of_what_does_not_fit(tmp_path, name, change):
    path = changed(tmp_path / "t", name, change)
    code, said = judged(path, tmp_path / "run", "--ops", "attn_norm", "--drift")
    if name == "ffn.gate.experts":
        assert code == 1 and any(r.get("unexplained") for r in said if r["record"] == "drift")
    else:
        assert code == 0 and missing(said)["drift"] == "streams behind the layer are [4, 3, 256] in chunk, request 0"


def no_scales(entries, values):
    return [e for e in entries if not e.tap.endswith("wq_a.input.scale")], values


def high_ids(entries, values):
    for e in entries:
        if e.tap.endswith("ids"):
            values[e.key][0] = CONFIG.vocab_size
    return entries, values


def other_table(entries, values):
    key = next(e.key for e in entries if e.tap == TAP + "attn.rope.table.cos" and e.request == 0)
    values[key][0] += 1
    return entries, values


@pytest.mark.parametrize(
    ("change", "op", "says"),
    [
        (no_scales, "attn.wq_a.input", f"{TAP}attn.wq_a.input: codes without scales"),
        (high_ids, "embed", f"ids: {CONFIG.vocab_size} is outside the vocabulary of {CONFIG.vocab_size}"),
        (other_table, "attn.rope.table", "attn.rope.table.cos, layer 2: two rows of position 0 differ"),
    ],
    ids=["scales", "ids", "table"],
)
def test_damage_of_a_trace_is_one_line(tmp_path, capsys, change, op, says):
    path = written(right(), tmp_path / "t", change=change)
    run = ["run", "--model", "procedural:mini", "--layers", "0" if op == "embed" else "2", "--ops", op, "--no-drift"]
    assert main([*run, "--candidate", str(path), "--out", str(tmp_path / "run")]) == 4
    error = capsys.readouterr().err
    assert says in error and error.count("\n") == 1 and trace.MANIFEST in error
