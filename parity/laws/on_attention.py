"""Laws on the kernels of attention and compressor, to the bit. Source: docs/judge.md §13, docs/pool.md §6 and §8.

Kernels are called through the names of this module, so that a change of one is seen here.
"""

from __future__ import annotations

from dataclasses import replace as changed
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from optimized.kernels.compress import compress
from optimized.kernels.decode_attention import Tiles, decode_attention
from optimized.kernels.inverse_rope import inverse_rope
from optimized.kernels.prefill_attention import prefill_attention
from optimized.kernels.qk_norm_rope import qk_norm_rope
from optimized.kernels.state_write import write_state
from optimized.kernels.window_write import write_window
from optimized.pool.allocator import Sequence
from optimized.pool.geometry import Geometry
from optimized.pool.pool import Pool
from optimized.pool.rows import encode_2buff
from optimized.step import plan_step
from reference.presets import preset

from . import statements as law
from .draws import PAIRS, bf16, f32, generator, order_of, quarters, turns, uneven, whole
from .law import Call, Law, Operands, same_bits, within_float64

T, H, D, ROWS, EPS = 5, 3, 128, 70, 2e-6
UNLISTED = 60  # rows from here on are in no list
TILES = Tiles(HEADS=16, ROWS=16, SPLIT=32, JOIN=16)  # lists of several tiles and parts
CONFIG = changed(preset("mini"), head_dim=D, sliding_window=7)


def attend(q: Tensor, main: Tensor, rope: Tensor, lists: Tensor, sink: Tensor, cos: Tensor | None = None,
           sin: Tensor | None = None, scale: float = D**-0.5) -> tuple[Tensor, ...]:  # fmt: skip
    """`lists` int32 [t, n] with -1 where there is none."""
    indptr = torch.cat([torch.zeros(1), (lists >= 0).sum(1).cumsum(0)]).int()
    return (decode_attention(q, main, rope, lists[lists >= 0], indptr, sink, cos, sin, scale=scale, tiles=TILES),)


def attention_operands(seed: int) -> Operands:
    main, rope = encode_2buff(uneven(seed, ROWS, D) / 16)
    lists = torch.full((T, 50), -1, dtype=torch.int32)
    for t, n in enumerate((1, 17, 50, 33, 5)):
        lists[t, :n] = torch.randperm(UNLISTED, generator=generator(9 * seed + t))[:n]
    sink = 2 + 2 * f32(seed + 5, H)
    return {"q": bf16(seed, T, H, D), "main": main, "rope": rope, "lists": lists, "sink": sink, **turns(seed, T)}


def unlisted(call: Call, ops: Operands) -> str | None:
    late = torch.arange(ROWS)[:, None] >= UNLISTED
    return law.causality(call, ops, {name: late.expand_as(ops[name]) for name in ("main", "rope")})


def nobody(call: Call, ops: Operands) -> str | None:
    filler = {"q": bf16(77, 2, H, D), "lists": torch.full((2, 50), -1, dtype=torch.int32), **turns(77, 2)}
    return law.padding(call, ops, filler, [torch.zeros(2, H, D, dtype=torch.bfloat16)], at=2)


def small_integers(seed: int) -> Operands:
    """Scores, and what moves them, are exact: integers, a channel that is 4 in every row, a scale of 2^-4."""
    values = whole(seed, -3, 3, ROWS, D).float()
    values[:, 0] = 4
    main, rope = encode_2buff(values)
    ops = attention_operands(seed)
    return {"q": whole(seed, -2, 2, T, H, D).bfloat16(), "main": main, "rope": rope, "lists": ops["lists"],
            "sink": whole(seed + 3, -8, 80, H) / 4}  # fmt: skip


def sixteenths(**ops: Tensor) -> tuple[Tensor, ...]:
    return attend(**ops, scale=2.0**-4)


def moved_scores(call: Call, ops: Operands) -> str | None:
    shifted = {name: x.clone() for name, x in ops.items()}
    shifted["q"][..., 0] += 8
    shifted["sink"] += 2
    return law.shift(call, ops, shifted)


