"""The kernel tests once more on a GPU, where there is one: same inputs, expectations and planted mistakes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from kernel_cases import on_device

from optimized.kernels.costs import layer_costs
from parity.bench.roofline import DECODE, PREFILL
from reference.presets import preset

# Not of kernels on data: how they are launched and what they cost; and gigabytes that only a CPU reserves without having them.
OTHER = {"launch", "gpu", "costs", "sheet", "bench", "far_rows"}
ALL = sorted(Path(__file__).parent.glob("test_kernel_*.py"))
FILES = [path.name for path in ALL if path.stem.removeprefix("test_kernel_") not in OTHER]
# Left out: memory that is only reserved on a CPU, and mistakes that are the interpreter's own casts.
NOT_THERE = "not gib and not truncated"


@pytest.mark.gpu
@pytest.mark.parametrize("file", FILES)
def test_kernels_on_the_gpu(file):
    if not torch.cuda.is_available():
        pytest.skip("no GPU: these kernels ran in the interpreter and were compiled, not run on hardware")
    environment = {**os.environ, "TRITON_INTERPRET": "0", "V4PARITY_KERNEL_DEVICE": "cuda"}
    command = [sys.executable, "-m", "pytest", "-q", "-k", NOT_THERE, str(Path(__file__).with_name(file))]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-5000:]


@pytest.mark.gpu
def test_kernels_are_timed_on_the_gpu():
    """The benchmark on a small model: every call runs, and none is faster than its roofline."""
    if not torch.cuda.is_available():
        pytest.skip("no GPU: nothing to time")
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    command = [sys.executable, "-m", "parity.cli", "bench", "kernels", "--device", "cuda", "--model", "procedural:mini"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-5000:]
    for step in (DECODE, PREFILL):
        assert all(f"\n{call} " in done.stdout for call in layer_costs(preset("mini"), step))
    assert all(float(share) <= 100 for share in re.findall(r" ([\d.]+)%", done.stdout))


def test_carrying_to_a_device_brings_outputs_back():
    """What the run above leans on: results and tensors written in place return, through strided views too."""

    def kernel(x: torch.Tensor, target: torch.Tensor, *, factor: float) -> tuple[torch.Tensor, torch.Tensor]:
        assert x.data_ptr() != source.data_ptr()
        target.copy_(x * factor)
        return x + 1, x + 2

    source, wide = torch.arange(6.0).view(2, 3), torch.zeros(2, 10)
    out = on_device(kernel, "cpu")(source, wide[:, 2:5], factor=3.0)
    assert torch.equal(out[0], source + 1) and torch.equal(out[1], source + 2)
    assert torch.equal(wide[:, 2:5], source * 3)
    assert wide[:, :2].abs().sum() == wide[:, 5:].abs().sum() == 0
    assert on_device(kernel, None) is kernel
