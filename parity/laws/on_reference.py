"""Laws of the mathematics, on the reference in float64. Source: docs/judge.md §13, docs/model.md §13."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from reference import formats
from reference.attention import sink_attention
from reference.compressor import Compressor
from reference.hadamard import hadamard
from reference.hyper_connection import HyperConnection
from reference.indexer import index_scores, select_topk
from reference.linear import Linear
from reference.moe import Expert, MoE, choose_experts
from reference.rope import Rope, rotate
from reference.rounding import Sites

from . import statements as law
from .draws import order_of, planted_scores, uneven
from .law import Call, Law, Operands, within_float64

SITES = Sites()
S, H, D, K, E = 4, 3, 24, 11, 5  # streams, heads, channels, rows, experts
TABLE = Rope(10_000.0, 16, None)


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def named(seed: int, **shapes: tuple[int, ...]) -> Operands:
    """Normal float64 operands, each from a stream of its own."""
    return {name: normal(1000 * seed + i, *shape) for i, (name, shape) in enumerate(shapes.items())}


def within(statement: Callable[..., str | None], *more: Any) -> Callable[[Call, Operands], str | None]:
    """The statement, with equality as float64 allows."""
    return lambda call, ops: statement(call, ops, *more, same=within_float64)


def attention(q: Tensor, shared: Tensor, picked: Tensor, sink: Tensor, hidden: Tensor, absent: Tensor) -> tuple[Tensor, ...]:
    return (sink_attention(q, shared, hidden.bool(), picked, absent.bool(), sink, SITES),)


def attention_operands(seed: int) -> Operands:
    ops = named(seed, q=(4, H, D), shared=(K, D), picked=(4, 6, D), sink=(H,))
    hidden, absent = torch.zeros(4, K, dtype=torch.uint8), torch.zeros(4, 6, dtype=torch.uint8)
    hidden[:, 8:] = 1  # rows that nobody sees
    absent[1:, 4] = 1
    return {**ops, "q": 2 * ops["q"], "sink": 2 + ops["sink"], "hidden": hidden, "absent": absent}


def unseen_rows(call: Call, ops: Operands) -> str | None:
    shared, picked = torch.zeros_like(ops["shared"], dtype=torch.bool), ops["absent"].bool()
    shared[ops["hidden"].bool().all(0)] = True
    picked = picked[:, :, None].expand_as(ops["picked"])
    return law.causality(call, ops, {"shared": shared, "picked": picked}, garbage=1e6)  # 0 times it is 0


def moved_scores(call: Call, ops: Operands) -> str | None:
    """A channel that is 1 in all rows moves all scores alike; the sink moves with them. That channel itself stays 1 · mass."""
    ops = {name: x.clone() for name, x in ops.items()}
    ops["shared"][:, 0], ops["picked"][..., 0] = 1, 1
    shifted = {name: x.clone() for name, x in ops.items()}
    shifted["q"][..., 0] += 3 * D**0.5
    shifted["sink"] += 3
    return law.shift(call, ops, shifted, same=within_float64)


def scores(q: Tensor, weights: Tensor, keys: Tensor) -> tuple[Tensor, ...]:
    return (index_scores(q, weights, keys, SITES),)


def streams(x: Tensor, z: Tensor, fn_pre: Tensor, fn_post: Tensor, fn_comb: Tensor, base_pre: Tensor, base_post: Tensor,
            base_comb: Tensor) -> tuple[Tensor, ...]:  # fmt: skip
    """u and the streams after the sub-layer."""
    fn = torch.cat([f.flatten(0, -3).flatten(1) for f in (fn_pre, fn_post, fn_comb)])
    base = torch.cat([base_pre, base_post, base_comb.flatten()])
    mix = HyperConnection(fn, base, torch.tensor([0.9, 1.3, 0.7], dtype=torch.float64), 20, 3e-6, 2e-6)
    u, post, comb = mix.pre(x, SITES)
    return u, mix.post(z, x, post, comb, SITES)


def stream_operands(seed: int) -> Operands:
    ops = named(seed, x=(3, S, D), z=(3, D), fn_pre=(S, S, D), fn_post=(S, S, D), fn_comb=(S, S, S, D), base_pre=(S,),
                base_post=(S,), base_comb=(S, S))  # fmt: skip
    return {name: x * (S * D) ** -0.5 if name.startswith("fn") else x for name, x in ops.items()}


def combine(z: Tensor, x: Tensor, post: Tensor, comb: Tensor) -> tuple[Tensor, ...]:
    mix = HyperConnection(x, x, x, 0, 0.0, 0.0)  # its weights have no part in `post`
    return (mix.post(z, x, post, comb, SITES),)


def experts(x: Tensor, gate: Tensor, bias: Tensor, w1: Tensor, w2: Tensor, w3: Tensor) -> tuple[Tensor, ...]:
    def expert(e: int) -> Expert:
        return Expert(Linear(w1[e]), Linear(w2[e]), Linear(w3[e]))

    moe = MoE(Linear(gate), bias, None, expert, Expert(*(Linear(0.1 * w.sum(0)) for w in (w1, w2, w3))), 3, 1.7, 1.5)
    chosen, weights = moe.route(x, torch.zeros(len(x), dtype=torch.long), SITES)
    return moe(x, torch.zeros(len(x), dtype=torch.long), SITES), chosen, weights


def expert_operands(seed: int) -> Operands:
    return named(seed, x=(6, D), gate=(E, D), bias=(E,), w1=(E, 8, D), w2=(E, D, 8), w3=(E, 8, D))


def compressor(values: Tensor, gates: Tensor, norm: Tensor, cuts: tuple[int, ...] = ()) -> tuple[Tensor, ...]:
    """Rows and what is kept for the next, of a sequence whose values and gates come in pieces."""
    nothing = Linear(norm)
    module = Compressor(nothing, nothing, values.new_zeros(4, values.shape[1]), norm, 4, TABLE, 2e-6, index_keys=False)
    state = module.initial_state()
    for part in zip(values.tensor_split(cuts), gates.tensor_split(cuts), strict=True):
        state = module.extend(*part, state, SITES)
    return state.rows, state.values, state.gates


def turned(q: Tensor, k: Tensor, p: Tensor, r: Tensor) -> tuple[Tensor, ...]:
    """Products of queries at positions p and rows at positions r."""
    one, other = (rotate(x, TABLE.table(at, x.dtype, SITES)) for x, at in ((q, p), (k, r)))
    return (one @ other.T,)


def turn_operands(seed: int) -> Operands:
    at = torch.Generator().manual_seed(seed)
    positions = {name: torch.randint(0, 4000, (5,), generator=at) for name in ("p", "r")}
    return {**named(seed, q=(5, D), k=(5, D)), **positions}


def both_turned(q: Tensor, k: Tensor) -> tuple[Tensor, ...]:
    return hadamard(q), hadamard(k)


def cancels(call: Call, ops: Operands) -> str | None:
    q, k = call(**ops)
    return within_float64((q @ k.T,), (ops["q"] @ ops["k"].T,))


def e4m3(x: Tensor) -> tuple[Tensor, ...]:
    return formats.quantize_e4m3(x, 64)


def e2m1(x: Tensor) -> tuple[Tensor, ...]:
    return formats.quantize_e2m1(x, 32)


def quantised(x: Tensor) -> tuple[Tensor, ...]:
    """Values after each quantiser and bfloat16."""
    code, scale = formats.quantize_e4m3(x, 64)
    eights = formats.dequantize_blocks(formats.e4m3_decode(code.contiguous()), scale, 64)
    code, scale = formats.quantize_e2m1(x, 32)
    return eights, formats.dequantize_blocks(formats.e2m1_decode(code), scale, 32), formats.round_bf16(x)


def stays(call: Call, ops: Operands) -> str | None:
    words = [law.idempotence(lambda x, i=i: call(x=x)[i], ops["x"]) for i in range(3)]  # type: ignore[misc]
    return next((w for w in words if w), None)


def picks(scores: Tensor, visible: Tensor) -> tuple[Tensor, ...]:
    return (select_topk(scores, visible, 6),)


def chosen(scores: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
    return (choose_experts(scores, bias, 3),)


def planted_choice(seed: int) -> Operands:
    scores = planted_scores(seed, torch.float64)["scores"]
    return {"scores": scores.nan_to_num(0.5, 2.0, 0.0), "bias": normal(seed, 40).round()}


def sorted_choice(call: Call, ops: Operands) -> str | None:
    total = ops["scores"] + ops["bias"]
    return law.selection(call(**ops)[0].sort(-1).values, total, torch.full((len(total),), total.shape[1]), 3)


def columns_past(call: Call, ops: Operands) -> str | None:
    late = torch.arange(ops["scores"].shape[1]) >= ops["visible"][:, None]
    return law.causality(call, ops, {"scores": late})


NAMES = law.Renaming
_SCALED = "2^k times the input: the same codes, scale bytes k larger"
LAWS = (
    Law("scaling.e4m3", "quantiser", "reference", _SCALED, lambda s: {"x": uneven(s, 5, 200)}, e4m3,
        lambda call, ops: law.scaling(call, ops, "x", 5, [1])),
    Law("scaling.e2m1", "quantiser", "reference", _SCALED, lambda s: {"x": uneven(s, 5, 200)}, e2m1,
        lambda call, ops: law.scaling(call, ops, "x", -5, [1])),
    Law("heads.core", "attn.core", "reference", "heads in another order put out the same in that order", attention_operands,
        attention, within(law.relabelling, NAMES({"q": 1, "sink": 0}, out_axes={0: 1}), order_of(H)), ("hidden", "absent")),
    Law("heads.scores", "attn.indexer.scores", "reference", "index heads in another order give the same scores",
        lambda s: named(s, q=(4, H, D), weights=(4, H), keys=(K, D)), scores,
        within(law.relabelling, NAMES({"q": 1, "weights": 1}), order_of(H))),
    Law("pages.core", "attn.core", "reference", "rows in another order give the same output", attention_operands, attention,
        within(law.relabelling, NAMES({"shared": 0, "hidden": 1}), order_of(K)), ("hidden", "absent")),
    Law("streams.mix", "hc", "reference", "streams in another order stay the same streams", stream_operands, streams,
        within(law.relabelling, NAMES({"x": 1, "fn_pre": (0, 1), "fn_post": (0, 1), "fn_comb": (0, 1, 2), "base_pre": 0,
               "base_post": 0, "base_comb": (0, 1)}, out_axes={1: 1}), order_of(S))),
    Law("experts.moe", "ffn", "reference", "experts under other numbers give the same output and weights", expert_operands,
        experts, within(law.relabelling, NAMES(dict.fromkeys(("gate", "bias", "w1", "w2", "w3"), 0), out_labels=(1,)),
                        order_of(E))),
    Law("chunking.compressor", "attn.compressor", "reference", "groups and rest are the same however a prompt is cut",
        lambda s: named(s, values=(22, 2 * D), gates=(22, 2 * D), norm=(D,)), compressor,
        within(law.chunking, (1, 3, 4, 11, 16, 21))),
    Law("causality.core", "attn.core", "reference", "rows that nobody sees may hold anything, to the bit", attention_operands,
        attention, unseen_rows, ("hidden", "absent")),
    Law("causality.picks", "attn.indexer.picks", "reference", "columns that a token does not see may hold anything",
        lambda s: planted_scores(s, torch.float64), picks, columns_past),
    Law("sink.core", "attn.core", "reference", "all scores and the sink moved by one number: the same output",
        attention_operands, attention, moved_scores, ("hidden", "absent")),
    Law("hadamard.scores", "attn.indexer", "reference", "a rotation of queries and keys leaves their products",
        lambda s: named(s, q=(5, 64), k=(7, 64)), both_turned, cancels),
    Law("rope.translation", "rope", "reference", "products of rotated rows depend on the distance of positions only",
        turn_operands, turned,
        lambda call, ops: law.shift(call, ops, ops | {"p": ops["p"] + 37, "r": ops["r"] + 37}, same=within_turns)),
    Law("linearity.combine", "hc.post", "reference", "the mix of a sum is the sum of the mixes",
        lambda s: named(s, z=(3, D), x=(3, S, D), post=(3, S), comb=(3, S, S)), combine,
        lambda call, ops: law.linearity(call, ops, {"z": normal(91, 3, D), "x": normal(92, 3, S, D)}, same=within_float64)),
    Law("idempotence.formats", "quantiser", "reference", "what was rounded once stays", lambda s: {"x": uneven(s, 5, 256)},
        quantised, stays),
    Law("topk.picks", "attn.indexer.picks", "reference", "the k largest, lower columns first among equals, NaN above all",
        lambda s: planted_scores(s, torch.float64), picks,
        lambda call, ops: law.selection(call(**ops)[0], ops["scores"], ops["visible"], 6)),
    Law("topk.experts", "ffn.gate.experts", "reference", "the k largest of score + bias, lower numbers first among equals",
        planted_choice, chosen, sorted_choice),
)  # fmt: skip


def within_turns(got: tuple[Tensor, ...], want: tuple[Tensor, ...]) -> str | None:
    """As `within_float64`, of sums whose angles, below 2^12, were rounded to 53 bits: 2^12 · 2^-53 a turn, two turns."""
    far, largest = float((got[0] - want[0]).abs().max()), float(want[0].abs().max())
    return None if far <= D * 2.0**-40 * largest else f"products are {far:.1e} off, of {largest:.1e}"
