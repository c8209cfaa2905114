"""What each op takes and gives, by name, axes, size and storage: the words that `cases` and `judge` share.

A weight has its checkpoint name inside the layer. Codes stand under the payload's own name, one tensor more under
`NAME.scale`. Source: docs/single.md §1.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

from reference.checkpoint.manifest import manifest
from reference.config import Config
from reference.state import Batch

from ..candidates import SOURCE
from ..cases import layer_kinds
from ..ops import BY_NAME, Op

# Ops of the table that cannot be judged alone, and why.
LEFT_OUT = {
    "attn.indexer.rows": "row numbers of this project's pool: an engine's own pool numbers rows its own way",
}

# name, axis letters, size words (`Sizes`), storage, law of drawing (`drawing.py`). Storage e4m3 and e2m1x2 bring NAME.scale.
_TABLE = """
ids                               t    t           i64     ids
positions                         t    t           i64     positions
bounds                            b    b1          i64     bounds
cos                               td   t,half      f32     cos
sin                               td   t,half      f32     sin
window                            cd   w,d         bf16    row
compressed                        cd   c,d         bf16    row
keys                              cd   i,id        key     key
state.values                      cd   v,pool      f32     normal
state.gates                       cd   v,pool      f32     gate
streams                           tsd  t,s,D       bf16    streams
embed                             tsd  t,es,D      bf16    uneven
enorm                             td   t,D         bf16    uneven
hnorm                             tsd  t,s,D       bf16    uneven
hc_attn.u                         td   t,D         bf16    uneven
hc_attn.post                      ts   t,s         f32     post
hc_attn.comb                      tss  t,s,s       f32     comb
hc_attn.streams                   tsd  t,s,D       bf16    streams
hc_ffn.u                          td   t,D         bf16    uneven
hc_ffn.post                       ts   t,s         f32     post
hc_ffn.comb                       tss  t,s,s       f32     comb
hc_ffn.streams                    tsd  t,s,D       bf16    streams
attn_norm                         td   t,D         bf16    uneven
attn.wq_a                         td   t,q         bf16    uneven
attn.q_norm                       td   t,q         bf16    uneven
attn.wq_b                         td   t,hd        bf16    uneven
attn.wkv                          td   t,d         bf16    uneven
attn.q                            thd  t,h,d       bf16    query
attn.kv                           td   t,d         bf16    row
attn.o_rotated                    thd  t,h,d       bf16    uneven
attn.wo_a                         td   t,o         bf16    uneven
attn.wo_b                         td   t,D         bf16    uneven
attn.compressor.values            td   t,pool      f32     normal
attn.compressor.scores            td   t,pool      f32     gate
attn.indexer.wq_b                 td   t,ihd       bf16    uneven
attn.indexer.weights_proj         th   t,ih        f32     normal
attn.indexer.weights              th   t,ih        f32     normal
attn.indexer.q                    thd  t,ih,id     key     key
attn.indexer.compressor.values    td   t,pool      f32     normal
attn.indexer.compressor.scores    td   t,pool      f32     gate
attn.indexer.scores               tc   t,seen      f32     normal
attn.indexer.picks                tk   t,topk      i32     picks
ffn_norm                          td   t,D         bf16    uneven
ffn.gate.scores                   te   t,e         f32     score
ffn.gate.experts                  tk   t,k         i32     experts
ffn.gate.weights                  tk   t,k         f32     share
ffn.experts.h                     td   tk,I        e4m3    uneven
ffn.experts.w2                    td   tk,D        f32     normal
ffn.shared_experts.w1             td   t,I         bf16    uneven
ffn.shared_experts.w3             td   t,I         bf16    uneven
ffn.shared_experts.w2.input       td   t,I         e4m3    uneven
ffn.shared_experts.w2             td   t,D         f32     normal
ffn.out                           td   t,D         bf16    uneven
hc_head                           td   t,D         bf16    uneven
norm                              td   t,D         bf16    uneven
head.logits                       td   b,vocab     f32     -
nope                              cd   n,nope      e4m3    -
rope                              cd   n,rope      bf16    -
layout                            cd   n,rope      u8      -
row                               cd   n,d         row     -
values                            td   n,pool      f32     -
gates                             td   n,pool      f32     -
"""

# op: inputs | weights | outputs. A batch comes with every op; a question mark marks what may be left out.
_OPS = """
embed                          : ids                                    | embed.weight         | embed
enorm                          : embed                                  | enorm.weight         | enorm enorm.codes?
hnorm                          : streams                                | hnorm.weight         | hnorm hnorm.codes?
attn_norm                      : hc_attn.u                              | attn_norm.weight     | attn_norm attn_norm.codes?
ffn_norm                       : hc_ffn.u                               | ffn_norm.weight      | ffn_norm ffn_norm.codes?
attn.q_norm                    : attn.wq_a                              | attn.q_norm.weight   | attn.q_norm attn.q_norm.codes?
norm                           : hc_head                                | norm.weight          | norm
streams                        : e_proj h_proj                          |                      | streams
hc_attn.pre                    : streams                                | hc_attn              | hc_attn.u hc_attn.post hc_attn.comb
hc_ffn.pre                     : hc_attn.streams                        | hc_ffn               | hc_ffn.u hc_ffn.post hc_ffn.comb
hc_attn.streams                : streams attn.wo_b hc_attn.post hc_attn.comb |                 | hc_attn.streams
hc_ffn.streams                 : hc_attn.streams ffn.out hc_ffn.post hc_ffn.comb |             | hc_ffn.streams
hc_head                        : hc_ffn.streams                         | hc_head              | hc_head
head.logits                    : norm                                   | head.weight          | head.logits
attn.rope.table                :                                        |                      | cos sin
attn.q                         : attn.wq_b cos sin                      |                      | attn.q
attn.kv                        : attn.wkv cos sin                       | attn.kv_norm.weight  | ROW
attn.core                      : attn.q attn.kv window compressed attn.indexer.picks cos sin | attn.attn_sink | attn.o_rotated
attn.wo_a                      : attn.o_rotated                         | attn.wo_a            | attn.wo_a
attn.compressor.values         : attn_norm                              | attn.compressor.wkv attn.compressor.wgate | attn.compressor.values attn.compressor.scores
attn.compressor.row            : attn.compressor.values attn.compressor.scores state.values state.gates | attn.compressor.ape attn.compressor.norm | ROW
attn.compressor.state          : attn.compressor.values attn.compressor.scores | attn.compressor.ape | values gates
attn.indexer.weights           : attn_norm                              | attn.indexer.weights_proj | attn.indexer.weights_proj
attn.indexer.q                 : attn.indexer.wq_b attn.indexer.weights_proj cos sin |         | attn.indexer.q attn.indexer.weights?
attn.indexer.compressor.values : attn_norm                              | attn.indexer.compressor.wkv attn.indexer.compressor.wgate | attn.indexer.compressor.values attn.indexer.compressor.scores
attn.indexer.compressor.row    : attn.indexer.compressor.values attn.indexer.compressor.scores state.values state.gates | attn.indexer.compressor.ape attn.indexer.compressor.norm | keys
attn.indexer.compressor.state  : attn.indexer.compressor.values attn.indexer.compressor.scores | attn.indexer.compressor.ape | values gates
attn.indexer.scores            : attn.indexer.q attn.indexer.weights keys |                    | attn.indexer.scores
attn.indexer.picks             : attn.indexer.scores                    |                      | attn.indexer.picks
ffn.gate.scores                : ffn_norm                               | ffn.gate.weight      | ffn.gate.scores
ffn.gate.experts               : ffn.gate.scores                        | ffn.gate.bias ffn.gate.tid2eid | ffn.gate.experts ffn.gate.weights
ffn.experts.h                  : ffn_norm ffn.gate.experts ffn.gate.weights | EXPERTS.w1 EXPERTS.w3 | ffn.experts.h
ffn.experts.w2                 : ffn.experts.h ffn.gate.experts         | EXPERTS.w2           | ffn.experts.w2
ffn.shared_experts.w2.input    : ffn.shared_experts.w1 ffn.shared_experts.w3 |                 | ffn.shared_experts.w2.input
ffn.shared_experts.w2          : ffn.shared_experts.w2.input            | ffn.shared_experts.w2 | ffn.shared_experts.w2
ffn.out                        : ffn.experts.w2 ffn.shared_experts.w2 ffn.gate.experts |       | ffn.out
"""  # noqa: E501
BATCH = ("ids", "positions", "bounds")


@dataclass(frozen=True)
class Item:
    """A tensor by name: axis letters, size words, storage, and how it is drawn."""

    name: str
    dims: str
    sizes: tuple[str, ...]
    storage: str
    law: str

    @property
    def coded(self) -> bool:
        """Whether `NAME.scale` belongs to it."""
        return self.storage in ("e4m3", "key")


@dataclass(frozen=True)
class Contract:
    """Names of what an op takes, of its weights inside the layer, and of what it gives; `optional` of those may be absent."""

    op: str
    inputs: tuple[str, ...]
    weights: tuple[str, ...]
    outputs: tuple[str, ...]
    optional: frozenset[str]


def _items() -> dict[str, Item]:
    rows = [line.split() for line in _TABLE.strip().splitlines()]
    found = {name: Item(name, dims, tuple(sizes.split(",")), storage, law) for name, dims, sizes, storage, law in rows}
    for linear in SOURCE:
        width = {"attn.q_norm": "q", "attn.wo_a": "o"}.get(SOURCE[linear], "D")
        rows_of = "ts" if linear == "h_proj" else "t"
        found[f"{linear}.input"] = Item(f"{linear}.input", "td", (rows_of, width), "e4m3", "uneven")
        found.setdefault(linear, Item(linear, "td", (rows_of, "I" if "experts" in linear else "D"), "bf16", "uneven"))
    for norm in ("enorm", "hnorm", "attn_norm", "ffn_norm", "attn.q_norm"):
        found[f"{norm}.codes"] = Item(f"{norm}.codes", found[norm].dims, found[norm].sizes, "e4m3", "-")
    return found


ITEMS = _items()


def _contracts() -> dict[str, Contract]:
    found = {}
    for line in _OPS.strip().splitlines():
        op, _, rest = line.partition(":")
        inputs, weights, outputs = (part.split() for part in rest.split("|"))
        optional = frozenset(name[:-1] for name in outputs if name.endswith("?"))
        names = tuple(name.rstrip("?") for name in outputs)
        found[op.strip()] = Contract(op.strip(), tuple(inputs), tuple(weights), names, optional)
    for linear, source in SOURCE.items():
        found[f"{linear}.input"] = Contract(f"{linear}.input", (source,), (), (f"{linear}.input",), frozenset())
        found[linear] = Contract(linear, (f"{linear}.input",), (linear,), (linear,), frozenset())
    return found


_CONTRACTS = _contracts()


def contract(op: str, config: Config, layer: int, rows: str) -> Contract:
    """The contract of an op in a layer, in the order of its kernel's arguments; `rows` is how the profile stores pool rows,
    `2buff` or `bf16`. Raises ValueError where there is none."""
    c = _CONTRACTS[known(op).name]
    kinds = layer_kinds(config, layer)
    if not kinds & set(BY_NAME[op].kinds):
        raise ValueError(f"layer {layer} ({config.kind(layer)}) has no {op}; it exists in {', '.join(BY_NAME[op].kinds)}")
    absent = {"window": ("compressed", "attn.indexer.picks"), "hca": ("attn.indexer.picks",), "csa": ()}[config.kind(layer)]
    inputs = (*BATCH, *(name for name in c.inputs if name not in (*absent, *BATCH)))
    if c.outputs == ("ROW",):
        names = ("row",) if rows == "bf16" else ("nope", "rope", "layout")
        return Contract(op, inputs, c.weights, names, frozenset({"layout"}))
    return Contract(op, inputs, c.weights, c.outputs, c.optional)


def known(op: str) -> Op:
    """Raises ValueError, naming the ops that can be judged alone, or why this one cannot."""
    if op in LEFT_OUT:
        raise ValueError(f"{op} cannot be judged alone: {LEFT_OUT[op]}")
    if op not in _CONTRACTS or op not in BY_NAME:
        raise ValueError(f"no op {op!r}; ops are {', '.join(name for name in BY_NAME if name in _CONTRACTS)}")
    return BY_NAME[op]


def weight_prefix(config: Config, layer: int) -> str:
    """`layers.30.`, `mtp.0.`: before the checkpoint names of a layer's weights."""
    n = config.num_hidden_layers
    return f"layers.{layer}." if layer < n else f"mtp.{layer - n}."


