"""Laws on the kernels of the indexer, to the bit. Source: docs/judge.md §13, docs/pool.md §8.

Kernels are called through the names of this module, so that a change of one is seen here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from optimized.kernels.index_logits import index_logits
from optimized.kernels.indexer import index_query
from optimized.kernels.topk import topk
from reference import formats

from . import statements as law
from .draws import PAIRS, f32, generator, order_of, planted_scores, turns, uneven, whole
from .law import Call, Law, Operands, same_bits

T, H, WIDTH = 5, 3, 64


def score(codes: Tensor, scales: Tensor, weights: Tensor, keys: Tensor, key_scales: Tensor, table: Tensor, batch: Tensor,
          visible: Tensor) -> tuple[Tensor, ...]:  # fmt: skip
    """Scores [t, 128], 0 where a token does not see."""
    out = index_logits(codes, scales, weights, keys, key_scales, table, batch, visible, columns=128)
    return (out.masked_fill(torch.arange(128) >= visible[:, None], 0.0),)


def score_operands(seed: int) -> Operands:
    """Pages of 64 keys of 64 channels; tokens of two sequences."""
    def codes(at: int, *shape: int) -> Tensor:
        return whole(at, 0, 255, *shape).byte()

    table = torch.tensor([[4, 1], [2, 5]], dtype=torch.int32).roll(seed, 1)
    batch, visible = torch.tensor([[0, 1, 1, 0, 1], [3, 64, 100, 65, 128]], dtype=torch.int32)
    return {"codes": codes(seed, T, H, WIDTH // 2), "scales": whole(seed + 1, 125, 129, T, H, 2).byte(),
            "weights": f32(seed, T, H), "keys": codes(seed + 2, 6, 64 * WIDTH // 2),
            "key_scales": whole(seed + 3, 124, 130, 6, 64 * 2).byte(), "table": table, "batch": batch.roll(seed),
            "visible": visible.roll(seed)}  # fmt: skip


def unseen_pages(call: Call, ops: Operands) -> str | None:
    """Pages 0 and 3 are in no table, and nobody of sequence 0 sees all of its second page."""
    pages = {n: torch.zeros_like(ops[n], dtype=torch.bool) for n in ("keys", "key_scales")}
    for mask in pages.values():
        mask[[0, 3]] = True
    page, most = int(ops["table"][0, 1]), int(ops["visible"][ops["batch"] == 0].max())
    pages["keys"][page, max(0, most - 64) * WIDTH // 2 :] = True
    pages["key_scales"][page, max(0, most - 64) * 2 :] = True
    return law.causality(call, ops, pages)


def rotated(q: Tensor, k: Tensor) -> tuple[Tensor, ...]:
    """Rotated and quantised, back in float64, at position 0."""
    def one(x: Tensor) -> Tensor:
        n = len(x)
        codes, scales, _ = index_query(x.bfloat16()[:, None], torch.ones(n, 1), torch.ones(n, PAIRS), torch.zeros(n, PAIRS),
                                       form="fp8")  # fmt: skip
        return (formats.e4m3_decode(codes).double() * formats.e8m0_decode(scales).double())[:, 0]

    return one(q), one(k)


def axes(seed: int) -> Operands:
    """Along one axis each, of sizes that are powers of two: 64^-0.5 = 2^-3, so their rotations are exact in E4M3."""
    def some(at: int, n: int) -> Tensor:
        size = whole(at + 50, -3, 3, n).double().exp2()
        return torch.eye(WIDTH, dtype=torch.float64)[torch.randperm(WIDTH, generator=generator(at))[:n]] * size[:, None]

    return {"q": some(seed, 40), "k": some(seed + 7, 50)}


def cancels(call: Call, ops: Operands) -> str | None:
    q, k = call(**ops)
    return same_bits((q @ k.T,), (ops["q"] @ ops["k"].T,))


def queries(form: Any) -> Call:
    def call(q: Tensor, projected: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        return index_query(q, projected, cos, sin, form=form)

    return call


def query_operands(seed: int) -> Operands:
    return {"q": uneven(seed, T, H, WIDTH).bfloat16(), "projected": f32(seed, T, H), **turns(seed, T)}


def picks(scores: Tensor, visible: Tensor) -> tuple[Tensor, ...]:
    return (topk(scores, visible, 6),)


def columns_past(call: Call, ops: Operands) -> str | None:
    return law.causality(call, ops, {"scores": torch.arange(40) >= ops["visible"][:, None]})


NAMES = law.Renaming
_SCALED = "2^k times the query: the same codes and weights, scale bytes k larger"
_ANY = "what a token does not see may hold anything"
LAWS = (
    Law("scaling.index-fp4", "attn.indexer.q", "kernel", _SCALED, query_operands, queries("fp4"),
        lambda call, ops: law.scaling(call, ops, "q", 4, [1])),
    Law("scaling.index-fp8", "attn.indexer.q", "kernel", _SCALED, query_operands, queries("fp8"),
        lambda call, ops: law.scaling(call, ops, "q", 4, [1])),
    Law("hadamard.scores", "attn.indexer.q", "kernel", "rotated queries and keys have the products of unrotated ones", axes,
        rotated, cancels),
    Law("tokens.scores", "attn.indexer.scores", "kernel", "tokens in another order have the same scores in that order",
        score_operands, score, lambda call, ops: law.relabelling(call, ops, NAMES(
            {"codes": 0, "scales": 0, "weights": 0, "batch": 0, "visible": 0}, out_axes={0: 0}), order_of(T))),
    Law("pages.scores", "attn.indexer.scores", "kernel", "pages elsewhere, a table that says so: the same scores",
        score_operands, score, lambda call, ops: law.relabelling(call, ops, NAMES(
            {"keys": 0, "key_scales": 0}, labels=("table",)), order_of(6))),
    Law("causality.scores", "attn.indexer.scores", "kernel", _ANY, score_operands, score, unseen_pages),
    Law("causality.picks", "attn.indexer.picks", "kernel", _ANY, planted_scores, picks, columns_past),
    Law("tokens.picks", "attn.indexer.picks", "kernel", "tokens in another order pick the same in that order", planted_scores,
        picks, lambda call, ops: law.relabelling(call, ops, NAMES({"scores": 0, "visible": 0}, out_axes={0: 0}), order_of(9))),
    Law("topk.picks", "attn.indexer.picks", "kernel", "the k largest, lower columns first among equals, NaN above all",
        planted_scores, picks, lambda call, ops: law.selection(call(**ops)[0], ops["scores"], ops["visible"], 6)),
)  # fmt: skip
