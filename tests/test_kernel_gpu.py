"""The kernel tests once more on a GPU, where there is one: same inputs, expectations and planted mistakes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from kernel_cases import on_device

FILES = ["test_kernel_numeric.py", "test_kernel_gemm.py", "test_kernel_compress.py", "test_kernel_attention.py"]
FILES += ["test_kernel_norm.py", "test_kernel_hyper_connection.py", "test_kernel_gemm_bf16.py"]
FILES += ["test_kernel_router.py", "test_kernel_embed.py", "test_kernel_experts.py", "test_kernel_moe.py"]
FILES += ["test_kernel_expert_sum.py"]
FILES += ["test_kernel_qk_norm_rope.py", "test_kernel_window.py", "test_kernel_prefill.py"]
FILES += ["test_kernel_index.py", "test_kernel_selection.py"]
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
