"""Renderings of records for other programs: JUnit, Markdown, CSV; one module of a run."""

from __future__ import annotations

import copy
import math
from xml.etree import ElementTree as xml

import pandas as pd
import pytest

from parity import cli, records
from parity.report import junit, markdown, table

RUN = ["run", "--model", "procedural:mini", "--layers", "2", "--lengths", "5", "--start-pos", "127", "--phases", "decode"]
OPS = ["--ops", "attn.wq_a*,attn.compressor.*,attn.indexer.compressor.values,embed"]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """A CSA layer; `embed` is asked for and no layer has it, so the run is incomplete."""
    out = tmp_path_factory.mktemp("run")
    assert cli.main([*RUN, *OPS, "--out", str(out)]) == 3
    return out


@pytest.fixture
def clean(directory) -> list[records.Record]:
    return records.read_lines(directory)


def output_of(said: list[records.Record], op: str) -> records.Record:
    (verdict,) = [r for r in said if r["record"] == "verdict" and r["op"] == op]
    return verdict["outputs"][0]


@pytest.fixture
def failed(clean) -> list[records.Record]:
    """The same with one output that nothing excuses, whose place holds what no format likes to hold."""
    said = copy.deepcopy(clean)
    (verdict,) = [r for r in said if r["record"] == "verdict" and r["op"] == "attn.wq_a"]
    hostile = "a|b <script> & \"q\", `c` \x1b[31m *x*"
    verdict |= {"verdict": "fail", "budget_used": None}
    bad = {"verdict": "fail", "budget_used": None, "failing_rows": 1, "worst": {"token": 3, "error": hostile}}
    verdict["outputs"][0] |= bad
    said[-1] |= {"failed": 1, "passed": said[-1]["passed"] - 1, "exit_code": 1}
    return said


def verdicts(said: list[records.Record]) -> list[records.Record]:
    return [r for r in said if r["record"] == "verdict"]


def test_junit_has_a_case_for_every_verdict_with_its_numbers(clean):
    (suite,) = xml.fromstring(junit.render(clean))
    cases = suite.findall("testcase")
    ids = [f"layer_02-csa-{r['op']}-decode" for r in verdicts(clean)]
    assert [c.get("name") for c in cases] == [*ids, "embed-decode"]
    assert int(suite.get("tests")) == len(cases) and suite.get("failures") == "0"
    first = {p.get("name"): p.get("value") for p in cases[0].find("properties")}
    assert first["budget_used"] == f"{verdicts(clean)[0]['budget_used']:.3f}"
    about = {p.get("name"): p.get("value") for p in suite.find("properties")}
    assert (about["model"], about["profile"], about["seed"]) == (clean[0]["model"], "pool-fp8", "0")


def test_junit_tells_failed_required_and_merely_missing_apart(failed):
    (suite,) = xml.fromstring(junit.render(failed))
    (failure,) = suite.iter("failure")
    assert "budget used ∞ in 1 of" in failure.get("message") and "token 3" in failure.get("message")
    assert "\x1b" not in failure.text and "--ops 'attn.wq_a'" in failure.text
    (error,) = suite.iter("error")
    assert "no chosen layer has it" in error.get("message") and suite.get("errors") == "1"
    asked_nothing = copy.deepcopy(failed)
    for r in (r for r in asked_nothing if r["record"] == "not_run"):
        r["required"] = False
    (suite,) = xml.fromstring(junit.render(asked_nothing))
    assert suite.find(".//error") is None and suite.find(".//skipped") is not None and suite.get("skipped") == "1"


def test_markdown_has_failures_first_and_cells_that_stay_cells(failed, clean):
    text = markdown.render(failed)
    assert text.startswith("### v4parity: 1 of ")
    rows = [line for line in text.splitlines() if line.startswith("| layer\\_02 | decode | attn.wq\\_a |")]
    assert len(rows) == 1 and rows[0].replace("\\|", "").count("|") == 8 and "<script>" not in text.replace("\\<", "")
    assert text.index("| layer\\_02") < text.index("Passed, with") < text.index("Not run")
    assert "v4parity run --layers 02 --ops 'attn.wq_a'" in text
    assert "incomplete" in markdown.render(clean).splitlines()[0]
    assert "all 3 verdicts passed" in markdown.render([clean[0], {**clean[-1], "exit_code": 0, "judged": 3}])


def test_markdown_stays_short(failed):
    (bad,) = [r for r in failed if r["record"] == "verdict" and r["verdict"] == "fail"]
    text = markdown.render([*failed[:-1], *[bad] * 200, failed[-1]])
    assert len(text.splitlines()) < 60 and "… and 181 more outputs" in text


