"""Choices whose scores nobody stored: judged from what scores are made of, within the bounds of both.

Source: docs/single.md §6 and docs/judge.md §5.
"""

from __future__ import annotations

import torch

from .. import experts, indexing
from ..budget import gates
from ..budget.bounded import Bounded, rounded
from ..judge import Bytes, Dense, Selection
from ..step import Step
from ..twins import Expectation, Expectations, StoredOutputs


def experts_expected(step: Step, op: str, stored: StoredOutputs) -> Expectations:
    """The set within both scores' bounds, or the table's; weights from scores that are known within their bound."""
    ffn, how = step.block.ffn, step.how
    scores, chosen = experts.scores_expected(step, op, stored)[op].expected, stored[op]
    assert isinstance(scores, Dense) and isinstance(chosen, torch.Tensor)
    score, count = scores.expected, scores.expected.value.shape[1]
    at = torch.arange(len(chosen))[:, None], chosen.clamp(0, count - 1).long()
    weights = gates.normalised(score[at], ffn.scaling, how)
    if ffn.tid2eid is not None:
        best: Bytes | Selection = Bytes(ffn.tid2eid[step.batch.ids].int(), "tk")
    else:
        assert ffn.bias is not None
        rank = rounded(Bounded(score.value + ffn.bias, score.bound), how.u)
        best = Selection(rank, torch.full((len(chosen),), count, dtype=torch.int32), ffn.top_k)
    return {
        op: Expectation(best, step.places),
        "ffn.gate.weights": Expectation(Dense(weights, "f32", "tk", fair=False), step.places),
    }


def picks_expected(step: Step, op: str, stored: StoredOutputs) -> Expectations:
    """The set within both scores' bounds, table by table."""
    every = indexing.chosen_expected(step, op, stored)
    return {name.removesuffix(".set"): e for name, e in every.items() if name.endswith(".set")}


# Op -> the scores it goes by, and what it has to put out where those are not there.
WITHOUT_SCORES = {
    "ffn.gate.experts": ("ffn.gate.scores", experts_expected),
    "attn.indexer.picks": ("attn.indexer.scores", picks_expected),
}
