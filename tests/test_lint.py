"""What ruff and mypy do not know: who may import whom, tolerances without a name, sizes, and places that do not travel."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("reference", "optimized", "parity")
SOURCES = sorted(path for package in (*PACKAGES, "tests") for path in (ROOT / package).rglob("*.py"))
TEXTS = sorted({*SOURCES, *ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), ROOT / "Makefile", ROOT / "pyproject.toml"})

MAY_IMPORT = {
    "reference": ("reference",),
    "optimized": ("optimized", "reference.config", "reference.checkpoint", "reference.formats", "reference.errors"),
    "parity": ("parity", "reference", "optimized"),
}
LONGEST_FILE, LONGEST_FUNCTION = 400, 80
SHORTEST_FORMULA = 60  # characters of a function's body
LARGEST_TOLERANCE = 0.01  # a smaller number on the right of "<" in an assertion is a tolerance
TOLERANCE_WORDS = {"atol", "rtol", "abs_tol", "rel_tol"}
# Paths and hosts of the machine this was written on: spelt apart, as this file is searched too.
ELSEWHERE = re.compile("|".join(("/" + "work/", r"\.\./" + "shared", r"https?://[^\s\"')]*" + "registry", "/" + "tmp/")))


def imports(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def forbidden_imports(package: str, source: str) -> list[str]:
    ours = [name for name in imports(ast.parse(source)) if name.split(".")[0] in PACKAGES]
    return [name for name in ours if not any(f"{name}.".startswith(f"{allowed}.") for allowed in MAY_IMPORT[package])]


def is_number(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, (int, float)) and not isinstance(node.value, bool)


def literal_tolerances(source: str) -> list[int]:
    """Lines with atol=1e-5 or the like, or an assertion that something is below such a number."""
    lines = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            words = TOLERANCE_WORDS | ({"abs", "rel"} if ast.unparse(node.func).endswith("approx") else set())
            given = [k.value for k in node.keywords if k.arg in words and is_number(k.value)]
            lines += [value.lineno for value in given if value.value]
        if isinstance(node, ast.Assert):
            for compare in (n for n in ast.walk(node.test) if isinstance(n, ast.Compare)):
                below = zip(compare.ops, compare.comparators, strict=True)
                small = [n for op, n in below if isinstance(op, (ast.Lt, ast.LtE)) and is_number(n)]
                lines += [n.lineno for n in small if 0 < abs(n.value) <= LARGEST_TOLERANCE]
    return sorted(lines)


def long_functions(source: str) -> list[str]:
    functions = (n for n in ast.walk(ast.parse(source)) if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef)))
    return [f.name for f in functions if (f.end_lineno or 0) - f.lineno >= LONGEST_FUNCTION]


def bodies(source: str) -> dict[str, str]:
    """Function name by what it does: its statements, docstring aside, names of variables and all."""
    found = {}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef):
            statements = node.body[1:] if ast.get_docstring(node) is not None else node.body
            text = "\n".join(ast.unparse(statement) for statement in statements)
            if len(text) >= SHORTEST_FORMULA:
                found[text] = node.name
    return found


def shared_bodies(one: str, other: str) -> list[str]:
    a, b = bodies(one), bodies(other)
    return sorted(a[text] for text in a.keys() & b.keys())


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("package", PACKAGES)
def test_layers(package: str) -> None:
    """The reference knows nobody; the optimised side takes words, weights and formats from it, and no arithmetic."""
    files = [path for path in SOURCES if path.relative_to(ROOT).parts[0] == package]
    found = {name_of(path): forbidden_imports(package, path.read_text()) for path in files}
    assert not {path: names for path, names in found.items() if names}


def test_no_tolerance_without_a_name() -> None:
    found = {name_of(path): literal_tolerances(path.read_text()) for path in SOURCES}
    assert not {path: lines for path, lines in found.items() if lines}


def test_sizes() -> None:
    assert not {name_of(path): n for path in SOURCES if (n := len(path.read_text().splitlines())) > LONGEST_FILE}
    found = {name_of(path): long_functions(path.read_text()) for path in SOURCES}
    assert not {path: names for path, names in found.items() if names}


def test_nothing_points_outside_the_repository() -> None:
    found = {name_of(path): ELSEWHERE.findall(path.read_text()) for path in TEXTS if path.exists()}
    assert not {path: places for path, places in found.items() if places}


def test_no_formula_stands_on_both_sides() -> None:
    """Two derivations of one formula are the point: neither side may be a copy of the other."""
    sides = ["\n".join(p.read_text() for p in SOURCES if p.relative_to(ROOT).parts[0] == side) for side in PACKAGES[:2]]
    assert not shared_bodies(*(side.replace("from __future__ import annotations", "") for side in sides))


def test_the_checks_see() -> None:
    formula = "return weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)"
    assert shared_bodies(f"def f():\n    'doc'\n    {formula}", f"def g():\n    {formula}  # why") == ["f"]
    assert forbidden_imports("reference", "from parity.judge import x\nimport optimized") == ["parity.judge.x", "optimized"]
    assert forbidden_imports("optimized", "from reference.formats import x\nfrom reference.norm import y") == [
        "reference.norm.y"
    ]
    assert forbidden_imports("optimized", "from reference import rope, config") == ["reference.rope"]
    assert literal_tolerances("close(a, b, atol=1e-5)\nassert err < 1e-6\nassert 3 < x <= 0.005") == [1, 2, 3]
    assert literal_tolerances("assert y == pytest.approx(1, rel=3e-7)") == [1]
    assert literal_tolerances("assert_close(a, b, atol=bound)\nassert err < bound\nassert share < 0.5\nf(atol=0)") == []
    assert long_functions("def f():\n" + "    pass\n" * LONGEST_FUNCTION) == ["f"]
    assert ELSEWHERE.findall("see ../" + "shared/oracle") == ["../" + "shared"]
