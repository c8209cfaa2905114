"""The main job from its command line: exit codes, records and their schema, reports."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import jsonschema
import pytest
import torch

from parity import alone, candidates, cli, records
from parity.report import junit, markdown
from parity.report.html import render
from parity.report.terminal import reproduce
from reference.presets import preset

SMALL = ["run", "--model", "procedural:mini", "--layers", "2", "--lengths", "5", "--start-pos", "127"]
ONE = ["--ops", "attn.wq_a*", "--phases", "decode"]


def run(tmp_path, *words: str, name: str = "run") -> tuple[int, list[records.Record]]:
    code = cli.main([*words, "--out", str(tmp_path / name)])
    path = tmp_path / name
    return code, records.read_lines(path) if (path / records.FILE).exists() else []


@pytest.fixture(scope="module")
def clean(tmp_path_factory) -> tuple[int, list[records.Record]]:
    """A CSA layer of mini, every op and phase."""
    return run(tmp_path_factory.mktemp("clean"), *SMALL)


@pytest.fixture
def broken_gemm(monkeypatch) -> None:
    honest = candidates.gemm_fp8

    def wrong(codes, scales, weight_codes, weight_scales):
        y = honest(codes, scales, weight_codes, weight_scales)
        y.view(torch.int16)[0, 40] += 1
        return y

    monkeypatch.setattr(candidates, "gemm_fp8", wrong)


def test_exit_0_when_all_is_judged_and_passes(clean):
    code, said = clean
    assert code == 0 and said[-1]["exit_code"] == 0
    verdicts = [r for r in said if r["record"] == "verdict"]
    assert len(verdicts) == said[-1]["judged"] == said[-1]["passed"] > 60
    assert {r["op"] for r in verdicts} >= {"attn.wq_a.input", "attn.wq_a", "attn.compressor.row", "attn.core"}
    assert {r["phase"] for r in verdicts} == {"prefill", "decode", "verify", "chunk"}


def test_what_did_not_run_is_listed_with_its_reason(clean):
    missing = {r["op"]: r for r in clean[1] if r["record"] == "not_run"}
    judged = {r["op"] for r in clean[1] if r["record"] == "verdict"}
    assert {"streams", "head.logits"} <= set(missing) - judged
    assert all(r["reason"] for r in missing.values()) and clean[1][-1]["not_run"] == len(set(missing) - judged)
    assert any("synthetic" in note for note in clean[1][-1]["notes"])


def test_exit_1_when_a_verdict_fails_and_the_record_names_the_place(tmp_path, broken_gemm):
    code, said = run(tmp_path, *SMALL, *ONE)
    (failed,) = [r for r in said if r["record"] == "verdict" and r["verdict"] == "fail"]
    assert code == 1 and (failed["op"], failed["layer_id"], failed["phase"]) == ("attn.wq_a", "layer_02", "decode")
    worst = failed["outputs"][0]["worst"]
    assert worst == {"token": 0, "channel": 40, "sequence": 0, "position": 5, "channels": [40, 41]}
    assert "attn.wq_a" in render(said) and "class=\"bad\"" in render(said)
    again = reproduce(said[0], failed).split()
    assert again[:4] == ["v4parity", "run", "--layers", "02"]
    words = [word.strip("'") for word in again[1:]]
    assert cli.main([*words, "--out", str(tmp_path / "again")]) == 1


def test_a_prompt_too_short_for_an_index_key(tmp_path):
    """No token sees a key: scores and picks are not run, with the reason, and everything else is judged."""
    code, said = run(tmp_path, *SMALL[:5], "--lengths", "2", "--start-pos", "", "--phases", "prefill", "--no-drift")
    missing = {r["op"]: r["reason"] for r in said if r["record"] == "not_run"}
    assert code == 0 and said[-1]["passed"] == said[-1]["judged"] > 30
    assert missing["attn.indexer.scores"] == "no token of these steps has any of it"


def test_sums_of_fewer_bits_are_judged_as_such(tmp_path, monkeypatch):
    """Products off by a unit or two of bfloat16: wrong for sums in float32, and within what those of a Hopper may lose."""
    honest = candidates.gemm_fp8
    monkeypatch.setattr(candidates, "gemm_fp8", lambda *operands: (honest(*operands).float() * (1 + 2.0**-7)).bfloat16())
    words = [*SMALL, *ONE]
    assert run(tmp_path, *words, name="float32")[0] == 1
    code, said = run(tmp_path, *words, "--accumulate", "hopper-fp8", name="hopper")
    assert (code, said[0]["accumulate"]) == (0, "hopper-fp8")
    (product,) = (r for r in said if r["record"] == "verdict" and r["op"] == "attn.wq_a")
    assert "--accumulate hopper-fp8" in reproduce(said[0], product) and product["budget_used"] > 0


def test_exit_1_when_a_whole_layer_departs_and_every_op_passes(tmp_path, monkeypatch, capsys):
    """The two mixes of a layer exchanged: no op is wrong, and the run fails in every form it is told in."""
    honest = alone.block
    monkeypatch.setattr(alone, "block", lambda x, w, *rest: honest(x, replace(w, hc_attn=w.hc_ffn, hc_ffn=w.hc_attn), *rest))
    words = ["run", "--model", "procedural:mini", "--layers", "1", "--lengths", "3", "--start-pos", "", *ONE]
    assert run(tmp_path, *words, "--no-drift", name="ops")[0] == 0
    code, said = run(tmp_path, *words, "--drift")
    summary = said[-1]
    assert (code, summary["failed"], summary["departed"], summary["passed"]) == (1, 0, 1, 2)
    jsonschema.Draft202012Validator(records.schema()).validate(summary)
    printed, page = capsys.readouterr().out, render(said)
    assert "0 failed; whole layers that depart: 1;" in printed and "DEPARTS layer_01, decode: streams 0." in printed
    assert "1 whole layer departs from the twin" in page and "layer_01, prefill: streams 0." in page
    assert "passed; whole layers that depart: 1" in markdown.render(said)
    suite = junit.render(said)
    assert 'failures="2"' in suite and 'name="layer_01-hca-whole-decode"' in suite and "layer_01, decode: streams 0." in suite


@pytest.mark.parametrize(
    "words",
    [
        ["--ops", "attn.nothing"],
        ["--phases", "later"],
        ["--layers", "77"],
        ["--layers", "x-"],
        ["--lengths", "0"],
        ["--lengths", "", "--start-pos", ""],
        ["--start-pos", "1048576"],
        ["--profile", "official"],
        ["--accumulate", "fp16"],
    ],
)
def test_exit_2_for_a_word_that_means_nothing(tmp_path, words, capsys):
    assert run(tmp_path, *SMALL, *words) == (2, [])
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("option", ["--candidate=x", "--device=x", "--later"])
def test_exit_2_for_a_word_that_is_no_choice(tmp_path, option):
    with pytest.raises(SystemExit) as stop:
        run(tmp_path, *SMALL, option)
    assert stop.value.code == 2


def test_exit_2_for_options_that_contradict(tmp_path):
    assert cli.main([*SMALL, "--resume"]) == 2
    assert run(tmp_path, *SMALL, "--ids-file", "f") == (2, [])


def ids_file(tmp_path, **prompts: list[int]) -> list[str]:
    (tmp_path / "ids.json").write_text(json.dumps(prompts))
    return ["run", "--model", "procedural:mini", "--layers", "2", "--start-pos", "", "--ids-file", str(tmp_path / "ids.json")]


def test_given_ids_are_those_of_the_first_sequences(tmp_path):
    """The prompt is what the phases behind it and MTP leave; other ids are other numbers and another digest."""
    words = [*ONE, "--ops", "embed", "--layers", "0"]
    one, two, same = (
        run(tmp_path, *ids_file(tmp_path, a=[*range(12), last, 1, 2, 3, 4, 5, 6, 7]), *words, name=name)[1]
        for name, last in (("x", 20), ("y", 21), ("z", 20))
    )
    assert one[0]["lengths"] == [20 - (1 + 2 + 9 + 1)] and one[0]["ids"]["file"].endswith("ids.json")
    assert one[0]["ids"] != two[0]["ids"]
    assert [records.deterministic(r) for r in one] == [records.deterministic(r) for r in same]
    assert "--ids-file" in reproduce(one[0], one[1]) and "--lengths" not in reproduce(one[0], one[1])


@pytest.mark.parametrize(
    ("prompts", "said"),
    [
        ({"a": [5] * 13}, "a has 13 ids; the phases after its prompt take 13"),
        ({"a": [5] * 40, "b": [600] * 99}, "b, token 0: id 600 is outside the vocabulary of 512"),
        ({"a": [5, -1] * 20}, "a, token 1: id -1 is outside the vocabulary of 512"),
        ({"a": []}, "a is an empty prompt"),
        ({}, "expected an object of prompts"),
    ],
)
def test_exit_4_for_ids_that_do_not_fit(tmp_path, prompts, said, capsys):
    assert run(tmp_path, *ids_file(tmp_path, **prompts)) == (4, [])
    assert said in capsys.readouterr().err


def test_exit_4_for_a_device_that_is_not_there(tmp_path, capsys):
    assert run(tmp_path, *SMALL, "--device", "cuda") == (4, [])
    assert "cuda" in capsys.readouterr().err


def test_the_device_of_this_process_may_be_named(tmp_path):
    assert run(tmp_path, *SMALL, *ONE, "--device", "cpu")[0] == 0


@pytest.mark.parametrize(
    "words",
    [
        ["--layers", "mtp_0", "--ops", "attn.indexer.q,attn.wq_a"],  # no indexer in a window layer
        ["--layers", "0", "--ops", "attn.compressor.row"],  # no such op in a window layer
        [*ONE, "--ops", "*", "--gate"],
    ],
)
def test_exit_3_when_something_requested_did_not_run(tmp_path, words):
    code, said = run(tmp_path, *SMALL, "--phases", "decode", *words)
    assert code == 3 and any(r["required"] for r in said if r["record"] == "not_run")
    assert "Incomplete" in render(said)


def test_exit_4_for_bad_input(tmp_path, capsys):
    assert cli.main(["run", "--model", str(tmp_path / "absent"), "--out", str(tmp_path / "a")]) == 4
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / records.FILE).write_text("{}")
    assert cli.main([*SMALL, *ONE, "--out", str(tmp_path / "used")]) == 4
    assert cli.main(["report", str(tmp_path)]) == 4
    assert capsys.readouterr().err.count("v4parity:") == 3


def test_records_are_the_same_twice_and_fit_the_schema(tmp_path, clean):
    first, second = (run(tmp_path, *SMALL, *ONE, name=name)[1] for name in "ab")
    assert [records.deterministic(r) for r in first] == [records.deterministic(r) for r in second]
    check = jsonschema.Draft202012Validator(records.schema())
    check.check_schema(records.schema())
    for record in [*clean[1], *first]:
        check.validate(record)
    for wrong in ({"record": "verdict"}, {**clean[1][1], "verdict": "maybe"}, {**clean[1][-1], "extra": 1}):
        assert not check.is_valid(wrong)


def test_failing_records_fit_the_schema(tmp_path, broken_gemm):
    check = jsonschema.Draft202012Validator(records.schema())
    for record in run(tmp_path, *SMALL, *ONE)[1]:
        check.validate(record)


def test_a_seed_changes_the_numbers(tmp_path):
    one, two = (run(tmp_path, *SMALL, *ONE, "--seed", seed, name=seed)[1] for seed in "12")
    assert [r["relative_l2"] for r in one if r["record"] == "verdict"] != [
        r["relative_l2"] for r in two if r["record"] == "verdict"
    ]


def test_infinity_is_written_as_null(tmp_path):
    assert records.finite_or_none(math.inf) is None
    with pytest.raises(ValueError):
        records.write_lines(tmp_path / records.FILE, [{"x": math.inf}])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"record": "run", "schema": 99}'])
def test_damaged_records_are_refused(tmp_path, text):
    (tmp_path / records.FILE).write_text(text)
    assert cli.main(["report", str(tmp_path)]) == 4


def test_report_renders_a_run_again(tmp_path, capsys):
    run(tmp_path, *SMALL, *ONE)
    first = (tmp_path / "run" / "index.html").read_text()
    assert cli.main(["report", str(tmp_path / "run"), "--html", str(tmp_path / "again.html")]) == 0
    assert (tmp_path / "again.html").read_text() == first
    capsys.readouterr()
    assert cli.main(["report", str(tmp_path / "run")]) == 0
    out = capsys.readouterr().out
    assert "attn.wq_a" in out and "layer_02" in out and "not run" not in out.split("note")[0]


def test_config_digest_tells_configurations_apart():
    digests = {records.config_digest(preset(name)) for name in ("mini", "v4-pro-slim", "v4-pro", "v4-flash")}
    assert len(digests) == 4
