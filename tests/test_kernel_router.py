"""Router kernels: scores against float64, choices exactly, ties and values that are no numbers included."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_cases import gamma, mutant, on_device, poison_new_memory, uneven

from optimized.kernels import router as router_file

router_scores = on_device(router_file.router_scores)
choose_experts, look_up_experts = on_device(router_file.choose_experts), on_device(router_file.look_up_experts)
SMALL = router_file.Tiles(ROWS=16, COLS=16, STEP=64, CHOOSE_ROWS=2)
SCALING = 2.5


def softplus_root(logits: torch.Tensor) -> torch.Tensor:
    return torch.where(logits > 20, logits, torch.log1p(logits.clamp_max(20).exp())).sqrt()


def score_limits(x: torch.Tensor, gate: torch.Tensor, sum_error: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Least and largest legal score: the function is monotone, its evaluation is off by the exponential's two ulps and
    rounded argument, by some twenty roundings, and by what leaves float32 below e^-87."""
    x, gate = x.double(), gate.double()
    logits, error = x @ gate.T, sum_error * (x.abs() @ gate.abs().T)
    own = gamma(20 + 2 * logits.abs().clamp_max(90))
    low, high = softplus_root(logits - error), softplus_root(logits + error)
    return low * (1 - own) - 2.0**-62, high * (1 + own) + 2.0**-62


