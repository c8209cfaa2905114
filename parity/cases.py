"""What is run: which sequences, in which steps, from which positions, on which numbers. Source: docs/judge.md §8.

Lengths sit on the edges of the model: pooling groups, window, top-k, pool blocks; one less and one more. The batch is
ragged, and every sequence goes through the phases in turn: prefill, decode (the first after its edge), verify (two to
four tokens at once), chunk.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from reference.attention import Attention
from reference.compressor import Compressor
from reference.config import Config
from reference.norm import rms_norm
from reference.rope import rotate
from reference.rounding import Sites
from reference.state import CompressorState, LayerState

PHASES = ("prefill", "decode", "verify", "chunk")
MAX_DRAFT = 3  # tokens that a verify step has beyond the first
BLOCK = 256  # tokens of a pool block
CHUNKS = (9, 1, 6, 4, 2, 12, 3, 5)  # in turn
PROMPT = 64  # edges below it are reached by a prompt, those beyond by pouring
FAR = 65_535


@dataclass(frozen=True)
class SequencePlan:
    """One sequence: it begins at `start` (0, or far in, on a synthetic state) and takes `tokens[phase]` tokens a phase."""

    start: int
    tokens: dict[str, int]


@dataclass(frozen=True)
class Plan:
    """All sequences of a run. `judged` phases are compared; the others only run where a later one needs their state."""

    sequences: tuple[SequencePlan, ...]
    judged: tuple[str, ...]

    def phases(self) -> list[str]:
        """Phases to run, in order, up to the last one judged."""
        last = max(PHASES.index(p) for p in self.judged)
        return [p for p in PHASES[: last + 1] if any(s.tokens.get(p) for s in self.sequences)]


def edges(config: Config) -> list[int]:
    """Lengths at which something happens: around groups and pool blocks, where the window and the overlap are first full,
    and at the end of lossless selection."""
    around = {n + d for n in (4, 128, BLOCK) for d in (-1, 0, 1)}
    lossy = 4 * config.index_topk + 4  # this many tokens make one row more than top-k
    return sorted(around | {8, config.sliding_window, config.sliding_window + 1, lossy - 1, lossy})


def default_lengths(config: Config) -> list[int]:
    """Prompts: every edge that is near, and one prompt past an HCA group."""
    return [*(n for n in edges(config) if n < PROMPT), 129]


def default_starts(config: Config) -> list[int]:
    """Positions without a prompt: every edge that is not near, and one far out."""
    return [*(n for n in edges(config) if n >= PROMPT), FAR]


def default_chunks(config: Config) -> list[int]:
    """Chunks in turn, one of them longer than the window."""
    return [*CHUNKS[:3], config.sliding_window + 2, *CHUNKS * 3]


def plan(lengths: Sequence[int], starts: Sequence[int], judged: Sequence[str], chunks: Sequence[int] = CHUNKS) -> Plan:
    """A sequence for every prompt length, and one for every start position without a prompt; sorted as given."""
    sequences = []
    for i, (start, length) in enumerate([*((0, n) for n in lengths), *((s, 0) for s in starts)]):
        verify = 2 + i // 2 % MAX_DRAFT if i % 2 == 0 else 0  # drafts are verified in every other sequence
        tokens = {"prefill": length, "decode": 1, "verify": verify, "chunk": chunks[i % len(chunks)]}
        sequences.append(SequencePlan(start, tokens))
    return Plan(tuple(sequences), tuple(p for p in PHASES if p in judged))


def token_ids(plan: Plan, vocab: int, seed: int) -> list[Tensor]:
    """Ids of each sequence for all its phases and one more, which only MTP sees."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, vocab, (sum(s.tokens.values()) + 1,), generator=generator) for s in plan.sequences]


