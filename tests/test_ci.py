"""The workflow and the page about CI say only what the commands understand."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from parity.cli import build_parser

ROOT = Path(__file__).parents[1]
PAGES = (ROOT / ".github/workflows/parity.yml", ROOT / "docs/ci.md")


def commands(text: str) -> list[list[str]]:
    """Words of every line that calls `v4parity`, up to what the shell does with it."""
    lines = re.findall(r"^[ $]*(?:\.venv/bin/)?v4parity (.*)$", text, re.MULTILINE)
    return [shlex.split(re.sub(r"[|>;&].*", "", line)) for line in lines]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_commands_are_understood(page):
    found = commands(page.read_text())
    assert {words[0] for words in found} >= {"run", "report"} and len(found) >= 3
    for words in found:
        build_parser().parse_args(words)


def test_a_command_that_is_not_is_seen():
    (words,) = commands("        .venv/bin/v4parity run --output x && true\n")
    with pytest.raises(SystemExit):
        build_parser().parse_args(words)


def test_the_workflow_is_yaml_and_keeps_its_report_whatever_happens():
    yaml = pytest.importorskip("yaml")
    jobs = yaml.safe_load(PAGES[0].read_text())["jobs"]
    after = [s for s in jobs["parity"]["steps"] if "report" in str(s.get("run", "")) or "upload" in str(s.get("uses", ""))]
    assert len(after) == 2 and all(s["if"] == "always()" for s in after)
    assert not any(s.get("continue-on-error") for job in jobs.values() for s in job["steps"])
