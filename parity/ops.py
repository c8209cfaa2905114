"""Every op of the model: where it exists, what goes in and comes out, and who can evaluate it.

An op ends where an engine stores something. One without a candidate is named in every report with its reason. Source:
docs/judge.md §7.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from . import attend, candidates, experts, indexing, residual, twins
from .budget.bounded import ACCUMULATE
from .cases import PHASES
from .judge import Stored
from .step import Step

Candidate = Callable[[Step, str], dict[str, Stored]]
Twin = Callable[[Step, str, dict[str, Stored]], twins.Expectations]

ALL = ("window", "hca", "csa")
COMPRESSED = ("hca", "csa")
CSA = ("csa",)
MTP = ("mtp",)
FIRST = ("first",)
HEAD = ("head",)
NO_KERNEL = "no kernel yet"
ARITHMETIC = ACCUMULATE["fp32"]  # of the kernels of `optimized` in the interpreter


@dataclass(frozen=True)
class Op:
    """`kinds` of layer that have it (`cases.layer_kinds`), phases, taps in and
    out; candidate and twin, or the reason why there is none."""

    name: str
    kinds: tuple[str, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    candidate: Candidate | None = None
    twin: Twin | None = None
    phases: tuple[str, ...] = PHASES
    reason: str = NO_KERNEL
    bound: str = ""

    def missing(self, phase: str) -> str | None:
        """Why this op is not judged in a phase, or None."""
        if self.candidate is None:
            return self.reason
        return None if phase in self.phases else f"no kernel for {phase} yet"


def _linear(name: str, kinds: tuple[str, ...] = ALL) -> list[Op]:
    """An FP8 linear: its quantiser and its product."""
    return [
        Op(f"{name}.input", kinds, (candidates.SOURCE[name],), (f"{name}.input",), candidates.quantise, twins.quantise,
           bound="0: the payload is exact, so are amax, scale and quotient"),
        Op(name, kinds, (f"{name}.input",), (name,), candidates.gemm, twins.gemm,
           bound="min(k, λ·sqrt(k))·u·Σ|x·w|, k = input width; products of codes are exact"),
    ]  # fmt: skip


def _norm(name: str, kinds: tuple[str, ...], source: str) -> Op:
    return Op(name, kinds, (source,), (name,), residual.normed, residual.norm_expected,
              bound="mean of squares moves all channels alike, three roundings each; codes 0")  # fmt: skip


def _mix(part: str, before: str) -> Op:
    outputs = (f"{part}.u", f"{part}.post", f"{part}.comb")
    return Op(f"{part}.pre", ALL, (before,), outputs, residual.mixed, residual.mix_expected,
              bound="projection, rms; sigmoid by its slope, Sinkhorn by products of its Jacobians; weighted sum")  # fmt: skip


def _spread(part: str, output: str) -> Op:
    inputs = (output, f"{part}.post", f"{part}.comb")
    return Op(f"{part}.streams", ALL, inputs, (f"{part}.streams",), residual.spread, residual.spread_expected,
              bound="(s+2)·u·(|post·z| + Σ|comb·x|)")  # fmt: skip


def _projection(name: str, kinds: tuple[str, ...]) -> Op:
    return Op(name, kinds, ("attn_norm",), (name,), attend.projected, attend.projection_expected,
              bound="min(k, λ·sqrt(k))·u·Σ|x·w|, k = hidden size; float32 output")  # fmt: skip


def _state(name: str, kinds: tuple[str, ...]) -> Op:
    inputs = (f"{name}.values", "attn_norm")
    return Op(f"{name}.state", kinds, inputs, ("values", "gates"), candidates.state_rows, twins.state_rows,
              bound="0: the sum of score and bias is rounded once, to the float32 that is stored")  # fmt: skip


OPS: tuple[Op, ...] = (
    Op("embed", FIRST, ("ids",), ("embed",), residual.rows_embedded, residual.rows_expected, bound="0: bytes are moved"),
    _norm("enorm", MTP, "embed"),
    _norm("hnorm", MTP, "streams"),
    *_linear("e_proj", MTP),
    *_linear("h_proj", MTP),
    Op("streams", MTP, ("e_proj", "h_proj"), ("streams",), residual.added, residual.added_expected, bound="u·|e + h|"),
    _mix("hc_attn", "streams"),
    _norm("attn_norm", ALL, "hc_attn.u"),
    *_linear("attn.wq_a"),
    _norm("attn.q_norm", ALL, "attn.wq_a"),
    *_linear("attn.wq_b"),
    Op("attn.rope.table", ALL, (), ("cos", "sin"), candidates.table, twins.table,
       bound="|θ|·(2·4+2)·u for the frequency and the product, 4u for the function"),
    Op("attn.q", ALL, ("attn.wq_b", "attn.wkv"), ("attn.q",), attend.queries, attend.queries_expected,
       bound="norm of each head and rotation composed"),
    *_linear("attn.wkv"),
    Op("attn.kv", ALL, ("attn.wq_b", "attn.wkv"), ("attn.kv",), attend.window_rows, attend.window_expected,
       bound="norm and rotation composed; a code or scale may differ within it of an edge; bytes in the ring 0"),
    _projection("attn.compressor.values", COMPRESSED),
    Op("attn.compressor.row", COMPRESSED, ("attn_norm", "attn.compressor.values"), ("nope", "rope", "layout"),
       candidates.compressed_rows, twins.compressed_rows,
       bound="softmax pooling, norm and rotation composed; a code or scale may differ within it of an edge"),
    _state("attn.compressor", COMPRESSED),
    *_linear("attn.indexer.wq_b", CSA),
    _projection("attn.indexer.weights", CSA),
    Op("attn.indexer.q", CSA, ("attn.indexer.wq_b", "attn_norm"), ("attn.indexer.q",),
       indexing.queries, indexing.queries_expected,
       bound="rotation and Hadamard composed; a code or scale may differ within it of an edge; 2u for a weight's factor"),
    _projection("attn.indexer.compressor.values", CSA),
    Op("attn.indexer.compressor.row", CSA, ("attn_norm", "attn.indexer.compressor.values"), ("attn.indexer.compressor.row",),
       indexing.keys, twins.compressed_rows,
       bound="softmax pooling, norm, rotation and Hadamard composed; a code or scale may differ within it of an edge"),
    _state("attn.indexer.compressor", CSA),
    Op("attn.indexer.scores", CSA, ("attn.indexer.q", "attn.indexer.weights"), ("attn.indexer.scores",),
       indexing.scores, indexing.scores_expected,
       bound="Σ_h |w|·(min(k, λ·sqrt(k))·u·Σ|q·k| + (h+1)·u·ReLU), k = index head size"),
    Op("attn.indexer.picks", CSA, ("attn.indexer.q", "attn.indexer.weights"), ("attn.indexer.picks",),
       indexing.chosen, indexing.chosen_expected,
       bound="0 by its own scores; by the twin's, a gap within both bounds"),
    Op("attn.indexer.rows", CSA, ("attn.indexer.picks",), ("attn.indexer.rows",),
       indexing.translated, indexing.translated_expected, bound="0: row numbers"),
    Op("attn.core", ALL, ("attn.q", "attn.kv", "attn.indexer.picks"), ("attn.o_rotated",),
       attend.attention, attend.attention_expected,
       bound="score dots through exp, λ·sqrt(Σ(w·2^-8·v)²) for probabilities in bfloat16, sums, division, rotation"),
    Op("attn.wo_a", ALL, ("attn.o_rotated",), ("attn.wo_a",), attend.group_output, attend.group_expected,
       bound="min(k, λ·sqrt(k))·u·Σ|x·w|, k = width of a group; its input is not quantised"),
    *_linear("attn.wo_b"),
    _spread("hc_attn", "attn.wo_b"),
    _mix("hc_ffn", "hc_attn.streams"),
    _norm("ffn_norm", ALL, "hc_ffn.u"),
    Op("ffn.gate.scores", ALL, ("ffn_norm",), ("ffn.gate.scores",), experts.scores, experts.scores_expected,
       bound="dot product through softplus and root: half its relative error and a few function units"),
    Op("ffn.gate.experts", ALL, ("ffn_norm", "ffn.gate.scores"), ("ffn.gate.experts", "ffn.gate.weights"),
       experts.choice, experts.choice_expected,
       bound="0 by its own scores; by the twin's, a gap within both bounds; weights k + 6 roundings"),
    Op("ffn.experts.h", ALL, ("ffn_norm", "ffn.gate.experts", "ffn.gate.weights"),
       (*(f"ffn.experts.{x}" for x in ("w1.input", "w1", "w3.input", "w3", "h", "w2.input")),),
       experts.gate_up, experts.gate_up_expected,
       bound="products, each to bfloat16, SwiGLU and weight composed; a code or scale may differ within it of an edge"),
    Op("ffn.experts.w2", ALL, ("ffn_norm", "ffn.gate.experts", "ffn.gate.weights"), ("ffn.experts.w2",),
       experts.down, experts.down_expected, bound="min(k, λ·sqrt(k))·u·Σ|x·w|; products of codes are exact; float32 output"),
    *_linear("ffn.shared_experts.w1"),
    *_linear("ffn.shared_experts.w3"),
    Op("ffn.shared_experts.w2.input", ALL, ("ffn.shared_experts.w1", "ffn.shared_experts.w3"), ("ffn.shared_experts.h",),
       experts.shared_codes, experts.shared_expected,
       bound="SwiGLU; a code or scale may differ within it of an edge"),
    Op("ffn.shared_experts.w2", ALL, ("ffn.shared_experts.h",), ("ffn.shared_experts.w2", "ffn.shared_experts.w2.input"),
       experts.shared_down, experts.shared_down_expected,
       bound="min(k, λ·sqrt(k))·u·Σ|x·w|; products of codes are exact; float32 output"),
    Op("ffn.out", ALL, ("ffn_norm", "ffn.gate.experts", "ffn.gate.weights", "ffn.shared_experts.w2"), ("ffn.out",),
       experts.total, experts.total_expected, bound="(k+1)·u·Σ|y|, k = experts a token"),
    _spread("hc_ffn", "ffn.out"),
    Op("hc_head", HEAD, ("hc_ffn.streams",), ("hc_head",), residual.collapsed, residual.collapse_expected,
       bound="projection and rms, sigmoid by its slope, weighted sum"),
    _norm("norm", HEAD, "hc_ffn.streams"),
    Op("head.logits", HEAD, ("hc_ffn.streams",), ("head.logits",), residual.logits, residual.logits_expected,
       bound="min(k, λ·sqrt(k))·u·Σ|x·w|"),
)  # fmt: skip
BY_NAME = {op.name: op for op in OPS}


def select(patterns: Iterable[str]) -> list[Op]:
    """Ops that match any of the shell patterns, in order of the model. Raises ValueError for a pattern without a match."""
    chosen: set[str] = set()
    for pattern in patterns:
        found = fnmatch.filter(BY_NAME, pattern)
        if not found:
            raise ValueError(f"no op matches {pattern!r}; ops are named like attn.wq_a, attn.compressor.row, attn.core")
        chosen.update(found)
    return [op for op in OPS if op.name in chosen]


def wanted_taps(ops: Iterable[Op]) -> set[str]:
    """Taps a capture must keep to feed these ops."""
    taps = {tap for op in ops if op.candidate for tap in op.inputs}
    return taps | {candidates.SOURCE[t.removesuffix(".input")] for t in taps if t.endswith(".input")}


def known_taps() -> set[str]:
    """Every tap that an op reads or writes, inside its block."""
    return {tap for op in OPS for tap in (*op.inputs, *op.outputs)} | set(candidates.SOURCE.values())
