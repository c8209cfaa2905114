"""What the docs say in tables is what the code does."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from reference.rounding import SITES, profile

ROOT = Path(__file__).parent.parent
PROFILES = ("qat", "official", "pool-bf16", "pool-fp8")


def table_of_sites(text: str) -> dict[str, dict[str, str]]:
    """docs/model.md §11: profile -> site -> format as the page writes it."""
    found: dict[str, dict[str, str]] = {name: {} for name in PROFILES}
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) != 5 or not cells[0].startswith("`") or not set(re.findall(r"`([^`]+)`", cells[0])) <= SITES:
            continue
        for name, cell in zip(PROFILES, cells[1:], strict=True):
            for site in re.findall(r"`([^`]+)`", cells[0]):
                found[name] |= {site: cell} if cell != "–" else {}
    return found


def shown(name: str) -> dict[str, str]:
    def text(r):
        return r.format + (f"_{r.block}" if r.block else "") + (f"+{r.kept}" if r.kept else "")

    return {site: text(rounding) for site, rounding in profile(name).sites.items()}


@pytest.mark.parametrize("name", PROFILES)
def test_the_table_of_sites_is_the_profile(name):
    page = (ROOT / "docs/model.md").read_text()
    assert table_of_sites(page)[name] == shown(name)
    moved = page.replace("| `attn.q` | –", "| `attn.q` | bf16", 1)
    assert moved != page
    assert table_of_sites(moved)["qat"] != shown("qat")


@pytest.mark.parametrize("source", sorted(p for d in ("reference", "parity", "optimized") for p in (ROOT / d).rglob("*.py")),
                         ids=lambda p: str(p.relative_to(ROOT)))  # fmt: skip
def test_cited_sections_exist(source):
    for page, section in re.findall(r"(docs/\w+\.md) §(\d+(?:\.\d+)?)", source.read_text()):
        assert re.search(rf"^#+ {re.escape(section)}\b", (ROOT / page).read_text(), re.MULTILINE), f"{page} has no §{section}"
