"""The engine under random schedules; and the same, with mistakes planted in plans, allocator and kernels."""

from __future__ import annotations

from pathlib import Path

import pytest
from engine_machine import EngineMachine
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test
from kernel_cases import mutant
from test_pool_machine import examples

from optimized import engine, step


def test_no_schedule_changes_a_bit() -> None:
    """Two histories of 14 rules each, by default."""
    run_state_machine_as_test(EngineMachine, settings=settings(max_examples=examples(2), stateful_step_count=14))


STEP = {
    "rings keep too little": ("ratio, geometry.lookahead)\n", "ratio, geometry.lookahead)[1:]\n"),
    "rows written before they are needed": ("direct = int(places.extend.max()) <= geometry.lookahead + 1", "direct = True"),
    "a count that is stale": ("seen = visible(places.positions, RATIO", "seen = visible(places.positions - 1, RATIO"),
    "the first sequence's pages for all": ("batch_ids=there(places.batch_ids)", "batch_ids=there(0 * places.batch_ids)"),
}


def wrong_plans(name: str, tmp_path: Path) -> type[EngineMachine]:
    changes = ((engine, "plan_step", mutant(step, tmp_path, STEP[name]).plan_step),)
    return type("Wrong", (EngineMachine,), {"changes": changes})


def found(machine: type[EngineMachine]) -> None:
    search = settings(max_examples=40, stateful_step_count=20, phases=[Phase.generate], database=None, derandomize=True,
                      report_multiple_bugs=False)  # fmt: skip
    with pytest.raises(AssertionError):
        run_state_machine_as_test(machine, settings=search)


@pytest.mark.slow
@pytest.mark.parametrize("name", STEP)
def test_a_mistake_of_plans_is_found(name: str, tmp_path: Path) -> None:
    found(wrong_plans(name, tmp_path))


def test_a_history_by_hand_finds_a_ring_that_keeps_too_little(tmp_path: Path) -> None:
    """Two steps that end a CSA group between them; the right plans pass the same history."""
    for machine, passes in ((EngineMachine, True), (wrong_plans("rings keep too little", tmp_path), False)):
        run = machine()
        run.add(125)
        run.decode_all(1)
        run.step(run.live, [6], 2)
        if passes:
            run.teardown()
            continue
        with pytest.raises(AssertionError, match="after 125"):
            run.teardown()
