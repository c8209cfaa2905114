"""Every layer, op and phase of v4-pro-slim: the layer suite that the package ships, `parity/suite.py`."""

from __future__ import annotations

from parity.suite import pytest_generate_tests, test_op

__all__ = ["pytest_generate_tests", "test_op"]
