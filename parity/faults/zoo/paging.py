"""Paging: who owns which rows, what survives a rollback, a fork, a prefix or a move, and what a step is told about it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..change import edit, wrap
from ..fault import LAYER, OWN, Fault, whole

BOOKS = ("tests/test_allocator.py",)
PREFIX = ("tests/test_pool_prefix.py::test_a_request_from_a_prefix_gives_the_bits_of_its_first_owner",)
SCHEDULES = ("tests/test_engine_schedules.py::test_chunks_across_every_edge_give_the_bits_of_one_step",)
GENERATION = ("tests/test_engine_generate.py::test_speculation_gives_the_tokens_of_plain_decoding",)
PLANNER = ("tests/test_pool_plans.py::test_the_plan_of_a_step_equals_a_slow_planner",)
MACHINE = ("tests/machines/test_pool_machine.py::test_no_history_breaks_the_pool",)
ALLOCATOR, STEP = "pool.allocator", "step"
KEEP = "plans.write_plan(places.extend, places.end, ratio, geometry.lookahead)"
SEEN = "seen = visible(places.positions, RATIO[\"csa\"])"


def _first_plane_only(copy_bytes: Callable[..., None]) -> Callable[..., None]:
    return lambda source, target: copy_bytes(source[:1], target[:1])


def _without_rings(snapshot: Callable[..., Any]) -> Callable[..., Any]:
    def cut(self: Any, sequence: Any) -> Any:
        held = snapshot(self, sequence)
        rows = self.pool.geometry.arena_rows
        for part in held.slot:
            part[:rows] = 0
        return held

    return cut


def _nothing_poisoned(poison: Callable[..., None]) -> Callable[..., None]:
    return lambda self, parts: None


FAULTS = (
    Fault("paging.lookahead-not-kept", "stale state", "vllm-project/vllm-ascend#9111", "S2",
          "rings keep what the next group needs if nothing is taken back", "step",
          edit(STEP, (KEEP, KEEP.replace(", geometry.lookahead", ""))), tests=(*PLANNER, *SCHEDULES, *GENERATION)),
    Fault("paging.snapshot-without-rings", "stale state", "ggml-org/llama.cpp#26063", "S1",
          "a snapshot leaves out what only the compressors still need", "snapshot",
          wrap("pool.allocator:Allocator.snapshot", _without_rings), tests=(*MACHINE, *BOOKS, *SCHEDULES),
          also=("ggml-org/llama.cpp#26694", "ggml-org/llama.cpp#25259")),
    Fault("paging.one-plane-moved", "dropped tail", "ROCm/ATOM#1737", "S1",
          "codes move to another pool, their rotated channels do not", "restore",
          wrap("pool.allocator:copy_bytes", _first_plane_only), tests=(*MACHINE, *BOOKS, *PREFIX), also=("ROCm/ATOM#1673",)),
    Fault("paging.prefix-at-block", "wrong page", "vllm-project/vllm-ascend#10296", "S1",
          "a prefix that ends inside a block shares it", "reserve",
          edit(ALLOCATOR, ("range(sequence.length // BLOCK_TOKENS, len(sequence.blocks))",
                           "range(-(-sequence.length // BLOCK_TOKENS), len(sequence.blocks))")),
          tests=(*MACHINE, *BOOKS, *PREFIX)),
    Fault("paging.prefix-without-window", "stale state", "ROCm/ATOM#1417", "S1",
          "a prefix hit leaves the window as another request left it", "start",
          edit(ALLOCATOR, ("copy_bytes(slot, self.pool.slot(sequence.slot))", "pass")), tests=(*MACHINE, *PREFIX, *BOOKS)),
    Fault("paging.stale-lengths", "stale state", "vllm-project/vllm#52644", "S2",
          "a replayed step sees the keys that the step before saw", LAYER,
          edit(STEP, (SEEN, "seen = visible(np.maximum(places.positions - 4, 3), RATIO[\"csa\"])")),
          whole("csa", "decode", starts=(255,)), tests=(*PLANNER, *SCHEDULES)),
    Fault("paging.block-zeroed-not-poisoned", "missing step", OWN, "S3", "blocks and slots are handed out as they were left",
          "poison", wrap("pool.allocator:Allocator._poison", _nothing_poisoned), tests=(*MACHINE, *BOOKS)),
    Fault("paging.rollback-keeps-length", "stale state", OWN, "S1", "a rollback gives blocks back and keeps the length",
          "roll_back", edit(ALLOCATOR, ("sequence.length = length\n        sequence.drafted", "sequence.drafted")),
          tests=(*MACHINE, *BOOKS, *GENERATION)),
    Fault("paging.fork-shares-slot", "wrong page", OWN, "S1", "a fork's window and rings are empty", "fork",
          edit(ALLOCATOR, ("twin = self._start(sequence, self.pool.slot(sequence.slot))",
                           "twin = self.open(); twin.length = sequence.length; twin.reached = sequence.reached")),
          tests=(*MACHINE, *BOOKS)),
    Fault("paging.rows-before-attention", "order", OWN, "S1", "a long step writes its rows while the old ones are still needed",
          LAYER, edit(STEP, ("direct = int(places.extend.max()) <= geometry.lookahead + 1", "direct = True")),
          whole("window", "chunk", (8, 36)), tests=(*PLANNER, *SCHEDULES)),
    Fault("paging.slot-of-another", "wrong page", OWN, "S1", "rows of a batch go to the slots in the other order", LAYER,
          edit(STEP, ("np.array([s.slot for s in sequences])", "np.array([s.slot for s in sequences][::-1])")),
          whole("window", "decode", (17,), (127,)), tests=(*PLANNER, *SCHEDULES)),
    Fault("paging.table-of-another", "wrong page", OWN, "S1", "block tables of a batch are in the other order", LAYER,
          edit(STEP, ("for row, sequence in zip(table, sequences, strict=True):",
                      "for row, sequence in zip(table[::-1], sequences, strict=True):")),
          whole("csa", "decode", starts=(127, 255)), tests=(*PLANNER, *SCHEDULES)),
    Fault("paging.position-of-step", "off by one", OWN, "S1", "positions count from the start of the step", LAYER,
          edit(STEP, ("[batch_ids] + start[batch_ids]", "[batch_ids] + 0 * start[batch_ids]")),
          whole("window", "decode", (17,)), tests=(*PLANNER, *SCHEDULES)),
)  # fmt: skip
