"""The report as a reader meets it: headless Chromium opens the file, clicks and types.

Without a browser these tests are skipped; where V4PARITY_BROWSER is `required`, as `.ci/run` sets it when there is one,
that is a failure.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from devtools import Browser, binary, browser
from report_pages import GALLERY, attribution, failing, of, sample, whole

from parity.records import Record
from parity.report.html import render

pytestmark = pytest.mark.xdist_group("browser")  # one browser for all
ROWS = 200  # of the table at a time
LEAST_CONTRAST = 4.5  # WCAG 2, level AA, of text on its ground
# A page with everything that these tests look for and must not find.
PLANTED = """<!doctype html><style>body { margin: 0 } div { width: 3000px; color: #777; background: #888 }</style>
<div class="ground">wide</div><img src="http://127.0.0.1:9/x.png"><script>console.error("said"); null.thrown</script>"""

# Relative luminance of a CSS colour `rgb(r, g, b)`, as WCAG 2 has it, for the two below.
LUMINANCE = """const luminance = color => {
  const [r, g, b] = color.match(/[\\d.]+/g).slice(0, 3).map(v => v / 255)
    .map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};"""
# Contrast of texts with what they stand on: the first ground that is not transparent.
CONTRASTS = """(() => { LUMINANCE
  const ground = e => {
    while (e && /, 0\\)$/.test(getComputedStyle(e).backgroundColor)) e = e.parentElement;
    return e ? getComputedStyle(e).backgroundColor : "rgb(255, 255, 255)";
  };
  const ratio = (a, b) => (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
  return [...document.querySelectorAll("body, .dim, .good, .bad, a, td button.link, #heat .s5, .ground")]
    .map(e => ratio(luminance(getComputedStyle(e).color), luminance(ground(e))));
})()""".replace("LUMINANCE", LUMINANCE)
STEPS = """(() => { LUMINANCE
  const colour = i => getComputedStyle(document.querySelector(".key .s" + i)).backgroundColor;
  return [0, 1, 2, 3, 4].map(i => luminance(colour(i)));
})()""".replace("LUMINANCE", LUMINANCE)
OVERFLOW = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
COUNT = "document.getElementById('count').textContent"
LINES = "document.querySelectorAll('#verdicts tbody tr').length"
FOCUSED = "document.activeElement.title"
INSIDE = "document.activeElement.closest('#heat') !== null"
# Cells of the map that arrow keys lead to from the first, over any way.
REACHED = """(() => { const found = new Set(), open = [document.querySelector("#heat button")];
  while (open.length) { const from = open.pop(); if (found.has(from)) continue; found.add(from);
    for (const key of ["ArrowLeft", "ArrowRight", "ArrowUp", "ArrowDown"]) { from.focus();
      from.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true })); open.push(document.activeElement); } }
  return found.size; })()"""


@pytest.fixture(scope="module")
def tab():
    program = binary()
    if program is None:
        required = os.environ.get("V4PARITY_BROWSER") == "required"
        (pytest.fail if required else pytest.skip)("no chromium on the path")
    with browser(program) as page:
        yield page


@pytest.fixture(scope="module")
def pages(tmp_path_factory) -> dict[str, Path]:
    """The gallery's sample, one that judged nothing, one that failed and has an attribution, one with all layers of V4, and
    one that does everything wrong."""
    directory = tmp_path_factory.mktemp("pages")
    run, *_, summary = sample()
    empty = [run, {**summary, "judged": 0, "passed": 0, "exit_code": 3}]
    *wrong, end = failing()
    texts = {"empty": render(empty), "failing": render([*wrong, attribution(), end]), "whole": render(whole()),
             "planted": PLANTED}  # fmt: skip
    for name, text in texts.items():
        (directory / f"{name}.html").write_text(text)
    return {"sample": GALLERY / "index.html"} | {name: directory / f"{name}.html" for name in texts}


def verdicts() -> list[Record]:
    return of(sample(), "verdict")


def column(tab: Browser, number: int) -> list[str]:
    return tab.ask(f"[...document.querySelectorAll('#verdicts tbody tr')].map(row => row.cells[{number}].textContent)")


def shown(tab: Browser) -> str:
    return tab.ask("document.querySelector('#record h3').textContent")


def test_it_opens_without_errors_or_network(tab, pages):
    for name in ("sample", "empty", "failing", "whole"):
        tab.open(pages[name])
        assert tab.errors == [] and tab.requests == [pages[name].as_uri()]


def test_errors_and_network_are_seen(tab, pages):
    tab.open(pages["planted"])
    assert any("said" in e for e in tab.errors) and any("Uncaught" in e for e in tab.errors)
    assert "http://127.0.0.1:9/x.png" in tab.requests


@pytest.mark.parametrize("width", [400, 1600])
def test_nothing_is_wider_than_the_window(tab, pages, width):
    tab.look(width)
    for name in ("sample", "failing", "whole"):
        tab.open(pages[name])
        tab.ask("document.querySelectorAll('details').forEach(d => d.open = true)")
        assert tab.ask(OVERFLOW) == 0, name
    tab.open(pages["planted"])
    assert tab.ask(OVERFLOW) == 3000 - width


def test_dark_and_light_differ_and_both_can_be_read(tab, pages):
    grounds = {}
    for scheme in ("light", "dark"):
        tab.look(scheme=scheme)
        tab.open(pages["failing"])
        grounds[scheme] = tab.ask("getComputedStyle(document.body).backgroundColor")
        contrasts = tab.ask(CONTRASTS)
        assert len(contrasts) > 20 and min(contrasts) >= LEAST_CONTRAST
        steps = tab.ask(STEPS)  # one direction of lightness: the order shows without colours
        assert steps in (sorted(steps), sorted(steps, reverse=True)) and len(set(steps)) == 5
    assert grounds["light"] != grounds["dark"]
    tab.open(pages["planted"])
    assert min(tab.ask(CONTRASTS)) < LEAST_CONTRAST
    tab.look()


def test_the_filter_keeps_what_has_all_words(tab, pages):
    tab.open(pages["sample"])
    tab.click("#filter")
    tab.write("Compressor decode csa")
    ops, phases, kinds = (column(tab, i) for i in (0, 3, 2))
    expected = sum("compressor" in r["op"] and r["phase"] == "decode" and r["kind"] == "csa" for r in verdicts())
    assert len(ops) == expected > 0 and set(phases) == {"decode"} and set(kinds) == {"csa"}
    assert all("compressor" in op for op in ops)
    assert tab.ask(COUNT) == f"{expected} of {len(verdicts())} verdicts."
    tab.write(" nothing")
    assert tab.ask(LINES) == 0


def test_a_column_s_button_sorts_it_down_then_up(tab, pages):
    tab.open(pages["sample"])
    used = sorted((r["budget_used"] for r in verdicts()), reverse=True)
    for turned, order in (("descending", used), ("ascending", used[::-1])):
        tab.click("#verdicts th button", 4)
        assert tab.ask("document.querySelectorAll('#verdicts th')[4].ariaSort") == turned
        assert column(tab, 4) == [f"{x:.3f}" for x in order[:ROWS]]
    tab.click("#verdicts th button", 0)
    assert tab.ask("document.querySelectorAll('#verdicts [aria-sort]').length") == 1
    assert column(tab, 0)[0] == max(r["op"] for r in verdicts())


def test_failures_sort_before_all_that_passed(tab, pages):
    tab.open(pages["failing"])
    tab.click("#verdicts th button", 4)
    assert column(tab, 8)[:3] == ["fail", "fail", "pass"] and column(tab, 4)[:2] == ["∞", "∞"]


def test_thousands_of_verdicts_are_drawn_by_the_hundred(tab, pages):
    tab.open(pages["whole"])
    total = tab.ask("verdicts.length")
    assert total > 5000 and tab.ask(LINES) == ROWS
    tab.click("#verdicts th button", 5)
    assert tab.ask(LINES) == ROWS
    tab.click("#more")
    assert tab.ask(LINES) == 2 * ROWS and tab.ask(COUNT) == f"{total:,} verdicts; the first {2 * ROWS} are shown."
    assert tab.ask("[...document.querySelectorAll('#heat tbody tr')].map(tr => tr.cells.length)").count(63) > 40


def test_a_click_in_the_map_shows_its_record(tab, pages):
    tab.open(pages["failing"])
    assert shown(tab) == "attn.core · layer_03 · hca"  # the first of the worst, before anything is chosen
    assert tab.ask("document.querySelector('#heat [aria-current]').title") == "attn.core, layer_03: ∞ of the budget, fail"
    assert "the expected rows shifted by one token" in tab.ask("document.getElementById('record').textContent")
    tab.click("#heat button[title^='attn.wo_a, mtp_0']")
    assert shown(tab).startswith("attn.wo_a · mtp_0")
    command = tab.ask("document.querySelector('#record pre').textContent")
    assert re.search("--ops 'attn.wo_a' --phases (prefill|decode) --lengths", command)
    tab.click("#verdicts td button", 0)
    assert shown(tab) == "embed · layer_00 · window"


def test_the_keyboard_reaches_the_map_moves_in_it_and_leaves_again(tab, pages):
    tab.open(pages["sample"])
    for _ in range(30):
        tab.press("Tab")
        if tab.ask(INSIDE):
            break
    fullest = max(verdicts(), key=lambda r: r["budget_used"])
    assert tab.ask(FOCUSED).startswith(f"{fullest['op']}, {fullest['layer_id']}: ")
    assert tab.ask("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    assert tab.ask("document.querySelectorAll('#heat button[tabindex=\"0\"]').length") == 1
    tab.click("#heat button[title^='attn.indexer.weights, layer_04']")
    for key, cell in (("ArrowLeft", "attn.indexer.weights, layer_02"), ("ArrowLeft", "attn.indexer.weights, layer_02"),
                      ("ArrowUp", "attn.indexer.wq_b, layer_02"), ("ArrowDown", "attn.indexer.weights, layer_02"),
                      ("ArrowRight", "attn.indexer.weights, layer_04")):  # fmt: skip
        tab.press(key)
        assert tab.ask(FOCUSED).split(":")[0] == cell
    tab.press("ArrowUp")
    tab.press("Enter")
    assert shown(tab) == "attn.indexer.wq_b · layer_04 · csa"
    tab.press("Tab")
    assert not tab.ask(INSIDE)


def test_arrows_lead_to_every_cell(tab, pages):
    tab.open(pages["sample"])
    assert tab.ask(REACHED) == tab.ask("document.querySelectorAll('#heat button').length") > 200


def test_cells_that_arrows_do_not_reach_are_seen(tab, pages):
    tab.open(pages["sample"])
    tab.ask("grid.splice(3, 1, [])")
    assert tab.ask(REACHED) < tab.ask("document.querySelectorAll('#heat button').length")
