"""Planted faults in the indexer: each is caught, in the right op, at the right place. What a selection may exchange."""

from __future__ import annotations

import math

import pytest
import torch
from judge_cases import HOW, failing, only, run, run_layer
from kernel_cases import mutant

from optimized.kernels import index_logits as logits_file
from optimized.kernels import indexer as query_file
from optimized.kernels import topk as topk_file
from optimized.kernels import translate as translate_file
from parity import indexing, ops
from parity.budget.bounded import Bounded
from parity.judge import Places, Selection, judge

CSA = 2  # layer of mini
AT = "attn.indexer."
NAMES = tuple(AT + name for name in ("weights", "q", "compressor.row", "scores", "picks", "rows"))


@pytest.mark.parametrize("phases", [("prefill", "chunk"), ("decode", "verify")])
def test_the_clean_run_passes(phases):
    judged = run_layer(CSA, [ops.BY_NAME[n] for n in NAMES], phases, (7, 41))
    assert not failing(judged)
    assert {j.op.name for j in judged if any(v.elements for v in j.verdicts)} == set(NAMES)


@pytest.mark.parametrize(
    "edit",
    [
        ("y = hadamard(y, LANES, STEPS)", "y = y"),
        ("cos, sin, t, live, 1.0", "cos, sin, t, live, -1.0"),
        ("other=0.0) * factor", "other=0.0) * (factor * 2)"),
        ("code, scale = encode_e2m1(y, LANES)", "code, scale = encode_e2m1(y * 1.1, LANES)"),
    ],
)
def test_faults_inside_index_queries(tmp_path, monkeypatch, edit):
    wrong = mutant(query_file, tmp_path, edit)
    monkeypatch.setattr(indexing, "index_query", wrong.index_query)
    only(run(CSA, *NAMES), AT + "q")


@pytest.mark.parametrize(
    "edit",
    [
        ("tl.where(dot < 0, 0.0, dot) * weight", "dot * weight"),  # no ReLU
        ("tl.where(dot < 0, 0.0, dot) * weight[:, None]", "tl.where(dot < 0, 0.0, dot) * tl.abs(weight)[:, None]"),
        ("scale_at(r, g, GROUPS, ORDER)", "scale_at(r, 0 * g, GROUPS, ORDER)"),  # first scale of a key for all of it
    ],
)
def test_faults_inside_the_scores(tmp_path, monkeypatch, edit):
    wrong = mutant(logits_file, tmp_path, edit)
    monkeypatch.setattr(indexing, "index_logits", wrong.index_logits)
    found = failing(run(CSA, *NAMES))
    assert AT + "scores" in found and set(found) <= {AT + "scores", AT + "picks"}
    exact = [v for v in found.get(AT + "picks", []) if not v.output.endswith(".set")]
    assert exact == []  # by the scores that it got, the selection did right


def test_a_key_of_another_sequence_is_found_in_the_scores(monkeypatch):
    honest = indexing.index_logits

    def crossed(*args, **more):
        *most, table, sequence, seen = args
        return honest(*most, table.roll(1, 0), sequence, seen, **more)

    monkeypatch.setattr(indexing, "index_logits", crossed)
    found = failing(run(CSA, AT + "scores"))[AT + "scores"]
    assert all({"token", "sequence", "position"} <= set(v.worst) for v in found)


def test_a_key_on_the_wrong_page(monkeypatch):
    honest = indexing.compress_index

    def elsewhere(*args, order):
        *most, table = args
        honest(*most, table.roll(1, 0), order=order)

    monkeypatch.setattr(indexing, "compress_index", elsewhere)
    assert {v.output for v in only(run(CSA, *NAMES), AT + "compressor.row")} == {"keys", "pool.index"}


def test_one_code_of_a_key_off_by_one(monkeypatch):
    honest = indexing.keys

    def flipped(step, op):
        stored = honest(step, op)
        codes, scales = stored["keys"]
        codes = codes.clone()
        codes[:1, 77] ^= 1
        return stored | {"keys": (codes, scales)}

    for v in only(run(CSA, AT + "compressor.row", attn_indexer_compressor_row=flipped), AT + "compressor.row"):
        assert v.worst["channels"] == [77, 78] and {"entry", "page", "page_row"} <= set(v.worst)


def test_ties_that_go_to_the_higher_column(tmp_path, monkeypatch):
    last = "(tied + tl.cumsum(equal, 0) > tl.sum(equal, 0) - ties)"
    wrong = mutant(topk_file, tmp_path, ("(tied + tl.cumsum(equal, 0) <= ties)", last))
    monkeypatch.setattr(indexing, "topk", wrong.topk)
    flat = indexing._own_scores
    monkeypatch.setattr(indexing, "_own_scores", lambda *args: torch.zeros_like(flat(*args)))
    found = only(run(CSA, AT + "picks"), AT + "picks")
    assert any(not v.output.endswith(".set") for v in found)


def test_a_pick_that_is_left_out(monkeypatch):
    honest = indexing.topk

    def short(*args):
        picks = honest(*args)
        picks[-1, 0] = picks[-1, 1]
        return picks

    monkeypatch.setattr(indexing, "topk", short)
    found = only(run(CSA, *NAMES), AT + "picks")
    assert {v.output.rsplit(".", 1)[-1] for v in found} >= {"set"} and all(v.budget_used == math.inf for v in found)


@pytest.mark.parametrize(
    "edit",
    [
        ("block * envelope + entry", "block * block_rows + entry"),
        ("indices + start[:, None] + j", "indices + start[:, None] + j + 1"),
    ],
)
def test_faults_inside_the_translation(tmp_path, monkeypatch, edit):
    wrong = mutant(translate_file, tmp_path, edit)
    monkeypatch.setattr(indexing, "translate", wrong.translate)
    for v in only(run(CSA, *NAMES), AT + "rows"):
        assert {"sequence", "position"} <= set(v.worst)


def selection(picks: list[int], bound: float, k: int = 2):
    """Scores 1, 0.99, 0.5, 0.4, and one that is not visible."""
    value = torch.tensor([[1.0, 0.99, 0.5, 0.4, 9.0]], dtype=torch.float64)
    expected = Selection(Bounded(value, torch.full_like(value, bound)), torch.tensor([4]), k)
    return judge("picks", torch.tensor([picks]), expected, HOW, Places())


def test_an_exchange_is_legal_within_the_bounds_of_both_scores():
    assert selection([0, 1], 0.0).budget_used == 0
    assert selection([0, 2], 0.0).budget_used == math.inf
    assert selection([0, 2], 0.245).budget_used == pytest.approx(1.0) and selection([0, 2], 0.25).passed
    assert not selection([0, 2], 0.24).passed and not selection([2, 3], 0.25).passed


@pytest.mark.parametrize("picks", [[0, 0], [0, 4], [0, -1], [-1, 0], [0, 5]])
def test_what_is_no_choice_of_two_visible_ones_is_illegal_at_any_bound(picks):
    assert selection(picks, 1e9).budget_used == math.inf


def test_places_past_the_visible_ones_are_minus_one():
    assert selection([0, 1, 2, 3, -1, -1], 0.0, k=6).passed and not selection([0, 1, 2, 3, 3, -1], 0.0, k=6).passed
