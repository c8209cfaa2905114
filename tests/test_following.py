"""The twin follows the candidate's choices where rounding explains them, and only there."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent / "meta"))

from judge_cases import HOW

from optimized import attention as wiring
from optimized import moe
from parity import cases, drift, following, records, run, whole
from parity.flow import Flow, Setting
from parity.following import explained
from parity.judge import Places
from parity.locate import APART, departure, first_divergence, headline
from reference.checkpoint.open import open_store
from reference.rounding import profile

STORE = open_store("procedural:mini")
CSA, NONE = 2, -1
MOVED = 2.0**-6  # what rounding moved a score, at most: a power of two, so that sums below are exact
REACH = 2 * APART * MOVED


def table(*scores: float) -> torch.Tensor:
    return torch.tensor([scores], dtype=torch.float64)


def choice(*numbers: int) -> torch.Tensor:
    return torch.tensor([numbers])


def is_explained(own: torch.Tensor, other: torch.Tensor, scores: torch.Tensor) -> bool:
    exact = scores.clone()
    exact[:, 0] -= MOVED  # of one score only: the most that a score moved counts
    return bool(explained(own, other, scores, exact))


@pytest.mark.parametrize("past, said", [(0.0, True), (math.ulp(1.0), False)])
def test_an_exchange_is_explained_up_to_the_reach_of_rounding(past, said):
    scores = table(0.5, 1.0, 1.0 - REACH - past, 0.0)
    assert is_explained(choice(0, 1), choice(0, 2), scores) == said
    assert is_explained(choice(1, 0), choice(2, 0), scores) == said  # order says nothing
    assert is_explained(choice(0, 1), choice(1, 0), scores)
    assert not is_explained(choice(0, 1), choice(1, 3), table(0.5, 1.0, 1.0, 0.5 - REACH - math.ulp(0.5)))


def test_every_exchange_of_a_token_must_be_near():
    scores = table(0.5, 1.0, 1.0, 0.5 - REACH / 2)
    assert is_explained(choice(1, 0), choice(2, 3), table(0.5, 0.5, 0.5, 0.5))
    assert is_explained(choice(1, 0), choice(2, 0), scores) and is_explained(choice(1, 0), choice(1, 3), scores)
    assert not is_explained(choice(1, 0), choice(2, 3), scores)  # 1 for 3 is further apart than either exchange


@pytest.mark.parametrize("other", [(0, 0), (0, NONE), (0, -2), (0, 4), (NONE, NONE)])
def test_what_is_no_choice_is_not_explained(other):
    """An expert twice, none, none of its own, or one that is not there, however near all scores are."""
    assert not is_explained(choice(0, 1), choice(*other), table(1.0, 1.0, 1.0, 1.0))


def test_hidden_rows_cannot_be_chosen():
    near = table(1.0, 1.0, 1.0, -math.inf)
    assert is_explained(choice(0, 1), choice(0, 2), near) and not is_explained(choice(0, 1), choice(0, 3), near)


def test_tokens_are_told_apart_and_nothing_is_a_choice():
    scores = torch.cat([table(1.0, 1.0, 0.0, 0.0)] * 2)
    exact = scores.clone()
    exact[0, 0] -= 0.25  # the first token's scores are off by that: an exchange over 1 is within 4 times 0.25
    own, other = torch.tensor([[0, 1], [0, 1]]), torch.tensor([[0, 2], [0, 2]])
    assert explained(own, other, scores, exact).tolist() == [True, False]
    nothing = torch.full((3, 0), NONE)
    assert explained(nothing, torch.full((3, 2), NONE), torch.zeros(3, 0), torch.zeros(3, 0)).all()


def layer_of(plan: cases.Plan, number: int) -> drift.Drift:
    """`forced` of one layer on synthetic streams."""
    run.one_thread()
    flow = Flow.start(Setting(STORE, profile("pool-fp8"), plan, (), HOW, 1, whole=True))
    assert list(flow.run_layer(number)) == []
    return next(d for d in flow.drift if isinstance(d, drift.Drift) and d.curve == "forced")


def said_of(d: drift.Drift) -> str:
    header = {"record": "run", "layers": [cases.layer_id(STORE.config, d.layer)], "phases": [d.phase]}
    said = [header, records.drift_record(STORE.config, d)]
    found = first_divergence(said)
    return headline(said) if found else ""


def other_experts(monkeypatch) -> None:
    """Biases of other experts."""
    honest = moe.choose_experts
    monkeypatch.setattr(moe, "choose_experts", lambda scores, bias, k, scaling: honest(scores, bias.roll(1), k, scaling))


def other_rows(monkeypatch) -> None:
    """Picks of the next rows."""
    honest = wiring.topk

    def shifted(logits, visible, k, **tiles):
        return (honest(logits, visible, k, **tiles) + 1) % visible[:, None]

    monkeypatch.setattr(wiring, "topk", shifted)


@pytest.mark.parametrize("change, name", [(other_experts, "experts"), (other_rows, "picks")])
def test_choices_beyond_rounding_are_a_wrong_layer_and_nearer_ones_are_followed(monkeypatch, change, name):
    """The same wrong choices: not explained, and named; and were rounding so large that it explained them, the twin would
    follow, token by token, and be as near as ever."""
    change(monkeypatch)
    plan = cases.plan([9], [131], ["decode"])
    wrong = layer_of(plan, CSA)
    assert wrong.flips[name] > 0 and wrong.unexplained[name] > 0
    assert said_of(wrong).startswith("first wrong layer")
    monkeypatch.setattr(following, "APART", 1e9)
    followed = layer_of(plan, CSA)
    assert followed.flips == wrong.flips and not followed.unexplained and said_of(followed) == ""
    assert 0 < followed.relative_l2 < min(followed.rounding, wrong.relative_l2 / APART)


def test_what_a_layer_rounds_is_measured_on_the_same_choices(monkeypatch):
    """A prompt whose token behind it nearly ties: without rounding another expert is chosen, and that is not taken for
    rounding; nor is the candidate's choice, which is a third one, taken for an error."""
    honest, followed = whole._follow, []

    def follow(evaluation, *rest):
        followed.append(evaluation.profile.name)
        return honest(evaluation, *rest)

    monkeypatch.setattr(whole, "_follow", follow)
    run.one_thread()
    flow = Flow.start(Setting(STORE, profile("pool-fp8"), cases.plan([9], [127], ["decode"]), (), HOW, 101, whole=True))
    flow.begin_with_tokens()
    for layer in range(CSA + 1):
        assert list(flow.run_layer(layer)) == []
    last = {d.curve: d for d in flow.drift if d.layer == CSA and d.phase == "decode"}
    forced = last["forced"]
    assert set(followed) == {"exact", "pool-fp8"} and forced.flips["experts"] > 0 and not forced.unexplained
    assert forced.relative_l2 < forced.rounding < last["rounding"].relative_l2 / 8