def turned_after(call: Call, ops: Operands) -> str | None:
    """Quarter turns inside the kernel, before its one rounding, and after it."""
    cos, sin = quarters(whole(4, 0, 3, T, PAIRS))
    plain = {name: x for name, x in ops.items() if name not in ("cos", "sin")}
    return same_bits(call(**plain, cos=cos, sin=sin), (inverse_rope(call(**plain)[0], cos, sin),))


def attend_in_chunks(q: Tensor, main: Tensor, rope: Tensor, sink: Tensor, cos: Tensor, sin: Tensor,
                     cuts: tuple[int, ...] = ()) -> tuple[Tensor, ...]:  # fmt: skip
    """One sequence from position 0 on; short chunks through the pool, long ones from their payload, as the engine does."""
    geometry = Geometry(CONFIG, "2buff", 1)
    pool = Pool(geometry, 1, 1)
    pool.poison()
    sequence, planes = Sequence(pool.slot_position(0)), pool.layer_rows(0)
    sequence.blocks.append(0)
    out = []
    for a, b in pairwise((0, *cuts, len(q))):
        plan = plan_step(geometry, {"window"}, [torch.zeros(b - a, dtype=torch.long)], [sequence], [a], "cpu")
        own, payload = plan.kinds["window"], (main[a:b], rope[a:b])
        lists: dict[str, Any] = {"indices": own.indices, "indptr": own.indptr, "sink": sink, "cos": cos[a:b], "sin": sin[a:b],
                                 "scale": D**-0.5, "tiles": TILES}  # fmt: skip
        if plan.direct:
            write_window(*payload, *planes, own.destination)
            out.append(decode_attention(q[a:b], *planes, **lists))
        else:
            out.append(prefill_attention(q[a:b], *planes, *payload, **lists))
            write_window(*payload, *planes, own.destination)
    return (torch.cat(out),)


def chunk_operands(seed: int) -> Operands:
    main, rope = encode_2buff(uneven(seed, 19, D) / 16)
    return {"q": bf16(seed, 19, H, D), "main": main, "rope": rope, "sink": 2 + 2 * f32(seed + 5, H), **turns(seed, 19)}


def later_payload(call: Call, ops: Operands) -> str | None:
    """One token's past only: rows of later tokens of its chunk may hold anything."""
    late = torch.arange(19)[:, None] >= 12
    return law.causality(lambda **o: (call(**o)[0][:12],), ops, {n: late.expand_as(ops[n]) for n in ("main", "rope")})


