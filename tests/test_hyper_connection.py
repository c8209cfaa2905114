"""Residual streams: Sinkhorn, gates, and the limits in which the mix is something known."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial

import pytest
import torch
from bounds import assert_within, rounding_bound
from hypothesis import strategies as st
from strategies import adversarial, holds, normal, refuted, seeds
from torch import Tensor

from reference.hyper_connection import HyperConnection, HyperHead, sinkhorn
from reference.rounding import Sites

S, D = 4, 10
EPS, RMS_EPS = 3e-6, 2e-6
SITES = Sites()
cases = st.tuples(seeds, st.sampled_from([0.0, 0.5, 2.0, 8.0]))


def connection(seed: int, size: float = 1.0) -> HyperConnection:
    n = (2 + S) * S
    return HyperConnection(normal(seed, n, S * D), size * normal(seed + 1, n), size * normal(seed + 2, 3), 20, EPS, RMS_EPS)


# ---- Sinkhorn


def columns_sum_to_one(mix: Callable[..., Tensor], case: tuple[int, float]) -> None:
    """It ends on a column step: sums are 1 - eps/(sum + eps), whatever the logits; entries are positive."""
    c = mix(case[1] * normal(case[0], 5, S, S), 20, EPS)
    assert (c > 0).all()
    assert_within(2 * EPS, c.sum(1), torch.ones(5, S, dtype=torch.float64))


def rows_too_when_logits_are_small(mix: Callable[..., Tensor], case: tuple[int, float]) -> None:
    c = mix(0.3 * normal(case[0], 5, S, S), 20, EPS)
    assert_within(10 * EPS, c.sum(2), torch.ones(5, S, dtype=torch.float64))


def is_the_published_iteration(mix: Callable[..., Tensor], case: tuple[int, float]) -> None:
    """Softmax over k is the first row step; 20 column steps, 19 further row steps. Entry by entry."""
    logits = case[1] * normal(case[0], 1, S, S)
    c = [[float(v) for v in torch.softmax(row, 0) + EPS] for row in logits[0]]
    for step in range(20):
        if step:
            c = [[v / (sum(row) + EPS) for v in row] for row in c]
        total = [sum(c[j][k] for j in range(S)) + EPS for k in range(S)]
        c = [[c[j][k] / total[k] for k in range(S)] for j in range(S)]
    want = torch.tensor(c, dtype=torch.float64)[None]
    assert_within(rounding_bound(400, want), mix(logits, 20, EPS), want)


def ends_on_rows(logits: Tensor, n: int, eps: float) -> Tensor:
    c = sinkhorn(logits, n, eps)
    return c / (c.sum(2, keepdim=True) + eps)


def transposed(logits: Tensor, n: int, eps: float) -> Tensor:
    return sinkhorn(logits.mT, n, eps).mT


def row_softmax_only(logits: Tensor, n: int, eps: float) -> Tensor:
    return sinkhorn(logits, 1, eps)


def without_eps(logits: Tensor, n: int, eps: float) -> Tensor:
    return sinkhorn(logits, n, 0.0)


def one_less(logits: Tensor, n: int, eps: float) -> Tensor:
    return sinkhorn(logits, n - 1, eps)


def test_sinkhorn() -> None:
    for law in (columns_sum_to_one, rows_too_when_logits_are_small, is_the_published_iteration):
        holds(law, cases, sinkhorn)


def test_equal_logits_give_quarters() -> None:
    c = sinkhorn(torch.full((2, S, S), 3.5, dtype=torch.float64), 20, EPS)
    assert_within(2 * EPS, c, torch.full((2, S, S), 0.25, dtype=torch.float64))


@pytest.mark.parametrize(
    ("law", "wrong"),
    [
        (columns_sum_to_one, ends_on_rows),
        (columns_sum_to_one, transposed),
        (rows_too_when_logits_are_small, row_softmax_only),
        (is_the_published_iteration, one_less),
        (is_the_published_iteration, without_eps),
        (is_the_published_iteration, transposed),
    ],
)
def test_sinkhorn_laws_see(law: Callable[..., None], wrong: Callable[..., Tensor]) -> None:
    refuted(law, cases, wrong)


# ---- gates


def gates(hc: HyperConnection, x: Tensor) -> tuple[Tensor, Tensor]:
    """pre, as seen by a tap, and post."""
    seen: dict[str, Tensor] = {}
    _, post, _ = hc.pre(x, Sites(tap=lambda name, value: seen.update({name: value})))
    return seen["pre"], post


def gates_are_bounded(of: Callable[..., tuple[Tensor, Tensor]], case: tuple[int, float]) -> None:
    """eps < pre < 1 + eps, 0 < post < 2 (closed where a sigmoid saturates)."""
    pre, post = of(connection(case[0], 6 * case[1] + 1), adversarial(case[0], 7, S, D))
    assert ((pre >= EPS) & (pre <= 1 + EPS)).all()
    assert ((post >= 0) & (post <= 2)).all()


def pre_without_eps(hc: HyperConnection, x: Tensor) -> tuple[Tensor, Tensor]:
    return gates(dataclasses.replace(hc, hc_eps=0.0), x)


def post_with_eps(hc: HyperConnection, x: Tensor) -> tuple[Tensor, Tensor]:
    pre, post = gates(hc, x)
    return pre, post + EPS


def test_gates() -> None:
    holds(gates_are_bounded, cases, gates)


@pytest.mark.parametrize("wrong", [pre_without_eps, post_with_eps])
def test_gate_law_sees(wrong: Callable[..., tuple[Tensor, Tensor]]) -> None:
    refuted(gates_are_bounded, cases, wrong)


# ---- known limits


def wrapped(hc: HyperConnection, x: Tensor, z: Tensor, turn: bool = False) -> Tensor:
    _, post, comb = hc.pre(x, SITES)
    return hc.post(z, x, post, comb.mT if turn else comb, SITES)


def residual_network(hc: HyperConnection) -> HyperConnection:
    """Scale 0, and a base for which pre = 1/4, post = 1 and comb is nearly the identity."""
    comb = (50.0 * torch.eye(S, dtype=torch.float64)).flatten()
    base = torch.cat([torch.full((S,), -torch.log(torch.tensor(3.0)).item(), dtype=torch.float64), torch.zeros(S), comb])
    return dataclasses.replace(hc, scale=torch.zeros(3, dtype=torch.float64), base=base)


def is_a_residual_network(around: Callable[..., Tensor], case: tuple[int, float]) -> None:
    """Four equal streams stay equal, and gain what the sub-layer puts out; the sub-layer reads the stream itself."""
    hc, x = residual_network(connection(case[0])), normal(case[0], 3, 1, D).repeat(1, S, 1)
    z = normal(case[0] + 9, 3, D)
    u, _, _ = hc.pre(x, SITES)
    assert_within(5 * EPS * float(x.abs().amax()), u, x[:, 0])
    assert_within(5 * EPS * float(x.abs().amax()), around(hc, x, z), x + z[:, None])


def half_post(hc: HyperConnection, x: Tensor, z: Tensor) -> Tensor:
    return wrapped(hc, x, z / 2)


def equal_streams_part_only_by_post(around: Callable[..., Tensor], case: tuple[int, float]) -> None:
    """u = (sum of pre) x, and x'[k] = post[k] z + x, as columns of comb sum to 1."""
    hc, x, z = connection(case[0], case[1]), normal(case[0], 3, 1, D).repeat(1, S, 1), normal(case[0] + 9, 3, D)
    pre, post = gates(hc, x)
    assert_within(rounding_bound(8, x, 4 * x), hc.pre(x, SITES)[0], pre.sum(1, keepdim=True) * x[:, 0])
    assert_within(2 * EPS * float(x.abs().amax()), around(hc, x, z), post[:, :, None] * z[:, None] + x)


