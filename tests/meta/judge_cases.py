"""What the tests of the judge share: small kernels in float32, and faults put into stored outputs."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from parity import cases, ops
from parity.budget.bounded import ACCUMULATE
from parity.flow import Flow, Judged, Setting
from parity.judge import Stored
from parity.run import one_thread
from reference.checkpoint.open import open_store
from reference.rounding import profile

HOW = ACCUMULATE["fp32"]
SEEDS = range(20)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def uneven(g: torch.Generator, *shape: int) -> Tensor:
    """float32 normals, blocks of 64 channels up to 2^12 apart, one outlier a row."""
    x = torch.randn(*shape, generator=g)
    blocks = -(-shape[-1] // 64)
    size = torch.randint(-6, 7, (*shape[:-1], blocks), generator=g).float().exp2()
    x = x * size.repeat_interleave(64, -1)[..., : shape[-1]]
    return x.scatter(-1, torch.randint(0, shape[-1], (*shape[:-1], 1), generator=g), 700.0)


def run_layer(
    layer: int,
    chosen: list[ops.Op],
    phases: tuple[str, ...] = ("decode", "verify"),
    lengths: tuple[int, ...] = (7,),
    build: str = "pool-fp8",
) -> list[Judged]:
    """One layer of `mini` with these ops, from poured states at the edges of groups, window and pool block."""
    one_thread()
    plan = cases.plan(lengths, [127, 255, 36], phases, chunks=[9])
    setting = Setting(open_store("procedural:mini"), profile(build), plan, chosen, HOW, 3)
    return list(Flow.start(setting).run_layer(layer))


def with_candidate(name: str, candidate: ops.Candidate) -> ops.Op:
    """An op of the table in the hands of another candidate."""
    return replace(ops.BY_NAME[name], candidate=candidate)


def failing(judged: list[Judged]) -> dict[str, list]:
    """Failing verdicts by op."""
    found: dict[str, list] = {}
    for j in judged:
        found.setdefault(j.op.name, []).extend(v for v in j.verdicts if not v.passed)
    return {name: verdicts for name, verdicts in found.items() if verdicts}


def codes_of(stored: dict[str, Stored], name: str) -> tuple[Tensor, Tensor]:
    value = stored[name]
    assert isinstance(value, tuple)
    return value


def only(judged: list[Judged], *names: str) -> list:
    """Failing verdicts, which must be of these ops, and of all of them."""
    found = failing(judged)
    assert set(found) == set(names), f"failing ops: {sorted(found)}"
    return [v for verdicts in found.values() for v in verdicts]


def run(layer: int, *names: str, **changes: ops.Candidate) -> list[Judged]:
    """Verdicts of these ops; `changes` maps an op's name, dots as underscores, to another candidate."""
    chosen = [ops.BY_NAME[n] for n in names]
    swapped = [with_candidate(op.name, changes[key]) if (key := op.name.replace(".", "_")) in changes else op for op in chosen]
    return run_layer(layer, swapped)
