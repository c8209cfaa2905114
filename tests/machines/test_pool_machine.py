"""The pool under everything that can happen to it; and the same, with mistakes planted in allocator, plans and step."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test
from kernel_cases import mutant
from pool_checks import Parts
from pool_machine import machine

from optimized import step
from optimized.pool import allocator, plans

Edits = tuple[tuple[str, str], ...]
MODULES: dict[str, ModuleType] = {"allocator": allocator, "plans": plans, "step": step}
NIGHTLY = settings.get_profile("nightly").max_examples


def examples(default: int) -> int:
    """How many histories; the nightly profile asks for more."""
    return NIGHTLY if settings.default.max_examples == NIGHTLY else default


@pytest.mark.parametrize(
    ("parts", "count"), [(Parts(), 26), (Parts(build="bf16", layout="fp8_linear"), 10)], ids=["2buff-fp4", "bf16-fp8"]
)
def test_no_history_breaks_the_pool(parts: Parts, count: int) -> None:
    """26 and 10 histories of 60 rules each, by default."""
    run_state_machine_as_test(machine(parts), settings=settings(max_examples=examples(count), stateful_step_count=60))


ALLOCATOR: dict[str, Edits] = {
    "blocks come back unclean": (("            self._poison(self._block(block))\n            heapq", "            heapq"),),
    "slots come back unclean": (("        self._poison(self.pool.slot(sequence.slot))\n        heapq", "        heapq"),),
    "a slot opens unclean": (("        self.pool.open_slot(sequence.slot)\n", ""),),
    "shared blocks are written into": (("if self.owners[sequence.blocks[i]] > 1]", "if False]"),),
    "a copy is not a copy": (("        copy_bytes(self._block(block), self._block(own))\n", ""),),
    "a copied block stays owned": (("        self.owners[block] -= 1\n        return own", "        return own"),),
    "a fork has no slot of its past": (("        copy_bytes(slot, self.pool.slot(sequence.slot))\n", ""),),
    "a fork forgets what its rings hold": (
        ("= past.length, past.drafted, past.reached", "= past.length, past.drafted, past.length"),),
    "shares are not counted": (
        ("            self.owners[block] += 1\n        return blocks[:]", "            pass\n        return blocks[:]"),),
    "a prefix keeps a block too many": (
        ("sequence.blocks[: -(-sequence.length // BLOCK_TOKENS)]", "sequence.blocks"),),
    "a prefix is the slot itself": (
        ("tuple(part.clone() for part in self.pool.slot(sequence.slot))\n        return Prefix",
         "self.pool.slot(sequence.slot)\n        return Prefix"),),
    "drafts outlive a rejection": (("min(sequence.drafted, length)", "sequence.drafted"),),
    "a rejection keeps its block": (("keep = -(-length // BLOCK_TOKENS)", "keep = length // BLOCK_TOKENS + 1"),),
    "one token too many taken back": (
        ("sequence.reached - self.pool.geometry", "sequence.reached - 1 - self.pool.geometry"),),
    "a snapshot without its blocks": (("            copy_bytes(held, self._block(sequence.blocks[-1]))\n", ""),),
    "the last block of a step is missing": (
        ("-(-(sequence.length + extend) // BLOCK_TOKENS)", "(sequence.length + extend) // BLOCK_TOKENS + 1"),),
    "the boundary forgets who is there": (("if g not in taken]", "]"),),
    "the boundary cuts through a block": (("if blocks < used_blocks or", "if blocks + 1 < used_blocks or"),),
}  # fmt: skip
PLANS: dict[str, Edits] = {
    "a count of the step's end, not of the token": (
        ("seen = np.where(live, visible(positions, ratio), 0)", "seen = np.where(live, visible(positions | 3, ratio), 0)"),),
    "picks in the order they came": (("picks = np.sort(", "picks = np.array("), ("last), axis=1)", "last))")),
    "the next page": (("batch_ids[:, None], column]", "batch_ids[:, None], np.maximum(column - 1, 0)]"),),
    "the first page for all": (("entry // per_block, axis=1)", "0 * entry, axis=1)"),),
    "rings keep what one group needs": (("pooled_tokens(ratio) - lookahead)]", "pooled_tokens(ratio))]"),),
    "rings keep the last group only": (("end - pooled_tokens(ratio) - lookahead)", "end - ratio - lookahead)"),),
    "the ring is read one short": (("pooled_tokens(ratio) - (j + 1))", "pooled_tokens(ratio) - (j + 2))"),),
    "groups close one late": (("plan[(plan[:, 2] + 1) % ratio == 0]", "plan[plan[:, 2] % ratio == 0]"),),
    "the step's rows are the pool's": (("np.where(at >= start, start - 1 - first - at, rows)", "rows"),),
    "payload counted from each sequence": (("start - 1 - first - at", "start - 1 - at"),),
    "one row more than the window": (("np.minimum(positions + 1, geometry", "np.minimum(positions + 2, geometry"),),
    "slots in 16 bits": (("np.asarray(slots, np.int64)[batch_ids, None]", "np.asarray(slots, np.int16)[batch_ids, None]"),),
}  # fmt: skip
STEP: dict[str, Edits] = {
    "rows written before they are needed": (("<= geometry.lookahead + 1", "<= geometry.lookahead + 2"),),
    "0 for nowhere": (("np.where(overwritten, -1, rows)", "np.where(overwritten, 0, rows)"),),
    "the ring takes every row": (("np.where(overwritten, -1, rows)", "rows"),),
    "only the window is kept": (("places.positions + geometry.ring <", "places.positions + geometry.config.sliding_window <"),),
    "no room for rejections": (("places.end, ratio, geometry.lookahead)", "places.end, ratio)"),),
    "the first page throughout": (
        ("row[: len(sequence.blocks)] = sequence.blocks", "row[: len(sequence.blocks)] = sequence.blocks[0]"),),
    "positions of the step, not of the sequence": (("+ start[batch_ids]", "+ start[0]"),),
}  # fmt: skip
# Found within a second or so, and one of each module that takes some; the others are tried with `-m slow`.
QUICK = {
    "a slot opens unclean", "a fork has no slot of its past", "the boundary cuts through a block",
    "a count of the step's end, not of the token", "picks in the order they came", "the ring is read one short",
    "groups close one late", "one row more than the window", "slots in 16 bits", "the first page throughout", "0 for nowhere",
}  # fmt: skip
TABLES = {"allocator": ALLOCATOR, "plans": PLANS, "step": STEP}
MISTAKES = [
    pytest.param(module, name, id=f"{module}-{name.replace(' ', '-')}", marks=[] if name in QUICK else pytest.mark.slow)
    for module, table in TABLES.items()
    for name in table
]


def with_mistake(module: str, edits: Edits, tmp_path: Path) -> Parts:
    wrong = mutant(MODULES[module], tmp_path, *edits)
    if module == "plans":
        own_step = mutant(step, tmp_path)
        own_step.plans = wrong
        return Parts(plans=wrong, step=own_step)
    return replace(Parts(), **{module: wrong})


@pytest.mark.parametrize(("module", "name"), MISTAKES)
def test_a_mistake_is_found(module: str, name: str, tmp_path: Path) -> None:
    found = settings(max_examples=60, stateful_step_count=40, phases=[Phase.generate], database=None, derandomize=True,
                     report_multiple_bugs=False)  # fmt: skip
    with pytest.raises((AssertionError, IndexError, ValueError, RuntimeError)):
        run_state_machine_as_test(machine(with_mistake(module, TABLES[module][name], tmp_path)), settings=found)