def test_where_token_ids_choose_nothing_else_is_right(monkeypatch):
    honest = moe.look_up_experts
    monkeypatch.setattr(moe, "look_up_experts", lambda scores, table, ids, scaling: honest(scores, table, ids - 1, scaling))
    monkeypatch.setattr(following, "APART", 1e9)
    wrong = layer_of(cases.plan([3], [], ["decode"]), 1)
    assert wrong.unexplained == {"experts": 1.0} and said_of(wrong).startswith("first wrong layer")


def test_unexplained_choices_alone_are_named():
    d = drift.Drift(CSA, "decode", "forced", 0.001, 1.0, 0, {}, {"experts": 0.5}, 0.01, unexplained={"experts": 1.0})
    assert said_of(d).endswith("the layer as a whole is not: experts that scores do not explain")
    said = records.drift_record(STORE.config, d)
    assert departure(said) == "layer_02, decode: experts of 100% of tokens that scores do not explain"
    far = {**said, "relative_l2": None, "rows": {"window": {"relative_l2": 0.5, "rounding": 0.1}}, "unexplained": {}}
    assert departure(far) == (
        "layer_02, decode: streams not finite from the twin, rounding 0.01; window rows 0.5 from the twin, rounding 0.1"
    )


def test_one_wrong_token_among_many_is_no_small_error():
    """All tokens together are within 4 times their rounding, and one of them is nothing."""
    g = torch.Generator().manual_seed(4)
    twin = torch.randn(200, 4, 8, generator=g, dtype=torch.float64)
    smooth = twin * (1 + 0.03 * torch.randn(200, 1, 1, generator=g, dtype=torch.float64))
    wrong = twin.clone()
    wrong[150] = 0
    seat = drift.Seat(CSA, "prefill", torch.arange(200), Places({"position": torch.arange(200)}), torch.tensor([199]))
    right, bad = (drift.forced_distances(seat, drift.Side(x), drift.Side(twin), twin, smooth)[0] for x in (twin, wrong))
    assert said_of(right) == "" and bad.relative_l2 < APART * bad.rounding
    assert said_of(bad).startswith("first wrong layer: layer_02, prefill, position 150")
    assert "streams of a token 1 from the twin" in departure(records.drift_record(STORE.config, bad))


@pytest.mark.parametrize(
    "other, same", [((1, 0), True), ((0, 1, NONE), True), ((0, 1, 1), False), ((0, 1, 2), False), ((0,), False)]
)
def test_choices_are_the_same_as_sets_of_so_many(other, same):
    own, theirs = (drift.Side(torch.zeros(1), picks=choice(*x)) for x in ((0, 1), other))
    assert drift.same_choices(own, theirs) == drift.same_choices(theirs, own) == same


def test_a_run_that_judged_no_op_says_so():
    far = drift.Drift(CSA, "decode", "forced", 1.0, 0.0, 0, {}, {}, 0.01)
    header = {"record": "run", "layers": ["layer_02"], "phases": ["decode"]}
    said = headline([header, records.drift_record(STORE.config, far), {"record": "summary"}])
    assert said == "first wrong layer: layer_02, decode: no op of it was judged, the layer as a whole is not right"
