"""The bf16 build: rows of one vector, index keys of eight bits with a float32 scale. Clean, and with planted faults."""

from __future__ import annotations

import math

import pytest
import torch
from judge_cases import failing, only, run_layer
from kernel_cases import mutant

from optimized.kernels import compress as compress_file
from optimized.kernels import index_logits as logits_file
from parity import attend, candidates, indexing, ops, row_forms

HCA, CSA = 1, 2  # layers of mini
ROWS = ("attn.kv", "attn.compressor.row", "attn.core")
INDEX = tuple(f"attn.indexer.{name}" for name in ("q", "compressor.row", "scores", "picks"))


def run(layer: int, *names: str, phases: tuple[str, ...] = ("decode", "verify")):
    return run_layer(layer, [ops.BY_NAME[n] for n in names], phases, (7, 29), build="pool-bf16")


@pytest.mark.parametrize(("layer", "names"), [(HCA, ROWS), (CSA, ROWS + INDEX)])
@pytest.mark.parametrize("phases", [("prefill", "chunk"), ("decode", "verify")])
def test_the_clean_run_passes(layer, names, phases):
    judged = run(layer, *names, phases=phases)
    assert not failing(judged)
    assert {j.op.name for j in judged if any(v.elements for v in j.verdicts)} == set(names)
    forms = {v.output: v.storage for j in judged for v in j.verdicts}
    assert forms["row"] == "bf16" and forms.get("keys", "e4m3_128") == "e4m3_128"


def test_a_row_that_lost_its_last_bits(monkeypatch):
    honest = attend.qk_norm_rope

    def truncated(*args):
        q = honest(*args)
        main = args[6].view(torch.int16)
        main[args[8] if len(args) > 8 else slice(None)] &= ~1
        return q

    monkeypatch.setattr(attend, "qk_norm_rope", truncated)
    for v in only(run(HCA, "attn.kv"), "attn.kv"):
        assert v.output == "row" and {"sequence", "position", "channel"} <= set(v.worst)


def test_a_compressed_row_through_two_roundings_of_which_one_is_coarse(tmp_path, monkeypatch):
    wrong = mutant(compress_file, tmp_path, ("store_bf16_tile(main_rows, target * main_stride, live, y",
                                             "store_bf16_tile(main_rows, target * main_stride, live, y * 1.01"))  # fmt: skip
    monkeypatch.setattr(candidates, "compress", wrong.compress)
    for v in only(run(HCA, "attn.compressor.row"), "attn.compressor.row"):
        assert v.output == "row" and {"entry", "page"} <= set(v.worst)


def test_a_window_row_that_also_lands_next_door(monkeypatch):
    honest = attend.qk_norm_rope

    def twice(*args):
        q = honest(*args)
        if len(args) > 8:
            args[6][args[8][-1] + 1] = args[6][args[8][-1]]
        return q

    monkeypatch.setattr(attend, "qk_norm_rope", twice)
    assert {v.output for v in only(run(HCA, "attn.kv"), "attn.kv")} == {"pool.row"}


def test_a_ring_of_a_long_step_that_gets_its_neighbours_rows(monkeypatch):
    honest = attend.write_window
    monkeypatch.setattr(attend, "write_window", lambda main, *rest: honest(main.roll(1, 0), *rest))
    assert {v.output for v in only(run(HCA, "attn.kv", phases=("prefill",)), "attn.kv")} == {"ring.row"}


def test_a_key_scale_that_is_no_power_of_two(monkeypatch):
    honest = indexing.compress_index

    def between(*args, order):
        honest(*args, order=order)
        args[-2][args[-2] > 0] *= 1.5

    monkeypatch.setattr(indexing, "compress_index", between)
    for v in only(run(CSA, *INDEX), "attn.indexer.compressor.row"):
        assert v.output in ("keys", "pool.index") and v.budget_used == math.inf


def test_scores_that_leave_out_the_scales_of_the_keys(tmp_path, monkeypatch):
    wrong = mutant(logits_file, tmp_path, ("* (e8m0_up(query_scale) * tl.trans(key_scale))", "* e8m0_up(query_scale)"))
    monkeypatch.setattr(indexing, "index_logits", wrong.index_logits)
    assert "attn.indexer.scores" in failing(run(CSA, "attn.indexer.scores"))


def test_a_float32_scale_becomes_its_exponent_or_no_scale():
    scales = torch.tensor([1.0, 0.25, 2.0**100, 0.75, -1.0, 0.0, math.nan, math.inf])
    _, found = row_forms.key_codes(torch.zeros(8, 4, dtype=torch.uint8), scales, "fp8")
    assert found.tolist() == [127, 125, 227, 255, 255, 255, 255, 255]
