"""The fault zoo: faults can be turned on and off, one of every kind is caught and blamed rightly, and a silent one is told."""

from __future__ import annotations

import ast
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from optimized.kernels import decode_attention, topk
from parity import attend
from parity.cli import main
from parity.commands import faults as command
from parity.faults import BY_NAME, FAULTS, OUT_OF_REACH, Fault, matrix, public, render, smallest
from parity.faults.change import Both, Change, Edit, turned_on, wrap
from parity.faults.fault import LAYER, LAYERS, OWN, at
from parity.faults.gates import Outcome, covering, run_cell
from parity.ops import BY_NAME as OPS
from reference.errors import BadInput

ROOT = Path(__file__).parents[1]
ONE_OF_EACH_KIND = (
    "rope.rows-turned-back", "streams.comb-transposed", "attention.window-short", "compressor.lane-a-padded",
    "quantisation.exponent-floored", "rope.yarn-in-window-layers", "quantisation.last-64-dropped",
    "indexer.half-split-rotation", "attention.padded-lanes-counted", "cache.window-untranslated", "attention.no-sink",
    "cache.stride-of-codes", "attention.padded-lanes-loaded", "quantisation.bf16-truncated", "indexer.relu-after-sum",
)  # fmt: skip


def edits(change: Change) -> Iterator[Edit]:
    if isinstance(change, Edit):
        yield change
    elif isinstance(change, Both):
        for part in change.parts:
            yield from edits(part)


def test_every_line_that_a_fault_changes_is_there_and_every_cell_is_part_of_a_default_run() -> None:
    for fault in FAULTS:
        for edit in edits(fault.change):
            ast.parse(edit.source())
        assert fault.cell is None or fault.cell.plan().sequences, fault.name
        assert fault.cell or fault.laws or fault.tests, fault.name
        assert fault.op in OPS or fault.op == LAYER or not fault.cell, fault.name
    for knob in smallest.KNOBS:
        for amount in knob.amounts:
            for edit in edits(knob.change(amount)):
                ast.parse(edit.source())


def test_there_are_enough_of_them() -> None:
    assert len(BY_NAME) == len(FAULTS) >= 90
    assert sum(f.source == OWN for f in FAULTS) >= 25
    threads = {f.source for f in FAULTS} | {o.source for o in OUT_OF_REACH}
    assert len(threads - {OWN}) >= 60
    tests = {name.split("::")[0] for f in FAULTS for name in f.tests}
    assert all((ROOT / name).exists() for name in tests)


def test_one_of_every_kind_is_there() -> None:
    assert {BY_NAME[name].kind for name in ONE_OF_EACH_KIND} == {f.kind for f in FAULTS}
    assert {BY_NAME[name].kind for name in public.TEN} == {
        "sign", "axis", "off by one", "stale state", "wrong scale", "wrong table", "dropped tail", "swapped halves",
        "missing clamp", "wrong page",
    }  # fmt: skip
    assert len({BY_NAME[name].op for name in public.TEN}) == 10


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("name", ONE_OF_EACH_KIND)
def test_one_of_every_kind_is_caught_and_blamed_on_the_right_op(name: str) -> None:
    fault = BY_NAME[name]
    assert fault.cell is not None
    outcome = run_cell(fault.cell, fault.change)
    assert outcome.caught and outcome.named == fault.op, outcome.words


def test_a_fault_is_gone_when_it_is_turned_off() -> None:
    fault = BY_NAME["attention.no-sink"]
    honest = attend.decode_attention, decode_attention.combine_kernel
    with turned_on(fault.change):
        assert attend.decode_attention is not honest[0] and decode_attention.combine_kernel is not honest[1]
    assert (attend.decode_attention, decode_attention.combine_kernel) == honest
    assert fault.cell is not None and not run_cell(fault.cell, None).caught


def test_a_line_that_is_gone_or_stands_twice_is_an_error() -> None:
    for old in ("no such line", "tl.load"):
        with pytest.raises(ValueError, match="stands"), turned_on(Edit("optimized.kernels.topk", ((old, ""),))):
            pass
    assert topk.topk_kernel is not None


def test_a_cell_outside_of_the_default_run_is_an_error() -> None:
    with pytest.raises(ValueError, match="default run"):
        at("csa", "decode", (1000,)).plan()


def silent() -> Fault:
    """One that changes nothing."""
    nothing = wrap("kernels.topk:topk", lambda f: f)
    return replace(BY_NAME["attention.no-sink"], name="attention.silent", change=nothing, laws=())


