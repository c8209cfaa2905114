"""Requests that start from a kept prefix: the bits of one that was prefilled, whatever others made of the same prefix."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from kernel_cases import mutant
from torch import Tensor

from optimized.engine import Engine
from optimized.pool import allocator as allocator_file
from optimized.pool import index_rows, rows
from optimized.pool.allocator import Allocator, Prefix, Sequence
from reference.checkpoint.procedural import ProceduralStore
from reference.presets import preset

# One compressed layer of each kind, small elsewhere. Edges of CSA groups, of HCA groups and of blocks.
CONFIG = replace(
    preset("mini"), num_hidden_layers=2, compress_ratios=(128, 4, 0), num_hash_layers=0, index_topk=3, hidden_size=128,
    num_attention_heads=2, o_groups=1, n_routed_experts=2, num_experts_per_tok=1, vocab_size=128,
)  # fmt: skip
EDGES = [3, 4, 5, 127, 128, 129, 255, 256, 257]
EXTEND = 2


def ids(n: int, seed: int) -> Tensor:
    return torch.randint(0, CONFIG.vocab_size, (n,), generator=torch.Generator().manual_seed(seed))


def make(profile: str, held: int) -> Engine:
    """Room for `held` sequences of two blocks."""
    return Engine(ProceduralStore(CONFIG), profile, blocks=2 * held, slots=held, lookahead=2)


def invented(engine: Engine, length: int, generator: torch.Generator) -> Sequence:
    """A sequence with a past that nobody computed: random rows, keys and rings."""
    allocator, pool = engine.allocator, engine.memory.pool
    sequence = allocator.open()
    allocator.reserve([sequence], [length])
    for parts in (pool.slot(sequence.slot), *(pool.block(b) for b in sequence.blocks)):
        values = torch.randn(len(parts[0]), CONFIG.head_dim, generator=generator)
        made = rows.encode_2buff(values) if len(parts) == 2 else (rows.encode_bf16(values),)
        for part, new in zip(parts, made, strict=True):
            part.copy_(new.view(torch.uint8))
    for field in engine.geometry.fields:
        for layer, kind in enumerate(engine.geometry.kinds):
            if field.name.startswith(kind):
                ring = pool.state(field.name, layer)[sequence.slot]
                ring.copy_(torch.randn(ring.shape, generator=generator))
    layout = engine.memory.index.layout
    for layer in (i for i, kind in enumerate(engine.geometry.kinds) if kind == "csa"):
        for block in sequence.blocks:
            keys = torch.randn(index_rows.PAGE_ROWS, CONFIG.index_head_dim, generator=generator)
            page = index_rows.pack(*index_rows.encode(keys, layout.form), layout)
            for part, new in zip(engine.memory.index.pages(layer), page, strict=True):
                part[block] = new
    allocator.advance(sequence, length)
    return sequence


def go_on(engine: Engine, sequences: list[Sequence], seed: int) -> tuple[Tensor, list[Tensor]]:
    """The next tokens of each: their logits, and every byte that the sequences own afterwards."""
    tokens = list(ids(EXTEND * len(sequences), seed).split(EXTEND))
    logits = engine.logits(engine.step(tokens, sequences))
    return logits, [part.clone() for s in sequences for part in held(engine.allocator, s)]


def held(allocator: Allocator, sequence: Sequence) -> Iterator[Tensor]:
    yield from allocator.pool.slot(sequence.slot)
    for block in sequence.blocks:
        yield from (*allocator.pool.block(block), *allocator.index.block(block))


def faults(engine: Engine, lengths: list[int]) -> list[str]:
    """The first owner goes on, then one goes on otherwise from its prefix, then one as the first did."""
    allocator, generator = engine.allocator, torch.Generator().manual_seed(0)
    owners = [invented(engine, n, generator) for n in lengths]
    prefixes: list[Prefix] = [allocator.keep(s) for s in owners]
    want, left = go_on(engine, owners, seed=1)
    others = [allocator.start(p) for p in prefixes]
    otherwise, _ = go_on(engine, others, seed=2)
    found = [] if want.isfinite().all() and not torch.equal(want, otherwise) else ["nothing to see"]
    for sequence in (*others, *owners):
        allocator.free(sequence)
    again = [allocator.start(p) for p in prefixes]
    got, bytes_of = go_on(engine, again, seed=1)
    for n, here, there in zip(lengths, got.split(EXTEND), want.split(EXTEND), strict=True):
        found += [] if torch.equal(here, there) else [f"logits after {n}"]
    found += [] if all(torch.equal(a, b) for a, b in zip(bytes_of, left, strict=True)) else ["bytes"]
    for sequence in again:
        allocator.free(sequence)
    for prefix in prefixes:
        allocator.release(prefix)
    return found + ([] if allocator.free_blocks == allocator.blocks else ["blocks lost"])


@pytest.fixture(scope="module")
def engine() -> Engine:
    return make("pool-fp8", 2 * len(EDGES))


def test_a_request_from_a_prefix_gives_the_bits_of_its_first_owner(engine: Engine):
    assert faults(engine, EDGES) == []


def test_a_prefix_that_others_write_into_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: Engine):
    edit = ("            self.owners[block] += 1\n        return blocks[:]", "            pass\n        return blocks[:]")
    memory, own = engine.memory, engine.allocator
    wrong = mutant(allocator_file, tmp_path, edit).Allocator(memory.pool, memory.index, own.blocks, own.slots)
    monkeypatch.setattr(engine, "allocator", wrong)
    assert faults(engine, [5])


@pytest.mark.slow
@pytest.mark.parametrize("profile", ["pool-fp8", "pool-bf16"])
def test_prefixes_of_a_real_prompt(profile: str):
    """Kept on the way through a prompt; started from each, the prompt's next tokens have the logits of one long step."""
    engine, tokens = make(profile, 2 + len(EDGES)), ids(EDGES[-1] + EXTEND, seed=3)
    allocator, walker = engine.allocator, engine.allocator.open()
    want = engine.logits(engine.step([tokens], [allocator.open()]))
    prefixes = []
    for first, end in zip([0, *EDGES], EDGES, strict=False):
        engine.step([tokens[first:end]], [walker])
        prefixes.append(allocator.keep(walker))
    started = [allocator.start(p) for p in prefixes]
    got = engine.logits(engine.step([tokens[n : n + EXTEND] for n in EDGES], started))
    assert want.isfinite().all()
    assert torch.equal(got, torch.cat([want[n : n + EXTEND] for n in EDGES]))
