"""The HTML file: what it says about a run that passed, failed, judged nothing; that it stands alone and holds no markup of
others; the gallery's sample."""

from __future__ import annotations

import json
import math
import re
from html.parser import HTMLParser
from typing import Any

import pytest
import torch
from report_pages import GALLERY, failing, lost, of, sample, spoil, whole

from parity import candidates, cli, records
from parity.report import curves, table
from parity.report.html import MOST, data, flips, heatmap, missing, percent, render, step
from parity.report.terminal import reproduce


class Page(HTMLParser):
    """Checks that tags close, and collects what the page loads and what a reader reads."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.loads: list[str] = []
        self.words: list[str] = []
        self.data: dict[str, Any] = {}
        self.feed(text)
        assert self.open == []
        self.said = " ".join(" ".join(self.words).split())

    def handle_starttag(self, tag, attrs):
        self.loads += [value for name, value in attrs if name in ("src", "href", "srcset") and not value.startswith("#")]
        if tag not in ("meta", "br", "input", "img", "link"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        pass

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, text):
        if self.open and self.open[-1] == "script" and text.startswith("{"):
            self.data = json.loads(text)
        elif self.open and self.open[-1] not in ("script", "style"):
            self.words.append(text)


@pytest.fixture
def clean() -> list[records.Record]:
    return sample()


def test_the_gallery_is_what_its_records_say(clean):
    page = (GALLERY / "index.html").read_text()
    assert render(clean) == page
    clean[5]["elements"] += 1
    assert render(clean) != page


@pytest.mark.parametrize("make", [sample, failing, lambda: whole(7)], ids=["sample", "failing", "every layer"])
def test_the_page_is_whole_and_loads_nothing(make):
    text = render(make())
    assert Page(text).loads == []
    assert not re.search(r"https?:|@import|url\(", text)
    assert "prefers-color-scheme: dark" in text and 'name="viewport"' in text


@pytest.mark.parametrize("planted", ['<img src="a.png">', '<link href="a.css">', '<a href="b.html">b</a>'])
def test_what_a_page_loads_is_seen(clean, planted):
    assert Page(render(clean).replace("</header>", planted + "</header>")).loads


def test_a_run_that_passed_says_so_first_and_what_it_left_out(clean):
    said, summary = Page(render(clean)).said, clean[-1]
    assert "Every chosen op was judged in every chosen phase." in said and "judged nowhere;" not in said
    clean[-1:-1] = [lost("streams", "decode", "no kernel of its own"), lost("norm", "chunk", "no memory")]
    summary["not_run"] = 2
    said = Page(render(clean)).said
    assert f"✓ Right: all {summary['judged']} verdicts passed." in said
    assert "Not covered: 2 ops judged nowhere ;" in said and all(said.count(note) == 2 for note in summary["notes"])
    assert all(r["reason"] in said for r in of(clean, "not_run"))
    assert "✗ Wrong" not in said and "First wrong op" not in said


def test_a_run_that_failed_names_the_first_wrong_op_its_place_and_a_command():
    records = failing()
    said = Page(render(records)).said
    assert f"✗ Wrong: 2 of {records[-1]['judged']} verdicts failed." in said
    place = "token 2, head 5, sequence 1, position 257, channels 48–64"
    first = "sequence 1 position 257, head 5, channels 48..63: output attn.o_rotated is the expected rows shifted by one token."
    assert f"First wrong op: attn.core, layer_03, decode, {first}" in said
    wrong = [r for r in of(records, "verdict") if r["verdict"] == "fail"]
    assert [r["layer_id"] for r in wrong] == ["layer_03", "layer_04"]
    assert all(reproduce(records[0], r) in said for r in wrong) and "budget used ∞; worst at " + place in said


def test_a_planted_fault_is_the_page_s_first_word(tmp_path, monkeypatch):
    honest = candidates.gemm_fp8

    def wrong(*operands):
        y = honest(*operands)
        y.view(torch.int16)[0, 40] += 1
        return y

    monkeypatch.setattr(candidates, "gemm_fp8", wrong)
    words = ["--layers", "2", "--lengths", "5", "--start-pos", "127", "--ops", "attn.wq_a", "--phases", "decode"]
    assert cli.main(["run", "--model", "procedural:mini", *words, "--out", str(tmp_path / "run")]) == 1
    said = Page((tmp_path / "run" / "index.html").read_text()).said
    assert "✗ Wrong: 1 of 1 verdicts failed." in said
    assert "First wrong op: attn.wq_a, layer_02, decode, sequence 0 position 5, channel 40." in said


def test_failures_beyond_the_first_are_counted(clean):
    for r in of(clean, "verdict")[: MOST + 3]:
        spoil(clean, r["op"], r["layer_id"], r["phase"])
    said = Page(render(clean)).said
    assert said.count("worst at token") == MOST and "And 3 more outputs" in said


def test_an_incomplete_run_does_not_read_as_right(clean):
    clean[-1]["exit_code"] = 3
    assert f"Incomplete: {clean[-1]['judged']} verdicts passed, and something" in Page(render(clean)).said
    empty = [clean[0], *of(clean, "not_run"), {**clean[-1], "judged": 0, "passed": 0}]
    said = Page(render(empty)).said
    assert "Incomplete: nothing was judged." in said and "Right" not in said


def test_records_of_one_module_and_without_volatile_fields_make_a_page(clean):
    part = table.of_module([{**r, "volatile": {}} for r in clean], "compressor")
    page = Page(render(part))
    assert {row["op"] for row in heatmap(part[0], of(part, "verdict"))["rows"]} == set(page.data["words"]["op"])
    assert "attn.core" not in page.said and "Drift" not in page.said


HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(1)>\" ' &amp; {{ 7*7 }}"


def poison(value: Any, keep: tuple[str, ...] = ("record", "verdict", "layer_id", "kind", "curve")) -> Any:
    """Hostile text in every string of a record but those that steer the page."""
    if isinstance(value, dict):
        return {name: x if name in keep else poison(x) for name, x in value.items()}
    if isinstance(value, list):
        return [poison(x) for x in value]
    return HOSTILE if isinstance(value, str) else value


def test_text_in_records_stays_text():
    records = failing()
    few = [r for r in of(records, "verdict") if r["op"] == "attn.core"][:8]
    hostile = [poison(r) for r in [records[0], *few, *of(records, "drift"), *of(records, "not_run"), records[-1]]]
    text = render(hostile)
    assert "<script>alert" not in text and "<img" not in text and text.count("</script>") == 2
    page = Page(text)
    assert page.data["words"]["op"] == [HOSTILE] and page.data["verdicts"][0][-1][0][0] == HOSTILE
    assert page.said.count(" ".join(HOSTILE.split())) > 10 and page.loads == []


def test_layers_and_kinds_are_text_too(clean):
    for r in of(clean, "verdict") + of(clean, "drift"):
        r |= {"layer_id": HOSTILE, "kind": HOSTILE}
    text = render(clean)
    assert "<script>alert" not in text and "<img" not in text


def test_the_script_is_given_every_verdict(clean):
    given = Page(render(clean)).data
    verdicts = of(clean, "verdict")
    assert len(given["verdicts"]) == len(verdicts) == clean[-1]["judged"]
    for row, r in zip(given["verdicts"], verdicts, strict=True):
        names = [given["words"][name][i] for name, i in zip(("op", "layer_id", "phase", "bound"), row, strict=False)]
        assert names == [r["op"], r["layer_id"], r["phase"], r["bound"]] and given["kinds"][r["layer_id"]] == r["kind"]
        assert row[4:9] == [1, r["budget_used"], r["relative_l2"], r["flips"], r["elements"]]
        assert [o[:2] for o in row[9]] == [[o["output"], o["storage"]] for o in r["outputs"]]
        filled = given["command"].replace("{op}", r["op"]).replace("{layer}", r["layer_id"]).replace("{phase}", r["phase"])
        assert filled == reproduce(clean[0], r)


def test_a_share_that_nothing_excuses_stays_legal_json():
    records = failing()
    of(records, "verdict")[0]["relative_l2"] = math.nan
    rows = json.loads(json.dumps(data(records[0], of(records, "verdict")), allow_nan=False))["verdicts"]
    assert sum(row[5] is None and row[4] == 0 for row in rows) == 2 and rows[0][6] is None


def test_heat_steps_at_their_limits():
    assert [step(x) for x in (0.0, 0.03, 0.031, 0.1, 0.3, 0.31, 1.0, 1.01, math.inf)] == [0, 1, 2, 2, 3, 4, 4, 5, 5]


def test_the_map_shows_the_worst_phase_and_what_is_not_there(clean):
    verdict = spoil(clean, "attn.core", "layer_03", "decode")
    verdict["budget_used"] = 0.2  # failed by a test of its rows alone
    heat = heatmap(clean[0], [r for r in of(clean, "verdict") if r["op"] != "norm"])
    assert [name for name, _ in heat["layers"]] == clean[0]["layers"]
    rows = {row["op"]: row["cells"] for row in heat["rows"]}
    assert list(rows) == clean[0]["ops"] and rows["norm"] is None
    assert rows["attn.core"][3] == {"step": 5, "words": "attn.core, layer_03: 0.200 of the budget, fail"}
    assert [c is not None for c in rows["attn.indexer.q"]] == [False, False, True, False, True, False]
    largest = max(r["budget_used"] for r in of(clean, "verdict") if (r["op"], r["layer"]) == ("attn.wo_a", 0))
    assert f"{largest:.3f} of the budget" in rows["attn.wo_a"][0]["words"]


def test_what_was_not_run_is_grouped_by_reason():
    found = missing([lost("a", "decode", "x"), lost("a", "chunk", "x"), lost("b", "decode", "x"), lost("b", "chunk", "x"),
                     lost("c", "decode", "x"), lost("d", "decode", "x", True)])  # fmt: skip
    assert [(m["ops"], m["phases"], m["required"]) for m in found] == [
        (["a", "b"], ("decode", "chunk"), False), (["c"], ("decode",), False), (["d"], ("decode",), True)
    ]  # fmt: skip


def test_flips_count_all_elements_of_an_output_that_has_any():
    def verdict(op, *outputs):
        return {"op": op, "outputs": [dict(zip(("output", "storage", "flips", "elements"), o, strict=True)) for o in outputs]}

    found = flips([verdict("x", ("a", "bf16", 0, 60), ("b", "bf16", 0, 5)),
                   verdict("x", ("a", "bf16", 3, 40), ("a", "e4m3", 2, 4)),
                   verdict("y", ("a", "bf16", 0, 7), ("b", "none", 0, 0))])  # fmt: skip
    counts = [(f["op"], f["output"], f["storage"], f["flips"], f["elements"], f["share"]) for f in found]
    assert counts == [("x", "a", "e4m3", 2, 4, 0.5), ("x", "a", "bf16", 3, 100, 0.03)]
    assert [percent(x) for x in (0.5, 0.1, 0.0999, 0.03, 1e-7)] == ["50 %", "10 %", "10 %", "3 %", "1e-05 %"]


def drift(layer: str, size: float | None, phase: str = "decode", **more: Any) -> dict[str, Any]:
    return {"record": "drift", "layer_id": layer, "phase": phase, "relative_l2": size, **more}


def test_curves_lie_on_a_logarithmic_axis():
    drawn = curves.panels([drift("layer_00", 1e-3), drift("layer_01", 1e-2), drift("mtp_0", 1e-1)])
    (line,) = drawn["phases"]["decode"]
    axes = curves.Axes(("layer_00", "layer_01", "mtp_0"), -3, 0)
    assert axes.y(0) == curves.TOP and axes.y(-3) == curves.HEIGHT - curves.BOTTOM
    assert axes.y(-2) - axes.y(-1) == pytest.approx(axes.y(-1) - axes.y(0))
    assert [y for _, y, *_ in line["dots"]] == [f"{axes.y(e):.1f}" for e in (-3, -2, -1)]
    assert [name for _, name in drawn["ticks"]] == ["0", "1", "mtp 0"]
    assert [name for _, name in drawn["decades"]] == ["1e0", "1e-1", "1e-2", "1e-3"]
    assert float(line["dots"][0][0]) == curves.LEFT and float(line["dots"][2][0]) == curves.WIDTH - curves.RIGHT


def test_curves_of_older_and_newer_records():
    assert curves.panels([]) is None and curves.panels([drift("layer_00", 0.0)]) is None
    drawn = curves.panels([drift("layer_00", 0.1), drift("layer_00", 0.0, curve="forced"),
                           drift("layer_00", 0.2, curve="free", predicted=0.3)])  # fmt: skip
    assert list(drawn["curves"]) == ["rounding", "forced", "free", "predicted"]
    assert drawn["rows"] == [("layer_00", [0.1, 0.0, 0.2, 0.3])]
    assert [len(line["dots"]) for line in drawn["phases"]["decode"]] == [1, 0, 1, 1]


def test_what_else_drift_records_hold_is_shown(clean):
    def share(layer, curve, experts):
        return drift(layer, 0.1, curve=curve, flips={"experts": experts})

    found = curves.choices([share("layer_00", "free", 0.1), share("layer_00", "forced", 0.0), share("layer_01", "free", 0.3)])
    assert [(c["curve"], c["mean"], c["largest"], c["at"]) for c in found] == [
        ("free", 0.2, 0.3, "layer_01"), ("forced", 0.0, 0.0, "layer_00")
    ]  # fmt: skip
    logits = {"record": "logits", "layer_id": "layer_04", "phase": "decode", "curve": "free", "relative_l2": 0.02,
              "kl_mean": 3.1e-4, "kl_p99": 4.2e-4, "kl_max": None, "top1": 0.875, "overlap": 1.0, "k": 10,
              "worst": {"sequence": 3, "position": 36}}  # fmt: skip
    fallen = drift("layer_01", None, curve="free", error="ValueError: <b>", flips={"picks": 0.25})
    said = Page(render([*clean[:-1], logits, fallen, clean[-1]])).said
    assert "2.0e-02 3.1e-04 4.2e-04 – 88 % 100 % sequence 3, position 36" in said
    assert "layer_01, decode, free: the layer did not run: ValueError: <b>" in said
    assert "free decode picks 25 % 25 % layer_01" in said


def test_many_layers_keep_few_labels():
    said = curves.panels([drift(f"layer_{i:02d}", 10.0 ** -(i % 23)) for i in range(61)])
    assert len(said["ticks"]) <= curves.LABELS and len(said["decades"]) <= curves.LABELS
