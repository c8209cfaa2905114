"""Another engine's trace as the candidate of a run: what is judged, what is not and why, and where a mistake is."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import jsonschema
import pytest
import torch
from traced_cases import CONFIG, LAYER, LOADER, flow, judged, missing, right, spoilt, verdicts, written

from parity import ops, records, trace
from parity.cli import main
from parity.report.terminal import reproduce
from parity.single.files import config_json

TAP = f"layers.{LAYER}."


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return written(right(), tmp_path_factory.mktemp("whole") / "t")


@pytest.fixture(scope="module")
def clean(whole, tmp_path_factory):
    """Exit code and records of the whole trace."""
    return judged(whole, tmp_path_factory.mktemp("clean") / "run")


def test_every_op_of_a_trace_is_judged_and_a_whole_layer(clean):
    code, said = clean
    found = verdicts(said)
    assert code == 0 and {r["op"] for r in found.values()} == {op.name for op in ops.OPS if set(op.kinds) & {"csa"}} - {
        "attn.indexer.rows"
    }
    assert {phase for _, phase in found} == {"prefill", "decode", "chunk"}
    assert {r["curve"] for r in said if r["record"] == "drift"} == {"forced"}
    assert (said[0]["engine"], said[0]["streams"], said[0]["phases"]) == ("kernels", "trace", ["prefill", "decode", "chunk"])
    assert "no pool" not in missing(said) and "this project's pool" in missing(said)["attn.indexer.rows"]
    schema = records.schema()
    for record in said:
        jsonschema.validate(record, schema)


@pytest.mark.slow
def test_verdicts_are_those_of_a_run_of_the_same_kernels(clean):
    """A run feeds kernels with the twin's payloads, an engine with its own: where these are the same, so is every number."""
    theirs, equal = verdicts(clean[1]), {}
    for j in flow().run_layer(LAYER):
        if not j.missing and (j.op.name, j.phase) in theirs:
            mine = records.verdict_record(CONFIG, j, 0.0)
            same = {o["output"]: o for o in mine["outputs"]}, {o["output"]: o for o in theirs[j.op.name, j.phase]["outputs"]}
            equal.setdefault(j.op.name, []).append(all(same[0][n] == o for n, o in same[1].items() if n in same[0]))
    names = [op.name for op in ops.OPS]
    first = [n for n in names[names.index("hc_attn.pre") : names.index("attn.core")] if n in equal and not n.endswith(".row")]
    assert len(first) > 15 and all(all(equal[n]) for n in first if n != "attn.indexer.scores")


def first_row_negated(outputs):
    return {n: torch.cat([-x[:1], x[1:]]) for n, x in outputs.items()}


def a_row_behind(outputs):
    """Token 2 of the second request has the row of the token before it."""
    (codes, scales), rope = outputs["nope"], outputs["rope"]
    copied = [torch.cat([x[:6], x[5:6], x[7:]]) for x in (codes, scales, rope, outputs["layout"])]
    return {"nope": (copied[0], copied[1]), "rope": copied[2], "layout": copied[3]}


def nibbles_swapped(outputs):
    codes, scales = outputs["keys"]
    other = codes.clone()
    other[1] = codes[1].unflatten(0, (-1, 2)).flip(1).flatten()
    return {"keys": (other, scales)}


def another_expert(outputs):
    experts = outputs["ffn.gate.experts"].clone()
    experts[3, 0] = next(e for e in range(CONFIG.n_routed_experts) if e not in experts[3].tolist())
    return {**outputs, "ffn.gate.experts": experts}


def a_scale_doubled(outputs):
    ((name, (codes, scales)),) = outputs.items()
    other = scales.clone()
    other[5, 0] += 1
    return {name: (codes, other)}


def tokens_shifted(outputs):
    return {n: x.roll(1, 0) for n, x in outputs.items()}


MISTAKES = [
    ("attn.q", first_row_negated, "sequence 0 position 5", ""),
    ("attn.indexer.compressor.row", nibbles_swapped, "sequence 1 position 7", "slow"),
    ("ffn.gate.experts", another_expert, "sequence 0 position 8", ""),
    ("attn.kv", a_row_behind, "sequence 1 position 6", "slow"),
    ("attn.wo_b.input", a_scale_doubled, "sequence 1 position 5", "slow"),
    ("attn.wq_b", tokens_shifted, "sequence", "slow"),
]


