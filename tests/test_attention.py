"""The core of attention: sink, row sets, windows, groups."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from bounds import assert_within, rounding_bound
from hypothesis import strategies as st
from strategies import TINY, holds, normal, refuted, seeds, tiny_model, tokens
from torch import Tensor

from reference import attention as module
from reference.attention import Attention, Rows, sink_attention
from reference.rounding import Sites
from reference.state import SequenceState

SITES = Sites()
T, H, D = 3, 4, 16
Core = Callable[..., Tensor]
cases = st.tuples(seeds, st.integers(1, 9), st.integers(0, 6))
Case = tuple[int, int, int]


def operands(case: Case) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """q, shared rows and which are hidden, picked rows and which are absent, sink: every query sees a row."""
    seed, k, n = case
    g = torch.Generator().manual_seed(seed)
    hidden, absent = torch.rand(T, k, generator=g) < 0.4, torch.rand(T, n, generator=g) < 0.4
    hidden[:, 0] = False
    q, shared, picked = 3 * normal(seed, T, H, D), normal(seed + 1, k, D), normal(seed + 2, T, n, D)
    return q, shared, hidden, picked, absent, 2 * normal(seed + 3, H)


def each_query(case: Case) -> list[tuple[int, int, Tensor]]:
    """(token, head, the rows it sees)."""
    _, shared, hidden, picked, absent, _ = operands(case)
    return [(t, h, torch.cat([shared[~hidden[t]], picked[t][~absent[t]]])) for t in range(T) for h in range(H)]


def one_softmax_with_sink(core: Core, case: Case) -> None:
    q, *_, sink = operands(case)
    out = core(*operands(case), SITES)
    for t, h, rows in each_query(case):
        e = torch.exp(rows @ q[t, h] / D**0.5)
        want = (e[:, None] * rows).sum(0) / (e.sum() + torch.exp(sink[h]))
        assert_within(rounding_bound(4 * D, want, rows), out[t, h], want)


def no_sink_is_a_plain_softmax(core: Core, case: Case) -> None:
    q, shared, hidden, picked, absent, sink = operands(case)
    out = core(q, shared, hidden, picked, absent, torch.full_like(sink, -1e30), SITES)
    for t, h, rows in each_query(case):
        want = torch.softmax(rows @ q[t, h] / D**0.5, 0) @ rows
        assert_within(rounding_bound(4 * D, want, rows), out[t, h], want)


def a_large_sink_takes_everything(core: Core, case: Case) -> None:
    q, shared, hidden, picked, absent, sink = operands(case)
    out = core(q, shared, hidden, picked, absent, sink + 800, SITES)
    assert_within(torch.finfo(torch.float64).tiny, out, torch.zeros_like(out))


def stays_in_the_hull(core: Core, case: Case) -> None:
    """Each channel between the least and the largest of the rows and 0, which the sink stands for."""
    out = core(*operands(case), SITES)
    for t, h, rows in each_query(case):
        slack = rounding_bound(4 * D, rows)
        assert (out[t, h] <= rows.amax(0).clamp_min(0) + slack).all()
        assert (out[t, h] >= rows.amin(0).clamp_max(0) - slack).all()


def order_of_rows_is_nothing(core: Core, case: Case) -> None:
    q, shared, hidden, picked, absent, sink = operands(case)
    g = torch.Generator().manual_seed(case[0])
    a, b = torch.randperm(case[1], generator=g), torch.randperm(case[2], generator=g)
    out = core(q, shared[a], hidden[:, a], picked[:, b], absent[:, b], sink, SITES)
    want = core(q, shared, hidden, picked, absent, sink, SITES)
    assert_within(rounding_bound(4 * D, want, shared), out, want)


def absent_rows_are_nothing(core: Core, case: Case) -> None:
    """Rows behind -1 may hold anything finite."""
    q, shared, hidden, picked, absent, sink = operands(case)
    more, gone = torch.cat([picked, 100 * normal(1, T, 2, D)], dim=1), torch.cat([absent, torch.ones(T, 2).bool()], dim=1)
    want = core(q, shared, hidden, picked, absent, sink, SITES)
    assert_within(rounding_bound(4 * D, want, shared), core(q, shared, hidden, more, gone, sink, SITES), want)


def scaled_sink(q, shared, hidden, picked, absent, sink, sites):
    return sink_attention(q, shared, hidden, picked, absent, sink * D**-0.5, sites)


def no_sink(q, shared, hidden, picked, absent, sink, sites):
    return sink_attention(q, shared, hidden, picked, absent, torch.full_like(sink, -torch.inf), sites)


def sink_at_least_zero(q, shared, hidden, picked, absent, sink, sites):
    return sink_attention(q, shared, hidden, picked, absent, sink.clamp_min(0), sites)


def two_softmaxes(q, shared, hidden, picked, absent, sink, sites):
    both = sink_attention(q, shared, hidden, picked[:, :0], absent[:, :0], sink, sites)
    return both + sink_attention(q, shared, hidden, picked, absent, sink, sites)


def first_row_twice(q, shared, hidden, picked, absent, sink, sites):
    twice, hidden = torch.cat([shared[:1], shared]), torch.cat([hidden[:, :1], hidden], dim=1)
    return sink_attention(q, twice, hidden, picked, absent, sink, sites)


def absent_ignored(q, shared, hidden, picked, absent, sink, sites):
    return sink_attention(q, shared, hidden, picked, torch.zeros_like(absent), sink, sites)


LAWS = [one_softmax_with_sink, no_sink_is_a_plain_softmax, a_large_sink_takes_everything, stays_in_the_hull,
        order_of_rows_is_nothing, absent_rows_are_nothing]  # fmt: skip


@pytest.mark.parametrize("law", LAWS)
def test_core(law: Callable[..., None]) -> None:
    holds(law, cases, sink_attention)


@pytest.mark.parametrize(
    ("law", "wrong"),
    [
        (one_softmax_with_sink, scaled_sink),
        (one_softmax_with_sink, no_sink),
        (no_sink_is_a_plain_softmax, sink_at_least_zero),
        (a_large_sink_takes_everything, no_sink),
        (stays_in_the_hull, two_softmaxes),
        (order_of_rows_is_nothing, first_row_twice),
        (absent_rows_are_nothing, absent_ignored),
    ],
)
def test_core_laws_see(law: Callable[..., None], wrong: Core) -> None:
    refuted(law, cases, wrong)


# ---- which rows a query sees


def seen_rows(layer: int, n: int, monkeypatch: pytest.MonkeyPatch) -> list[set[tuple[str, int]]]:
    """For each position of a prompt, the raw positions and the compressed rows its core was given, by content."""
    sets: list[set[tuple[str, int]]] = []
    model = tiny_model(tap=None)
    names: dict[bytes, tuple[str, int]] = {}
    right = Attention.core

    def core(self: Attention, q: Tensor, positions: Tensor, rows: Rows, picks: Tensor | None, sites: Sites) -> Tensor:
        if self is model.loader.block(layer).attn:
            compressed = [] if rows.compressed is None else rows.compressed
            names.update({row.numpy().tobytes(): ("raw", rows.first + i) for i, row in enumerate(rows.raw)})
            names.update({row.numpy().tobytes(): ("row", i) for i, row in enumerate(compressed)})
            monkeypatch.setattr(module, "sink_attention", watch)
        out = right(self, q, positions, rows, picks, sites)
        monkeypatch.setattr(module, "sink_attention", sink_attention)
        return out

    def watch(q, shared, hidden, picked, absent, sink, sites):
        for t in range(len(q)):
            rows = [*shared[~hidden[t]], *picked[t][~absent[t]]]
            sets.append({names[row.contiguous().numpy().tobytes()] for row in rows})
            assert len(sets[-1]) == len(rows)
        return sink_attention(q, shared, hidden, picked, absent, sink, sites)

    monkeypatch.setattr(Attention, "core", core)
    model.forward([tokens(n, 2)], [SequenceState()])
    return sets


def window(p: int) -> set[tuple[str, int]]:
    return {("raw", i) for i in range(max(0, p - TINY.sliding_window + 1), p + 1)}


def test_window_layers_see_the_window_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    assert seen_rows(1, 20, monkeypatch) == [window(p) for p in range(20)]


def test_hca_layers_see_every_finished_row(monkeypatch: pytest.MonkeyPatch) -> None:
    finished = [{("row", j) for j in range((p + 1) // 128)} for p in range(258)]
    assert seen_rows(2, 258, monkeypatch) == [window(p) | finished[p] for p in range(258)]


def test_csa_layers_see_topk_finished_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    for p, rows in enumerate(seen_rows(0, 40, monkeypatch)):
        compressed = {row for row in rows if row[0] == "row"}
        assert rows - compressed == window(p)
        assert compressed <= {("row", j) for j in range((p + 1) // 4)}
        assert len(compressed) == min(TINY.index_topk, (p + 1) // 4)


def test_small_blocks_give_the_same_output(monkeypatch: pytest.MonkeyPatch) -> None:
    """Queries and scores are worked in blocks; where they end makes no difference."""
    ids = tokens(131, 3)
    whole = tiny_model().forward([ids], [SequenceState()])
    monkeypatch.setattr(module, "QUERY_BLOCK", 5)
    monkeypatch.setattr(module, "CORE_ELEMENTS", 100)
    assert_within(rounding_bound(1000, whole), tiny_model().forward([ids], [SequenceState()]), whole)


def grouped_output(of: Callable[..., Tensor], seed: int) -> None:
    """Group g: its heads one after the other through rows [g*r, (g+1)*r) of wo_a."""
    attention = tiny_model().loader.block(1).attn
    o, w = normal(seed, 3, 6, 128), attention.wo_a.dense(torch.float64)
    parts = [w[48 * g : 48 * g + 48] @ torch.cat([o[t, 2 * g], o[t, 2 * g + 1]]) for t in range(3) for g in range(3)]
    want = torch.stack(parts).view(3, 144)
    assert_within(rounding_bound(512, want), of(attention, o, SITES), want)


def heads_interleaved(attention: Attention, o: Tensor, sites: Sites) -> Tensor:
    return attention.group_output(o.unflatten(1, (2, 3)).transpose(1, 2).flatten(1, 2), sites)


def test_grouped_output() -> None:
    holds(grouped_output, seeds, Attention.group_output, examples=5)
    refuted(grouped_output, seeds, heads_interleaved, examples=5)
