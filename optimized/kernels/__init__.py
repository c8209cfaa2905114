"""Triton kernels, one operation a file. One source, three modes: interpreter, ahead-of-time compile, GPU.

Triton reads its mode once, when it is first imported, so the mode is settled here, before any kernel file imports
it: on a machine without a GPU the kernels run in the interpreter unless TRITON_INTERPRET says otherwise (the
compile check starts its own process with TRITON_INTERPRET=0). Source: docs/pool.md §6.
"""

from __future__ import annotations

import os
import sys

import torch

_AS_TRITON_FOUND_IT = os.environ.get("TRITON_INTERPRET")
if _AS_TRITON_FOUND_IT is None and not torch.cuda.is_available():
    if "triton" in sys.modules:
        raise ImportError(
            "triton was imported before optimized.kernels, in compile mode, and there is no GPU: "
            "import optimized.kernels first, or set TRITON_INTERPRET=1"
        )
    os.environ["TRITON_INTERPRET"] = "1"