def mixes_over_the_first_index(around: Callable[..., Tensor], case: tuple[int, float]) -> None:
    """x'[k] = post[k] z + sum_j comb[j, k] x[j]; entry by entry."""
    hc, x, z = connection(case[0]), adversarial(case[0], 2, S, D), normal(case[0] + 9, 2, D)
    _, post, comb = hc.pre(x, SITES)
    want = torch.stack(
        [torch.stack([post[t, k] * z[t] + sum(comb[t, j, k] * x[t, j] for j in range(S)) for k in range(S)]) for t in range(2)]
    )
    assert_within(rounding_bound(8, want, x), around(hc, x, z), want)


def test_limits() -> None:
    for law in (is_a_residual_network, equal_streams_part_only_by_post, mixes_over_the_first_index):
        holds(law, cases, wrapped)


@pytest.mark.parametrize(
    ("law", "wrong"),
    [
        (is_a_residual_network, half_post),
        (equal_streams_part_only_by_post, partial(wrapped, turn=True)),
        (mixes_over_the_first_index, partial(wrapped, turn=True)),
    ],
)
def test_limit_laws_see(law: Callable[..., None], wrong: Callable[..., Tensor]) -> None:
    refuted(law, cases, wrong)


def test_the_norm_is_over_all_streams_together() -> None:
    """Scaling all streams leaves the gates (up to eps); scaling one does not."""
    hc, x = connection(1), 100 * normal(2, 3, S, D)
    alone = x.clone()
    alone[:, 1] *= 3
    size = float(gates(hc, x)[0].abs().amax())
    assert_within(RMS_EPS * size, gates(hc, 5 * x)[0], gates(hc, x)[0])
    with pytest.raises(AssertionError):
        assert_within(RMS_EPS * size, gates(hc, alone)[0], gates(hc, x)[0])


def test_head_is_a_gated_sum() -> None:
    head = HyperHead(normal(0, S, S * D), normal(1, S), normal(2, 1), EPS, RMS_EPS)
    x = adversarial(3, 5, S, D)
    m = (x.flatten(1) @ head.fn.T) / torch.sqrt(x.flatten(1).square().mean(1, keepdim=True) + RMS_EPS)
    w = 1 / (1 + torch.exp(-(m * head.scale + head.base))) + EPS
    want = (w[:, :, None] * x).sum(1)
    assert_within(rounding_bound(S * D, want, x), head(x, SITES), want)
    unsure = dataclasses.replace(head, hc_eps=0.0)
    with pytest.raises(AssertionError):
        assert_within(rounding_bound(S * D, want, x), unsure(x, SITES), want)
