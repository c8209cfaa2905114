"""E4M3 codes whose bits are moved into float32: the same bits of an output as by tables, whatever x and the thread are."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from test_cpu_products import every_code_and_scale, normal, stored

from optimized.cpu import codes, fused, vector
from optimized.cpu.fused import Products, best

pytestmark = pytest.mark.skipif(
    best() not in ("vnni", "avx512") or "gfni" not in fused.cpu_features(), reason="bits are moved by GFNI and AVX-512"
)


@pytest.fixture
def both(monkeypatch):
    """Products of one token with bits moved if x allows it, and by tables; `both.read` lists how codes were read."""
    read, real = [], vector.product

    def product(code, *rest):
        read.append(type(code))
        real(code, *rest)

    def run(weight, scale, x):
        found = []
        for moved in (True, False):
            monkeypatch.setattr(fused, "moves_bits", lambda moved=moved: moved)
            found += Products()([(weight, scale, x, 0, len(weight))])
        return found

    monkeypatch.setattr(vector, "product", product)
    run.read = read
    return run


def spread(seed: int, low: int, high: int, width: int = 1408) -> torch.Tensor:
    """Both signs, all bits of the mantissa, magnitudes in [2^low, 2^high), and some zeros of both signs."""
    g = torch.Generator().manual_seed(seed)
    exponents = torch.randint(low, high, (1, width), generator=g)
    x = torch.ldexp(1 + torch.rand(1, width, generator=g), exponents) * torch.randint(-1, 2, (1, width), generator=g)
    x[0, :2] = torch.tensor([0.0, -0.0])
    return x


MOVED, TABLES = type(codes.E4M3_MOVED), type(codes.E4M3)


@pytest.mark.parametrize(("low", "high"), [(-4, 2), (-103, -102), (-103, 22), (21, 22)])
@pytest.mark.parametrize("scales", [(1, 2), (100, 130), (239, 241)])
def test_the_bits_are_those_of_tables(both, low, high, scales):
    weight, scale = stored("fp8", 300, 1408, seed=5, scales=scales)
    moved, tables = both(weight, scale, spread(6, low, high))
    assert torch.equal(moved.view(torch.int32), tables.view(torch.int32)) and both.read == [MOVED, TABLES]


def test_so_are_those_of_every_code_in_every_scale(both):
    moved, tables = both(*every_code_and_scale("fp8"), normal(3, 1, 128))
    assert torch.equal(moved, tables) and both.read == [MOVED, TABLES]


OUT = [torch.inf, -torch.inf, torch.nan, 2.0**22, -3e38, 2.0**-104, 1e-45]


@pytest.mark.parametrize("value", OUT)
def test_an_input_with_which_they_would_differ_is_left_to_tables(both, value):
    weight, scale = stored("fp8", 40, 256, seed=5)
    x = normal(3, 1, 256)
    x[0, 131] = value
    moved, tables = both(weight, scale, x)
    assert both.read == [TABLES, TABLES] and torch.equal(moved.view(torch.int32), tables.view(torch.int32))


def last_bit(exponent: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """One input, with the last bit of its mantissa set, beside the least of codes."""
    weight, x = torch.zeros(4, 128, dtype=torch.uint8), torch.zeros(1, 128)
    weight[:, 7], x[0, 7] = 1, (1 + 2.0**-23) * 2.0**exponent
    return weight.view(torch.float8_e4m3fn), torch.full((1, 1), 200, dtype=torch.uint8).view(torch.float8_e8m0fnu), x


def test_the_limits_are_where_they_differ(both, monkeypatch):
    moved, tables = both(*last_bit(-103))
    assert torch.equal(moved, tables) and both.read == [MOVED, TABLES]
    monkeypatch.setattr(codes, "LEAST", 0.0)
    moved, tables = both(*last_bit(-104))
    assert both.read[2:] == [MOVED, TABLES] and not torch.equal(moved, tables)
    monkeypatch.setattr(codes, "MOST", torch.inf)
    moved, tables = both(*last_bit(22))
    assert moved.isinf().all() and tables.isfinite().all()


def test_more_tokens_and_float64_are_left_to_tables(both):
    weight, scale = stored("fp8", 40, 256, seed=5)
    for x in (normal(3, 2, 256), normal(3, 1, 256, dtype=torch.float64)):
        both(weight, scale, x)
    assert set(both.read) == {TABLES}


FLUSH = """
import sys
import torch
assert torch.set_flush_denormal(True)  # before there are other threads, so that they do it too
from optimized.cpu import codes, fused, vector
least = torch.tensor([2.0**-140])
fused.moves_bits = lambda: True
if "broken" in sys.argv:
    vector._FLUSHES = 0
weight = torch.full((512, 128), 3, dtype=torch.uint8).view(torch.float8_e4m3fn)
scale = torch.full((4, 1), 127, dtype=torch.uint8).view(torch.float8_e8m0fnu)
(y,) = fused.Products()([(weight, scale, torch.ones(1, 128), 0, 512)])
print((y == 128 * 3 / 512).all().item(), (least * 2).item() == 0)
"""


@pytest.mark.parametrize(("how", "says"), [("sound", ["True", "True"]), ("broken", ["False", "True"])])
def test_a_thread_that_flushes_subnormals_does_so_before_and_after_only(how, says, tmp_path):
    apart = {"NUMBA_CACHE_DIR": str(tmp_path)} if how == "broken" else {}
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **apart}
    child = subprocess.run([sys.executable, "-c", FLUSH, how], capture_output=True, text=True, check=True, env=env)
    assert child.stdout.split() == says


@pytest.mark.parametrize(("gfni", "cost", "want"), [(True, 1.9, True), (True, 2.0, False), (False, 1.0, False)])
def test_bits_are_moved_where_that_is_quick(monkeypatch, gfni, cost, want):
    monkeypatch.setattr(fused, "cpu_features", lambda: {"gfni"} if gfni else set())
    monkeypatch.setattr(fused, "seconds_of", lambda value: cost if value < 2.0**-126 else 1.0)
    assert fused.moves_bits.__wrapped__() is want