def pool_in_chunks(kv: Tensor, score: Tensor, ape: Tensor, norm: Tensor, cuts: tuple[int, ...] = ()) -> tuple[Tensor, ...]:
    """Rows of all groups of one sequence, and what its ring holds for the next."""
    kind = "csa" if len(ape) == 4 else "hca"
    geometry = Geometry(CONFIG, "2buff", 1)
    pool, layer, rows = Pool(geometry, 1, 1), geometry.kinds.index(kind), geometry.stride(kind)
    pool.poison()
    pool.open_slot(pool.slot_position(0))
    sequence, planes, at = Sequence(pool.slot_position(0)), pool.layer_rows(layer), geometry.kinds.index(kind)
    sequence.blocks.append(0)
    rings = [pool.state(f"{'hca' if kind == 'hca' else 'csa_main'}_{part}", at) for part in ("kv", "score")]
    for a, b in pairwise((0, *cuts, len(kv))):
        plan = plan_step(geometry, {kind}, [torch.zeros(b - a, dtype=torch.long)], [sequence], [a], "cpu")
        group = plan.kinds[kind].compression
        projected = kv[a:b], score[a:b]
        compress(*projected, *rings, group.complete, plan.slots, ape, norm, EPS, *group.turn, planes[0], planes[1],
                 plan.block_table, ratio=len(ape), envelope=geometry.envelope, block_rows=rows)  # fmt: skip
        write_state(*projected, *rings, group.keep, plan.slots, ape)
    held = torch.arange(max(0, len(kv) - 2 * len(ape)) if kind == "csa" else len(kv) - len(ape), len(kv)) % rings[0].shape[1]
    done = geometry.compress_index(0, torch.arange(len(kv) // len(ape)))
    return *(plane[done] for plane in planes), *(ring[sequence.slot, held] for ring in rings)


def pooling_operands(tokens: int, ratio: int) -> Any:
    width = D * (2 if ratio == 4 else 1)
    return lambda seed: {"kv": uneven(seed, tokens, width) / 8, "score": 2 * f32(seed + 1, tokens, width),
                         "ape": f32(seed + 2, ratio, width), "norm": f32(seed + 3, D)}  # fmt: skip


def products(q: Tensor, kv: Tensor, weight: Tensor, turn_q: Tensor, turn_k: Tensor) -> tuple[Tensor, ...]:
    """Of normed queries and rows, each turned by quarters, as float64; all terms are exact there."""
    rows = torch.empty(len(kv), D, dtype=torch.bfloat16)
    q = qk_norm_rope(q, kv, weight, EPS, *quarters(turn_q), rows.clone(), None)
    qk_norm_rope(torch.zeros_like(q), kv, weight, EPS, *quarters(turn_k), rows, None)
    return ((q.double() @ rows.double().T).flatten(1),)


def translated(call: Call, ops: Operands) -> str | None:
    return law.shift(call, ops, ops | {name: ops[name] + 1 for name in ("turn_q", "turn_k")}, same=within_float64)


def product_operands(seed: int) -> Operands:
    turn_q, turn_k = (whole(at, 0, 3, 1, PAIRS).expand(T, PAIRS) for at in (seed, seed + 3))
    return {"q": bf16(seed, T, H, D), "kv": bf16(seed + 1, T, D), "weight": f32(seed + 2, D),
            "turn_q": turn_q, "turn_k": turn_k}  # fmt: skip


NAMES = law.Renaming
_TOKENS = "tokens in another order put out the same in that order"
_CUT = "a prompt cut anywhere leaves the same"
_ANY = "what a token does not see may hold anything"
_CORE = Law("tokens.core", "attn.core", "kernel", _TOKENS, attention_operands, attend, lambda call, ops: law.relabelling(
    call, ops, NAMES({"q": 0, "lists": 0, "cos": 0, "sin": 0}, out_axes={0: 0}), order_of(T)))  # fmt: skip
LAWS = (
    _CORE,
    Law("heads.core", "attn.core", "kernel", "heads in another order put out the same in that order", attention_operands,
        attend,
        lambda call, ops: law.relabelling(call, ops, NAMES({"q": 1, "sink": 0}, out_axes={0: 1}), order_of(H))),
    Law("pages.core", "attn.core", "kernel", "rows elsewhere, lists that say so: the same output", attention_operands, attend,
        lambda call, ops: law.relabelling(call, ops, NAMES({"main": 0, "rope": 0}, labels=("lists",)), order_of(ROWS))),
    Law("causality.core", "attn.core", "kernel", "rows in no list may hold anything", attention_operands, attend, unlisted),
    Law("causality.payload", "attn.core", "kernel", _ANY, chunk_operands, attend_in_chunks, later_payload),
    Law("padding.core", "attn.core", "kernel", "nobody between tokens puts out zeros and changes nobody", attention_operands,
        attend, nobody),
    Law("sink.core", "attn.core", "kernel", "all scores and the sink moved by one number: the same output", small_integers,
        sixteenths, moved_scores),
    Law("rope.turned-back", "attn.core", "kernel", "quarter turns inside the kernel are quarter turns after it",
        attention_operands, attend, turned_after),
    Law("rope.translation", "attn.q", "kernel", "products of turned queries and rows depend on the difference of turns only",
        product_operands, products, translated),
    Law("chunking.core", "attn.core", "kernel", _CUT, chunk_operands, attend_in_chunks,
        lambda call, ops: law.chunking(call, ops, (1, 3, 9, 11, 18))),
    Law("chunking.csa", "attn.compressor.row", "kernel", _CUT, pooling_operands(21, 4), pool_in_chunks,
        lambda call, ops: law.chunking(call, ops, (1, 3, 4, 5, 12, 18))),
    Law("chunking.hca", "attn.compressor.row", "kernel", _CUT, pooling_operands(130, 128), pool_in_chunks,
        lambda call, ops: law.chunking(call, ops, (1, 5, 126, 127, 128))),
)  # fmt: skip
