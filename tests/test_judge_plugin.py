"""The pytest plugin: ids of the layer suite, what -k selects, options and header."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

SUITE = Path(__file__).with_name("test_layers.py")


def collect(*words: str) -> tuple[list[str], str]:
    """Ids that a selection of the layer suite has, and all output."""
    command = [sys.executable, "-m", "pytest", str(SUITE), "--collect-only", "-q", "-p", "no:cacheprovider", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=SUITE.parents[1])
    return re.findall(r"test_op\[(.*)\]", done.stdout), done.stdout + done.stderr


@pytest.fixture(scope="module")
def slim() -> list[str]:
    return collect()[0]


def test_every_layer_of_pro_has_ids_with_kind_op_and_phase(slim):
    names = {i.split("-")[0] for i in slim}
    assert names == {f"layer_{n:02d}" for n in range(61)} | {"mtp_0"}
    kinds = {i.split("-")[0]: i.split("-")[1] for i in slim}
    assert (kinds["layer_00"], kinds["layer_30"], kinds["layer_59"], kinds["mtp_0"]) == ("hca", "csa", "hca", "window")
    assert "layer_30-csa-attn.core-verify" in slim and "mtp_0-window-e_proj-prefill" in slim


def test_chosen_layers_run_every_phase_and_the_others_decode_and_a_chunk(slim):
    phases = {n: {i.rsplit("-", 1)[1] for i in slim if i.startswith(n)} for n in {i.split("-")[0] for i in slim}}
    whole = {n for n, p in phases.items() if p == {"prefill", "decode", "verify", "chunk"}}
    assert whole == {"layer_00", "layer_01", "layer_02", "layer_03", "layer_30", "layer_59", "layer_60", "mtp_0"}
    assert all(p == {"decode", "chunk"} for n, p in phases.items() if n not in whole)


def test_ids_hold_the_words_that_k_selects_by(slim):
    """`-k "compressor and decode"` finds compressor ops of both kinds of layer, and nothing of window layers."""
    chosen = [i for i in slim if "compressor" in i and "decode" in i]
    assert {i.split("-")[1] for i in chosen} == {"csa", "hca"} and "mtp_0" not in {i.split("-")[0] for i in chosen}


def test_another_model_has_its_own_layers_and_the_header_says_so():
    ids, out = collect("--v4-model", "procedural:mini", "-v")
    assert {i.split("-")[0] for i in ids} <= {f"layer_{n:02d}" for n in range(5)} | {"mtp_0"}
    assert "optimized on procedural:mini, profile pool-fp8, seed 0" in out


def test_real_scale_is_a_decode_step_of_every_layer():
    ids, _ = collect("--v4-scale", "real")
    assert {i.split("-")[0] for i in ids} == {f"layer_{n:02d}" for n in range(61)} | {"mtp_0"}
    assert all(i.endswith("-decode") for i in ids)


def test_an_unknown_candidate_is_a_usage_error():
    assert "invalid choice: 'mine'" in collect("--v4-candidate", "mine")[1]
