"""The indexer: scores with a ReLU, the selection rule, and where it begins to drop rows."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from bounds import FAR, PEER_FLOAT64, assert_within, rounding_bound
from hypothesis import strategies as st
from strategies import TINY, adversarial, holds, normal, refuted, run, seeds, tiny_model, tokens
from torch import Tensor

from reference.indexer import index_scores, select_topk
from reference.rounding import Sites

SITES = Sites()


# ---- scores


def relu_before_weights(score: Callable[..., Tensor], seed: int) -> None:
    q, w, keys = adversarial(seed, 3, 5, 16), normal(seed + 1, 3, 5), adversarial(seed + 2, 7, 16)
    want = torch.zeros(3, 7, dtype=torch.float64)
    for t, c, h in itertools.product(range(3), range(7), range(5)):
        want[t, c] += w[t, h] * max(float(q[t, h] @ keys[c]), 0)
    size = q.norm(dim=-1).amax() * keys.norm(dim=-1).amax() * w.abs().sum(-1).amax()
    assert_within(rounding_bound(32, size), score(q, w, keys, SITES), want)


def no_relu(q: Tensor, w: Tensor, keys: Tensor, sites: Sites) -> Tensor:
    return torch.einsum("th,thd,cd->tc", w, q, keys)


def relu_after_weights(q: Tensor, w: Tensor, keys: Tensor, sites: Sites) -> Tensor:
    return torch.relu(torch.einsum("th,thd,cd->thc", w, q, keys)).sum(1)


def relu_after_the_sum(q: Tensor, w: Tensor, keys: Tensor, sites: Sites) -> Tensor:
    return torch.relu(no_relu(q, w, keys, sites))


def test_scores() -> None:
    holds(relu_before_weights, seeds, index_scores)


@pytest.mark.parametrize("wrong", [no_relu, relu_after_weights, relu_after_the_sum])
def test_scores_see(wrong: Callable[..., Tensor]) -> None:
    refuted(relu_before_weights, seeds, wrong)


# ---- selection

selections = st.tuples(seeds, st.integers(1, 40), st.integers(1, 12))


def takes_the_largest(select: Callable[..., Tensor], case: tuple[int, int, int]) -> None:
    """min(k, visible) rows of largest score, the lower row of equal ones, ascending, -1 behind. Many scores are equal."""
    seed, c, k = case
    g = torch.Generator().manual_seed(seed)
    scores = torch.randint(-3, 4, (6, c), generator=g).double()
    visible = torch.randint(0, c + 1, (6,), generator=g)
    picks = select(scores, visible, k)
    assert picks.shape == (6, min(k, c))
    for t in range(6):
        order = sorted(range(int(visible[t])), key=lambda j, t=t: (-float(scores[t, j]), j))[:k]
        assert picks[t].tolist() == sorted(order) + [-1] * (min(k, c) - len(order))


def higher_row_wins(scores: Tensor, visible: Tensor, k: int) -> Tensor:
    flipped = select_topk(scores.flip(1), torch.full_like(visible, scores.shape[1]), k)
    picks = (scores.shape[1] - 1 - flipped).sort(-1).values
    return picks.masked_fill(picks >= visible[:, None], -1)


def sees_one_more(scores: Tensor, visible: Tensor, k: int) -> Tensor:
    return select_topk(scores, visible + 1, k)


def one_fewer(scores: Tensor, visible: Tensor, k: int) -> Tensor:
    picks = select_topk(scores, visible, k)
    picks[:, -1] = -1
    return picks


def by_magnitude(scores: Tensor, visible: Tensor, k: int) -> Tensor:
    return select_topk(scores.abs(), visible, k)


def test_selection() -> None:
    holds(takes_the_largest, selections, select_topk)


@pytest.mark.parametrize("wrong", [higher_row_wins, sees_one_more, one_fewer, by_magnitude])
def test_selection_sees(wrong: Callable[..., Tensor]) -> None:
    refuted(takes_the_largest, selections, wrong)


def test_blocks_of_queries_choose_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """Long prompts are scored a few queries at a time."""
    model = tiny_model()
    indexer = model.loader.block(0).attn.indexer
    assert indexer is not None
    q, w, keys = normal(0, 50, 5, 64), normal(1, 50, 5), normal(2, 12, 64)
    whole = indexer.select(q, w, keys, torch.arange(50), SITES)
    monkeypatch.setattr("reference.indexer.SCORE_ELEMENTS", 3 * 5 * 12)
    assert torch.equal(indexer.select(q, w, keys, torch.arange(50), SITES), whole)


def test_weights_are_scaled_for_width_and_heads() -> None:
    indexer = tiny_model().loader.block(0).attn.indexer
    assert indexer is not None
    x = normal(3, 4, TINY.hidden_size)
    want = x @ indexer.weights_proj.dense(torch.float64).T / (64 * 5) ** 0.5
    assert_within(rounding_bound(8, want), indexer.weights(x, SITES), want)


# ---- in the model


def first_loss(topk: int) -> int:
    """The first position whose logits differ from those without selection."""
    ids = tokens(64, 11)
    full, sparse = run(tiny_model(index_topk=64), ids), run(tiny_model(index_topk=topk), ids)
    differs = ((full - sparse).abs().amax(-1) > FAR * PEER_FLOAT64).nonzero().flatten()
    before = int(differs[0])
    assert_within(PEER_FLOAT64, sparse[:before], full[:before])
    return before


@pytest.mark.parametrize("topk", [1, 3, 7])
def test_selection_begins_to_drop_rows_at_4_topk_plus_3(topk: int) -> None:
    assert first_loss(topk) == 4 * topk + 3


def test_with_topk_for_all_rows_nothing_is_selected() -> None:
    ids = tokens(64, 11)
    assert_within(PEER_FLOAT64, run(tiny_model(index_topk=16), ids), run(tiny_model(index_topk=64), ids))


@pytest.mark.parametrize(
    ("wrong", "edge"),
    [
        (lambda scores, visible, k: select_topk(scores, visible, min(k, 2)) if k < 16 else select_topk(scores, visible, k), 11),
        (lambda scores, visible, k: select_topk(scores, visible - 1, k) if k < 16 else select_topk(scores, visible, k), 3),
    ],
    ids=["one pick fewer", "its own block unseen"],
)
def test_that_edge_sees(monkeypatch: pytest.MonkeyPatch, wrong: Callable[..., Tensor], edge: int) -> None:
    monkeypatch.setattr("reference.indexer.select_topk", wrong)
    assert first_loss(3) == edge
