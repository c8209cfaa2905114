"""The whole model: any cut and any batch gives the same logits; causality; translation; states that can be put back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from bounds import FAR, PEER_FLOAT64, assert_within, distance
from hypothesis import strategies as st
from strategies import TINY, MemoryStore, chunked, holds, refuted, run, seeds, tiny_model, tiny_store, tokens
from torch import Tensor

from reference.attention import Attention
from reference.compressor import Compressor
from reference.errors import BadInput
from reference.indexer import select_topk
from reference.model import Model
from reference.norm import rms_norm
from reference.rope import Rope, rotate
from reference.rounding import profile
from reference.state import Batch, LayerState, SequenceState

MODEL = tiny_model()
Patch = Sequence[tuple[str, Any]]


def with_mistake(*patches: tuple[str, Any]) -> Callable[[], Any]:
    """A context in which parts of the reference are replaced."""

    def context() -> Any:
        patch = pytest.MonkeyPatch()
        for name, wrong in patches:
            patch.setattr(f"reference.{name}", wrong)
        return patch

    return context


class Correct:
    def undo(self) -> None:
        pass


# ---- cutting

Context = Callable[[], Any]


def any_cut_gives_the_same_logits(context: Context, case: tuple[int, int, list[int]]) -> None:
    n, seed, cuts = case
    ids, patch = tokens(n, seed), context()
    try:
        assert_within(PEER_FLOAT64, run(MODEL, ids, cuts), run(MODEL, ids))
    finally:
        patch.undo()


right_extend, right_rows = Attention.extend, Compressor.extend


def short_window(self: Attention, *args: Any) -> Any:
    states, rows = right_extend(self, *args)
    return [replace(s, window=s.window[1:]) for s in states], rows


def lost_compressor_state(self: Compressor, values: Tensor, gates: Tensor, state: Any, sites: Any) -> Any:
    after = right_rows(self, values, gates, state, sites)
    return replace(after, values=after.values.clone().zero_())


EDGES = (1, 3, 4, 5, TINY.sliding_window, 8, 4 * TINY.index_topk + 3, 127, 128, 129)


def test_any_cut() -> None:
    holds(any_cut_gives_the_same_logits, chunked(EDGES), Correct)


def test_token_by_token() -> None:
    any_cut_gives_the_same_logits(Correct, (131, 1, list(range(1, 131))))


@pytest.mark.parametrize(
    "wrong",
    [("attention.Attention.extend", short_window), ("compressor.Compressor.extend", lost_compressor_state)],
    ids=["short window", "lost compressor state"],
)
def test_cuts_see(wrong: tuple[str, Any]) -> None:
    refuted(any_cut_gives_the_same_logits, chunked(EDGES, longest=30), with_mistake(wrong))


@pytest.mark.parametrize("name", ["qat", "pool-fp8"])
def test_quantised_profiles_may_be_cut_too(name: str) -> None:
    """Rows and keys are quantised once, when they are made: a cut leaves nothing that could round otherwise."""
    ids, model = tokens(131, 2), tiny_model(profile=profile(name))
    assert_within(PEER_FLOAT64, run(model, ids, (5, 6, 127, 128, 130)), run(model, ids))


# ---- batches

ragged = st.lists(st.tuples(st.integers(1, 20), st.integers(1, 12), seeds), min_size=2, max_size=4)


def batches_are_sequences_side_by_side(context: Context, case: list[tuple[int, int, int]]) -> None:
    """Each sequence (tokens before, tokens now, seed) stepped in one ragged batch, and alone."""
    patch = context()
    try:
        ids = [tokens(before + now, seed) for before, now, seed in case]
        states = [SequenceState() for _ in case]
        MODEL.forward([t[:before] for t, (before, _, _) in zip(ids, case, strict=True)], states)
        together = MODEL.logits(MODEL.forward([t[before:] for t, (before, _, _) in zip(ids, case, strict=True)], states))
        alone = torch.cat([run(MODEL, t)[before:] for t, (before, _, _) in zip(ids, case, strict=True)])
        assert_within(PEER_FLOAT64, together, alone)
    finally:
        patch.undo()


def neighbours_window(self: Attention, x: Tensor, kv: Tensor, batch: Batch, states: list[LayerState], sites: Any) -> Any:
    """Every sequence continues the first one's window where that is as long."""
    same = [replace(s, window=states[0].window if len(states[0].window) == len(s.window) else s.window) for s in states]
    return right_extend(self, x, kv, batch, same, sites)