def streams(config: Config, tokens: int, generator: torch.Generator) -> Tensor:
    """Residual streams [t, s, D] that look trained: channels with lasting outliers, tokens of different size, streams
    that differ; of eight tokens one so faint that epsilons show, and one of zeros. bfloat16 values in float64."""
    s, d = config.hc_mult, config.hidden_size
    channel = torch.exp(0.5 * torch.randn(d, generator=generator, dtype=torch.float64))
    channel[torch.randint(0, d, (max(1, d // 64),), generator=generator)] *= 30
    token = torch.exp(torch.randn(tokens, 1, 1, generator=generator, dtype=torch.float64))
    token[5::8] *= 2.0**-12
    token[6::8] = 0
    common = torch.randn(tokens, 1, d, generator=generator, dtype=torch.float64)
    own = torch.randn(tokens, s, d, generator=generator, dtype=torch.float64)
    return (token * channel * (common + own)).to(torch.bfloat16).double()


def synthetic_state(attn: Attention, position: int, sites: Sites, generator: torch.Generator) -> LayerState:
    """A state as a sequence of `position` tokens could have left it, without computing them: rows of normal numbers
    through the layer's own norms, rotations and quantisers."""
    if not position:
        return attn.initial_state()
    n = min(position, attn.sliding_window - 1)
    raw = torch.randn(n, attn.head_dim, generator=generator, dtype=torch.float64)
    table = attn.rope.table(torch.arange(position - n, position), torch.float64, sites)
    window = sites("kv", rotate(rms_norm(raw, attn.kv_norm, attn.eps), table), spare=attn.rope.dim)
    index = attn.indexer.compressor if attn.indexer else None
    at = sites.at("compressor"), sites.at("indexer").at("compressor")
    parts = [_synthetic_compressor(c, position, s, generator) for c, s in zip((attn.compressor, index), at, strict=True)]
    return LayerState(window, *parts)


def _synthetic_compressor(
    compressor: Compressor | None, position: int, sites: Sites, generator: torch.Generator
) -> CompressorState | None:
    if compressor is None:
        return None
    start = compressor.initial_state()
    finished = position // compressor.ratio
    pooled = torch.randn(finished, compressor.norm.shape[0], generator=generator, dtype=torch.float64)
    rows = compressor.finish(pooled, 0, sites) if finished else start.rows
    held = position - finished * compressor.ratio + (compressor.ratio if compressor.overlapping and finished else 0)
    values, gates = torch.randn(2, held, compressor.ape.shape[1], generator=generator, dtype=torch.float64)
    gates = 2 * gates
    if position % 3 == 0:  # tokens so faint, and so dear to the gates, that the norm's epsilon shows
        values, gates = values * 2.0**-12, gates + 16
    values, gates = values.float().double(), gates.float().double()
    if compressor.overlapping and not finished:
        values, gates = torch.cat([start.values, values]), torch.cat([start.gates, gates])
    return CompressorState(values, gates, rows)


def layer_numbers(text: str, config: Config) -> list[int]:
    """`all`, `30`, `0-5`, `0,2,60` -> numbers of layers, MTP block 0 as the last; `mtp_0` names it. Raises ValueError."""
    known = list(range(config.num_hidden_layers + int(config.has_mtp)))
    if text == "all":
        return known
    named = {f"mtp_{i}": config.num_hidden_layers + i for i in range(int(config.has_mtp))}
    chosen = [_span(part.strip(), named) for part in text.split(",")]
    numbers = list(dict.fromkeys(itertools.chain(*chosen)))
    unknown = [n for n in numbers if n not in known]
    if unknown:
        raise ValueError(f"no layer {unknown[0]}: the model has {config.num_hidden_layers}, and {len(named)} MTP blocks")
    return numbers


def _span(text: str, named: dict[str, int]) -> list[int]:
    if text in named:
        return [named[text]]
    first, dash, last = text.partition("-")
    if not first.isdigit() or (dash and not last.isdigit()):
        raise ValueError(f"{text!r} names no layers; write 30, 0-5, mtp_0, a list of those with commas, or all")
    return list(range(int(first), int(last or first) + 1))


def layer_kinds(config: Config, layer: int) -> set[str]:
    """Kinds of ops that a layer has: that of its attention; `mtp` in a drafter; `first` where embeddings come in, `head`
    where logits come out."""
    drafter = layer >= config.num_hidden_layers
    ends = {"first": drafter or layer == 0, "head": drafter or layer == config.num_hidden_layers - 1, "mtp": drafter}
    return {config.kind(layer)} | {name for name, here in ends.items() if here}


def layer_name(config: Config, layer: int) -> str:
    """Tap prefix of a layer's block: `layers.30`, `mtp.0.block`."""
    return f"layers.{layer}" if layer < config.num_hidden_layers else f"mtp.{layer - config.num_hidden_layers}.block"


def layer_id(config: Config, layer: int) -> str:
    """Name of a layer in test ids: `layer_30`, `mtp_0`."""
    return f"layer_{layer:02d}" if layer < config.num_hidden_layers else f"mtp_{layer - config.num_hidden_layers}"
