"""Laws: what theory says of ops exactly, as gates. Source: docs/judge.md §13."""

from __future__ import annotations

from . import on_attention, on_experts, on_indexer, on_reference
from .law import Law, Violation

LAWS: tuple[Law, ...] = (*on_reference.LAWS, *on_attention.LAWS, *on_indexer.LAWS, *on_experts.LAWS)


def named(name: str) -> tuple[Law, ...]:
    """All laws of a family (`padding`), or on both sides the one of this name (`padding.core`). Raises KeyError."""
    found = tuple(law for law in LAWS if name in (law.name, law.family))
    if not found:
        raise KeyError(f"no law {name!r}; families: {', '.join(sorted({law.family for law in LAWS}))}")
    return found


__all__ = ["LAWS", "Law", "Violation", "named"]
