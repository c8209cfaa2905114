"""Around the kernels: Triton's mode, checks of arguments, 64-bit addresses."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from optimized.kernels import launch


def python(source: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run source in a process that has no word on Triton's mode but what is given."""
    clean = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    return subprocess.run([sys.executable, "-c", source], env={**clean, **environment}, capture_output=True, text=True)


WITHOUT_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is there: nothing falls back to the interpreter")


@WITHOUT_GPU
def test_kernels_choose_the_interpreter_where_there_is_no_gpu():
    done = python("from optimized.kernels.launch import INTERPRETER; print(INTERPRETER)")
    assert done.stdout == "True\n", done.stderr


def test_an_explicit_mode_is_kept():
    done = python("from optimized.kernels.launch import INTERPRETER; print(INTERPRETER)", TRITON_INTERPRET="0")
    assert done.stdout == "False\n", done.stderr


@WITHOUT_GPU
def test_triton_imported_first_is_said_plainly():
    done = python("import triton, optimized.kernels.launch")
    assert done.returncode and "import optimized.kernels first" in done.stderr


def test_the_pool_needs_no_triton():
    done = python("import sys, optimized.pool.pool, optimized.pool.plans, optimized.rope; print('triton' in sys.modules)")
    assert done.stdout == "False\n", done.stderr


def test_require_refuses_dtype_shape_and_gaps():
    x = torch.zeros(4, 6)
    launch.require(x, "x", torch.float32, (None, 6), dense=2)
    launch.require(x[:, :3], "x", torch.float32, (4, 3))
    of_shape = ((x.double(), (4, 6), 1), (x, (4, 5), 1), (x, (None,), 1))
    with_gaps = ((x.T, (6, 4), 1), (x[:, :3], (4, 3), 2))
    for wrong, shape, dense in (*of_shape, *with_gaps):
        with pytest.raises(ValueError, match="x "):
            launch.require(wrong, "x", torch.float32, shape, dense=dense)


@pytest.mark.parametrize("n", [1, 2, 3, 127, 128, 129])
def test_power_of_two_is_the_next_one(n):
    power = launch.power_of_two(n)
    assert power & (power - 1) == 0 and power // 2 < n <= power


BITS = """
import hashlib, torch
import optimized.kernels.interpreter as fast
if {plain}: fast.quicken = lambda: None
from triton.runtime import interpreter
as_it_came = interpreter._get_np_dtype
from optimized.kernels.gemm_bf16 import gemm_bf16
from optimized.kernels.quantize import quantize_activation
print(as_it_came is interpreter._get_np_dtype)
x = torch.randn(37, 384, generator=torch.Generator().manual_seed(5)).mul_(2.0 ** torch.arange(384).div(48)).bfloat16()
out = *quantize_activation(x), gemm_bf16(x, x[:5]), gemm_bf16(-0.0 * x, x[:5])
print(hashlib.sha256(b"".join(y.numpy().tobytes() for y in out)).hexdigest())
"""


@WITHOUT_GPU
def test_a_quicker_interpreter_gives_the_same_bits():
    plain, quick = (python(BITS.format(plain=plain)) for plain in (True, False))
    assert (plain.stdout.split()[:1], quick.stdout.split()[:1]) == (["True"], ["False"]), plain.stderr + quick.stderr
    assert plain.stdout.split()[1] == quick.stdout.split()[1]
