"""The reference against `naive.py`, a second implementation: every kind of layer, MTP, exact and quantised."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from bounds import FAR, PEER_FLOAT64, assert_within, distance
from naive import Naive, fp8
from strategies import TINY, MemoryStore, smallest_margin, tiny_model, tiny_store, tokens

from reference.rounding import profile
from reference.state import SequenceState

N = 131  # a block of 128 and three tokens


@pytest.mark.parametrize("name", ["exact", "qat"])
def test_second_implementation_agrees(name: str) -> None:
    store, ids, after = tiny_store(), tokens(N, 5), tokens(N, 6)
    assert smallest_margin(MemoryStore(TINY, store.values), ids) > FAR * PEER_FLOAT64
    naive = Naive(store, qat=name == "qat")
    logits, drafts = [], []
    for token, following in zip(ids.tolist(), after.tolist(), strict=True):
        row, streams = naive.step(token)
        logits.append(row)
        drafts.append(naive.mtp_step(streams, following))
    model = tiny_model(torch.float64, profile(name))
    x = model.forward([ids], [SequenceState()])
    assert_within(PEER_FLOAT64, model.logits(x), torch.from_numpy(np.stack(logits)))
    assert_within(PEER_FLOAT64, model.mtp_logits(x, [after], [SequenceState()]), torch.from_numpy(np.stack(drafts)))


def test_the_comparison_sees_a_wrong_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of 64 instead of 128 at the linear inputs, in three tokens."""
    store, ids = tiny_store(), tokens(3, 5)

    def logits() -> torch.Tensor:
        naive = Naive(store, qat=True)
        return torch.from_numpy(np.stack([naive.step(token)[0] for token in ids.tolist()]))

    right = logits()
    monkeypatch.setattr("naive.fp8", lambda x, block: fp8(x, 32 if block == 128 else block))
    assert distance(logits(), right) > FAR * PEER_FLOAT64
