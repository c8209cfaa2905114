"""pytest options for judging a model, and a header that says what is judged. Loaded wherever the package is installed.

`--v4-model`, `--v4-scale` and `--v4-candidate` choose the model, its size and who is judged. Source: docs/judge.md §10.
"""

from __future__ import annotations

import os
from importlib import metadata
from pathlib import Path

import pytest

MODELS = {"slim": "procedural:v4-pro-slim", "real": "procedural:v4-pro"}
CANDIDATES = ("optimized",)
PROFILE = "pool-fp8"
SEED = 0


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("v4parity")
    group.addoption("--v4-model", metavar="M", help="directory in the released format, or procedural:PRESET[@seed]")
    group.addoption("--v4-scale", choices=sorted(MODELS), default="slim",
                    help="slim: all layers of Pro at small widths; real: one decode step at Pro's widths")  # fmt: skip
    group.addoption("--v4-candidate", choices=CANDIDATES, default=CANDIDATES[0], help="whose kernels are judged")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "xdist_group(name): tests that share one layer's run (with --dist loadgroup)")


def pytest_report_header(config: pytest.Config) -> str:
    versions = " ".join(f"{name} {_version(name)}" for name in ("v4parity", "torch", "triton"))
    device = "GPU" if any(Path(p).exists() for p in ("/dev/nvidia0", "/dev/kfd")) else "no GPU: interpreter"
    candidate = config.getoption("--v4-candidate")
    return (f"v4parity: {candidate} on {model_of(config)}, profile {PROFILE}, seed {SEED}; {device}, "
            f"{os.cpu_count()} cores; {versions}")  # fmt: skip


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "absent"


def model_of(config: pytest.Config) -> str:
    """The model that the options ask for."""
    return config.getoption("--v4-model") or MODELS[config.getoption("--v4-scale")]
