"""What every wrapper needs around its kernel: the mode, tile choice, and checks of what it is handed.

Source: docs/pool.md §6.
"""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor

from .interpreter import quicken
from .numeric import INTERP

INTERPRETER = INTERP.value
if INTERPRETER:
    quicken()
T = TypeVar("T")


def tiles_for_mode(gpu: T, interpreter: T) -> T:
    """The tiles of this process's mode. Both are constants of the variant: no batch may change them."""
    return interpreter if INTERPRETER else gpu


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def power_of_two(n: int) -> int:
    """Smallest power of two >= n, for n >= 1."""
    return 1 << (n - 1).bit_length()


def require(
    tensor: Tensor, name: str, dtype: torch.dtype, shape: tuple[int | None, ...], dense: int = 1
) -> None:
    """Raise ValueError unless the tensor has this dtype and shape (None: any size) and its last `dense` dimensions lie
    without gaps."""
    same_rank = tensor.ndim == len(shape)
    fits = same_rank and all(want in (None, have) for want, have in zip(shape, tensor.shape, strict=True))
    if tensor.dtype != dtype or not fits:
        raise ValueError(f"{name} is {tensor.dtype} {list(tensor.shape)}, expected {dtype} {list(shape)}")
    step = 1
    for size, stride in zip(tensor.shape[-dense:][::-1], tensor.stride()[-dense:][::-1], strict=True):
        if tensor.numel() and size > 1 and stride != step:
            raise ValueError(f"{name} has strides {tensor.stride()}; its last {dense} dimensions must have no gaps")
        step *= size
