"""What the kernels of one layer must move and multiply in a step, worked out from their contracts.

Bytes: every operand byte that is used counts once, every result byte once; scratch between two kernels of a call is a result
of the one and an operand of the other. Flops: two a multiply-add of matrix products; elementwise work is not counted.
Tests count the same in the interpreter, address by address. Source: docs/kernels.md §1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from reference.config import Config, Kind

from ..pool.geometry import BLOCK_TOKENS, RATIO, pooled_tokens, visible
from . import decode_attention, experts, hyper_connection
from .launch import ceil_div, power_of_two

Unit = Literal["fp8", "bf16", "fp32"]
Costs = dict[str, dict[str, "Cost"]]  # call -> kernel (a name of aot.py) -> cost
ROW_READ = {"2buff": lambda d: d - 64 + (d - 64) // 64 + 128, "bf16": lambda d: 2 * d}  # one scale byte of each pair
ROW_WRITTEN = {"2buff": lambda d: d + 128, "bf16": lambda d: 2 * d}
SUFFIX = {"2buff": "", "bf16": "_bf16"}
KEY = {"fp4": lambda d: d // 2 + d // 32, "fp8": lambda d: d + 4}  # bytes of a key and its scales in a page
QUERY = {"fp4": lambda d: d // 2 + d // 32, "fp8": lambda d: d + 1}
TURN = 2 * 32 * 4  # bytes of cos and sin of one position


@dataclass(frozen=True)
class Cost:
    """Bytes `read` and `written`, and `flops` of matrix products whose operands are of type `unit`."""

    read: int
    written: int
    flops: int = 0
    unit: Unit = "fp32"

    @property
    def moved(self) -> int:
        return self.read + self.written


@dataclass(frozen=True)
class Step:
    """`sequences` that each grow to `end` tokens: by one (decode), or from nothing (prefill). Raises ValueError."""

    sequences: int
    end: int
    new: int

    def __post_init__(self) -> None:
        if self.new not in (1, self.end):
            raise ValueError(f"a step brings one token of {self.end} or all of them, not {self.new}")

    @property
    def tokens(self) -> int:
        return self.sequences * self.new

    @property
    def direct(self) -> bool:
        """Whether attention finds the step's own rows in the pool."""
        return self.new == 1

    @property
    def positions(self) -> range:
        return range(self.end - self.new, self.end)

    def seen(self, ratio: int, limit: int | None = None) -> list[int]:
        """Compressed rows that the tokens of one sequence see, or the picks among them."""
        counts = [visible(p, ratio) if ratio else 0 for p in self.positions]
        return counts if limit is None else [min(n, limit) for n in counts]


def layer_costs(c: Config, s: Step) -> Costs:
    """Every call of a layer of each kind, and of the model's ends, at this model's widths."""
    return {**_streams(c, s), **_products(c, s), **_rows(c, s), **_compressors(c, s), **_indexer(c, s), **_attention(c, s),
            **_experts(c, s)}  # fmt: skip


def fp8_rows(n: int, width: int) -> int:
    return n * (width + ceil_div(width, 128))


def fp8_weight(n: int, k: int) -> int:
    return n * k + ceil_div(n, 128) * ceil_div(k, 128)


