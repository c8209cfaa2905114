"""Far from the start, at the released top-k: one step, chunks and single tokens give the same bits, from made-up pasts.

A sequence's blocks lie behind the first 2 GiB of their plane.
"""

from __future__ import annotations

import pytest
import torch
from engine_cases import differing, layer_config, layer_engine, pour_past, run
from torch import Tensor

from optimized.engine import Engine
from optimized.pool.allocator import Snapshot
from optimized.pool.pool import IndexPool, Pool
from reference.config import Kind

BUILDS = ["pool-fp8", "pool-bf16"]
TOP_K = {"v4-pro": 1024, "v4-flash": 512}
LAST = 1 << 20  # positions of a release


def far_engine(kind: Kind, build: str, top_k: int, longest: int, monkeypatch: pytest.MonkeyPatch) -> Engine:
    """Its free blocks begin where a plane has 2 GiB behind it; memory that nobody touches stays unmapped."""
    monkeypatch.setattr(Pool, "poison", lambda self: None)
    monkeypatch.setattr(IndexPool, "poison", lambda self: None)
    config = layer_config(kind, sliding_window=128, index_topk=top_k, max_position_embeddings=LAST)
    geometry = layer_engine(config, build, blocks=1, slots=1).geometry
    first = -(-(2 << 30) // (geometry.envelope * geometry.row_bytes[0])) if geometry.envelope else 0
    engine = layer_engine(config, build, blocks=first + -(-(longest + 8) // 256), slots=1)
    engine.allocator._free_blocks = list(range(first, engine.allocator.blocks))  # a heap: ascending
    return engine


def past(engine: Engine, length: int) -> Snapshot:
    sequence = pour_past(engine, length, seed=length)
    kept = engine.allocator.snapshot(sequence)
    engine.allocator.free(sequence)
    return kept


def check(engine: Engine, length: int, n: int, sizes: tuple[int, ...] = (1, 3)) -> None:
    """`n` tokens in one step, in chunks that are written before attention, and one by one."""
    before, tokens = [past(engine, length)], [draw(n)]
    want = run(engine, before, tokens, [n])
    assert want[0][0].isfinite().all()
    wrong = {size: differing(run(engine, before, tokens, [size]), want) for size in sizes}
    assert not any(wrong.values()), (length, wrong)


def draw(n: int) -> Tensor:
    return torch.randint(0, 512, (n,), generator=torch.Generator().manual_seed(n))


def test_where_selection_becomes_lossy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Token 4 * 512 + 3 is the first that sees more rows than Flash picks."""
    engine = far_engine("csa", "pool-fp8", TOP_K["v4-flash"], 2060, monkeypatch)
    assert engine.geometry.envelope * engine.allocator._free_blocks[0] * engine.geometry.row_bytes[0] >= 2 << 30
    check(engine, 4 * 512, 4, sizes=(3,))


@pytest.mark.slow
@pytest.mark.parametrize("build", BUILDS)
@pytest.mark.parametrize("model", TOP_K)
def test_csa_around_the_end_of_lossless_selection(model: str, build: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At Pro's numbers 4,095 to 4,100: all rows, then the first that is left out."""
    engine = far_engine("csa", build, TOP_K[model], 4 * TOP_K[model] + 5, monkeypatch)
    check(engine, 4 * TOP_K[model] - 1, 6)


@pytest.mark.slow
@pytest.mark.parametrize("length", [65_536, 1_000_000])
@pytest.mark.parametrize("kind", ["window", "csa", "hca"])
@pytest.mark.parametrize("build", BUILDS)
def test_far_positions(build: str, kind: Kind, length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    check(far_engine(kind, build, TOP_K["v4-pro"], length, monkeypatch), length, 4)
