"""A failing verdict as one file that anybody can run: `standalone` with the numbers of the worst row at its end.

Source: docs/single.md §4.
"""

from __future__ import annotations

from .script import from_case as from_case
from .script import from_run as from_run
