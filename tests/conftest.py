"""Hypothesis profiles, threads, and the oracle cases where a checkout has them."""

from __future__ import annotations

import os

# Before anything loads numpy: the interpreter's products are small, and two threads spin longer than they compute.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from pathlib import Path

import numba
import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from oracle_case import OracleCase

os.environ.setdefault("TRITON_INTERPRET", "1")  # tests interpret, also beside a GPU; what needs one starts its own process
# Small matrices, and often several test processes at once. Numba shares torch's OpenMP runtime and sets its threads too.
numba.set_num_threads(1)
torch.set_num_threads(1)

_slow = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
settings.register_profile("dev", max_examples=50, deadline=None, suppress_health_check=_slow)
settings.register_profile("ci", max_examples=50, deadline=None, derandomize=True, database=None, suppress_health_check=_slow)
_known = [Phase.explicit, Phase.generate]  # a planted fault is to be found, and needs no smallest example
settings.register_profile("found", settings.get_profile("ci"), phases=_known)
settings.register_profile("nightly", max_examples=1000, deadline=None, suppress_health_check=_slow)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci" if os.environ.get("CI") else "dev"))

ORACLE = Path(__file__).parents[2] / "shared" / "oracle"


@pytest.fixture(scope="session", params=["pro-a", "flash-b"])
def oracle(request: pytest.FixtureRequest) -> OracleCase:
    """A tiny checkpoint with outputs of independent software, kept outside the repository."""
    if not (ORACLE / request.param).is_dir():
        pytest.skip(f"no oracle case {request.param}: tests/test_naive.py and tests/test_transformers.py stand in")
    return OracleCase(ORACLE / request.param)


@pytest.fixture(scope="session")
def bf16_oracle() -> OracleCase:
    """The case whose outputs were also computed with bfloat16 activations."""
    if not (ORACLE / "flash-b").is_dir():
        pytest.skip("no oracle case flash-b")
    return OracleCase(ORACLE / "flash-b")
