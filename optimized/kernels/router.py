"""Router: scores of all experts, and the choice of a token's experts with their weights, by score or by token id.

Contract (docs/pool.md §9.4)
    x         bfloat16 [t, d], gate bfloat16 [e, d], any row stride
    scores    float32 [t, e], dense: sqrt(softplus(x gate^T))
    bias      float32 [e]: chooses, and does no more
    tid2eid   int64 [v, k], dense, the experts of each token id; ids int64 [t], -1: padding
    experts   int32 [t, k]: by descending score + bias, the lower number before its equals; or the row of tid2eid in its
              order; -1 for padding
    weights   float32 [t, k]: scores of the chosen over their sum, times scaling; 0 for padding
    Outputs are contiguous, written whole and alias nothing. Ids and tid2eid are checked by whoever holds them: an id
    outside the table reads outside it.
    rounding  none below float32, no TF32. softplus is max(l, 0) + log1p(e^-|l|): beyond 17 the second term is below half
              an ulp, so that the identity above 20 of other software is the same function. Below -87, e^l leaves float32.
A score that is not a number counts as the largest, and makes the weights of its token NaN.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import ceil_div, power_of_two, require, tiles_for_mode
from .numeric import bf16_up


@dataclass(frozen=True)
class Tiles:
    """ROWS tokens by COLS experts a program of the product (both at least 16), STEP channels at a time; CHOOSE_ROWS tokens a
    program that chooses. Powers of two."""

    ROWS: int
    COLS: int
    STEP: int
    CHOOSE_ROWS: int
    num_warps: int = 4


GPU = Tiles(ROWS=16, COLS=32, STEP=64, CHOOSE_ROWS=1)
INTERPRETER = Tiles(ROWS=64, COLS=64, STEP=1024, CHOOSE_ROWS=64)


@triton.jit
def log1p_unit(z):
    """log(1 + z) for 0 <= z <= 1 to a few ulps, as 2 atanh(z / (2 + z)); what the series leaves out is below 2^-29."""
    s = z / (2.0 + z)
    q = s * s
    series = 1.0 + q * (1 / 3 + q * (1 / 5 + q * (1 / 7 + q * (1 / 9 + q * (1 / 11 + q * (1 / 13 + q * (1 / 15)))))))
    return 2.0 * s * series


@triton.jit
def scores_kernel(
    x, gate, scores, T, E, D, x_stride, gate_stride, ROWS: tl.constexpr, COLS: tl.constexpr, STEP: tl.constexpr
):  # fmt: skip
    t = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    e = (tl.program_id(1) * COLS + tl.arange(0, COLS)).to(tl.int64)
    logits = tl.zeros((ROWS, COLS), tl.float32)
    for first in range(0, D, STEP):
        d = first + tl.arange(0, STEP)
        a = tl.load(x + t[:, None] * x_stride + d[None, :], mask=(t < T)[:, None] & (d < D)[None, :], other=0.0)
        b = tl.load(gate + e[:, None] * gate_stride + d[None, :], mask=(e < E)[:, None] & (d < D)[None, :], other=0.0)
        logits = tl.dot(bf16_up(a), tl.trans(bf16_up(b)), logits, input_precision="ieee")
    positive = tl.where(logits > 0, logits, 0.0)
    softplus = positive + log1p_unit(tl.exp(-tl.abs(logits)))
    tl.store(scores + t[:, None] * E + e[None, :], tl.sqrt(softplus), mask=(t < T)[:, None] & (e < E)[None, :])


@triton.jit
def ordered(x):
    """float32 -> int32 that orders alike, NaN above all; never the least int32."""
    bits = tl.where(x != x, 0x7FC00000, x.to(tl.int32, bitcast=True))
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def store_choice(experts, weights, scores, pick, t, T, E, scaling, K: tl.constexpr, SLOTS: tl.constexpr):
    """Store picks [rows, SLOTS] and their normalised scores; a pick of -1 has weight 0."""
    k = tl.arange(0, SLOTS)[None, :]
    stored = (t < T)[:, None] & (k < K)
    score = tl.load(scores + t[:, None] * E + pick, mask=stored & (pick >= 0), other=0.0)
    weight = tl.where(pick >= 0, score / tl.sum(score, 1)[:, None] * scaling, 0.0)
    tl.store(experts + t[:, None] * K + k, pick, mask=stored)
    tl.store(weights + t[:, None] * K + k, weight, mask=stored)


@triton.jit
def choose_kernel(
    scores, bias, experts, weights, T, E, scaling,
    K: tl.constexpr, SLOTS: tl.constexpr, LANES: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    t = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    e = tl.arange(0, LANES)
    inside = (t < T)[:, None] & (e < E)[None, :]
    offset = tl.load(bias + e, mask=e < E, other=0.0)[None, :]
    rank = tl.load(scores + t[:, None] * E + e[None, :], mask=inside, other=0.0) + offset
    key = tl.where((e < E)[None, :], ordered(rank), -(2**31))
    picks = tl.zeros((ROWS, SLOTS), tl.int32)
    for slot in range(K):
        best = tl.max(key, 1)
        pick = tl.min(tl.where(key == best[:, None], e[None, :], LANES), 1)
        picks = tl.where(tl.arange(0, SLOTS)[None, :] == slot, pick[:, None], picks)
        key = tl.where(e[None, :] == pick[:, None], -(2**31), key)
    store_choice(experts, weights, scores, picks, t, T, E, scaling, K, SLOTS)


@triton.jit
def look_up_kernel(
    scores, tid2eid, ids, experts, weights, T, E, scaling,
    K: tl.constexpr, SLOTS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    t = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    k = tl.arange(0, SLOTS)[None, :]
    token = tl.load(ids + t, mask=t < T, other=-1)[:, None]
    pick = tl.load(tid2eid + token * K + k, mask=(token >= 0) & (k < K), other=-1)
    store_choice(experts, weights, scores, pick.to(tl.int32), t, T, E, scaling, K, SLOTS)


def router_scores(x: Tensor, gate: Tensor, tiles: Tiles | None = None) -> Tensor:
    """bfloat16 [t, d], bfloat16 [e, d] -> float32 [t, e]. Raises ValueError."""
    require(x, "x", torch.bfloat16, (None, None))
    (tokens, width), experts = x.shape, gate.shape[0]
    require(gate, "gate", torch.bfloat16, (None, width))
    tiles = tiles or tiles_for_mode(GPU, INTERPRETER)
    scores = torch.empty(tokens, experts, dtype=torch.float32, device=x.device)
    if scores.numel():
        scores_kernel[(ceil_div(tokens, tiles.ROWS), ceil_div(experts, tiles.COLS))](
            x, gate, scores, tokens, experts, width, x.stride(0), gate.stride(0),
            ROWS=tiles.ROWS, COLS=tiles.COLS, STEP=tiles.STEP, num_warps=tiles.num_warps,
        )  # fmt: skip
    return scores


def choose_experts(
    scores: Tensor, bias: Tensor, top_k: int, scaling: float, tiles: Tiles | None = None
) -> tuple[Tensor, Tensor]:
    """Scores [t, e] and bias [e] -> experts int32 [t, k] and weights float32 [t, k]. Raises ValueError."""
    require(scores, "scores", torch.float32, (None, None), dense=2)
    tokens, count = scores.shape
    require(bias, "bias", torch.float32, (count,))
    if not 0 < top_k <= count:
        raise ValueError(f"top_k is {top_k}, of {count} experts")
    tiles = tiles or tiles_for_mode(GPU, INTERPRETER)
    experts, weights = _choice(scores, top_k)
    if tokens:
        choose_kernel[(ceil_div(tokens, tiles.CHOOSE_ROWS),)](
            scores, bias, experts, weights, tokens, count, scaling,
            K=top_k, SLOTS=power_of_two(top_k), LANES=power_of_two(count),
            ROWS=tiles.CHOOSE_ROWS, num_warps=tiles.num_warps,
        )  # fmt: skip
    return experts, weights


def look_up_experts(
    scores: Tensor, tid2eid: Tensor, ids: Tensor, scaling: float, tiles: Tiles | None = None
) -> tuple[Tensor, Tensor]:
    """Scores [t, e] and token ids int64 [t] -> experts int32 [t, k] and weights float32 [t, k]. Raises ValueError."""
    require(scores, "scores", torch.float32, (None, None), dense=2)
    require(tid2eid, "tid2eid", torch.int64, (None, None), dense=2)
    require(ids, "ids", torch.int64, (scores.shape[0],))
    (tokens, count), top_k = scores.shape, tid2eid.shape[1]
    tiles = tiles or tiles_for_mode(GPU, INTERPRETER)
    experts, weights = _choice(scores, top_k)
    if tokens:
        look_up_kernel[(ceil_div(tokens, tiles.CHOOSE_ROWS),)](
            scores, tid2eid, ids, experts, weights, tokens, count, scaling,
            K=top_k, SLOTS=power_of_two(top_k), ROWS=tiles.CHOOSE_ROWS, num_warps=tiles.num_warps,
        )  # fmt: skip
    return experts, weights


def _choice(scores: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    experts = torch.empty(scores.shape[0], top_k, dtype=torch.int32, device=scores.device)
    return experts, torch.empty(experts.shape, dtype=torch.float32, device=scores.device)
