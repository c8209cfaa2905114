"""What the tests of the engine's schedules share: models of one layer, and sequences whose past is made up.

A made-up past is random, finite and in the pool's own formats, and only what a sequence of that length may read is there:
anything else keeps the allocator's NaN bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Many
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from optimized.engine import Engine
from optimized.pool import rows as codec
from optimized.pool.allocator import Sequence, Snapshot
from optimized.pool.geometry import BLOCK_TOKENS, RATIO, pooled_tokens
from optimized.pool.index_rows import PAGE_ROWS, encode, key_order, scale_order
from reference.checkpoint.procedural import ProceduralStore
from reference.config import Config, Kind
from reference.presets import preset
from reference.rounding import Profile, Rounding

Outcome = tuple[Tensor, list[Tensor]]  # streams, and every byte that the sequence owns


def layer_config(kind: Kind, **changes: Any) -> Config:
    """One layer with mini's widths, and nothing after it. CSA drops rows from position 4 * 3 + 3 on."""
    one = {"num_hidden_layers": 1, "compress_ratios": (RATIO[kind],), "num_hash_layers": 0, "index_topk": 3}
    return replace(preset("mini"), **{**one, **changes})


def layer_engine(config: Config, build: str, blocks: int, slots: int, lookahead: int = 2) -> Engine:
    return Engine(ProceduralStore(config), build, blocks=blocks, slots=slots, lookahead=lookahead)


def pour_past(engine: Engine, length: int, seed: int) -> Sequence:
    """A sequence of `length` tokens in a model of one layer: window rows, compressed rows, index keys, rings."""
    sequence, generator = engine.allocator.open(), torch.Generator().manual_seed(seed)
    engine.allocator.reserve([sequence], [length])
    geometry = engine.geometry
    kind = geometry.kinds[0]
    first = max(0, length - geometry.ring)
    window = geometry.window_index(kind, sequence.slot, torch.arange(first, length))
    _write_rows(engine, window, torch.randn(length - first, engine.config.head_dim, generator=generator))
    if ratio := RATIO[kind]:
        entries, blocks = torch.arange(length // ratio), torch.tensor(sequence.blocks, dtype=torch.int64)
        per_block = BLOCK_TOKENS // ratio
        rows = geometry.compress_index(blocks[entries // per_block], entries % per_block)
        _write_rows(engine, rows, torch.randn(len(rows), engine.config.head_dim, generator=generator))
        if kind == "csa":
            _write_keys(engine, blocks[entries // PAGE_ROWS], entries % PAGE_ROWS, generator)
        _write_rings(engine, sequence, length, ratio, generator)
    engine.allocator.advance(sequence, length)
    return sequence


def _write_rows(engine: Engine, rows: Tensor, values: Tensor) -> None:
    planes = engine.memory.pool.layer_rows(0)
    if len(planes) == 1:
        planes[0][rows] = values.bfloat16()
        return
    for plane, part in zip(planes, codec.encode_2buff(values), strict=True):
        plane[rows] = part


def _write_keys(engine: Engine, blocks: Tensor, rows: Tensor, generator: torch.Generator) -> None:
    layout, width = engine.memory.index.layout, engine.config.index_head_dim
    codes, scales = encode(torch.randn(len(rows), width, generator=generator), layout.form)
    places = key_order(layout, width)[rows], scale_order(layout, width)[rows]
    for plane, place, part in zip(engine.memory.index.pages(0), places, (codes, scales), strict=True):
        plane[blocks[:, None], place] = part


def _write_rings(engine: Engine, sequence: Sequence, length: int, ratio: int, generator: torch.Generator) -> None:
    at = torch.arange(max(0, length - pooled_tokens(ratio) - engine.geometry.lookahead), length)
    for field in engine.geometry.fields:
        if field.layers:
            ring = engine.memory.pool.state(field.name, 0)[sequence.slot]
            ring[at % field.ring] = torch.randn(len(at), field.width, generator=generator)


def snapshots(engine: Engine, lengths: Many[int]) -> list[Snapshot]:
    """Made-up pasts of these lengths, kept outside of the pool."""
    kept = []
    for length in lengths:
        sequence = pour_past(engine, length, seed=length)
        kept.append(engine.allocator.snapshot(sequence))
        engine.allocator.free(sequence)
    return kept


def run(engine: Engine, pasts: Many[Snapshot], tokens: Many[Tensor], sizes: Many[int]) -> list[Outcome]:
    """Sequence i takes `tokens[i]` in chunks of `sizes[i]`, all of them in the same steps for as long as they have tokens."""
    sequences = [engine.allocator.restore(past) for past in pasts]
    streams: list[list[Tensor]] = [[] for _ in pasts]
    for step in _steps([ids.split(size) for ids, size in zip(tokens, sizes, strict=True)]):
        x = engine.step([part for _, part in step], [sequences[i] for i, _ in step])
        for (i, _), part in zip(step, x.split([len(part) for _, part in step]), strict=True):
            streams[i].append(part)
    outcomes = [(torch.cat(parts), left_behind(engine, s)) for parts, s in zip(streams, sequences, strict=True)]
    for sequence in sequences:
        engine.allocator.free(sequence)
    return outcomes


def _steps(cut: Many[Many[Tensor]]) -> Iterator[list[tuple[int, Tensor]]]:
    for n in range(max(map(len, cut))):
        yield [(i, parts[n]) for i, parts in enumerate(cut) if n < len(parts)]


def left_behind(engine: Engine, sequence: Sequence) -> list[Tensor]:
    """Every byte that the sequence owns."""
    allocator = engine.allocator
    blocks = [part for b in sequence.blocks for part in (*allocator.pool.block(b), *allocator.index.block(b))]
    return [part.clone() for part in (*allocator.pool.slot(sequence.slot), *blocks)]


def equal(one: Many[Tensor], other: Many[Tensor]) -> bool:
    return all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(one, other, strict=True))


def differing(got: Many[Outcome], want: Many[Outcome]) -> list[int]:
    """Numbers of the sequences whose streams or bytes are not the same bit for bit."""
    pairs = enumerate(zip(got, want, strict=True))
    return [i for i, ((x, left), (y, kept)) in pairs if not equal([x, *left], [y, *kept])]


def with_numerator(rounding: Profile) -> Profile:
    """The profile with the kernel's bfloat16 numerator: for lists that fit one tile, so that it is a site."""
    return Profile(rounding.name, rounding.carrier, {**rounding.sites, "attn.p": Rounding("bf16")})
