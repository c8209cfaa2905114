"""The engine under random schedules; and the same, with mistakes planted in plans, allocator and kernels."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
from engine_machine import EngineMachine
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test
from kernel_cases import mutant
from test_pool_machine import ALLOCATOR, Edits, examples

from optimized import attention, block, engine, moe, rope, step
from optimized.kernels import decode_attention, prefill_attention
from optimized.pool import allocator

Changes = tuple[tuple[ModuleType, str, Any], ...]


def test_no_schedule_changes_a_bit() -> None:
    """7 histories of 40 rules by default: about a hundred steps."""
    run_state_machine_as_test(EngineMachine, settings=settings(max_examples=examples(7), stateful_step_count=40))


STEP: dict[str, Edits] = {
    "rings keep too little": (("ratio, geometry.lookahead)\n", "ratio, geometry.lookahead)[1:]\n"),),
    "rows written before they are needed": (("direct = int(places.extend.max()) <= geometry.lookahead + 1", "direct = True"),),
    "a count that is stale": (("seen = visible(places.positions, RATIO", "seen = visible(places.positions - 1, RATIO"),),
    "the first sequence's pages for all": (("batch_ids=there(places.batch_ids)", "batch_ids=there(0 * places.batch_ids)"),),
}
OWNER: dict[str, Edits] = {
    "a fork shares its slot": (
        ("(sequence.blocks)\n        return twin",
         "(sequence.blocks)\n        twin.slot = sequence.slot\n        return twin"),),
    "a fork's rings are those of a new request": (
        ("(sequence.blocks)\n        return twin",
         "(sequence.blocks)\n        self.pool.open_slot(twin.slot)\n        return twin"),),
    **{name: ALLOCATOR[name] for name in (
        "a fork has no slot of its past", "a prefix is the slot itself", "shared blocks are written into",
        "a copy is not a copy", "shares are not counted")},
}  # fmt: skip


def planned(edits: Edits, tmp_path: Path) -> Changes:
    return ((engine, "plan_step", mutant(step, tmp_path, *edits).plan_step),)


def owned(edits: Edits, tmp_path: Path) -> Changes:
    wrong = mutant(allocator, tmp_path, *edits)
    wrong.PoolFull = allocator.PoolFull
    return ((engine, "Allocator", wrong.Allocator),)


def machine(changes: Changes) -> type[EngineMachine]:
    return type("Wrong", (EngineMachine,), {"changes": changes})


SEARCHED = {name: (planned, edits) for name, edits in STEP.items()}
SEARCHED |= {name: (owned, OWNER[name]) for name in ("a fork's rings are those of a new request",)}


@pytest.mark.slow
@pytest.mark.parametrize(("plant", "edits"), SEARCHED.values(), ids=SEARCHED)
def test_a_mistake_is_found(plant: Callable[[Edits, Path], Changes], edits: Edits, tmp_path: Path) -> None:
    search = settings(max_examples=40, stateful_step_count=20, phases=[Phase.generate], database=None, derandomize=True,
                      report_multiple_bugs=False)  # fmt: skip
    with pytest.raises(AssertionError):
        run_state_machine_as_test(machine(plant(edits, tmp_path)), settings=search)


def by_hand(run: EngineMachine) -> None:
    """Two steps that between them end two groups of CSA and one of HCA."""
    run.add(125)
    run.decode_all(1)
    run.step(run.live, [6], 2)
    run.teardown()


def test_a_history_by_hand_finds_a_ring_that_keeps_too_little(tmp_path: Path) -> None:
    """The right plans pass the same history."""
    by_hand(EngineMachine())
    with pytest.raises(AssertionError, match="after 125"):
        by_hand(machine(planned(STEP["rings keep too little"], tmp_path))())


def shared_by_hand(run: EngineMachine) -> None:
    """A fork and a prefix in the middle of a block, a group of CSA and one of HCA; all of them go on."""
    run.add(125)
    run.decode_all(1)
    run.fork(0)
    run.keep(0)
    run.decode_all(2)
    run.step(run.live[:1], [9], 5)  # more than its rings hold beside what the prefix needs
    run.start_from_prefix(0)
    run.step([run.live[2], run.live[0]], [3, 2], 3)
    run.free(1)
    run.decode_all(4)
    run.teardown()


def test_a_history_with_a_fork_and_a_prefix_by_hand() -> None:
    shared_by_hand(EngineMachine())


@pytest.mark.slow
@pytest.mark.parametrize("name", OWNER)
def test_a_mistake_of_sharing_is_found_by_hand(name: str, tmp_path: Path) -> None:
    with pytest.raises(AssertionError):
        shared_by_hand(machine(owned(OWNER[name], tmp_path))())


def wrong_sink(tmp_path: Path) -> Changes:
    wrong = mutant(decode_attention, tmp_path, ("tl.exp(tl.load(sink + h, ", "tl.exp(-tl.load(sink + h, "))
    return (attention, "decode_attention", wrong.decode_attention), (prefill_attention, "attend", wrong.attend)


def wrong_base(tmp_path: Path) -> Changes:
    wrong = mutant(rope, tmp_path, ("return 1.0 / config.rope_theta**", "return 1.0 / config.compress_rope_theta**"))
    return ((step, "rope_table", wrong.rope_table),)


def wrong_place(tmp_path: Path) -> Changes:
    return planned((("complete[:, 2] // ratio * ratio", "complete[:, 2]"),), tmp_path)


def wrong_share(tmp_path: Path) -> Changes:
    wrong = mutant(moe, tmp_path, ("per_tok, config.routed_scaling_factor)", "per_tok, 1.0)"))
    return ((block, "moe", wrong.moe),)


SHARED = {  # by all schedules: bits agree, the twin does not
    "a sink of the other sign": wrong_sink,
    "the other base of rotary channels in window layers": wrong_base,
    "compressed rows turned by their last position": wrong_place,
    "experts without their scale": wrong_share,
}


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if i == 0 else pytest.mark.slow) for i, n in enumerate(SHARED)])
def test_a_mistake_of_every_schedule_is_found_by_the_twin(name: str, tmp_path: Path) -> None:
    with ExitStack() as planted:
        for change in SHARED[name](tmp_path):
            planted.enter_context(mock.patch.object(*change))
        with pytest.raises(AssertionError, match="from the twin, where rounding explains"):
            by_hand(EngineMachine())