def exact_case(rows: int, experts: int, width: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Small integers, so that logits from about -100 to 100 are exact in float32."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randint(-3, 4, (rows, width), generator=g) * torch.linspace(0, 1, rows)[:, None].mul(4).round()
    return x.bfloat16(), (torch.randint(-3, 4, (experts, width), generator=g) / 4).bfloat16()


def in_limits(scores: torch.Tensor, limits: tuple[torch.Tensor, torch.Tensor]) -> bool:
    return bool(((limits[0] <= scores.double()) & (scores.double() <= limits[1])).all())


@pytest.mark.parametrize(("rows", "experts", "width"), [(1, 8, 128), (17, 33, 200), (66, 384, 72), (2, 1, 16)])
@pytest.mark.parametrize("tiles", [None, SMALL])
def test_scores_of_exact_logits(rows, experts, width, tiles):
    x, gate = exact_case(rows, experts, width)
    assert in_limits(router_scores(x, gate, tiles=tiles), score_limits(x, gate, 0.0))


def test_scores_over_the_whole_range_of_logits():
    """Logits -200 ... 200 in eighths, through 17, 20 and their neighbours, and far tails."""
    x = (torch.arange(-1600, 1601) / 8).view(-1, 1)
    high = x.bfloat16()
    x = torch.cat([high, (x - high.float()).bfloat16()], 1)  # two bfloat16 make each logit exactly
    gate = torch.ones(1, 2).bfloat16()
    scores = router_scores(x, gate, tiles=router_file.Tiles(ROWS=512, COLS=16, STEP=16, CHOOSE_ROWS=1))
    assert in_limits(scores, score_limits(x, gate, 0.0))
    assert (scores.diff(dim=0) >= 0).all()


@given(st.integers(1, 40), st.integers(1, 70), st.integers(1, 300), st.integers(0, 9))
def test_scores_of_uneven_inputs(rows, experts, width, seed):
    g = torch.Generator().manual_seed(seed)
    x, gate = uneven(g, rows, width, spread=2).bfloat16(), uneven(g, experts, width, spread=1).bfloat16() / 64
    assert in_limits(router_scores(x, gate), score_limits(x, gate, gamma(width)))


def test_scores_at_the_width_of_pro():
    x, gate = exact_case(3, 384, 7168)
    assert in_limits(router_scores(x, gate), score_limits(x, gate, 0.0))


def chosen(scores: torch.Tensor, bias: torch.Tensor, k: int) -> torch.Tensor:
    """The definition, one token at a time: largest score + bias first, then the lower number."""
    ranks = (scores + bias).tolist()
    return torch.tensor([sorted(range(len(row)), key=lambda e: (-row[e], e))[:k] for row in ranks])


def check_weights(weights: torch.Tensor, scores: torch.Tensor, experts: torch.Tensor) -> None:
    picked = scores.double().gather(1, experts.long())
    want = picked / picked.sum(1, keepdim=True) * SCALING
    assert ((weights.double() - want).abs() <= gamma(experts.shape[1] + 4) * want).all()


@given(st.integers(1, 70), st.integers(1, 40), st.integers(1, 8), st.integers(0, 99))
def test_choice_is_exact_with_many_ties(rows, experts, k, seed):
    g = torch.Generator().manual_seed(seed)
    scores = torch.randint(1, 4, (rows, experts), generator=g) / 2
    bias = torch.randint(-8, 3, (experts,), generator=g) / 2
    k = min(k, experts)
    picks, weights = choose_experts(scores, bias, k, SCALING)
    assert torch.equal(picks.long(), chosen(scores, bias, k))
    check_weights(weights, scores, picks)


@pytest.mark.parametrize("tiles", [None, SMALL])
def test_choice_among_the_experts_of_pro(tiles):
    """384 experts, 6 of them; scores one ulp apart; the bias overrules the score and stays out of the weight."""
    g = torch.Generator().manual_seed(0)
    scores = torch.rand(5, 384, generator=g) + 0.5
    scores[1] = 1.0
    scores[1, 200:] = torch.nextafter(torch.tensor(1.0), torch.tensor(2.0))
    bias = torch.randn(384, generator=g)
    bias[100:300] = 0.25
    picks, weights = choose_experts(scores, bias, 6, SCALING, tiles=tiles)
    assert torch.equal(picks.long(), chosen(scores, bias, 6))
    check_weights(weights, scores, picks)
    flat = choose_experts(scores, torch.zeros(384), 6, SCALING, tiles=tiles)[0]
    assert flat[1].tolist() == list(range(200, 206))


def test_a_score_that_is_not_a_number_is_chosen_and_shows():
    scores, bias = torch.rand(3, 10) + 0.5, torch.zeros(10)
    clean = choose_experts(scores, bias, 3, SCALING)
    scores[1, 7] = torch.nan
    picks, weights = choose_experts(scores, bias, 3, SCALING)
    assert picks[1, 0] == 7 and weights[1].isnan().all()
    assert torch.equal(picks[[0, 2]], clean[0][[0, 2]]) and torch.equal(weights[[0, 2]], clean[1][[0, 2]])
    scores[1] = torch.nan
    assert choose_experts(scores, bias, 3, SCALING)[0][1].tolist() == [0, 1, 2]


def test_look_up_with_padding():
    g = torch.Generator().manual_seed(0)
    table = torch.stack([torch.randperm(8, generator=g)[:3] for _ in range(50)])
    scores, ids = torch.rand(70, 8, generator=g), torch.randint(0, 50, (70,), generator=g)
    ids[::9] = -1
    picks, weights = look_up_experts(scores, table, ids, SCALING)
    live = ids >= 0
    assert torch.equal(picks[live].long(), table[ids[live]]) and (picks[~live] == -1).all()
    check_weights(weights[live], scores[live], picks[live])
    assert (weights[~live] == 0).all()


def test_bits_of_a_token_do_not_depend_on_the_others():
    x, gate = exact_case(70, 33, 200)
    x, bias = (x.float() * 1.37).bfloat16(), torch.linspace(-1, 1, 33)
    scores = router_scores(x, gate)
    whole = choose_experts(scores, bias, 6, SCALING)
    for rows in ([0], [69], [3, 64, 7], list(range(1, 66))):
        part = router_scores(x[rows], gate)
        assert torch.equal(part, scores[rows])
        for got, want in zip(choose_experts(part, bias, 6, SCALING), whole, strict=True):
            assert torch.equal(got, want[rows])


def test_strided_rows_with_poison_around_and_outputs_written_whole(monkeypatch):
    x, gate = exact_case(9, 33, 200)
    table, ids = torch.arange(12).view(4, 3), torch.tensor([0, 1, 2, 3, -1, 3, 2, 1, 0])
    scores = router_scores(x, gate)
    clean = (scores, *choose_experts(scores, gate[:, 0].float(), 5, SCALING), *look_up_experts(scores, table, ids, SCALING))
    wide = torch.full((2, 33, 70_000), torch.nan, dtype=torch.bfloat16)
    views = wide[0, :9, 48:248].copy_(x), wide[1, :, 8:208].copy_(gate)
    poison_new_memory(monkeypatch)
    scores = router_scores(*views)
    again = (scores, *choose_experts(scores, gate[:, 0].float(), 5, SCALING), *look_up_experts(scores, table, ids, SCALING))
    for got, want in zip(again, clean, strict=True):
        assert torch.equal(got, want)


def test_no_tokens_and_refusals():
    scores, bias = torch.rand(2, 8), torch.zeros(8)
    assert [tuple(t.shape) for t in choose_experts(scores[:0], bias, 3, SCALING)] == [(0, 3), (0, 3)]
    with pytest.raises(ValueError, match="top_k"):
        choose_experts(scores, bias, 9, SCALING)
    with pytest.raises(ValueError, match="bias"):
        choose_experts(scores, bias[1:], 3, SCALING)
    with pytest.raises(ValueError, match="ids"):
        look_up_experts(scores, torch.zeros(5, 3, dtype=torch.int64), torch.zeros(3, dtype=torch.int64), SCALING)


@pytest.mark.parametrize(
    "edit",
    [
        ("tl.sqrt(softplus)", "softplus"),
        ("positive + log1p_unit", "log1p_unit"),
        ("log1p_unit(tl.exp(-tl.abs(logits)))", "tl.log(1.0 + tl.exp(-tl.abs(logits)))"),  # loses small scores
        ("1 / 5 + q", "1 / 4 + q"),
        ("log1p_unit(tl.exp(", "log1p_unit(tl.exp(-1e-4 + "),
        ("(d < D)[None, :], other=0.0)\n        logits", "(d < D - 1)[None, :], other=0.0)\n        logits"),
    ],
)
def test_planted_mistakes_in_the_scores_are_seen(tmp_path, edit):
    wrong = on_device(mutant(router_file, tmp_path, edit).router_scores)
    x, gate = exact_case(17, 33, 200)
    assert not in_limits(wrong(x, gate), score_limits(x, gate, 0.0))


@pytest.mark.parametrize(
    "edit",
    [
        ("tl.min(tl.where(key == best[:, None], e[None, :], LANES)", "tl.max(tl.where(key == best[:, None], e[None, :], -1)"),
        ("bits ^ 0x7FFFFFFF", "bits"),  # negative ranks in reverse
        ("tl.load(scores + t[:, None] * E + e[None, :], mask=inside, other=0.0) +", "0.0 +"),  # the bias alone decides
        ("mask=stored & (pick >= 0), other=0.0)", "mask=stored & (pick >= 0), other=0.0) + 0.01"),
        ("* scaling", ""),
    ],
)
def test_planted_mistakes_in_the_choice_are_seen(tmp_path, edit):
    wrong = on_device(mutant(router_file, tmp_path, edit).choose_experts)
    scores = torch.randint(1, 4, (20, 30), generator=torch.Generator().manual_seed(1)) / 2
    bias = torch.randint(-8, -3, (30,), generator=torch.Generator().manual_seed(2)) / 2
    picks, weights = wrong(scores, bias, 4, SCALING)
    with pytest.raises(AssertionError):
        assert torch.equal(picks.long(), chosen(scores, bias, 4))
        check_weights(weights, scores, picks)
