"""Rows, pages and slots behind 2 GiB, in every kernel and in each of its tensors: the bytes of the same call near by."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from far_cases import CALLS, ints, kernel_file, results


@pytest.mark.parametrize("name", CALLS)
def test_rows_behind_two_gib(name):
    call = CALLS[name]()
    module = kernel_file(call.file)
    want = results(module, call)
    assert [tensor for tensor in call.spread if results(module, call, tensor) != want] == []


def test_every_kernel_that_widens_an_address_is_here():
    """The others' tensors lie without gaps (`swiglu`, `expert_sum`), or have a test of their own (`experts`)."""
    widen = {p.stem for p in Path(str(kernel_file("embed").__file__)).parent.glob("*.py") if "tl.int64" in p.read_text()}
    assert widen - {make().file for make in CALLS.values()} == {"experts", "expert_sum", "swiglu"}


def test_the_largest_page_that_row_numbers_reach():
    """Translation multiplies in 32 bits, and may: row numbers fit them by contract."""
    call, last = CALLS["translate"](), (2**31 - 1) // 1982
    call.args["block_table"][0], call.args["envelope"] = last, 1982
    call.args["picks"][0] = ints(0, 63)
    kernel_file(call.file).translate(**call.args)
    assert call.args["indices"][:2].tolist() == [last * 1982, last * 1982 + 63]


def test_a_32_bit_address_does_not_survive(tmp_path):
    """The same calls over kernel files without their widening: every one reads or writes elsewhere, or dies."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"OMP_NUM_THREADS": "1"}
    program = [sys.executable, str(Path(__file__).with_name("far_cases.py")), str(tmp_path)]
    done = subprocess.run(program, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    wide, narrow = json.loads(done.stdout.splitlines()[-1])
    assert wide == [f"{name}: {tensor}" for name, make in CALLS.items() for tensor in make().widened]
    assert narrow == []
