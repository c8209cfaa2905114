"""Pinned drift: what counts as moved, how often an unchanged build is accused, and the committed baseline of `mini`."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path

import numpy as np
import pytest

from parity import attend, baseline, cli, records
from reference.errors import BadInput

PINNED = Path(__file__).parents[1] / "reports" / "baselines"
MINI = ["run", "--model", "procedural:mini", "--lengths", "9", "--start-pos", "127", "--phases", "decode"]
SEVERAL = "attn.compressor.*,attn.indexer.compressor.*,ffn.gate.*,head.*,attn.q"
KINDS = ("window", "csa", "csa", "hca")


def made(seed: int, scale: float = 1.0, kind: str = "", budget: float = 0.1, exit_code: int = 0) -> list[records.Record]:
    """A run of forty ops: distances vary by a tenth, budgets by a fiftieth; in layers of `kind` distances are `scale` times
    as large."""
    rng = np.random.default_rng(seed)
    said = [{"record": "run", "schema": 1, "model": "m@0", "config_sha256": "0" * 64, "engine": "e", "accumulate": "fp32",
             "profile": {"name": "p", "sites": {}}, "seed": seed, "streams": "synthetic", "layers": ["layer_00"],
             "lengths": [3], "start_pos": [], "phases": ["decode"], "ids": None,
             "ops": ["exact", *(f"op{i}" for i in range(40))]}]  # fmt: skip
    for op in said[0]["ops"]:
        for layer, of in enumerate(KINDS):
            size = 0.0 if op == "exact" else 1e-3 * (scale if of == kind else 1.0)
            share = 0.0 if op == "exact" else budget + 0.02 * rng.standard_normal()
            out = {"output": op, "distance": {"relative_l2": size * math.exp(0.1 * rng.standard_normal())}}
            said.append({"record": "verdict", "op": op, "layer_id": f"layer_{layer:02d}", "kind": of,
                         "budget_used": max(share, 0.0), "outputs": [out]})  # fmt: skip
    said.append({"record": "drift", "layer_id": "layer_00", "relative_l2": 1e-2 * math.exp(0.1 * rng.standard_normal())})
    return [*said, {"record": "summary", "exit_code": exit_code}]


@pytest.fixture(scope="module")
def pinned() -> baseline.Baseline:
    return baseline.measure([made(seed) for seed in range(8)])


@pytest.mark.parametrize(
    ("freedom", "tail", "t"),
    [(1, 0.025, 12.7062), (2, 0.025, 4.30265), (3, 0.005, 5.84091), (7, 0.005, 3.49948), (10, 0.025, 2.22814),
     (30, 0.0005, 3.64596), (1, 0.0005, 636.619)],
)  # fmt: skip
def test_student_is_that_of_the_tables(freedom, tail, t):
    assert f"{baseline.student(freedom, tail):.6g}" == f"{t:.6g}"


def test_a_figure_is_pinned_with_median_spread_and_freedom(pinned):
    of = {(f.metric, f.op, f.where): f for f in pinned.figures}
    values = [math.log(baseline.figures(made(seed))["relative_l2", "op3", "op3", "csa"]) for seed in range(8)]
    figure = of["relative_l2", "op3", "csa"]
    assert math.isclose(math.log(figure.median), float(np.median(values)), rel_tol=baseline.SUMS)
    assert figure.freedom == 3 * 7 and 0.05 < figure.spread < 0.2
    assert of["budget_used", "op3", ""].freedom == 7 and of["relative_l2", "drift rounding", ""].freedom == 7
    assert of["relative_l2", "exact", "csa"].spread == 0


def test_an_unchanged_build_is_not_accused(pinned):
    assert [seed for seed in range(100, 200) if baseline.compare(pinned, made(seed))] == []


def test_a_change_of_one_kind_of_layer_is_named_with_its_size(pinned):
    said = made(300, scale=3.0, kind="hca")
    moves = baseline.compare(pinned, said)
    assert {(m.figure.op, m.figure.where) for m in moves} == {(f"op{i}", "hca") for i in range(40)}
    assert all(m.worse and m.spreads > m.limit for m in moves)
    f, now, spreads = moves[0].figure, moves[0].now, moves[0].spreads
    assert f"{f.op} hca: relative_l2 rose from {f.median:.3g} to {now:.3g}, {spreads:.1f} spreads" in str(moves[0])
    assert [m.spreads for m in moves] == sorted((m.spreads for m in moves), reverse=True)


def test_better_is_said_and_is_not_worse(pinned):
    moves = baseline.compare(pinned, made(301, scale=1 / 3, kind="csa"))
    assert len(moves) == 40 and not any(m.worse for m in moves) and "fell from" in str(moves[0])


def test_a_budget_moves_by_more_than_four_flipped_rows(pinned):
    up = baseline.compare(pinned, made(302, budget=0.1 + 2 * baseline.FLIPPED_ROWS))
    assert {m.figure.metric for m in up} == {"budget_used"} and len(up) == 40
    assert baseline.compare(pinned, made(303, budget=0.1 + baseline.FLIPPED_ROWS / 4)) == []


@pytest.mark.parametrize("field", ["budget_used", "relative_l2"])
def test_what_nothing_excuses_has_moved(pinned, field):
    said = made(304)
    for r in (r for r in said if r["record"] == "verdict" and r["op"] == "op5"):
        r |= {"budget_used": None} if field == "budget_used" else {"outputs": [{"output": "op5", "distance": {field: None}}]}
    moves = baseline.compare(pinned, said)
    assert {(m.figure.op, m.figure.metric) for m in moves} == {("op5", field)} and all(math.isinf(m.spreads) for m in moves)


def test_exact_stays_exact(pinned):
    said = made(305)
    next(r for r in said if r.get("op") == "exact")["outputs"][0]["distance"]["relative_l2"] = 1e-9
    (move,) = baseline.compare(pinned, said)
    assert (move.figure.op, move.figure.where, move.now) == ("exact", "window", 1e-9)


@pytest.mark.parametrize(("step", "moved"), [(baseline.UNIT / 2.1, []), (baseline.UNIT * 2, ["table"])])
def test_a_figure_without_spread_may_move_by_half_a_unit_of_float32(step, moved):
    """A table of sines is the same for all seeds, and another processor rounds it otherwise."""

    def run(seed: int, distance: float) -> list[records.Record]:
        said = made(seed)
        said[1] = {**said[1], "op": "table", "outputs": [{"output": "table", "distance": {"relative_l2": distance}}]}
        return said

    pinned = baseline.measure([run(seed, 2e-8) for seed in range(4)])
    assert [m.figure.op for m in baseline.compare(pinned, run(9, 2e-8 + step))] == moved


def test_a_lost_figure_is_missed_unless_its_op_was_not_asked_for(pinned):
    said = made(306)
    kept = [r for r in said if r.get("op") != "op7" or r["kind"] != "csa"]
    assert {(f.op, f.where) for f in baseline.lost(pinned, kept)} == {("op7", "csa")}
    kept[0] = {**kept[0], "ops": [op for op in kept[0]["ops"] if op != "op7"]}
    assert baseline.lost(pinned, kept) == []


def test_a_lost_curve_is_missed_where_whole_layers_ran():
    """Rounding's own drift is in every run; the candidate's only where it was asked for."""

    def run(seed: int, *without: str, drift: bool) -> list[records.Record]:
        said = made(seed)
        said[0]["drift"] = drift
        free = [{"record": name, "curve": "free", "layer_id": "layer_00", "relative_l2": 0.01} for name in ("drift", "logits")]
        kept = [*said[:-1], *free]
        return [*(r for r in kept if f"{r['record']} {r.get('curve', 'rounding')}" not in without), said[-1]]

    pinned = baseline.measure([run(seed, drift=True) for seed in range(4)])
    for lost in ("drift free", "logits free", "drift rounding"):
        assert [f.op for f in baseline.lost(pinned, run(9, lost, drift=True))] == [lost]
    assert baseline.lost(pinned, run(9, "drift free", "logits free", drift=False)) == []
    assert len(baseline.lost(pinned, run(9, "drift rounding", drift=False))) == 1


@pytest.mark.parametrize("field", [*baseline.SAME, "profile"])
def test_another_run_is_not_compared(pinned, field):
    said = made(307)
    said[0][field] = {"name": "p", "sites": {"x": 1}} if field == "profile" else "other"
    with pytest.raises(BadInput, match=field):
        baseline.compare(pinned, said)
    with pytest.raises(BadInput, match=field):
        baseline.measure([made(1), made(2), said])


def written(directory: Path, said: list[records.Record]) -> str:
    directory.mkdir()
    records.write_lines(directory / records.FILE, said)
    return str(directory)


def test_the_commands_pin_check_and_never_roll(tmp_path, capsys):
    runs = [written(tmp_path / f"{seed}", made(seed)) for seed in range(4)]
    home = ["--baselines", str(tmp_path / "pinned")]
    assert cli.main(["baseline", "check", runs[0], *home]) == 4
    assert cli.main(["baseline", "update", *runs[:2], *home]) == 2
    assert cli.main(["baseline", "update", *runs[:2], runs[1], *home]) == 2
    failed = written(tmp_path / "failed", made(9, exit_code=1))
    assert cli.main(["baseline", "update", *runs, failed, *home]) == 4
    assert not (tmp_path / "pinned").exists()
    assert cli.main(["baseline", "update", *runs, *home]) == 0
    (path,) = (tmp_path / "pinned").iterdir()
    assert path.name == "m-0-p.json" and baseline.read(path) == baseline.measure([made(seed) for seed in range(4)])
    before = path.read_bytes()
    worse = written(tmp_path / "worse", made(10, scale=20.0, kind="hca"))
    better = written(tmp_path / "better", made(11, scale=1 / 20, kind="hca"))
    capsys.readouterr()
    assert [cli.main(["baseline", "check", run, *home]) for run in (runs[0], better, worse)] == [0, 0, 1]
    out = capsys.readouterr().out
    assert out.count("WORSE") == out.count("better  op") == 40 and "40 worse, 0 better, 0 missing" in out
    lost = written(tmp_path / "lost", [r for r in made(12) if r.get("op") != "op7"])
    assert cli.main(["baseline", "check", lost, *home]) == 3
    assert path.read_bytes() == before
    others = [written(tmp_path / f"new{seed}", made(seed, scale=20.0, kind="hca")) for seed in range(3)]
    capsys.readouterr()
    assert cli.main(["baseline", "update", *others, *home]) == 0
    assert capsys.readouterr().out.count("rose from") == 40 and path.read_bytes() != before


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"schema": 2}', '{"schema": 1, "identity": {}, "seeds": [], "figures": [{"op": 1}]}']
)
def test_a_damaged_baseline_is_refused(tmp_path, text, capsys):
    run = written(tmp_path / "run", made(0))
    (tmp_path / "m-0-p.json").write_text(text)
    assert cli.main(["baseline", "check", run, "--baselines", str(tmp_path)]) == 4
    assert "m-0-p.json" in capsys.readouterr().err


def fresh(out: Path, ops: str, seed: int = 2026) -> int:
    words = [*MINI, "--ops", ops, "--seed", str(seed), "--out", str(out)]
    return cli.main(words)


def check(out: Path) -> int:
    return cli.main(["baseline", "check", str(out), "--baselines", str(PINNED)])


def test_the_committed_baseline_holds_for_a_new_seed(tmp_path):
    assert fresh(tmp_path, SEVERAL) == 0 and check(tmp_path) == 0
    pinned = baseline.read(baseline.file_of(PINNED, records.read_lines(tmp_path)))
    assert 2026 not in pinned.seeds and len(pinned.seeds) >= 8


@pytest.mark.slow
@pytest.mark.parametrize("seed", [2026, 2027])
def test_the_committed_baseline_holds_for_every_op(tmp_path, seed):
    assert fresh(tmp_path, "*", seed) == 0 and check(tmp_path) == 0


def test_a_drift_that_no_bound_sees_has_moved(tmp_path, monkeypatch, capsys):
    """A product that is off by 2**-21: a few hundredths of its budget, and four times its usual distance."""
    honest = attend.gemm_bf16
    monkeypatch.setattr(attend, "gemm_bf16", lambda *words, **more: honest(*words, **more) * (1 + 2.0**-21))
    assert fresh(tmp_path, "attn.compressor.values") == 0
    capsys.readouterr()
    assert check(tmp_path) == 1
    worse = [line for line in capsys.readouterr().out.splitlines() if line.startswith("WORSE")]
    assert {line.split()[1] for line in worse} == {"attn.compressor.values"} and all("rose from" in line for line in worse)


def test_the_committed_file_is_as_the_command_writes_it(tmp_path):
    for path in PINNED.glob("*.json"):
        baseline.write(baseline.read(path), tmp_path / path.name)
        assert (tmp_path / path.name).read_bytes() == path.read_bytes()
        assert json.loads(path.read_text())["identity"]["model"].startswith("procedural:")
    assert len(list(tmp_path.iterdir())) == len(list(PINNED.glob("*.json"))) > 0


def test_measuring_changes_no_record():
    runs = [made(seed) for seed in range(3)]
    kept = copy.deepcopy(runs)
    baseline.measure(runs)
    assert runs == kept
