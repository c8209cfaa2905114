"""The pytest plugin and the layer suite that it serves: ids, what -k selects, options, header; from an empty directory."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree as xml

import pytest

from parity import ops, pytest_plugin, run, suite  # what the suite imports stays loaded between runs in this process
from parity.flow import NOTHING, Judged

pytest_plugins = "pytester"
SUITE = ["--pyargs", "parity.suite", "-p", "no:cacheprovider"]
MINI = ["--v4-model", "procedural:mini"]


@pytest.fixture
def collect(pytester):
    """Ids that a selection of the layer suite has in an empty directory, and all output."""

    def collect(*words: str) -> tuple[list[str], str]:
        done = pytester.runpytest_inprocess(*SUITE, "--collect-only", "-q", *words)
        text = done.stdout.str() + done.stderr.str()
        return re.findall(r"test_op\[(.*)\]", text), text

    return collect


@pytest.fixture
def slim(collect) -> list[str]:
    return collect()[0]


def test_every_layer_of_pro_has_ids_with_kind_op_and_phase(slim):
    names = {i.split("-")[0] for i in slim}
    assert names == {f"layer_{n:02d}" for n in range(61)} | {"mtp_0"}
    kinds = {i.split("-")[0]: i.split("-")[1] for i in slim}
    assert (kinds["layer_00"], kinds["layer_30"], kinds["layer_59"], kinds["mtp_0"]) == ("hca", "csa", "hca", "window")
    assert "layer_30-csa-attn.core-verify" in slim and "mtp_0-window-e_proj-prefill" in slim


def test_chosen_layers_run_every_phase_and_the_others_decode_and_a_chunk(slim):
    phases = {n: {i.rsplit("-", 1)[1] for i in slim if i.startswith(n)} for n in {i.split("-")[0] for i in slim}}
    whole = {n for n, p in phases.items() if p == {"prefill", "chunk", "decode", "verify"}}
    assert whole == {"layer_00", "layer_01", "layer_02", "layer_03", "layer_30", "layer_59", "layer_60", "mtp_0"}
    assert all(p == {"decode", "chunk"} for n, p in phases.items() if n not in whole)


def test_ids_hold_the_words_that_k_selects_by(slim):
    """`-k "compressor and decode"` finds compressor ops of both kinds of layer, and nothing of window layers."""
    chosen = [i for i in slim if "compressor" in i and "decode" in i]
    assert {i.split("-")[1] for i in chosen} == {"csa", "hca"} and "mtp_0" not in {i.split("-")[0] for i in chosen}


def test_the_repository_runs_the_suite_that_is_shipped(pytester, slim):
    here = Path(__file__).with_name("test_layers.py")
    done = pytester.runpytest_inprocess(here, "--collect-only", "-q", "-p", "no:cacheprovider", f"--rootdir={here.parent}")
    assert re.findall(r"test_op\[(.*)\]", done.stdout.str()) == slim


def test_another_model_has_its_own_layers_and_the_header_says_so(collect):
    ids, out = collect(*MINI, "-v", "--v4-seed", "3")
    assert {i.split("-")[0] for i in ids} == {f"layer_{n:02d}" for n in range(5)} | {"mtp_0"}
    assert "optimized on procedural:mini, profile pool-fp8, seed 3" in out and "interpreter" in out
    assert all(re.search(rf"{name} \d", out) for name in ("v4parity", "torch", "triton"))


def test_a_profile_is_one_build_and_none_is_the_default_with_some_layers_of_the_other(collect):
    both, fp8, bf16 = (collect(*MINI, *words)[0] for words in ([], ["--v4-profile", "pool-fp8"], ["--v4-profile", "pool-bf16"]))
    assert set(fp8) == {i for i in both if "-bf16-" not in i} and len(both) > len(fp8)
    assert all("-bf16-" in i for i in bf16) and len(bf16) == len(fp8)
    assert pytest_plugin.PROFILES == run.PROFILES


def test_real_scale_is_a_decode_step_of_every_layer(collect):
    ids, _ = collect("--v4-scale", "real")
    assert {i.split("-")[0] for i in ids} == {f"layer_{n:02d}" for n in range(61)} | {"mtp_0"}
    assert all(i.endswith("-decode") for i in ids)


@pytest.mark.parametrize(("option", "word"), [("candidate", "mine"), ("profile", "official"), ("scale", "huge")])
def test_an_unknown_word_is_a_usage_error(collect, option, word):
    assert f"invalid choice: '{word}'" in collect(f"--v4-{option}", word)[1]


@pytest.mark.slow
@pytest.mark.parametrize("workers", [[], ["-n", "2", "--dist", "loadgroup"]])
def test_a_layer_is_judged_from_an_empty_directory(pytester, workers):
    """In processes of its own, alone and under xdist; seed and profile are those asked for, properties are in JUnit."""
    chosen = ["-k", "layer_04 and (attn.wq_a or head) and decode and not bf16", "--junitxml", "r.xml"]
    done = pytester.runpytest_subprocess(*SUITE, *MINI, "--v4-seed", "5", *chosen, *workers)
    cases = list(xml.parse(pytester.path / "r.xml").iter("testcase"))
    done.assert_outcomes(passed=len(cases))
    names = {c.get("name") for c in cases}
    assert {f"test_op[layer_04-csa-{op}-decode]" for op in ("attn.wq_a", "head.logits")} <= names
    assert all({"budget_used", "relative_l2", "flips"} <= {p.get("name") for p in c.iter("property")} for c in cases)


@pytest.mark.parametrize("missing, outcome", [(NOTHING, AssertionError), ("layers.2 is stored as bf16", pytest.skip.Exception)])
def test_a_cell_that_judges_nothing_fails_and_one_without_a_kernel_is_skipped(monkeypatch, missing, outcome):
    nothing = Judged(ops.BY_NAME["attn.core"], 2, "decode", (), missing)
    monkeypatch.setattr(suite, "judged", lambda cell: {("attn.core", "decode"): nothing})
    with pytest.raises(outcome):
        suite.test_op(lambda name, value: None, None, "attn.core", "decode")
