"""Planted faults in the three kernel families: each is caught, in the right op, at the right place.

A fault is put into the kernel's file (a mutant), its inputs, or the bytes it stored. The clean run passes.
"""

from __future__ import annotations

import math

import pytest
import torch
from judge_cases import codes_of, failing, only, run, run_layer
from kernel_cases import mutant

from optimized.kernels import compress as compress_file
from optimized.kernels import decode_attention as attention_file
from optimized.kernels import gemm_fp8 as gemm_file
from optimized.kernels import quantize as quantize_file
from optimized.pool import plans
from parity import attend, candidates, ops

CSA, HCA, WINDOW = 2, 1, 0  # layers of mini
GEMM, ROW, STATE, CORE = "attn.wq_a", "attn.compressor.row", "attn.compressor.state", "attn.core"


@pytest.mark.parametrize(("layer", "names"), [(CSA, (GEMM + ".input", GEMM, ROW, STATE, CORE)), (HCA, (ROW, STATE, CORE))])
def test_the_clean_run_passes(layer, names):
    judged = run(layer, *names)
    assert not failing(judged)
    assert {j.op.name for j in judged if j.verdicts} == set(names)


# --- activation quantiser and FP8 GEMM


def test_a_floored_scale_exponent_is_the_quantisers_fault_and_not_the_products(tmp_path, monkeypatch):
    halved = "tl.max(magnitude_bits(value), 2) - 0x800000"
    wrong = mutant(quantize_file, tmp_path, ("tl.max(magnitude_bits(value), 2)", halved))
    monkeypatch.setattr(candidates, "quantize_activation", wrong.quantize_activation)
    for v in only(run(CSA, GEMM + ".input", GEMM), GEMM + ".input"):
        assert v.tests["scale"] == math.inf


@pytest.mark.parametrize(
    "edit",
    [
        ("range(0, (K + 127) // 128)", "range(0, (K - 1) // 128)"),  # last K block dropped
        ("(n // 128) * w_scale_stride", "(n // 128) * 0 * w_scale_stride"),  # every output block takes the first scale
        ("x_scale_stride + block", "x_scale_stride"),  # every depth block takes the first scale
    ],
)
def test_faults_inside_the_gemm(tmp_path, monkeypatch, edit):
    wrong = mutant(gemm_file, tmp_path, edit)
    monkeypatch.setattr(candidates, "gemm_fp8", wrong.gemm_fp8)
    op = "attn.wkv"
    for v in only(run(CSA, op + ".input", op), op):
        assert v.budget_used > 1 and "channel" in v.worst


def test_one_ulp_in_one_element_of_a_product_is_found_there():
    def nudged(step, op):
        y = candidates.gemm(step, op)[op].clone()
        y.view(torch.int16)[1, 77] += 1
        return {op: y}

    for v in only(run(CSA, GEMM, attn_wq_a=nudged), GEMM):
        assert (v.worst["token"], v.worst["channels"], v.failing_rows) == (1, [77, 78], 1)


def test_a_nan_and_an_infinity_in_a_product_are_found():
    for bad in (math.nan, math.inf):

        def broken(step, op, bad=bad):
            y = candidates.gemm(step, op)[op].clone()
            y[0, 3] = bad
            return {op: y}

        for v in only(run(CSA, GEMM, attn_wq_a=broken), GEMM):
            assert v.budget_used == math.inf and v.worst["channel"] == 3


# --- compressor


@pytest.mark.parametrize(
    ("layer", "edit"),
    [
        (CSA, ("tl.where(k >= RATIO, HEAD_DIM, 0)", "tl.where(k >= RATIO, 0, HEAD_DIM)")),  # overlap halves swapped
        (HCA, ("gate = tl.load(score_state", "gate = 0.5 * tl.load(score_state")),  # stored scores scaled
        (CSA, ("ape + (k % RATIO)", "ape + (0 * k)")),  # position bias of the first slot everywhere
    ],
)
def test_faults_inside_the_compressor(tmp_path, monkeypatch, layer, edit):
    wrong = mutant(compress_file, tmp_path, edit)
    monkeypatch.setattr(candidates, "compress", wrong.compress)
    found = only(run(layer, ROW), ROW)
    assert {v.output for v in found} & {"nope", "rope"}
    assert all({"entry", "page", "page_row", "position"} <= set(v.worst) for v in found if v.output in ("nope", "rope"))


