"""Gates that a fault is shown to: a cell of `v4parity run`, and tests that exist without it. Source: docs/faults.md §2."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from reference.checkpoint.open import open_store
from reference.rounding import profile

from .. import locate, ops, records
from ..cases import layer_id
from ..flow import Flow, Setting
from ..laws import Law
from ..locate import Divergence
from ..records import Record
from ..run import one_thread
from .change import Change, turned_on
from .fault import LAYER, LAYERS, Cell

MODEL = "procedural:mini"
ROOT = Path(__file__).parents[2]  # tests are there in a checkout


@dataclass(frozen=True)
class Outcome:
    """What one gate said: whether it failed, what it named, the budget that the first failing verdict used (None: no budget
    excuses it, or the gate has none), and processor seconds."""

    gate: str
    caught: bool
    named: str
    words: str
    budget_used: float | None
    seconds: float


def run_cell(cell: Cell, change: Change | None, seed: int = 0) -> Outcome:
    """The cell with this change turned on, as far as the first thing that is wrong. What a report would say of it."""
    began = time.process_time()
    with turned_on(change):
        divergence, budget = _first(cell, seed)
    gate = "layer" if divergence and divergence.cause == "layer" else "op"
    named = "" if divergence is None else divergence.op if divergence.cause == "op" else LAYER
    words = divergence.words if divergence else ""
    return Outcome(gate, divergence is not None, named, words, budget, time.process_time() - began)


def _first(cell: Cell, seed: int) -> tuple[Divergence | None, float | None]:
    """The first divergence of a cell, and the budget its verdict used. Whole layers run from the first one on."""
    one_thread()
    store, last = open_store(MODEL), LAYERS[cell.layer]
    setting = Setting(store, profile(cell.profile), cell.plan(), ops.OPS, ops.ARITHMETIC, seed, whole=cell.whole)
    layers = range(last + 1) if cell.whole else (last,)
    names = [layer_id(store.config, layer) for layer in layers]
    said: list[Record] = [{"record": "run", "layers": names, "phases": list(setting.plan.judged)}]
    flow = Flow.start(setting)
    if cell.whole:
        flow.begin_with_tokens()
    for layer in layers:
        for judged in flow.run_layer(layer):
            failing = [v for v in judged.verdicts if not v.passed]
            if failing:
                said.append(records.verdict_record(store.config, judged, 0.0))
                return locate.first_divergence(said), failing[0].budget_used
        said += [records.drift_record(store.config, d) for d in flow.drift if d.curve != "free"]
        flow.drift.clear()
        if divergence := locate.first_divergence(said):
            return divergence, None
    return None, None


def run_law(law: Law) -> Outcome:
    """A law under whatever is turned on."""
    began = time.process_time()
    try:
        violation = law.run()
        words = violation.words if violation else ""
    except Exception as error:  # a kernel that raises obeys no law
        words = f"{type(error).__name__}: {error}".split("\n")[0][:200]
    return Outcome(f"law {law.name}", bool(words), law.op if words else "", words, None, time.process_time() - began)


def run_tests(tests: Sequence[str], fault: str) -> Outcome:
    """These tests in a process of their own with a fault turned on, as far as the first that fails."""
    words = [sys.executable, "-m", "parity.faults.under", fault, "-x", "-q", "-p", "no:cacheprovider", *tests]
    environment = os.environ | {"HYPOTHESIS_PROFILE": "found", "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    began = os.times()
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    ended = os.times()
    spent = ended.children_user + ended.children_system - began.children_user - began.children_system
    if done.returncode not in (0, 1):
        raise RuntimeError(f"{fault}: pytest ended with {done.returncode}: {(done.stdout + done.stderr)[-2000:]}")
    failed = re.search(r"^FAILED (\S+)", done.stdout, re.MULTILINE)
    name = failed[1] if failed else ""
    return Outcome("test", done.returncode == 1, name, f"fails: {name}" if name else "", None, spent)


def covering(cells: Iterable[Cell]) -> list[Cell]:
    """Fewer cells that hold all sequences and phases of these: what one layer is asked in a phase is asked together, and where
    layers run whole, from the first one on, the last one asks for all."""
    together: dict[tuple[str, ...], list[Cell]] = {}
    for cell in cells:
        layer = "whole" if cell.whole else cell.layer
        together.setdefault((layer, cell.profile, *cell.phases), []).append(cell)
    return [_union(same) for same in together.values()]


def _union(cells: Sequence[Cell]) -> Cell:
    lengths, starts = (sorted({n for cell in cells for n in getattr(cell, part)}) for part in ("lengths", "starts"))
    deepest = max((cell.layer for cell in cells), key=LAYERS.__getitem__)
    return replace(cells[0], layer=deepest, lengths=tuple(lengths), starts=tuple(starts))
