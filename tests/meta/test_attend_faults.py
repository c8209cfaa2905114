"""Planted faults around the attention core: each is caught, in the right op, at the right place."""

from __future__ import annotations

import math

import pytest
import torch
from judge_cases import failing, only, run, run_layer
from kernel_cases import mutant

from optimized.kernels import gemm_bf16 as gemm_file
from optimized.kernels import qk_norm_rope as rows_file
from parity import attend, ops
from reference.presets import preset

WINDOW, HCA, CSA = 0, 1, 2  # layers of mini
NAMES = ("attn.q", "attn.kv", "attn.compressor.values", "attn.core", "attn.wo_a")
INDEX = ("attn.indexer.weights", "attn.indexer.compressor.values")
LONG = ("prefill", "chunk")


@pytest.mark.parametrize(
    ("kind", "around"),
    [("window", (16, 256)), ("hca", (16, 128, 256)), ("csa", (16, 36, 256))],  # 36 tokens make nine rows, and top-k is eight
)
def test_edges_of_what_a_token_sees(kind, around):
    seen = torch.arange(1, 300)  # tokens that a position sees, itself included
    near = attend.at_edge(preset("mini"), kind, seen - 1)
    assert seen[near].tolist() == [1, *sorted(n + d for n in around for d in (-1, 0, 1))]  # and the very first


def test_a_fault_at_any_place_of_a_group_is_seen():
    """In a long step from any start, every residue of a group's four positions is among the tokens that are judged."""
    assert all(len({t % 4 for t in range(start, start + 20, attend.EVERY)}) == 4 for start in range(4))


def run_long(layer: int, *names: str):
    return run_layer(layer, [ops.BY_NAME[n] for n in names], LONG, (7, 29))


@pytest.mark.parametrize("layer", [HCA, CSA])
def test_the_clean_run_passes(layer):
    names = (*NAMES, *INDEX) if layer == CSA else NAMES
    for judged in (run(layer, *names), run_long(layer, *names)):
        assert not failing(judged)
        assert {j.op.name for j in judged if j.verdicts} == set(names)


@pytest.mark.parametrize(
    ("edit", "found"),
    [
        (("tl.load(kv_weight + d, mask=d < HEAD_DIM, other=0.0)", "(d < HEAD_DIM) * 1.0"), "attn.kv"),  # no weight
        (("rotate_tail(y, cos, sin, t, t < T, 1.0", "rotate_tail(y, cos, sin, t, t < T, -1.0"), "attn.kv"),  # turned back
        (("x * inverse_rms(x, eps, HEAD_DIM), cos", "x, cos"), "attn.q"),  # queries without their norm
        (("cos, sin, t, live, 1.0", "sin, cos, t, live, 1.0"), "attn.q"),
    ],
)
def test_faults_inside_queries_and_rows(tmp_path, monkeypatch, edit, found):
    wrong = mutant(rows_file, tmp_path, edit)
    monkeypatch.setattr(attend, "qk_norm_rope", wrong.qk_norm_rope)
    only(run(WINDOW, *NAMES[:2]), found)


def test_a_window_row_in_its_neighbours_place(monkeypatch):
    """Of the second sequence in a decode step: its own place stays poison, and a foreign row is overwritten."""
    honest = attend.qk_norm_rope

    def shifted(*args):
        if len(args) == 9:
            args[8][1] += 1
        return honest(*args)

    monkeypatch.setattr(attend, "qk_norm_rope", shifted)
    judged = run_layer(WINDOW, [ops.BY_NAME["attn.kv"]], ("decode",))
    outputs = {v.output for v in only(judged, "attn.kv")}
    assert {"nope", "pool.nope", "pool.rope"} <= outputs


def test_a_ring_that_gets_the_row_of_the_token_before(monkeypatch):
    honest = attend.write_window
    monkeypatch.setattr(attend, "write_window", lambda main, *rest: honest(main.roll(1, 0), *rest))
    for v in only(run_long(WINDOW, "attn.kv"), "attn.kv"):
        assert v.output == "ring.nope" and {"sequence", "position"} <= set(v.worst)


def test_a_ring_write_of_a_token_that_a_later_one_takes_is_found(monkeypatch):
    """The prompt of 29 does not fit the ring of 19: its first rows may not be written as well."""
    monkeypatch.setattr(attend, "last_writes", lambda places, positions, ends, ring: places)
    only(run_long(WINDOW, "attn.kv"), "attn.kv")


def test_attention_that_reads_the_window_of_the_pool_for_its_own_rows(monkeypatch):
    honest = attend.prefill_attention

    def stale(q, main, rope, own_main, own_rope, *rest, **more):
        return honest(q, main, rope, own_main.roll(1, 0), own_rope, *rest, **more)

    monkeypatch.setattr(attend, "prefill_attention", stale)
    for v in only(run_long(WINDOW, "attn.kv", "attn.core"), "attn.core"):
        assert {"token", "head", "sequence", "position"} <= set(v.worst)


def test_an_output_that_is_not_turned_back(monkeypatch):
    honest = attend.decode_attention
    monkeypatch.setattr(attend, "decode_attention", lambda *args, **more: honest(*args[:6], **more))
    for v in only(run(HCA, "attn.core", "attn.wo_a"), "attn.core"):
        first, last = v.worst["channels"]
        assert first >= 448 and last <= 512


@pytest.mark.parametrize(
    "edit",
    [
        ("group * x_group_stride", "0 * x_group_stride"),  # every group reads the first one's heads
        ("(n // 128) * w_scale_stride + first // 128", "(n // 128) * w_scale_stride"),  # first scale for all of a row
    ],
)
def test_faults_inside_the_grouped_product(tmp_path, monkeypatch, edit):
    wrong = mutant(gemm_file, tmp_path, edit)
    monkeypatch.setattr(attend, "grouped_gemm", wrong.grouped_gemm)
    only(run(CSA, "attn.core", "attn.wo_a"), "attn.wo_a")


def test_compressor_projections_that_went_through_bfloat16(monkeypatch):
    honest = attend.gemm_bf16
    monkeypatch.setattr(attend, "gemm_bf16", lambda x, w, **more: honest(x, w, **more).bfloat16().float())
    only(run(CSA, *NAMES, *INDEX), "attn.compressor.values", *INDEX)


def test_a_nan_in_the_payload_of_one_query(monkeypatch):
    honest = attend.qk_norm_rope

    def broken(*args):
        q = honest(*args)
        q[0, -1, 5] = math.nan
        return q

    monkeypatch.setattr(attend, "qk_norm_rope", broken)
    for v in only(run(WINDOW, "attn.q"), "attn.q"):
        assert (v.worst["head"], v.worst["channels"], v.budget_used) == (7, [5, 6], math.inf)