def outcome(**changes: object) -> Outcome:
    return replace(Outcome("op", True, "attn.core", "words", 3.0, 0.5), **changes)  # type: ignore[arg-type]


def test_what_is_missed_or_blamed_on_another_op_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fault = silent()
    assert matrix.wrong(matrix.Result(fault.name, "", (outcome(),)), fault) == ""
    assert matrix.wrong(matrix.Result(fault.name, "", (outcome(caught=False, named=""),)), fault) == "not caught"
    assert matrix.wrong(matrix.Result(fault.name, "", (outcome(named="attn.q"),)), fault) == "blamed on attn.q"
    assert matrix.wrong(matrix.Result(fault.name, "", (outcome(gate="law padding.core", named="x"),)), fault) == ""
    monkeypatch.setattr(matrix, "FAULTS", (fault,))
    monkeypatch.setattr(matrix, "laws_of", lambda fault: [])
    assert main(["faults", "--out", str(tmp_path)]) == 1
    assert "not caught" in (tmp_path / "matrix.md").read_text()


def test_results_are_kept_and_not_made_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    faced: list[str] = []

    def face(fault: Fault) -> matrix.Result:
        faced.append(fault.name)
        return matrix.Result(fault.name, matrix.digest(fault), (outcome(named=fault.op, budget_used=math.inf),))

    monkeypatch.setattr(matrix, "face", face)
    for count in (2, 3):
        results = matrix.run_all(FAULTS[:count], tmp_path, lambda fault, result: None)
        assert [r.fault for r in results] == [f.name for f in FAULTS[:count]] == faced
    changed = replace(FAULTS[0], severity="S3" if FAULTS[0].severity != "S3" else "S1")
    matrix.run_all([changed], tmp_path, lambda fault, result: None)
    assert faced.count(FAULTS[0].name) == 2
    (tmp_path / matrix.FILE).write_text('{"fault": 1}\n')
    with pytest.raises(BadInput, match="line 1"):
        matrix.read_results(tmp_path)


def test_pages_escape_and_say_what_is_wrong() -> None:
    fault = replace(silent(), what="<script>alert(1)</script>")
    table = render.rows([fault], [matrix.Result(fault.name, "", (outcome(caught=False, named=""),))])
    html = render.as_html(table)
    assert "<script>" not in html and "&lt;script&gt;" in html and "not caught" in html
    assert '"caught": 0' in render.as_json(table)
    right = render.rows([fault], [matrix.Result(fault.name, "", (outcome(budget_used=math.inf),))])
    assert render.totals(right)["rightly"] == 1 and "∞" in render.as_markdown(right)
    assert '"budget_used": null' in render.as_json(right)


def test_faults_are_chosen_by_name_kind_or_source(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["faults", "--list", "--only", "rope.*,sign"]) == 0
    names = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert "rope.half-split" in names and "indexer.weights-without-sign" in names and "attention.no-sink" not in names
    assert main(["faults", "--list", "--only", "nothing.*"]) == 4


def test_a_false_alarm_is_one(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    said = iter([outcome(caught=False), outcome()])
    monkeypatch.setattr("parity.faults.gates.run_cell", lambda cell, change, seed: next(said))
    assert command._clean([BY_NAME["attention.no-sink"]], range(2)) == 1
    said = capsys.readouterr()
    assert "seed 1: words" in said.err and "1 false alarms" in said.out


def test_formulas_of_public_gates() -> None:
    c, t = torch.tensor([3.0, 4.0]).double(), torch.tensor([3.0, 5.0]).double()
    assert public.calc_diff(c, t) == 1 / (25 + 34) and public.nmse(c, t) == 1 / 34
    assert public.cosine_diff(c, t) == pytest.approx(1 - 2 * 29 / 59)
    assert public.beyond(0.1, 0.1, both=True)(c, t) == pytest.approx(1 / 0.6)
    assert public.beyond(0.75, 0.1, both=False)(c, t) == pytest.approx(1 / 0.75)


def test_fewer_cells_hold_all_trigger_cells() -> None:
    """What a clean run over seeds asks: every sequence of every cell, on its layer or on the way to a later one."""
    cells = {f.cell for f in FAULTS if f.cell}
    fewer = covering(cells)
    assert len(fewer) < len(cells) / 2
    for cell in cells:
        assert any(
            (c.layer == cell.layer or (c.whole and LAYERS[c.layer] > LAYERS[cell.layer]))
            and (c.phases, c.profile, c.whole) == (cell.phases, cell.profile, cell.whole)
            and {*cell.lengths} <= {*c.lengths} and {*cell.starts} <= {*c.starts}
            for c in fewer
        )  # fmt: skip
