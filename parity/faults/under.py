"""`python -m parity.faults.under FAULT PYTEST-ARGUMENTS`: tests with a fault turned on. Source: docs/faults.md §2."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def main(arguments: Sequence[str]) -> int:
    """pytest's exit code."""
    import pytest

    from . import BY_NAME
    from .change import turned_on

    with turned_on(BY_NAME[arguments[0]].change):
        return int(pytest.main(list(arguments[1:])))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
