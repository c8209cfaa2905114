"""docs/kernels.md is what the command would write: the paper part always, what compilers made for a few kernels."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from optimized.kernels import aot
from optimized.kernels.aot import Report
from optimized.kernels.costs import Cost
from parity import cli
from parity.bench import sheet
from parity.bench.roofline import DEVICES
from reference.presets import preset

PAGE = Path(__file__).parents[1] / "docs/kernels.md"
KERNELS, TARGETS = ["quantize", "combine", "index_logits_fp8"], ["sm_90", "gfx950"]
FAKE = [Report(kernel, target, 0.1, 30, 0, 16, 4000, {"MMA": 4}) for target in aot.TARGETS for kernel in sheet.FP8_KERNELS]


def compiled_rows(page):
    """(target, kernel) -> its line."""
    sections = re.split(r"^### 4\.\d ", page, flags=re.MULTILINE)[1:]
    rows = [(s.split()[0], line) for s in sections for line in s.splitlines() if line.startswith("| ")]
    return {(target, line.split()[1]): line for target, line in rows if line.split()[1] != "kernel"}


def this_compiler():
    if sheet.compiler() not in PAGE.read_text():
        pytest.skip(f"the sheet was compiled with another version, here is {sheet.compiler()}")


def test_the_page_begins_with_what_is_worked_out_on_paper():
    paper = sheet.introduction() + "\n" + sheet.paper(preset("v4-pro"))
    assert PAGE.read_text().startswith(paper)
    assert not PAGE.read_text().startswith(sheet.introduction() + "\n" + sheet.paper(preset("v4-flash")))


def test_the_page_has_every_kernel_of_every_target():
    assert compiled_rows(PAGE.read_text()).keys() == {(t, k) for t in aot.TARGETS for k in aot.cases()}


@pytest.mark.aot
def test_compiled_kernels_stand_in_the_page_as_they_come_out():
    this_compiler()
    rows = compiled_rows(PAGE.read_text())
    reports = aot.compile_all(KERNELS, TARGETS)
    assert len(reports) == len(KERNELS) * len(TARGETS)
    for r in reports:
        assert sheet.compiled_row(r) == rows[r.target, r.kernel]
        assert sheet.compiled_row(replace(r, registers=r.registers + 1)) != rows[r.target, r.kernel]


@pytest.mark.aot
@pytest.mark.slow
def test_the_whole_page_is_what_the_command_writes():
    this_compiler()
    assert PAGE.read_text() == sheet.sheet(preset("v4-pro"), aot.compile_all(), sheet.compiler())


def test_the_command_writes_the_page_and_fails_on_a_fault(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(sheet, "compile_all", lambda: FAKE)
    command = ["bench", "kernels", "--model", "procedural:mini", "--sheet", str(tmp_path / "sheet.md")]
    assert cli.main(command) == 1  # the planted code has none of the required instructions
    assert "gemm_fp8 for sm_90 has no [QH]GMMA" in capsys.readouterr().out
    page = (tmp_path / "sheet.md").read_text()
    assert page.startswith("# Kernel sheet") and "| gemm_fp8 | 30 | 0 | 16 | MMA ×4 |" in page
    assert "Faults: gemm_fp8 has no [QH]GMMA" in page
    assert list(tmp_path.iterdir()) == [tmp_path / "sheet.md"]
    monkeypatch.setattr(sheet, "faults", lambda report: [])
    assert cli.main(command) == 0


def test_a_floor_is_the_slower_of_memory_and_arithmetic_added_up_over_kernels():
    h200 = DEVICES[0]
    moved, products = Cost(3_000_000, 1_800_000), Cost(0, 480, 1_979_000_000, "fp8")
    assert h200.seconds(moved) == pytest.approx(1e-6)
    assert h200.seconds(products) == pytest.approx(1e-6)
    assert h200.seconds(replace(products, unit="bf16")) == pytest.approx(2e-6)
    assert h200.floor({"a": moved, "b": products}) == pytest.approx(2e-6)