def test_csv_is_one_row_an_output_and_reads_back(failed, tmp_path):
    (tmp_path / "run.csv").write_text(table.csv(failed))
    back = pd.read_csv(tmp_path / "run.csv")
    outputs = [(r["op"], o["output"]) for r in verdicts(failed) for o in r["outputs"]]
    assert list(zip(back["op"], back["output"], strict=True)) == outputs
    (bad,) = back[back["verdict"] == "fail"].to_dict("records")
    assert bad["budget_used"] == math.inf and "token 3" in bad["worst"]
    exact = output_of(failed, "attn.compressor.values")
    (good,) = back[(back["op"] == "attn.compressor.values") & (back["output"] == exact["output"])].to_dict("records")
    assert good["relative_l2"] == exact["distance"]["relative_l2"] and good["test_element"] == exact["tests"]["element"]
    assert list(table.frame([failed[0], failed[-1]]).columns) == list(table.FIRST)  # nothing judged


@pytest.mark.parametrize(
    ("module", "names"),
    [
        ("compressor", {"attn.compressor.values", "attn.compressor.row", "attn.compressor.state",
                        "attn.indexer.compressor.values"}),
        ("attn.compressor", {"attn.compressor.values", "attn.compressor.row", "attn.compressor.state"}),
        ("indexer", {"attn.indexer.compressor.values"}),
        ("embed", {"embed"}),
    ],
)  # fmt: skip
def test_a_module_is_part_of_a_name(clean, module, names):
    """And its records are those of a run that asked for no more."""
    part = table.of_module(clean, module)
    assert {r["op"] for r in part[1:-1]} == names and part[0]["ops"] == [op for op in clean[0]["ops"] if op in names]
    assert part[-1]["judged"] == part[-1]["passed"] == len(verdicts(part))
    assert part[-1]["exit_code"] == (3 if module == "embed" else 0)


def test_an_op_is_of_no_module_that_only_begins_like_it(clean):
    with pytest.raises(ValueError, match="no op of this run has 'comp'"):
        table.of_module(clean, "comp")


def test_the_failures_of_a_module_are_counted_again(failed):
    assert table.of_module(failed, "wq_a")[-1]["exit_code"] == 1
    assert table.of_module(failed, "compressor")[-1]["exit_code"] == 0


def test_drift_by_kind_names_the_worst_place(clean):
    said = copy.deepcopy(clean)
    other = copy.deepcopy(next(r for r in said if r.get("op") == "attn.compressor.values"))
    other |= {"layer_id": "layer_04", "phase": "verify"}
    for o in other["outputs"]:
        o["budget_used"], o["distance"]["relative_l2"], o["flips"] = 0.9, 1.0, 7
    rows = {(r["op"], r["output"]): r for r in table.drift([*said[:-1], other, said[-1]]).to_dict("records")}
    row = rows["attn.compressor.values", "attn.compressor.values"]
    one = output_of(clean, "attn.compressor.values")["distance"]["relative_l2"]
    assert (row["verdicts"], row["budget_used"], row["at"], row["largest_l2"]) == (2, 0.9, "layer_04 verify", 1.0)
    assert row["median_l2"] == (one + 1.0) / 2 and row["flips"] == 7 + output_of(clean, "attn.compressor.values")["flips"]


def test_the_command_writes_what_is_asked_and_prints_otherwise(directory, tmp_path, capsys):
    files = {"--junit": "r.xml", "--md": "r.md", "--csv": "r.csv", "--html": "r.html"}
    words = [word for option, name in files.items() for word in (option, str(tmp_path / name))]
    assert cli.main(["report", str(directory), *words]) == 0
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(files.values())
    assert capsys.readouterr().out.split() == [str(tmp_path / n) for n in ("r.html", "r.md", "r.xml", "r.csv")]
    assert cli.main(["report", str(directory), "--module", "compressor", "--csv", str(tmp_path / "m.csv")]) == 0
    assert set(pd.read_csv(tmp_path / "m.csv")["op"].str.contains("compressor")) == {True}
    assert cli.main(["report", str(directory), "--module", "compressor"]) == 0
    out = capsys.readouterr().out
    assert "largest L2" in out and "attn.wq_a" not in out
    assert cli.main(["report", str(directory), "--module", "nothing"]) == 2
    assert cli.main(["report", str(directory), "--csv", str(tmp_path / "absent" / "x.csv")]) == 4
