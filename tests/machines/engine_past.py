"""The small model of the engine's machine, made-up pasts to begin at, and what a next token could read.

One layer of each kind, the first with hashed experts. What edges hang on is real: head_dim and rotary channels, the ratios,
blocks of 256 tokens; what only costs time is small.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from unittest import mock

import torch
from slow_layout import POOLED, RATIOS, SlowLayout
from torch import Tensor

from optimized.engine import Engine
from optimized.pool import rows as codec
from optimized.pool.allocator import Sequence, Snapshot
from optimized.pool.index_rows import PAGE_ROWS, decode, encode, key_order, scale_order
from optimized.pool.pool import IndexPool, Pool
from parity.alone import Listening
from reference.checkpoint.procedural import ProceduralStore
from reference.config import Kind
from reference.presets import preset
from reference.state import CompressorState, LayerState

CONFIG = replace(
    preset("mini"), num_hidden_layers=3, compress_ratios=(0, 128, 4, 0), num_hash_layers=1, index_topk=3, sliding_window=8,
    hidden_size=64, hc_mult=2, hc_sinkhorn_iters=3, num_attention_heads=2, o_groups=1, q_lora_rank=64, o_lora_rank=32,
    index_n_heads=2, n_routed_experts=3, num_experts_per_tok=2, moe_intermediate_size=64, vocab_size=64,
)  # fmt: skip
PROFILE = "pool-fp8"
LOOKAHEAD, BLOCKS, SLOTS = 2, 8, 4
NEAR = 2  # blocks at the beginning of a pool whose others lie behind 2 GiB
KINDS = tuple(CONFIG.kind(i) for i in range(CONFIG.num_hidden_layers))
STORE = ProceduralStore(CONFIG)


@cache
def weights() -> Listening:
    return Listening(STORE, 1 << 30)


def make_engine(blocks: int = BLOCKS, slots: int = SLOTS) -> Engine:
    engine = Engine(STORE, PROFILE, blocks=blocks, slots=slots, lookahead=LOOKAHEAD)
    engine.weights = weights()
    return engine


def far_engine() -> Engine:
    """With `BLOCKS` free blocks, all but the first `NEAR` of them, and all slots, behind 2 GiB of their plane. Nobody touches
    what lies between, so that it takes no memory; the free ones are poisoned."""
    first = -(-(2 << 30) // _block_bytes())
    with mock.patch.object(Pool, "poison"), mock.patch.object(IndexPool, "poison"):
        engine = make_engine(blocks=first + BLOCKS - NEAR)
    allocator, slots = engine.allocator, engine.memory.pool.slots
    allocator._free_blocks = [*range(NEAR), *range(first, allocator.blocks)]  # a heap: ascending
    for b in allocator._free_blocks:
        allocator._poison(allocator._block(b))
    for position in range(slots - SLOTS, slots):
        allocator._poison(allocator.pool.slot(position))
    return engine


@cache
def _block_bytes() -> int:
    geometry = make_engine().geometry
    return geometry.envelope * geometry.row_bytes[0]


@cache
def past(length: int) -> Snapshot:
    """A made-up past: random rows, keys and rings where a token at `length` may read, NaN bytes elsewhere."""
    engine, generator = make_engine(), torch.Generator().manual_seed(length)
    sequence = engine.allocator.open()
    engine.allocator.reserve([sequence], [length])
    engine.allocator.advance(sequence, length)
    for layer in range(CONFIG.num_hidden_layers):
        rows = [row for part in rows_of(engine, sequence, layer, engine.geometry.ring) for row in part]
        parts = codec.encode_2buff(torch.randn(len(rows), CONFIG.head_dim, generator=generator))
        for plane, part in zip(engine.memory.pool.planes, parts, strict=True):
            plane[rows] = part.view(torch.uint8)
    keys = encode(torch.randn(length // 4, CONFIG.index_head_dim, generator=generator), engine.memory.index.layout.form)
    for (plane, place), part in zip(_key_places(engine, sequence), keys, strict=True):
        plane[place] = part
    for name, ring in rings(engine, sequence.slot).items():
        at = torch.arange(max(0, length - POOLED[_kind(name)]), length) % len(ring)
        ring[at] = torch.randn(len(at), ring.shape[1], generator=generator)
    return engine.allocator.snapshot(sequence)


def rows_of(
    engine: Engine, sequence: Sequence, layer: int, back: int = CONFIG.sliding_window - 1
) -> tuple[list[int], list[int]]:
    """Rows of the row space that hold the last `back` positions of a layer's window, and its compressed entries."""
    at, length, ratio = SlowLayout(engine.geometry), sequence.length, RATIOS[KINDS[layer]]
    window = [at.window(layer, sequence.slot, p) for p in range(max(0, length - back), length)]
    return window, [at.compressed(layer, list(sequence.blocks), c) for c in range(length // ratio if ratio else 0)]


def _key_places(engine: Engine, sequence: Sequence) -> list[tuple[Tensor, tuple[Tensor, Tensor]]]:
    """Pages of keys and of scales, each with the places of the sequence's index keys."""
    layout, entries = engine.memory.index.layout, torch.arange(sequence.length // 4)
    block = torch.tensor(list(sequence.blocks), dtype=torch.long)[entries // PAGE_ROWS, None]
    orders = (order(layout, CONFIG.index_head_dim)[entries % PAGE_ROWS] for order in (key_order, scale_order))
    pages = engine.memory.index.pages(engine.geometry.kinds.index("csa"))
    return [(page, (block, order)) for page, order in zip(pages, orders, strict=True)]


def _kind(name: str) -> Kind:
    return "hca" if name.startswith("hca") else "csa"


def rings(engine: Engine, slot: int) -> dict[str, Tensor]:
    """Every compressor ring of a slot, by the name of its field."""
    pool, kinds = engine.memory.pool, engine.geometry.kinds
    return {f.name: pool.state(f.name, kinds.index(_kind(f.name)))[slot] for f in engine.geometry.fields}


def readable(engine: Engine, sequence: Sequence) -> list[Tensor]:
    """Copies of all that the next token may read: window rows, compressed rows, index keys, rings."""
    layers = range(CONFIG.num_hidden_layers)
    rows = [row for layer in layers for part in rows_of(engine, sequence, layer) for row in part]
    out = [plane[rows] for plane in engine.memory.pool.planes]
    out += [page[place] for page, place in _key_places(engine, sequence)]
    for name, ring in rings(engine, sequence.slot).items():
        out.append(ring[torch.arange(max(0, sequence.length - POOLED[_kind(name)]), sequence.length) % len(ring)])
    return out


def drawn(engine: Engine, sequence: Sequence) -> list[LayerState]:
    """What the reference would hold in the place of these bytes: the same numbers, in float64."""
    states = []
    for layer, kind in enumerate(KINDS):
        window, compressed = (_decoded(engine, rows) for rows in rows_of(engine, sequence, layer))
        keys = decode(*(page[place] for page, place in _key_places(engine, sequence)), engine.memory.index.layout.form)
        main = _compressor(engine, sequence, "hca" if kind == "hca" else "csa_main", compressed) if RATIOS[kind] else None
        index = _compressor(engine, sequence, "csa_idx", keys.double()) if kind == "csa" else None
        states.append(LayerState(window, main, index))
    return states


def _decoded(engine: Engine, rows: list[int]) -> Tensor:
    main, rotated = (plane[rows] for plane in engine.memory.pool.planes)
    return codec.decode_2buff(main, rotated.view(torch.bfloat16)).double()


def _compressor(engine: Engine, sequence: Sequence, name: str, rows: Tensor) -> CompressorState:
    """From its rings; an overlapping window of group 0 finds a group of nothing before it."""
    ratio, before = RATIOS[_kind(name)], 4 if _kind(name) == "csa" else 0
    first = sequence.length // ratio * ratio - before
    at = torch.arange(max(0, first), sequence.length)
    held = rings(engine, sequence.slot)
    parts = []
    for part, nothing in (("kv", 0.0), ("score", -torch.inf)):
        ring = held[f"{name}_{part}"]
        missing = torch.full((max(0, -first), ring.shape[1]), nothing, dtype=torch.float64)
        parts.append(torch.cat([missing, ring[at % len(ring)].double()]))
    return CompressorState(*parts, rows)
