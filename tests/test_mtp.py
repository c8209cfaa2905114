"""The MTP block: pairing, positions, its own window, cuts; test_naive.py and test_oracle.py hold its numbers."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from bounds import FAR, PEER_FLOAT64, assert_within, distance
from strategies import TINY, MemoryStore, tiny_model, tiny_store, tokens
from torch import Tensor

from reference.config import DSpark
from reference.errors import BadInput
from reference.model import Model
from reference.state import SequenceState

MODEL = tiny_model()
N = 24


def streams(ids: Tensor) -> Tensor:
    return MODEL.forward([ids], [SequenceState()])


def drafts(x: Tensor, following: Tensor, cuts: tuple[int, ...] = ()) -> Tensor:
    state, parts = SequenceState(), zip(x.tensor_split(cuts), following.tensor_split(cuts), strict=True)
    return torch.cat([MODEL.mtp_logits(part, [ids], [state]) for part, ids in parts])


def test_cuts() -> None:
    x, following = streams(tokens(N, 0)), tokens(N, 1)
    whole = drafts(x, following)
    assert_within(PEER_FLOAT64, drafts(x, following, tuple(range(1, N))), whole)
    assert_within(PEER_FLOAT64, drafts(x, following, (TINY.sliding_window, 9)), whole)


def test_cuts_see_a_state_left_behind() -> None:
    x, following = streams(tokens(N, 0)), tokens(N, 1)
    fresh = torch.cat([MODEL.mtp_logits(x[i : i + 8], [following[i : i + 8]], [SequenceState()]) for i in (0, 8, 16)])
    assert distance(fresh, drafts(x, following)) > FAR * PEER_FLOAT64


def test_row_t_needs_streams_and_next_tokens_up_to_t() -> None:
    x, following = streams(tokens(N, 0)), tokens(N, 1)
    base, at = drafts(x, following), 10
    other = torch.cat([following[:at], (following[at:] + 1) % TINY.vocab_size])
    changed = (drafts(x, other) - base).abs().amax(-1) > FAR * PEER_FLOAT64
    assert not changed[:at].any()
    assert changed[at:].all()


def test_the_window_is_its_own() -> None:
    """Row t reads the rows of the last `sliding_window` tokens and nothing before."""
    x, following = streams(tokens(N, 0)), tokens(N, 1)
    other = x.clone()
    other[3] *= -1
    changed = (drafts(other, following) - drafts(x, following)).abs().amax(-1) > FAR * PEER_FLOAT64
    assert changed.nonzero().flatten().tolist() == list(range(3, 3 + TINY.sliding_window))


def test_batches() -> None:
    ids, following = [tokens(n, n) for n in (5, 9)], [tokens(n, n + 1) for n in (5, 9)]
    x = [streams(part) for part in ids]
    together = MODEL.mtp_logits(torch.cat(x), following, [SequenceState(), SequenceState()])
    assert_within(PEER_FLOAT64, together, torch.cat([drafts(a, b) for a, b in zip(x, following, strict=True)]))


def test_models_without_mtp_say_so() -> None:
    spark = DSpark(5, 96, (1, 2, 3), 8)
    for config, message in (
        (dataclasses.replace(TINY, compress_ratios=TINY.compress_ratios[:-1]), "has no mtp.0"),
        (dataclasses.replace(TINY, dspark=spark), "DSpark"),
    ):
        model = Model(MemoryStore(config, tiny_store().values), torch.float64)
        with pytest.raises(BadInput, match=message):
            model.mtp_logits(streams(tokens(2, 0)), [tokens(2, 0)], [SequenceState()])
