"""A verdict as a standalone script: the same budget and place, in a bare interpreter; every kind of output; damage."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from parity import candidates, ops, records
from parity.budget.bounded import ACCUMULATE, Bounded
from parity.budget.codes import E2M1, E4M3
from parity.cli import main
from parity.judge import Bytes, Codes, Dense, Places, Selection, judge
from parity.repro import from_case, script, standalone
from parity.repro.script import Evidence, row_data
from parity.single.drawing import default_batch, draw
from parity.single.given import given_step
from parity.single.verdict import judge_outputs
from parity.twins import Expectation
from reference import formats
from reference.checkpoint.open import open_store
from reference.errors import BadInput

STORE = open_store("procedural:mini")
HOW = ACCUMULATE["fp32"]
LINE = re.compile(r"(PASS|FAIL) (\S+): output (\S+), budget used (\S+) \((\w+)\)")


def alone(text, tmp_path):
    """Run a script without this package on the path: outcome, op, output, budget used, test; and all it said."""
    path = tmp_path / "repro.py"
    path.write_text(text)
    done = subprocess.run([sys.executable, "-I", str(path)], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode in (0, 1), done.stderr
    return LINE.match(done.stdout).groups(), done.stdout, done.returncode


def case(op, layer, phase="verify"):
    return draw(op, STORE, layer, phase, "pool-fp8", default_batch(STORE.config, phase, 0, op), 0)


def kernel_outputs(inputs):
    stored = ops.BY_NAME[inputs.op].candidate(given_step(inputs, HOW), inputs.op)
    return {name: x for name, x in stored.items() if name in inputs.contract.outputs}


def negated(x, at):
    x = x.clone()
    x[at] *= -1
    return x


@pytest.mark.parametrize(
    ("op", "layer", "spoil", "operands"),
    [
        ("attn.wq_b", 2, lambda o: {"attn.wq_b": negated(o["attn.wq_b"], (7, 300))}, True),
        ("attn_norm", 2, lambda o: {"attn_norm": negated(o["attn_norm"], (3, 17))}, True),
        ("attn.core", 2, lambda o: {"attn.o_rotated": negated(o["attn.o_rotated"], (4, 5, 500))}, False),
        ("attn.wo_b.input", 0, lambda o: {"attn.wo_b.input": (o["attn.wo_b.input"][0] ^ 1, o["attn.wo_b.input"][1])}, False),
    ],
)
def test_a_spoiled_case_fails_alike_in_a_bare_interpreter(tmp_path, op, layer, spoil, operands):
    inputs = case(op, layer)
    outputs = spoil(kernel_outputs(inputs))
    verdict = judge_outputs(inputs, outputs)
    worst = max(verdict.outputs, key=lambda v: v.budget_used)
    text = from_case(inputs, outputs)
    said, everything, code = alone(text, tmp_path)
    assert said[:3] == ("FAIL", op, worst.output) and code == 1 and not verdict.passed
    assert float(said[3]) == pytest.approx(worst.budget_used) and said[4] in worst.tests
    assert all(f"{name} {at}" in everything for name, at in worst.worst.items() if name != "channels")
    assert ("computed anew" in everything) == operands
    assert len(text) < 200_000 and "import parity" not in text and "from parity" not in text
    if operands:
        damaged = standalone.unpack(re.sub(r'[\s"()]', "", text.split("DATA = (")[1].split(")\n")[0]))
        damaged["t"] = damaged["t"] * (1 + 1e-9)
        with pytest.raises(SystemExit, match="damaged"):
            standalone.check_twin(damaged)


class Stage:
    """The parts of a step that a script looks at."""

    how = HOW


def evidence(stored, expected):
    op = replace(ops.BY_NAME["attn.core"], candidate=None)
    return Evidence(Stage(), op, {"x": stored}, {"x": Expectation(expected, Places())})


def both(stored, expected):
    """Budget of the worst row's verdict here and in the script."""
    one = judge("x", stored, expected, HOW, Places())
    data = standalone.unpack(script.pack(row_data(evidence(stored, expected), one)))
    return one, standalone.verdict(data)


NUMBERS = st.sampled_from([0.0, -0.0, 1.0, 1.5, -2.0, 0.99, 2.0**-126, 1e-30, 448.0, 6.0, -5.0, 3e4])


@settings(max_examples=60)
@given(st.lists(NUMBERS, min_size=8, max_size=8), st.sampled_from([0.0, 2.0**-20, 2.0**-7]), st.integers(-3, 3),
       st.sampled_from(["f32", "bf16"]), st.integers(0, 2**32 - 1))  # fmt: skip
def test_plain_numbers_are_judged_alike(values, room, steps, form, seed):
    t = torch.tensor([values], dtype=torch.float64) * (1 + torch.rand(1, 8, generator=torch.Generator().manual_seed(seed)))
    c = (t * (1 + steps * 2.0**-9)).to({"f32": torch.float32, "bf16": torch.bfloat16}[form])
    expected = Dense(Bounded(t, room * t.abs()), form, "td", fair=False)
    one, (used, test) = both(c, expected)
    assert used == pytest.approx(one.budget_used, rel=2.0**-40) and test in one.tests


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_is_no_number_is_judged_alike(bad):
    t = torch.ones(1, 8, dtype=torch.float64)
    c = t.float().clone()
    c[0, 3] = bad
    assert both(c, Dense(Bounded(t, t / 8), "f32", "td", fair=False))[1][0] == torch.inf
    t = t.clone()
    t[0, 3] = bad
    one, (used, _) = both(c, Dense(Bounded(t, torch.ones_like(t) / 8), "f32", "td", fair=False))
    assert used == one.budget_used == 0