@pytest.mark.parametrize(
    ("op", "spoil", "place"), [pytest.param(*m[:3], id=m[0], marks=[pytest.mark.slow] if m[3] else []) for m in MISTAKES]
)
def test_a_mistake_is_named_where_it_is_and_nothing_behind_it(tmp_path, capsys, op, spoil, place):
    path = written(spoilt(op, spoil), tmp_path / "t")
    code, said = judged(path, tmp_path / "run", "--no-drift", "--phases", "chunk")
    assert code == 1 and [r["op"] for r in said if r.get("verdict") == "fail"] == [op]
    assert len(verdicts(said)) > 40
    line = capsys.readouterr().out.splitlines()[0]
    assert line.startswith(f"first wrong op: {op}, layer_02, chunk, {place}")
    failed = next(r for r in said if r.get("verdict") == "fail")
    words = reproduce(said[0], failed)
    assert f"--candidate {path}" in words and "--lengths" not in words
    script = tmp_path / "again.py"
    assert main(["repro", str(tmp_path / "run"), "--out", str(script)]) == 0
    again = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False)
    assert again.returncode == 1 and f"FAIL {op}" in again.stdout


def edited(source: Path, path: Path, edit) -> Path:
    """A copy of a trace with another manifest."""
    shutil.copytree(source, path)
    manifest = json.loads((path / trace.MANIFEST).read_text())
    edit(manifest)
    (path / trace.MANIFEST).write_text(json.dumps(manifest))
    return path


def without(*taps):
    def edit(manifest):
        kept = [t for t in manifest["tensors"] if trace.block_tap(t["tap"]).removesuffix(".scale") not in taps]
        manifest.update(tensors=kept)

    return edit


def test_what_a_trace_lacks_is_not_run_with_the_reason(whole, tmp_path):
    """Codes that a quantiser makes to the bit follow from its payload; a table is known within a bound; nothing else is."""
    lacking = ("attn.q", "attn.wq_a.input", "attn.rope.table.cos", "attn.compressor.scores", "hc_attn.post")
    words = "attn.q,attn.core,attn.wq_a.input,attn.wq_a,attn.kv,attn.compressor.*,hc_attn.*,attn.rope.table"
    code, said = judged(edited(whole, tmp_path / "t", without(*lacking)), tmp_path / "run", "--ops", words, "--no-drift")
    found, reasons = verdicts(said), missing(said)
    assert code == 3 and all(r["verdict"] == "pass" for r in found.values())
    assert {op for op, _ in found} == {"attn.wq_a", "attn.kv", "attn.compressor.values", "hc_attn.pre"}
    assert "from attn_norm: the trace has no attn.wq_a.input" in found["attn.wq_a", "chunk"]["bound"]
    assert reasons["attn.q"] == reasons["attn.core"] == "the trace has no attn.q"
    assert reasons["attn.compressor.row"] == "the trace has no attn.compressor.scores"
    assert reasons["hc_attn.pre"] == reasons["hc_attn.streams"] == "the trace has no hc_attn.post"
    assert reasons["attn.rope.table"] == "the trace has no attn.rope.table.cos"


def test_choices_without_scores_are_judged_as_sets(whole, tmp_path):
    """By the gaps that both scores' bounds excuse, experts' weights within them; a choice that is none fails."""
    words = ("--ops", "ffn.gate.experts,attn.indexer.picks", "--no-drift", "--phases", "chunk")
    lacking = without("ffn.gate.scores", "attn.indexer.scores")
    code, said = judged(edited(whole, tmp_path / "t", lacking), tmp_path / "run", *words)
    found = verdicts(said)
    assert code == 0 and {op for op, _ in found} == {"ffn.gate.experts", "attn.indexer.picks"}
    assert all("the trace has no" in r["bound"] for r in found.values())
    assert {"gap"} == set(found["attn.indexer.picks", "chunk"]["tests"])

    def change(entries, values):
        values["4.layers.2.ffn.gate.experts"] = another_expert({"ffn.gate.experts": values["4.layers.2.ffn.gate.experts"]})[
            "ffn.gate.experts"
        ]
        values["5.layers.2.attn.indexer.picks"][0, 0] = 3  # of the group that is not complete
        return entries, values

    path = edited(written(right(), tmp_path / "wrong", change=change), tmp_path / "u", lacking)
    code, said = judged(path, tmp_path / "bad", *words)
    assert code == 1 and all(r["verdict"] == "fail" for r in verdicts(said).values())