def fp4_weight(n: int, k: int) -> int:
    return n * (k // 2 + ceil_div(k, 32))


def _streams(c: Config, s: Step) -> Costs:
    """Embedding, hyper-connections, norms, quantiser. Only the last token of a sequence goes through the model's head."""
    t, last, n, d = s.tokens, s.sequences, c.hc_mult, c.hidden_size
    x, z, post, comb, mixes = 2 * t * n * d, 2 * t * d, 4 * t * n, 4 * t * n * n, (2 + n) * n
    fn = 4 * mixes * n * d
    scratch, used, product = _partials(t, n, d, mixes)
    head_scratch, head_used, head_product = _partials(last, n, d, n)
    mix = Cost(used + 4 * mixes + 12 + x, z + post + comb)
    groups = c.o_groups * c.o_lora_rank
    return {
        "embed": {"embed": Cost(8 * t + 2 * d * min(t, c.vocab_size), x)},
        "hc_pre": {"hc_project": Cost(x + fn, scratch, product), "hc_mix": mix},
        "hc_post": {"hc_post": Cost(z + x + post + comb, x)},
        "hc_post_pre": {"hc_post_project": Cost(z + x + post + comb + fn, x + scratch, product), "hc_mix": mix},
        "hc_head": {
            "hc_project": Cost(2 * last * n * d + 4 * n * n * d, head_scratch, head_product),
            "hc_head": Cost(head_used + 4 * n + 4 + 2 * last * n * d, 2 * last * d),
        },
        "mtp.streams": {"mtp_streams": Cost(z + x, x)},
        "norm": {"norm": Cost(2 * last * d + 4 * d, 2 * last * d)},
        "attn_norm": {"norm_quantize": _norm_quantize(t, d)},
        "attn.q_norm": {"norm_quantize": _norm_quantize(t, c.q_lora_rank)},
        "attn.wo_b.input": {"quantize": Cost(2 * t * groups, fp8_rows(t, groups))},
    }


def _partials(t: int, n: int, d: int, mixes: int) -> tuple[int, int, int]:
    """Of the product with fn: bytes of its parts, those of them that are used, and flops."""
    parts = ceil_div(d, hyper_connection.GPU.SPLIT)
    lanes = max(power_of_two(mixes + 1), 16)
    return 4 * t * parts * lanes, 4 * t * parts * (mixes + 1), 2 * t * mixes * n * d


def _norm_quantize(t: int, d: int) -> Cost:
    return Cost(2 * t * d + 4 * d, 2 * t * d + fp8_rows(t, d))


def _products(c: Config, s: Step) -> Costs:
    t, d, rank, heads = s.tokens, c.hidden_size, c.q_lora_rank, c.num_attention_heads * c.head_dim
    i, groups = c.moe_intermediate_size, c.o_groups * c.o_lora_rank
    main, index = 2 * c.head_dim, 2 * c.index_head_dim  # widths of overlapping groups
    return {
        "attn.qkv_a": {"gemm_fp8": _gemm_fp8(t, ceil_div(rank, 128) * 128 + c.head_dim, d)},
        "attn.wq_b": {"gemm_fp8": _gemm_fp8(t, heads, rank)},
        "attn.indexer.wq_b": {"gemm_fp8": _gemm_fp8(t, c.index_n_heads * c.index_head_dim, rank)},
        "attn.wo_b": {"gemm_fp8": _gemm_fp8(t, d, groups)},
        "ffn.shared.gate_up": {"gemm_fp8": _gemm_fp8(t, ceil_div(i, 128) * 128 + i, d)},
        "ffn.shared.down": {"gemm_fp8": _gemm_fp8(t, d, i, out=4)},
        "attn.from_x csa": {"gemm_bf16": _gemm_bf16(t, 2 * main + 2 * index + c.index_n_heads, d)},
        "attn.from_x hca": {"gemm_bf16": _gemm_bf16(t, 2 * c.head_dim, d)},
        "head": {"gemm_bf16": _gemm_bf16(s.sequences, c.vocab_size, d)},
        "attn.wo_a": {
            "grouped_gemm": Cost(
                2 * t * heads + fp8_weight(groups, heads // c.o_groups), 2 * t * groups,
                2 * t * groups * (heads // c.o_groups), "bf16",
            ),
        },
    }  # fmt: skip


def _gemm_fp8(t: int, n: int, k: int, out: int = 2) -> Cost:
    return Cost(fp8_rows(t, k) + fp8_weight(n, k), out * t * n, 2 * t * n * k, "fp8")


def _gemm_bf16(t: int, n: int, k: int) -> Cost:
    return Cost(2 * t * k + 2 * n * k, 4 * t * n, 2 * t * n * k, "bf16")


def _rows(c: Config, s: Step) -> Costs:
    """Queries and window rows. A prefill writes to its payload, and the last rows of it to the window afterwards."""
    t, d, q = s.tokens, c.head_dim, 2 * s.tokens * c.num_attention_heads * c.head_dim
    costs: Costs = {"inverse_rope": {"inverse_rope": Cost(q + TURN * t, q)}}
    for build, suffix in SUFFIX.items():
        read = q + 2 * t * d + 4 * d + TURN * t + 8 * t
        costs[f"qk_norm_rope {build}"] = {f"qk_norm_rope{suffix}": Cost(read, q + t * ROW_WRITTEN[build](d))}
    if not s.direct:
        kept = s.sequences * min(s.new, c.sliding_window) * ROW_WRITTEN["2buff"](d)
        costs["window_write"] = {"window_write": Cost(8 * t + kept, kept)}
    return costs


def _compressors(c: Config, s: Step) -> Costs:
    costs: Costs = {}
    for kind in ("csa", "hca"):
        costs[f"state_write {kind}"] = {"state_write": _state_write(s, RATIO[kind], c.head_dim)}
        for build, suffix in SUFFIX.items():
            row = ROW_WRITTEN[build](c.head_dim)
            costs[f"compress {kind} {build}"] = {f"compress_{kind}{suffix}": _compress(s, RATIO[kind], c.head_dim, row)}
    costs["state_write index"] = {"state_write": _state_write(s, 4, c.index_head_dim)}
    for form, key in KEY.items():
        cost = _compress(s, 4, c.index_head_dim, key(c.index_head_dim))
        costs[f"compress index {form}"] = {f"compress_index_{form}": cost}
    return costs


def _compress(s: Step, ratio: int, d: int, row: int) -> Cost:
    """Values and scores of the pooled tokens, in overlapping groups the half that the group takes; ape where it is added."""
    pooled, overlap = pooled_tokens(ratio), pooled_tokens(ratio) // ratio
    groups = visible(s.end - 1, ratio) - visible(s.end - s.new - 1, ratio)
    if groups == 0:
        return Cost(0, 0)
    if s.direct:
        halves, biased = min(s.end, pooled), 1
    else:
        halves, biased = (overlap * groups - (overlap - 1)) * ratio, min(overlap, groups) * ratio
    blocks = ceil_div(groups, BLOCK_TOKENS // ratio)
    per_sequence = 2 * 4 * d * halves + groups * (16 + TURN) + 4 + 4 * blocks  # plan, cos and sin, slot, block table
    return Cost(s.sequences * per_sequence + 4 * d * biased + 4 * d, s.sequences * groups * row)


def _state_write(s: Step, ratio: int, d: int) -> Cost:
    kept, width = min(s.new, pooled_tokens(ratio)), d * (pooled_tokens(ratio) // ratio)
    values = s.sequences * 2 * 4 * width * kept
    return Cost(values + s.sequences * (12 * kept + 4) + 4 * width * min(kept, ratio), values)


def _indexer(c: Config, s: Step) -> Costs:
    t, h, d = s.tokens, c.index_n_heads, c.index_head_dim
    seen, most = s.seen(4), visible(s.end - 1, 4)
    scores, live = s.sequences * sum(seen), s.sequences * sum(n > 0 for n in seen)
    picks = s.sequences * sum(s.seen(4, c.index_topk))
    pages = 4 * s.sequences * ceil_div(most, BLOCK_TOKENS // 4)
    costs: Costs = {}
    for form, name in (("fp4", "fp4"), ("fp4", "flydsl"), ("fp8", "fp8"), ("fp8", "preshuffled")):
        query = live * h * (QUERY[form](d) + 4) + 4 * live + 4 * t
        read = query + pages + s.sequences * most * KEY[form](d)
        unit: Unit = "bf16" if form == "fp4" else "fp8"
        costs[f"index_logits {name}"] = {f"index_logits_{name}": Cost(read, 4 * scores, 2 * h * d * scores, unit)}
        made = t * h * (QUERY[form](d) + 4)
        costs[f"index_query {form}"] = {f"index_query_{form}": Cost(2 * t * h * d + 4 * t * h + TURN * t, made)}
    return costs | {
        "topk": {"topk": Cost(4 * scores + 4 * t, 4 * t * c.index_topk)},
        "translate": {"translate": Cost(4 * picks + pages + 8 * t + 4 * (t + 1), 4 * picks)},
    }


def _attention(c: Config, s: Step) -> Costs:
    costs: Costs = {}
    for kind in ("csa", "hca", "window"):
        for build in SUFFIX:
            costs[f"attention {kind} {build}"] = _attend(c, s, kind, build)
    return costs


def _attend(c: Config, s: Step, kind: Kind, build: str) -> dict[str, Cost]:
    """Rows of the lists, each once; numerators, maxima and sums of the parts that lists are cut in."""
    t, h, d = s.tokens, c.num_attention_heads, c.head_dim
    seen = s.seen(RATIO[kind], c.index_topk if kind == "csa" else None)
    lengths = [n + min(p + 1, c.sliding_window) for n, p in zip(seen, s.positions, strict=True)]
    rows = sum(lengths) if s.direct else s.end + s.seen(RATIO[kind])[-1]
    split = decode_attention.tiles_for_heads(h).SPLIT
    parts = s.sequences * sum(ceil_div(n, split) for n in lengths) * h * (4 * d + 8)
    listed, q, indptr = s.sequences * sum(lengths), 2 * t * h * d, 4 * (t + 1)
    read = q + 4 * listed + indptr + s.sequences * rows * ROW_READ[build](d)
    kernel = f"attend{'' if s.direct else '_step'}{SUFFIX[build]}"
    return {
        kernel: Cost(read, parts, 2 * 2 * h * d * listed, "bf16"),
        "combine": Cost(parts + indptr + 4 * h + TURN * t, q),
    }


def _experts(c: Config, s: Step) -> Costs:
    """Pairs of token and expert are spread evenly, which hits the most experts; an expert's weights are read once."""
    t, d, i, e, k = s.tokens, c.hidden_size, c.moe_intermediate_size, c.n_routed_experts, c.num_experts_per_tok
    pairs, choice = t * k, 8 * t * k
    costs: Costs = {
        "ffn.gate": {"router_scores": Cost(2 * t * d + 2 * e * d, 4 * t * e, 2 * t * e * d)},
        "choose_experts": {"choose_experts": Cost(4 * t * e + 4 * e, choice)},
        "look_up_experts": {"look_up_experts": Cost(4 * pairs + 8 * t + 8 * k * min(t, c.vocab_size), choice)},
        "ffn.sum": {"expert_sum": Cost(4 * pairs * d + 4 * pairs + 4 * t * d, 2 * t * d)},
        "ffn.shared.swiglu": {"swiglu_quantize": Cost(2 * 2 * t * i, fp8_rows(t, i))},
    }
    hit, plan, h = min(e, pairs), _expert_plan(pairs, e), fp8_rows(pairs, i)
    for form, suffix, weight in (("fp4", "", fp4_weight), ("fp8", "_fp8", fp8_weight)):
        up = Cost(fp8_rows(t, d) + hit * 2 * weight(i, d) + plan + 4 * pairs, h, 2 * 2 * pairs * i * d, "bf16")
        down = Cost(h + hit * weight(d, i) + plan, 4 * pairs * d, 2 * pairs * i * d, "bf16")
        costs[f"ffn.experts.gate_up {form}"] = {f"expert_gate_up{suffix}": up}
        costs[f"ffn.experts.down {form}"] = {f"expert_down{suffix}": down}
    return costs


def _expert_plan(pairs: int, count: int) -> int:
    """Bytes of a plan that a product reads: the expert of every block, and the rows of those that have one."""
    height, hit = experts.GPU_UP.ROWS, min(count, pairs)
    more, least = pairs % hit, pairs // hit
    used = more * ceil_div(least + 1, height) + (hit - more) * ceil_div(least, height)
    return 4 * (pairs // height + hit) + 4 * height * used