@pytest.mark.parametrize("grid", ["e4m3", "e2m1"])
def test_codes_are_judged_alike_to_the_last_flip(grid):
    """Random values, every code and scale moved by one, with and without room; ties and zeros among them."""
    block, floor = (64, formats.E4M3_AMAX_FLOOR) if grid == "e4m3" else (32, formats.E2M1_AMAX_FLOOR)
    rule, g = (E4M3 if grid == "e4m3" else E2M1), torch.Generator().manual_seed(3)
    for trial in range(40):
        t = torch.randn(1, 2 * block, generator=g).double()
        t[0, :9] = torch.tensor([0.0, -0.0, 0.25, -0.75, 1.25, 2.5, 5.0, 448.0 if trial % 2 else 6.0, 1.75])
        codes, scales = rule.quantize(t.float(), block, floor)
        moved = codes.clone()
        moved[0, trial % (2 * block)] ^= 1 << trial % 4
        shifted = scales.clone()
        shifted[0, trial % 2] += trial % 3 - 1
        for room in (0.0, 2.0**-6):
            expected = Codes(Bounded(t, room * t.abs()), block, floor, "td", rule)
            for stored in ((codes, scales), (moved, scales), (codes, shifted)):
                one, (used, _) = both(stored, expected)
                assert used == pytest.approx(one.budget_used)


def test_picks_and_bytes_are_judged_alike():
    t = torch.tensor([[5.0, 4.0, 3.0, 2.9, 1.0, 9.0]], dtype=torch.float64)
    expected = Selection(Bounded(t, torch.full_like(t, 0.04)), torch.tensor([5]), 4)
    for picks in ([0, 1, 2, 3], [0, 1, 2, 4], [0, 1, 1, 2], [0, 1, 2, 5], [0, 1, 2, -1], [3, 1, 0, 4]):
        one, (used, _) = both(torch.tensor([picks], dtype=torch.int32), expected)
        assert used == pytest.approx(one.budget_used)
    wrong = torch.tensor([[1, 2, 3]], dtype=torch.uint8)
    assert both(wrong, Bytes(torch.tensor([[1, 2, 4]], dtype=torch.uint8), "cd"))[1][0] == torch.inf


def test_a_biased_kernel_is_shown_by_the_signs_of_all_rows():
    t = 1 + torch.rand(400, 4, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    c = (t + 0.02).bfloat16()
    one = judge("x", c, Dense(Bounded(t, torch.full_like(t, 0.5)), "bf16", "td"), HOW, Places())
    data = row_data(evidence(c, Dense(Bounded(t, torch.full_like(t, 0.5)), "bf16", "td")), one)
    used, test = standalone.verdict(standalone.unpack(script.pack(data)))
    assert test == "bias" and used == pytest.approx(one.budget_used) and used > 1


def test_a_long_row_is_cut_around_the_worst():
    t = torch.ones(1, 3 * script.MOST, dtype=torch.float64)
    c = t.float().clone()
    c[0, 2 * script.MOST] = 2
    one = judge("x", c, Dense(Bounded(t, t / 8), "f32", "td"), HOW, Places())
    data = row_data(evidence(c, Dense(Bounded(t, t / 8), "f32", "td")), one)
    assert len(data["c"]) == script.MOST and data["c"][data["element"]] == 2
    assert standalone.verdict(data)[0] == pytest.approx(one.budget_used)


def faulty(step, op):
    """The product with one element of the wrong sign."""
    y = candidates.gemm(step, op)[op]
    return {op: negated(y, (-1, 40))}


@pytest.fixture
def failed_run(tmp_path, monkeypatch):
    """A small run of a model with one wrong product, as `v4parity run` leaves it."""
    chosen = [replace(op, candidate=faulty) if op.name == "attn.wkv" else op for op in ops.OPS]
    monkeypatch.setattr(ops, "OPS", tuple(chosen))
    monkeypatch.setattr(ops, "BY_NAME", {op.name: op for op in chosen})
    words = ["--model", "procedural:mini", "--layers", "2", "--phases", "decode", "--lengths", "5", "--start-pos", "127"]
    assert main(["run", *words, "--ops", "attn.wkv.input,attn.wkv", "--out", str(tmp_path / "run")]) == 1
    return tmp_path / "run"


def test_a_failing_record_of_a_run(failed_run, tmp_path, capsys):
    assert main(["repro", str(failed_run), "--out", str(tmp_path / "script.py")]) == 0
    said, everything, code = alone((tmp_path / "script.py").read_text(), tmp_path)
    bad = next(r for r in records.read_lines(failed_run) if r.get("verdict") == "fail")
    assert said[:3] == ("FAIL", "attn.wkv", "attn.wkv") and code == 1
    assert float(said[3]) == pytest.approx(bad["budget_used"])
    assert "channel 40" in everything and f"position {bad['outputs'][0]['worst']['position']}" in everything
    lines = records.read_lines(failed_run)
    passing = next(i for i, r in enumerate(lines) if r.get("verdict") == "pass")
    assert main(["repro", str(failed_run), "--record", str(passing), "--out", str(tmp_path / "good.py")]) == 0
    assert alone((tmp_path / "good.py").read_text(), tmp_path)[0][0] == "PASS"
    assert main(["repro", str(failed_run), "--record", "0"]) == 4
    assert "is no verdict" in capsys.readouterr().err


def test_runs_without_a_failure_or_of_another_model(tmp_path):
    with pytest.raises(BadInput, match="no verdict of this run failed"):
        script.from_run([{"record": "run"}], STORE)