def test_one_stale_ring_slot_is_found_in_the_row_that_pools_it(monkeypatch):
    """Position 125 of the sequence that starts at 127: its row is the one that position 127 completes."""
    honest = candidates.rings

    def stale(poured, indexer):
        values, gates = honest(poured, indexer)
        values[poured.slots[1], 125 % values.shape[1]] *= -1
        return values, gates

    monkeypatch.setattr(candidates, "rings", stale)
    row = [v for v in failing(run_layer(CSA, [ops.BY_NAME[ROW]], ("decode",)))[ROW] if v.output == "nope"]
    assert [(v.worst["sequence"], v.worst["entry"], v.failing_rows) for v in row] == [(1, 31, 1)]


def test_a_row_on_the_wrong_page_is_found_as_damage_to_the_pool(monkeypatch):
    honest = candidates.compress

    def elsewhere(*args, block_rows, **kwargs):
        *most, table = args
        honest(*most, table.roll(1, 0), block_rows=block_rows, **kwargs)

    monkeypatch.setattr(candidates, "compress", elsewhere)
    outputs = {v.output for v in only(run(CSA, ROW), ROW)}
    assert {"nope", "pool.nope", "pool.rope"} <= outputs


def test_a_scale_byte_that_is_not_written_twice_is_found():
    def single(step, op):
        stored = candidates.compressed_rows(step, op)
        stored["layout"] = stored["layout"].clone()
        stored["layout"][:, 5] = 0
        return stored

    for v in only(run(CSA, ROW, attn_compressor_row=single), ROW):
        assert (v.output, v.worst["channels"]) == ("layout", [5, 6])


def test_a_flipped_code_is_found_in_its_channel():
    def flipped(step, op):
        stored = candidates.compressed_rows(step, op)
        codes, scales = codes_of(stored, "nope")
        codes = codes.clone()
        codes[:1, 200] ^= 1
        return stored | {"nope": (codes, scales)}

    for v in only(run(CSA, ROW, attn_compressor_row=flipped), ROW):
        assert v.output == "nope" and v.worst["channels"] == [200, 201] and v.failing_rows == 1


def test_a_state_write_to_the_wrong_ring_row_is_found(monkeypatch):
    honest = candidates.write_state

    def shifted(kv, score, kv_state, score_state, plan, slots, ape):
        plan = plan.clone()
        plan[:, 2] += 4  # the same position bias, another row of the ring
        honest(kv, score, kv_state, score_state, plan, slots, ape)

    monkeypatch.setattr(candidates, "write_state", shifted)
    outputs = {v.output for v in only(run(CSA, STATE), STATE)}
    assert {"values", "gates"} <= outputs and outputs & {"pool.nope", "pool.rope"}


# --- decode attention


@pytest.mark.parametrize(
    "edit",
    [
        ("h, mask=head, other=0.0) - peak", "h, mask=head, other=0.0) * 0.044 - peak"),  # sink scaled like a score
        ("total = total * carry + tl.sum(p, 1)", "total = total * carry + tl.sum(tl.where(j > start, p, 0.0), 1)"),
    ],
)
def test_faults_inside_attention(tmp_path, monkeypatch, edit):
    wrong = mutant(attention_file, tmp_path, edit)
    monkeypatch.setattr(attend, "decode_attention", wrong.decode_attention)
    for v in only(run(WINDOW, CORE), CORE):
        assert {"token", "head", "sequence", "position"} <= set(v.worst)


def test_one_index_off_by_a_page_is_found_in_its_token(monkeypatch):
    honest = plans.attention_lists

    def off(geometry, *args, **kwargs):
        indices, indptr = honest(geometry, *args, **kwargs)
        indices[indptr[2]] += geometry.envelope
        return indices, indptr

    monkeypatch.setattr(plans, "attention_lists", off)
    for v in only(run(HCA, CORE), CORE):
        assert v.worst["token"] == 2 and v.failing_rows == 8  # every head of that token


def test_a_group_that_is_not_over_is_not_visible(monkeypatch):
    """Per-sequence visibility, which lets the first tokens of a verify step see what their own drafts complete."""
    honest = plans.visible
    monkeypatch.setattr(plans, "visible", lambda p, ratio: honest(p + (ratio - 1), ratio))
    with pytest.raises((AssertionError, ValueError, IndexError)):
        assert not failing(run(HCA, CORE))


def test_a_pool_that_attention_writes_to_is_found(monkeypatch):
    honest = attend.decode_attention

    def scribbling(q, nope, rope, *args, **kwargs):
        nope[7, 3] ^= 0xFF
        return honest(q, nope, rope, *args, **kwargs)

    monkeypatch.setattr(attend, "decode_attention", scribbling)
    for v in only(run(WINDOW, CORE), CORE):
        assert (v.output, v.worst["channel"]) == ("pool.nope", 3)
