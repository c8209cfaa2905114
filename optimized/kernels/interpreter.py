"""Triton's interpreter without two costs of its own, together about a fifth of what it takes.

It puts its versions of all of the language's functions in place for a launch, and does so again at every call of a device
function inside that launch; and it builds a table of all types for each type it looks up. Values do not change: the first
is already done when it is done again, the second is a function of its argument. Source: docs/pool.md §6.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import triton.language as tl
from triton.runtime import interpreter


def quicken() -> None:
    """Once per process, before the first launch."""
    inside = interpreter._patch_lang

    def call(self: interpreter.InterpretedFunction, *args: Any, **kwargs: Any) -> Any:
        if not _in_place(self.fn):
            inside(self.fn)
        try:
            return self.rewrite()(*args, **kwargs)
        except Exception as error:
            raise interpreter.InterpreterError(repr(error)) from error

    interpreter.InterpretedFunction.__call__ = call
    interpreter._get_np_dtype = _remembered(interpreter._get_np_dtype)


def _remembered(look: Callable[[tl.dtype], Any]) -> Callable[[tl.dtype], Any]:
    """`look` by the name of the element type: all that it depends on."""
    known: dict[str, Any] = {}

    def by_name(dtype: tl.dtype) -> Any:
        name = dtype.scalar.name
        if name not in known:
            known[name] = look(dtype)
        return known[name]

    return by_name


def _in_place(fn: Any) -> bool:
    """Whether the launch under way has put in place what this device function sees."""
    return not tl.core.is_builtin(tl.load) and fn.__globals__.get("tl") is tl
