"""Compiled loops leave torch's thread count alone, in a process where they are the first to run."""

from __future__ import annotations

import os
import subprocess
import sys

CHILD = """
import torch
torch.set_num_threads(1)
from reference.checkpoint.open import open_store
open_store("procedural:mini").get("layers.0.ffn.experts.0.w1.weight")
open_store("procedural:mini").get("embed.weight")
print(torch.get_num_threads())
"""


def test_drawing_keeps_torchs_thread_count():
    child = subprocess.run([sys.executable, "-c", CHILD], capture_output=True, text=True, check=True)
    assert child.stdout.split() == ["1"]


def test_waiting_threads_soon_sleep():
    """Set before torch is loaded, or its runtime does not see it."""
    names = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
    code = f"import os, sys, parity; print('torch' in sys.modules, *(os.environ[name] for name in {names}))"
    environment = {name: value for name, value in os.environ.items() if name not in names}
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert child.stdout.split() == ["False", "passive", "20000"]
