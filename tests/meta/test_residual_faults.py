"""Planted faults around the residual streams and at the model's ends: each is caught, in the right op, at the right place."""

from __future__ import annotations

import math

import pytest
from judge_cases import failing, only, run
from kernel_cases import mutant

from optimized.kernels import hyper_connection as mix_file
from optimized.kernels import norm as norm_file
from parity import residual

CSA, LAST, DRAFTER = 2, 4, 5  # layers of mini
AROUND = ("hc_attn.pre", "attn_norm", "attn.q_norm", "hc_attn.streams", "hc_ffn.pre", "ffn_norm", "hc_ffn.streams")
ENDS = ("embed", "enorm", "hnorm", "streams", "hc_head", "norm", "head.logits")


@pytest.mark.parametrize(("layer", "names"), [(CSA, AROUND), (DRAFTER, (*AROUND, *ENDS))])
def test_the_clean_run_passes(layer, names):
    judged = run(layer, *names)
    assert not failing(judged)
    assert {j.op.name for j in judged if j.verdicts} == set(names)


@pytest.mark.parametrize(
    ("edit", "outputs"),
    [
        (("for _ in range(1, iterations)", "for _ in range(1, 2)"), {"hc_attn.comb"}),  # Sinkhorn stops early
        (("c / (tl.sum(c, 1)[:, None, :] + eps)\n    return", "c\n    return"), {"hc_attn.comb"}),  # ends on a row step
        (("pre + hc_eps", "pre + 32 * hc_eps"), {"hc_attn.u"}),
        (("2.0 * sigmoid(m * tl.load(scale + 1)", "2.0 * sigmoid(m * tl.load(scale)"), {"hc_attn.post"}),  # another's scale
        (("/ width + rms_eps", "/ width"), set()),  # eps is far below these streams: legal, and must not be called a fault
    ],
)
def test_faults_inside_the_mix(tmp_path, monkeypatch, edit, outputs):
    wrong = mutant(mix_file, tmp_path, edit)
    monkeypatch.setattr(residual, "hc_pre", wrong.hc_pre)
    found = failing(run(CSA, "hc_attn.pre", "hc_attn.streams"))
    assert {v.output for vs in found.values() for v in vs} == outputs
    assert set(found) <= {"hc_attn.pre"}


def test_streams_spread_by_the_transposed_matrix(monkeypatch):
    honest = residual.hc_post
    monkeypatch.setattr(residual, "hc_post", lambda z, x, post, comb, **more: honest(z, x, post, comb.mT.contiguous(), **more))
    for v in only(run(CSA, *AROUND), "hc_attn.streams", "hc_ffn.streams"):
        assert {"token", "stream", "channel"} <= set(v.worst)


def test_a_norm_whose_weight_is_an_offset_from_one(tmp_path, monkeypatch):
    wrong = mutant(norm_file, tmp_path, ("w[None, :] * (value", "(1 + w[None, :]) * (value"))
    monkeypatch.setattr(residual, "rms_norm_quantize", wrong.rms_norm_quantize)
    only(run(CSA, "attn_norm", "attn.q_norm"), "attn_norm", "attn.q_norm")


def test_codes_of_a_fused_norm_that_are_not_those_of_its_output(monkeypatch):
    honest = residual.rms_norm_quantize

    def stale(*args, **more):
        y, codes, scales = honest(*args, **more)
        codes[1, 70] ^= 1
        return y, codes, scales

    monkeypatch.setattr(residual, "rms_norm_quantize", stale)
    for v in only(run(CSA, "attn_norm"), "attn_norm"):
        assert (v.output, v.worst["channels"], v.budget_used) == ("attn_norm.codes", [70, 71], math.inf)


def test_a_token_that_got_its_neighbours_embedding(monkeypatch):
    honest = residual.embed
    monkeypatch.setattr(residual, "embed", lambda table, ids, streams: honest(table, ids.roll(1), streams))
    for v in only(run(DRAFTER, "embed", "enorm"), "embed"):
        assert v.budget_used == math.inf


def test_a_drafter_that_is_given_the_embedding_of_another_token(monkeypatch):
    honest = residual.mtp_streams
    monkeypatch.setattr(residual, "mtp_streams", lambda e, h: honest(e.roll(1, 0), h))
    for v in only(run(DRAFTER, "enorm", "streams", "hc_attn.pre"), "streams"):
        assert {"token", "stream", "channel"} <= set(v.worst)


def test_a_row_of_logits_from_another_token(monkeypatch):
    honest = residual.gemm_bf16
    monkeypatch.setattr(residual, "gemm_bf16", lambda x, w: honest(x.flip(0).contiguous(), w))
    for v in only(run(LAST, "hc_head", "norm", "head.logits"), "head.logits"):
        assert {"sequence", "position", "channel"} <= set(v.worst)


def test_a_kernel_that_raises_is_a_failed_verdict_of_its_op(monkeypatch):
    def broken(*args, **more):
        raise RuntimeError("no such tile\nand more")

    monkeypatch.setattr(residual, "hc_post", broken)
    for v in only(run(CSA, "hc_attn.pre", "hc_attn.streams"), "hc_attn.streams"):
        assert v.worst == {"error": "RuntimeError: no such tile"} and v.budget_used == math.inf


def test_an_output_of_another_shape_is_a_failed_verdict_of_its_op(monkeypatch):
    honest = residual.rms_norm_quantize
    monkeypatch.setattr(residual, "rms_norm_quantize", lambda x, *rest, **more: honest(x[1:], *rest, **more))
    for v in only(run(CSA, "attn_norm"), "attn_norm"):
        assert "shape" in str(v.worst["error"])