def test_a_request_that_begins_in_the_middle_has_no_past(whole, tmp_path):
    """Its first tokens are in no step: what reads them is not run, whole layers neither."""

    def edit(manifest):
        manifest.update(tensors=[t for t in manifest["tensors"] if t["request"] == 0 and t["phase"] != "prefill"])

    words = ("--ops", "attn.q,attn.core,attn.indexer.scores,attn.compressor.row,attn.wo_a", "--drift")
    code, said = judged(edited(whole, tmp_path / "t", edit), tmp_path / "run", *words)
    reasons = missing(said)
    assert code == 3 and {op for op, _ in verdicts(said)} == {"attn.q", "attn.wo_a"}
    for op in ("attn.core", "attn.indexer.scores", "attn.compressor.row"):
        assert reasons[op].endswith("of earlier tokens: the request begins at position 4")
    assert "whole layers need what came before" in reasons["drift"] and said[0]["start_pos"] == [4]


def test_shards_and_partial_sums_are_put_together(tmp_path):
    """Two ranks: heads of a query side by side, and halves of a product added, in bfloat16 each."""
    linear = LOADER.block(LAYER).attn.wo_b

    def change(entries, values):
        out = []
        for e in entries:
            if e.tap.endswith("attn.q"):
                parts, axis, partial = values.pop(e.key).chunk(2, 1), "h", False
            elif e.tap.endswith("attn.wo_b"):
                step = e.key.split(".")[0]
                x = right().held[LAYER, "attn.wo_b.input", int(step)].numbers()
                half = torch.arange(x.shape[1]) < x.shape[1] // 2
                parts, axis, partial = [linear.apply(x * m).bfloat16() for m in (half, ~half)], "d", True
                del values[e.key]
            else:
                out.append(e)
                continue
            for i, x in enumerate(parts):
                shard = trace.Shard(axis, i, 2)
                out.append(replace(e, key=f"{e.key}.{i}", shape=tuple(x.shape), shard=shard, partial_sum=partial))
                values[f"{e.key}.{i}"] = x.contiguous()
        return out, values

    path = written(right(), tmp_path / "t", change=change)
    words = ("--ops", "attn.q,attn.core,attn.wo_b,hc_attn.streams", "--no-drift")
    code, said = judged(path, tmp_path / "run", *words)
    found = verdicts(said)
    assert code == 3 and {op for op, _ in found} == {"attn.q", "attn.core", "attn.wo_b"}
    assert all(r["verdict"] == "pass" for r in found.values())
    assert "partial sums" in missing(said)["hc_attn.streams"]

    def twice(manifest):
        for t in (t for t in manifest["tensors"] if t["partial_sum"]):
            t.update(key=t["key"][:-1] + "0")

    code, said = judged(edited(path, tmp_path / "half", twice), tmp_path / "wrong", "--ops", "attn.wo_b", "--no-drift")
    assert code == 1 and all(r["verdict"] == "fail" for r in verdicts(said).values())


def in_float64(entries, values):
    wide = {k: x.double() if x.is_floating_point() else x for k, x in values.items()}
    return [replace(e, storage="f64") if values[e.key].is_floating_point() else e for e in entries], wide


def test_numbers_in_float64_are_judged_as_what_they_hold(clean, tmp_path):
    words = ("--ops", "attn.q,attn.kv,hc_attn.pre,ffn.gate.*", "--no-drift", "--phases", "chunk")
    code, said = judged(written(right(), tmp_path / "t", change=in_float64), tmp_path / "run", *words)
    theirs = verdicts(clean[1])
    assert code == 0 and len(verdicts(said)) == 5
    assert all(r["outputs"] == theirs[key]["outputs"] for key, r in verdicts(said).items())


def test_the_twin_itself_passes_in_float64(tmp_path):
    assert main(["capture", "--ids", "3,1,4,1,5", "--prefill", "4", "--out", str(tmp_path / "twin")]) == 0
    twin = trace.read_trace(tmp_path / "twin")
    wide, values = in_float64(twin.tensors, {t.key: twin.get(t) for t in twin.tensors})
    trace.write_trace(tmp_path / "t", replace(twin, tensors=tuple(wide)), values)
    code, said = judged(tmp_path / "t", tmp_path / "run")
    assert code == 0 and len(verdicts(said)) > 40
    assert "scores" in missing(said)["attn.compressor.row"]
    drift = [r for r in said if r["record"] == "drift"]
    assert [r["relative_l2"] for r in drift] == [0.0, 0.0]


