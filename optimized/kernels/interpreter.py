"""Triton's interpreter without five costs of its own, together about half of what it takes.

It puts its versions of all of the language's functions in place for a launch, and does so again at every call of a device
function inside that launch; it builds a table of all types for each type it looks up; it makes the shape of every value anew,
number by number; it computes whether sums, differences and products of integers overflow, for an assertion that is off; and
it rounds a whole tile of zeros to bfloat16 for what a masked load leaves out. Values do not change: what was done is not done
again, what is a function of its argument is remembered, and what nobody reads is not computed. Source: docs/pool.md §6.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
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
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)
    _remember_shapes()
    interpreter.InterpreterBuilder.cast_impl = _zeros_at_once(interpreter.InterpreterBuilder.cast_impl)


def _remembered(look: Callable[[tl.dtype], Any]) -> Callable[[tl.dtype], Any]:
    """`look` by the name of the element type: all that it depends on."""
    known: dict[str, Any] = {}

    def by_name(dtype: tl.dtype) -> Any:
        name = dtype.scalar.name
        if name not in known:
            known[name] = look(dtype)
        return known[name]

    return by_name


def _remember_shapes() -> None:
    """Types and values of one shape share it, its number of elements, and both as constants: nothing changes them."""
    make_type, make_value = tl.block_type.__init__, tl.tensor.__init__
    known: dict[tuple[int, ...], tuple[tl.block_type, str]] = {}
    number = tl.tensor(None, tl.int32)
    of_numbers = number.shape, number.numel

    def block_type(self: tl.block_type, element_ty: tl.dtype, shape: Any) -> None:
        key = tuple([n.value if isinstance(n, tl.constexpr) else n for n in shape])
        if key not in known:
            make_type(self, element_ty, shape)
            value = tl.tensor.__new__(tl.tensor)
            make_value(value, None, self)
            self.of_values = value.shape, value.numel
            known[key] = self, str(self.shape)
            return
        first, text = known[key]
        self.element_ty, self.shape, self.numel, self.of_values = element_ty, first.shape, first.numel, first.of_values
        self.name = f"<{text}, {element_ty}>"

    def tensor(self: tl.tensor, handle: Any, type: tl.dtype) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = type.of_values if isinstance(type, tl.block_type) else of_numbers

    tl.block_type.__init__, tl.tensor.__init__ = block_type, tensor


def _zeros_at_once(cast: Callable[..., Any]) -> Callable[..., Any]:
    """A cast of float32 zeros to bfloat16 without their bits being taken apart."""

    def cast_impl(self: Any, x: Any, dtype: tl.dtype) -> Any:
        if x.dtype.scalar == tl.float32 and dtype.scalar == tl.bfloat16 and not x.data.view(np.uint32).any():
            return interpreter.TensorHandle(np.zeros(x.data.shape, np.uint16), tl.bfloat16)
        return cast(self, x, dtype)

    return cast_impl


def _in_place(fn: Any) -> bool:
    """Whether the launch under way has put in place what this device function sees."""
    return not tl.core.is_builtin(tl.load) and fn.__globals__.get("tl") is tl
