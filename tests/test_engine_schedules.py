"""One layer of each kind from made-up pasts: any chunk size, any company, the same streams and pool bytes, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from engine_cases import differing, layer_config, layer_engine, pour_past, run, snapshots
from kernel_cases import mutant
from torch import Tensor

from optimized import engine as engine_module
from optimized import step as step_module
from optimized.engine import Engine
from reference.config import Kind

KINDS: list[Kind] = ["window", "csa", "hca"]
# Around the first group, the first HCA row, and the second block.
STARTS = [0, 1, 3, 120, 126, 127, 128, 140, 250, 255, 256, 260]
SIZES = [*range(1, 10), 15, 16, 17]
LONG_SIZES = [127, 128, 129]
EDGES = [1, 125, 253]


def draw(lengths: list[int], n: int) -> list[Tensor]:
    return [torch.randint(0, 512, (n,), generator=torch.Generator().manual_seed(1000 + s)) for s in lengths]


def engine_for(kind: Kind, build: str, slots: int) -> Engine:
    return layer_engine(layer_config(kind), build, blocks=2 * slots, slots=slots)


@pytest.mark.parametrize("kind", KINDS)
def test_chunks_across_every_edge_give_the_bits_of_one_step(kind: Kind) -> None:
    """Chunks of 2 and 3 are written before attention; a chunk of 4, and the whole, after it."""
    engine = engine_for(kind, "pool-fp8", slots=6)
    pasts, tokens = snapshots(engine, EDGES), draw(EDGES, 5)
    want = run(engine, pasts, tokens, [5] * 3)
    assert all(x.isfinite().all() for x, _ in want)
    assert differing(run(engine, pasts[::-1] + pasts, tokens[::-1] + tokens, [2] * 3 + [3] * 3), want[::-1] + want) == []
    assert differing(run(engine, pasts[1:2], tokens[1:2], [4]), want[1:2]) == []


def test_a_group_that_forgets_its_ring_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted mistake of chunks: a step that keeps too few projections for the next one."""
    engine = engine_for("csa", "pool-fp8", slots=2)
    pasts, tokens = snapshots(engine, [254]), draw([254], 4)
    want = run(engine, pasts, tokens, [4])
    keep = "plans.write_plan(places.extend, places.end, ratio, geometry.lookahead)"
    wrong = mutant(step_module, tmp_path, (keep, f"{keep}[1:]"))
    monkeypatch.setattr(engine_module, "plan_step", wrong.plan_step)
    assert differing(run(engine, pasts, tokens, [2]), want) == [0]


def test_a_made_up_past_is_all_that_is_read() -> None:
    """What a sequence of this length must not see is NaN, and one row of it that is missing reaches the streams."""
    engine = engine_for("csa", "pool-fp8", slots=2)
    sequence = pour_past(engine, 11, seed=0)
    row = engine.geometry.window_index("csa", sequence.slot, 10)
    engine.memory.pool.layer_rows(0)[0][row] = 0xFF
    assert engine.step(draw([11], 1), [sequence]).isnan().any()


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("build", ["pool-fp8", "pool-bf16"])
def test_every_chunk_size_from_every_start(build: str, kind: Kind) -> None:
    """Each start alone in one step; then all starts together, in every size of chunk, and long ones across the window."""
    engine = engine_for(kind, build, slots=len(STARTS))
    for starts, sizes, n in ((STARTS, SIZES[:9], 10), (STARTS, SIZES[9:], 18), (EDGES, LONG_SIZES, 131)):
        pasts, tokens = snapshots(engine, starts), draw(starts, n)
        want = [run(engine, [past], [ids], [n])[0] for past, ids in zip(pasts, tokens, strict=True)]
        assert all(x.isfinite().all() for x, _ in want)
        wrong = {size: differing(run(engine, pasts, tokens, [size] * len(pasts)), want) for size in sizes}
        assert not any(wrong.values()), wrong
