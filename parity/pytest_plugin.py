"""pytest options for judging a model, and a header that says what is judged. Loaded wherever the package is installed.

The options are those of `v4parity run`, in the same words; the tests are `parity.suite`. Source: docs/judge.md §10.
"""

from __future__ import annotations

import os
from importlib import metadata
from pathlib import Path

import pytest

MODELS = {"slim": "procedural:v4-pro-slim", "real": "procedural:v4-pro"}
CANDIDATES = ("optimized",)
PROFILES = ("pool-fp8", "pool-bf16")
PROFILE = PROFILES[0]


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("v4parity")
    group.addoption("--v4-model", metavar="M", help="directory in the released format, or procedural:PRESET[@seed]")
    group.addoption("--v4-scale", choices=sorted(MODELS), default="slim",
                    help="slim: all layers of Pro at small widths; real: one decode step at Pro's widths")  # fmt: skip
    group.addoption("--v4-candidate", choices=CANDIDATES, default=CANDIDATES[0], help="whose kernels are judged")
    group.addoption("--v4-profile", choices=PROFILES, metavar="P",
                    help=f"one build, {' or '.join(PROFILES)} (default {PROFILE}, and some layers in the other)")
    group.addoption("--v4-seed", type=int, default=0, metavar="N", help="of ids and synthetic state (default 0)")  # fmt: skip


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "xdist_group(name): tests that share one layer's run (with --dist loadgroup)")


def pytest_report_header(config: pytest.Config) -> str:
    versions = " ".join(f"{name} {_version(name)}" for name in ("v4parity", "torch", "triton"))
    device = "GPU" if any(Path(p).exists() for p in ("/dev/nvidia0", "/dev/kfd")) else "no GPU: interpreter"
    candidate, seed = config.getoption("--v4-candidate"), config.getoption("--v4-seed")
    rules = config.getoption("--v4-profile") or PROFILE
    return (f"v4parity: {candidate} on {model_of(config)}, profile {rules}, seed {seed}; {device}, "
            f"{os.cpu_count()} cores; {versions}")  # fmt: skip


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "absent"


def model_of(config: pytest.Config) -> str:
    """The model that the options ask for."""
    return config.getoption("--v4-model") or MODELS[config.getoption("--v4-scale")]