def weight_names(c: Contract, config: Config, layer: int, experts: Iterable[int] = ()) -> dict[str, str]:
    """Name inside the layer -> checkpoint name, of every stored tensor that the op needs; `experts` are the routed ones."""
    names, prefix = manifest(config), weight_prefix(config, layer)
    numbers = sorted(set(experts))
    wanted = [w.replace("EXPERTS", f"ffn.experts.{e}") for w in c.weights for e in (numbers if "EXPERTS" in w else [0])]
    found: dict[str, str] = {}
    for w in wanted:
        for at in (f"{prefix}{w}", w):  # head and embedding stand outside of layers
            here = [at] if at in names else [at + end for end in _ENDS if at + end in names]
            found |= {w if name == at else w + name.removeprefix(at): name for name in here}
            if here:
                break
    return found


_ENDS = (".weight", ".scale", ".bias", ".tid2eid", "_fn", "_base", "_scale")


@dataclass(frozen=True)
class Sizes:
    """Numbers behind the size words, for one layer and batch."""

    words: dict[str, int]

    @classmethod
    def of(cls, config: Config, layer: int, batch: Batch, op: str) -> Sizes:
        c, t = config, len(batch.ids)
        starts = [int(batch.positions[s.start]) for s in batch.sequences()]
        ends = [int(batch.positions[s.stop - 1]) + 1 for s in batch.sequences()]
        ratio, indexer = c.ratio(layer), op.startswith("attn.indexer.")
        width = c.index_head_dim if indexer else c.head_dim
        first = op in ("enorm", "embed") and layer >= c.num_hidden_layers
        return cls({
            "t": t, "b": len(starts), "b1": len(batch.bounds), "ts": t * c.hc_mult, "tk": t * c.num_experts_per_tok,
            "es": 1 if first else c.hc_mult, "D": c.hidden_size, "s": c.hc_mult, "q": c.q_lora_rank,
            "h": c.num_attention_heads, "d": c.head_dim, "hd": c.num_attention_heads * c.head_dim,
            "nope": c.head_dim - c.qk_rope_head_dim, "rope": c.qk_rope_head_dim, "half": c.qk_rope_head_dim // 2,
            "o": c.o_groups * c.o_lora_rank, "ih": c.index_n_heads, "id": c.index_head_dim,
            "ihd": c.index_n_heads * c.index_head_dim, "topk": c.index_topk, "e": c.n_routed_experts,
            "k": c.num_experts_per_tok, "I": c.moe_intermediate_size, "vocab": c.vocab_size,
            "pool": width * (2 if ratio == 4 else 1), "w": sum(min(n, c.sliding_window - 1) for n in starts),
            "c": sum(n // ratio for n in ends) if ratio else 0, "i": sum(n // 4 for n in ends), "seen": max(ends) // 4,
            "v": sum(held_tokens(n, ratio) for n in starts) if ratio else 0,
        })  # fmt: skip

    def shape(self, item: Item) -> tuple[int, ...]:
        return tuple(self.words[word] for word in item.sizes)


def held_tokens(position: int, ratio: int) -> int:
    """Tokens that a compressor still holds at a position: those of the unfinished group, in CSA one group more."""
    finished = position // ratio
    return position - finished * ratio + (ratio if ratio == 4 and finished else 0)


@cache
def names() -> frozenset[str]:
    """Every name that a trace may carry besides taps: batch, state, weights and outputs of single ops."""
    weights = {w.replace("EXPERTS", "ffn.experts") for c in _CONTRACTS.values() for w in c.weights}
    of_ops = {tap(c.op, name) for c in _CONTRACTS.values() for name in (*c.outputs, *(_PARTS if c.outputs == ("ROW",) else ()))}
    stored = {name + end for name in {*ITEMS, *of_ops} for end in ("", ".scale", ".slots")}
    return frozenset(stored | {w + end for w in weights for end in ("", *_ENDS)})


_PARTS = ("nope", "rope", "layout", "values", "gates", "cos", "sin")  # of a row, a ring, a table


def tap(op: str, output: str) -> str:
    """Name of an op's output inside its layer: a row or key is what its op is called, their parts are `attn.kv.nope`,
    `attn.compressor.state.gates`, all others stand for themselves."""
    return f"{op}.{output}" if output in _PARTS else op if output in ("row", "keys", "ROW") else output