def test_streams_alone_are_judged_by_layers(whole, tmp_path, capsys):
    """What many engines can dump: the streams around a layer. A layer that departs fails the run."""

    def only_streams(manifest):
        manifest.update(tensors=[t for t in manifest["tensors"] if t["tap"].endswith("hc_ffn.streams")])

    path = edited(whole, tmp_path / "t", only_streams)
    code, said = judged(path, tmp_path / "run")
    assert code == 0 and not verdicts(said) and len([r for r in said if r["record"] == "drift"]) == 3

    def swapped(manifest):
        for t in manifest["tensors"]:
            if t["tap"] == f"{TAP}hc_ffn.streams" and t["phase"] == "chunk":
                t.update(key=t["key"].replace("4.", "x.").replace("5.", "4.").replace("x.", "5."))

    capsys.readouterr()
    code, said = judged(edited(path, tmp_path / "u", swapped), tmp_path / "other")
    assert code == 1 and capsys.readouterr().out.startswith("first wrong layer: layer_02, chunk")


def test_what_cannot_be_a_candidate(whole, tmp_path, capsys):
    run = ["run", "--model", "procedural:mini", "--layers", "2", "--out", str(tmp_path / "run"), "--candidate"]

    def layered(manifest):
        manifest["tensors"][0].update(layer=1)

    cases = [
        (lambda m: m.pop("profile"), 2, "no profile"),
        (lambda m: m.update(profile="no"), 4, "no profile 'no'"),
        (lambda m: m.update(profile="qat"), 4, "not one that ops are judged by"),
        (lambda m: (m["config"].update(sliding_window=8), m.pop("config_sha256")), 4, "another model"),
        (lambda m: m.update(versions={"engine": 3}), 4, "versions"),
        (lambda m: m.update(claims="none"), 4, "claims"),
        (lambda m: m["tensors"][0].update(positions=[9, *m["tensors"][0]["positions"][1:]]), 4, "not consecutive"),
        (lambda m: m["tensors"].append(m["tensors"][0]), 4, "is there 2 times"),
        (layered, 4, "is no tap of layer 1"),
    ]
    for i, (edit, expected, says) in enumerate(cases):
        assert main([*run, str(edited(whole, tmp_path / str(i), edit))]) == expected, says
        error = capsys.readouterr().err
        assert says in error and error.count("\n") == 1
    half = edited(whole, tmp_path / "half", lambda m: None)
    (half / trace.TENSORS).write_bytes((half / trace.TENSORS).read_bytes()[:-100])
    assert main([*run, str(half)]) == 4 and trace.TENSORS in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main([*run, str(tmp_path / "nowhere")])
    assert "the directory of a trace" in capsys.readouterr().err
    assert main([*run, str(whole), "--lengths", "4"]) == 2 and "of its own" in capsys.readouterr().err
    all_others = {trace.block_tap(t.tap) for t in trace.read_trace(whole).tensors} - {"ids"}
    assert judged(edited(whole, tmp_path / "nothing", without(*all_others)), tmp_path / "empty")[0] == 3


def test_a_trace_is_written_without_this_package(whole, tmp_path):
    """The example of the documentation, with this engine's tensors, and what it says of itself."""
    page = (Path(__file__).parents[1] / "docs/single.md").read_text()
    (program,) = [code for code in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "def write_trace" in code]
    assert "parity" not in program and program.count("\n") <= 30
    space: dict = {}
    exec(program, space)
    source = trace.read_trace(whole)
    kept = [t for t in source.tensors if t.phase == "prefill" and re.search(r"attn_norm$|wq_a$|q_norm$|attn.q$|wq_b$", t.tap)]
    steps = [(t.tap, t.layer, t.phase, t.request, list(t.positions), t.dims, source.get(t).float().numpy()) for t in kept]
    versions = {"engine": "1.2"}
    space["write_trace"](tmp_path / "t", "somebody", versions, ["one rank"], "mini", config_json(CONFIG), "pool-fp8", steps)
    code, said = judged(tmp_path / "t", tmp_path / "run")
    expected = {"attn.wq_a", "attn.q_norm", "attn.wq_b", "attn.q", "attn.indexer.wq_b"}
    assert code == 0 and {op for op, _ in verdicts(said)} == expected
    assert said[0]["engine"] == "somebody (engine 1.2)" and "the trace says: one rank" in said[-1]["notes"]