def norm_over_the_batch(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return rms_norm(x, weight, eps) * (1 + x.mean())


def test_ragged_batches() -> None:
    holds(batches_are_sequences_side_by_side, ragged, Correct)


@pytest.mark.parametrize("wrong", [("attention.Attention.extend", neighbours_window), ("block.rms_norm", norm_over_the_batch)])
def test_batches_see(wrong: tuple[str, Any]) -> None:
    refuted(batches_are_sequences_side_by_side, ragged, with_mistake(wrong))


# ---- causality


def later_tokens_change_nothing(context: Context, case: tuple[int, int, list[int]]) -> None:
    n, seed, cuts = case
    ids, at, patch = tokens(n, seed), (cuts[0] if cuts else n // 2), context()
    other = torch.cat([ids[:at], (ids[at:] + 1) % TINY.vocab_size])
    try:
        assert_within(PEER_FLOAT64, run(MODEL, other)[:at], run(MODEL, ids)[:at])
    finally:
        patch.undo()


def sees_the_unfinished_block(scores: Tensor, visible: Tensor, k: int) -> Tensor:
    return select_topk(scores, visible + 1, k)


def test_causality() -> None:
    holds(later_tokens_change_nothing, chunked(EDGES), Correct)


def test_causality_sees() -> None:
    mistake = with_mistake(("indexer.select_topk", sees_the_unfinished_block))
    refuted(later_tokens_change_nothing, chunked(EDGES, longest=40), mistake)


# ---- translation

right_table = Rope.table


def translated(by: int) -> tuple[str, Any]:
    """Every rotary position of the model moved on; block numbers and visibility stay."""
    return "rope.Rope.table", lambda self, positions, dtype, sites: right_table(self, positions + by, dtype, sites)


def logits_far_on(by: int, *more: tuple[str, Any]) -> Tensor:
    patch = with_mistake(translated(by), *more)()
    try:
        return run(MODEL, tokens(131, 7))
    finally:
        patch.undo()


@pytest.mark.parametrize("by", [1, 1000])
def test_translation(by: int) -> None:
    """Attention and indexer feel differences of positions only, because the output is turned back by the query's own."""
    assert_within(PEER_FLOAT64, logits_far_on(by), logits_far_on(0))


def never_back(x: Tensor, table: tuple[Tensor, Tensor], inverse: bool = False) -> Tensor:
    return x if inverse else rotate(x, table)


def test_translation_sees_a_missing_inverse() -> None:
    wrong = ("attention.rotate", never_back)
    assert distance(logits_far_on(1000, wrong), logits_far_on(0, wrong)) > FAR * PEER_FLOAT64


# ---- states


def test_rollback_by_copy() -> None:
    """Drafted tokens are taken back by keeping the state from before them, at every offset in a block and window."""
    ids, drafts = tokens(20, 8), tokens(3, 9)
    for n in range(1, 18):
        state = SequenceState()
        MODEL.forward([ids[:n]], [state])
        kept = state.copy()
        MODEL.forward([drafts], [state])
        assert state.length == n + 3
        assert kept.length == n
        after = MODEL.logits(MODEL.forward([ids[n:]], [kept]))
        assert_within(PEER_FLOAT64, after, run(MODEL, ids)[n:])


def test_a_kept_reference_is_no_copy() -> None:
    """What the test above would miss if `copy` handed out the state itself."""
    ids, state = tokens(20, 8), SequenceState()
    MODEL.forward([ids[:9]], [state])
    MODEL.forward([tokens(3, 9)], [state])
    assert distance(MODEL.logits(MODEL.forward([ids[9:]], [state])), run(MODEL, ids)[9:]) > FAR * PEER_FLOAT64


def test_a_step_that_fails_leaves_the_states(monkeypatch: pytest.MonkeyPatch) -> None:
    ids, state = tokens(12, 3), SequenceState()
    MODEL.forward([ids[:6]], [state])

    def full(i: int, x: Tensor) -> None:
        if i == 2:
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        MODEL.forward([ids[6:]], [state], full)
    assert state.length == 6
    assert_within(PEER_FLOAT64, MODEL.logits(MODEL.forward([ids[6:]], [state])), run(MODEL, ids)[6:])


# ---- input, memory, dtype


@pytest.mark.parametrize(
    ("ids", "message"),
    [([], "sequence 1 has no tokens"), ([0, 97], "sequence 1 has token id 97"), ([-1], "sequence 1 has token id -1")],
)
def test_bad_tokens_are_refused(ids: list[int], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        MODEL.forward([tokens(2, 0), torch.tensor(ids, dtype=torch.int64)], [SequenceState(), SequenceState()])


def test_streamed_weights_give_the_same_logits() -> None:
    """With memory for a few experts only, weights are dequantised when used, tile by tile."""
    store = MemoryStore(TINY, tiny_store().values)
    ids, small = tokens(30, 4), Model(store, torch.float64, memory=100_000)
    assert not small.loader.resident
    assert_within(PEER_FLOAT64, run(small, ids, (9,)), run(MODEL, ids))
    once = sum(value.nbytes for name, value in store.values.items() if not name.startswith("mtp."))
    assert store.bytes_read > 3 / 2 * once  # two steps, each reading most weights again


def test_float32_is_near_float64() -> None:
    """Far nearer than any mistake of test_mutations.py is far."""
    from bounds import PEER_FLOAT32

    ids = tokens(131, 5)
    assert_within(PEER_FLOAT32, run(tiny_model(torch.float32), ids), run(MODEL, ids))


def test_hooks_see_every_layer() -> None:
    seen: list[tuple[int, tuple[int, ...]]] = []
    states = [SequenceState(), SequenceState()]
    MODEL.forward([tokens(3, 0), tokens(2, 1)], states, lambda i, x: seen.append((i, tuple(x.shape))))
    assert seen == [(i, (5, 4, 160)) for i in range(TINY.num_hidden_layers)]
