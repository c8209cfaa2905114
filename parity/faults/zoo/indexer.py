"""Indexer: queries, keys, scores, the choice, and the rows that it names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...run import PROFILES
from ..change import edit, wrap
from ..fault import OWN, Fault, at

FAR = 65_535
KEY, QUERY, SCORES = "attn.indexer.compressor.row", "attn.indexer.q", "attn.indexer.scores"
PICKS, ROWS = "attn.indexer.picks", "attn.indexer.rows"
LOGITS, TOPK, QUERIES, TRANSLATE = "kernels.index_logits", "kernels.topk", "kernels.indexer", "kernels.translate"
RELU = "score = tl.sum(tl.where(dot < 0, 0.0, dot) * weight[:, None], 0)"
LIMIT = "limit = tl.minimum(tl.load(visible + t), n)"
# Channels i and i + 32 as a pair, in place of neighbours, of the last 64: the two lines of `rotate_tail` that say which.
HALF_SPLIT = (
    ("even, odd = tl.split(y.reshape(y.shape[0], LANES // 2, 2))",
     "even, odd = tl.split(tl.permute(y.reshape(y.shape[0], LANES // 64, 2, 32), (0, 1, 3, 2)))\n"
     "    even, odd = even.reshape(y.shape[0], LANES // 2), odd.reshape(y.shape[0], LANES // 2)"),
    ("return tl.join(new_even, new_odd).reshape(y.shape[0], LANES)",
     "pair = tl.join(new_even, new_odd).reshape(y.shape[0], LANES // 64, 32, 2)\n"
     "    return tl.permute(pair, (0, 1, 3, 2)).reshape(y.shape[0], LANES)"),
)  # fmt: skip


def _keys_of_last_chunk(index_logits: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def recent(*args: Any, **kwargs: Any) -> Tensor:
        scores, batch, seen = index_logits(*args, **kwargs), args[6].long(), args[7]
        first = torch.full((int(batch.max()) + 1,), int(seen.max()), dtype=seen.dtype).scatter_reduce_(0, batch, seen, "amin")
        return scores.masked_fill_(torch.arange(scores.shape[1]) < first[batch][:, None] - 1, -torch.inf)

    return recent


def _picks_of_token_before(topk: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda *args, **kwargs: topk(*args, **kwargs).roll(1, 0)


FAULTS = (
    Fault("indexer.key-not-rotated", "missing step", "ROCm/ATOM#1507", "S2",
          "queries get the Hadamard rotation and keys do not", KEY,
          edit("kernels.compress", ("y = hadamard(y, LANES, STEPS)", "y = y")), at("csa", "decode", starts=(127,))),
    Fault("indexer.query-not-rotated", "missing step", OWN, "S2",
          "keys get the Hadamard rotation and queries do not", QUERY,
          edit(QUERIES, ("y = hadamard(y, LANES, STEPS)", "y = y")), at("csa", "decode", starts=(127,))),
    Fault("indexer.no-relu", "missing clamp", "1CatAI/1Cat-vLLM#250", "S2",
          "a head that disagrees counts as negative", SCORES,
          edit(LOGITS, (RELU, "score = tl.sum(dot * weight[:, None], 0)")), at("csa", "decode", starts=(127,)),
          also=("sgl-project/sglang#33271",)),
    Fault("indexer.relu-after-sum", "order", OWN, "S2", "ReLU over the sum of the heads, not over each", SCORES,
          edit(LOGITS, (RELU, "score = tl.sum(dot * weight[:, None], 0); score = tl.where(score < 0, 0.0, score)")),
          at("csa", "decode", starts=(127,))),
    Fault("indexer.sigmoid-weights", "missing step", "ml-explore/mlx-lm#1189", "S2",
          "head weights go through a sigmoid and heads are averaged", QUERY,
          edit(QUERIES, ("live, other=0.0) * factor", "live, other=0.0); weight = 1 / (1 + tl.exp(-weight)) / H")),
          at("csa", "decode", starts=(127,))),
    Fault("indexer.no-causal-mask", "leak", "huggingface/transformers#45820", "S1",
          "a query chooses among all rows, later ones too", PICKS, edit(TOPK, (LIMIT, "limit = n + 0 * tl.load(visible + t)")),
          at("csa", "prefill", (36,))),
    Fault("indexer.one-choice-for-all", "axis", "huggingface/transformers#45758", "S1",
          "all queries of a step attend to the choice of the first", ROWS,
          edit(TRANSLATE, ("picks + t[:, None] * picks_stride", "picks + 0 * t[:, None]")), at("csa", "chunk", starts=(127,))),
    Fault("indexer.keys-of-last-chunk", "stale state", "ml-explore/mlx-lm#1189", "S2",
          "only keys of the running chunk can be chosen", SCORES,
          wrap("kernels.index_logits:index_logits", _keys_of_last_chunk), at("csa", "decode", starts=(127,))),
    Fault("indexer.read-in-tiles", "wrong format", "vllm-project/vllm#52109", "S2",
          "keys are written row by row and read in tiles", SCORES,
          edit(LOGITS, ("key_at(r, j, BYTES, ORDER)", "key_at(r, j, BYTES, 3)")), at("csa", "decode", starts=(127,))),
    Fault("indexer.offset-wraps", "wrong page", "ROCm/aiter#4774", "S2",
          "page times stride wraps, here at 2^18 bytes instead of 2^31", SCORES,
          edit(LOGITS, ("block[:, None] * keys_stride", "block[:, None] * keys_stride % 262144")),
          at("csa", "decode", starts=(FAR,)), also=("vllm-project/vllm#52109",)),
    Fault("indexer.fnuz-zero", "wrong format", "vllm-project/vllm#52109", "S2",
          "byte 0x80, which is -0, is read as NaN", SCORES,
          edit("kernels.numeric", ("(u & 0x7F) == 0x7F,", "((u & 0x7F) == 0x7F) | (u == 0x80),"), within=LOGITS),
          at("csa", "decode", starts=(FAR,), profile=PROFILES[1])),
    Fault("indexer.workspace-tail", "dropped tail", "vllm-project/vllm#51252", "S2",
          "the last quarter of a token's keys is not gathered: what is there has no scale", SCORES,
          edit(LOGITS, ("key_scales + at, mask=live[:, None]", "key_scales + at, mask=(live & (c < limit * 3 // 4))[:, None]")),
          at("csa", "decode", starts=(127,))),
    Fault("indexer.bin-overflows", "dropped tail", "vllm-project/vllm#51782", "S2",
          "a buffer for candidates is full after 4,096 of them", PICKS,
          edit(TOPK, (LIMIT, f"{LIMIT}; limit = tl.minimum(limit, 4096)")),
          at("csa", "decode", starts=(FAR,)), also=("sgl-project/sglang#36807", "sgl-project/sglang#35257")),
    Fault("indexer.short-row-undefined", "missing clamp", "vllm-project/vllm#56464", "S3",
          "a token that sees no row leaves its picks unwritten", PICKS,
          edit(TOPK, ("(k >= tl.minimum(limit, K)) & (k < K)", "(k >= tl.minimum(limit, K)) & (k < K) & (limit > 0)")),
          at("csa", "prefill", (8,))),
    Fault("indexer.reads-past-row", "leak", "vllm-project/vllm#49714", "S2",
          "three columns past a row's end are read as scores", PICKS,
          edit(TOPK, (LIMIT, "limit = tl.minimum(tl.load(visible + t) + 3, n)")), at("csa", "prefill", (36,)),
          also=("vllm-project/vllm#33568",)),
    Fault("indexer.filler-dereferenced", "missing clamp", "sgl-project/sglang#32771", "S1",
          "-1 behind a short row's picks is looked up like a pick", ROWS,
          edit(TRANSLATE, ("(j < tl.minimum(count, K)[:, None])", "(j < K)")), at("csa", "chunk", (8,))),
    Fault("indexer.half-split-rotation", "swapped halves", "vllm-project/vllm-ascend#4641", "S2",
          "index queries are rotated in halves, not in neighbours", QUERY,
          edit("kernels.row_tiles", *HALF_SPLIT, within="kernels.indexer"), at("csa", "decode", starts=(127,)),
          also=("sgl-project/sglang#13530", "ml-explore/mlx-lm#512")),
    Fault("indexer.one-scale-a-key", "wrong scale", OWN, "S2", "the first scale of a key stands for all of it", SCORES,
          edit(LOGITS, ("scale_at(r, g, GROUPS, ORDER)", "scale_at(r, 0 * g, GROUPS, ORDER)")),
          at("csa", "decode", starts=(127,))),
    Fault("indexer.weights-without-sign", "sign", OWN, "S2", "head weights lose their sign", SCORES,
          edit(LOGITS, (RELU, RELU.replace("weight[", "tl.abs(weight)["))), at("csa", "decode", starts=(127, 128, 129))),
    Fault("indexer.heads-not-scaled", "wrong scale", OWN, "S3", "head weights miss the root of the number of heads", QUERY,
          edit(QUERIES, ("width**-0.5 * heads**-0.5", "width**-0.5")), at("csa", "decode", starts=(127,))),
    Fault("indexer.tie-to-higher", "order", OWN, "S3", "of equal scores the higher column wins", PICKS,
          edit(TOPK, ("(tied + tl.cumsum(equal, 0) <= ties)", "(tied + tl.cumsum(equal, 0) > tl.sum(equal, 0) - ties)")),
          at("csa", "decode", starts=(FAR,)), laws=("ties",), tests=("tests/test_kernel_selection.py",)),
    Fault("indexer.picks-of-token-before", "stale state", OWN, "S1", "a token gets the choice of the one before", PICKS,
          wrap("kernels.topk:topk", _picks_of_token_before), at("csa", "prefill", (36,))),
    Fault("indexer.rows-of-one-layer", "wrong page", OWN, "S1", "blocks are as large as one layer's part of them", ROWS,
          edit(TRANSLATE, ("block * envelope + entry", "block * block_rows + entry")), at("csa", "decode", starts=(255, 257))),
    Fault("indexer.list-one-late", "off by one", OWN, "S1", "rows go one place behind where the list has room", ROWS,
          edit(TRANSLATE, ("indices + start[:, None] + j", "indices + start[:, None] + j + 1")),
          at("csa", "decode", starts=(127, 129))),
    Fault("indexer.lowest-pick-late", "off by one", OWN, "S2", "the lowest pick is one column late", PICKS,
          edit(TOPK, ("+ tl.cumsum(count, 0) - 1, c, mask=take)", "+ tl.cumsum(count, 0) - 1, "
               "tl.maximum(c, tl.min(tl.where(take, c, 1 << 30), 0) + 1), mask=take)")), at("csa", "decode", starts=(127,))),
)  # fmt: skip
