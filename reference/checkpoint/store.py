"""Where weights come from: one protocol for directories of shards and for procedural models.

Source: docs/checkpoint.md §3 and §4.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ..config import Config
from ..errors import BadInput

# Storage tags of safetensors -> torch dtype. FP4 is stored as I8: two codes a byte.
DTYPE_OF_TAG: dict[str, torch.dtype] = {
    "I64": torch.int64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F8_E4M3": torch.float8_e4m3fn,
    "I8": torch.int8,
}


@dataclass(frozen=True)
class TensorInfo:
    """What a header says of one tensor: storage tag, shape as stored, and the shard's file name."""

    dtype: str
    shape: tuple[int, ...]
    shard: str

    @property
    def nbytes(self) -> int:
        size = DTYPE_OF_TAG[self.dtype].itemsize
        for n in self.shape:
            size *= n
        return size


class WeightStore(Protocol):
    """A checkpoint. Tensors come in their stored dtype; nothing is read before it is asked for."""

    @property
    def config(self) -> Config: ...

    @property
    def identity(self) -> str:
        """Names these exact weights: `procedural:mini@0/g1`, or the directory's name and index digest."""
        ...

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Every tensor by its checkpoint name."""
        ...

    @property
    def bytes_read(self) -> int:
        """Bytes handed out so far."""
        ...

    def get(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        """Rows [start, stop) along the first dimension, in the stored dtype. Raises BadInput for a missing name."""
        ...

    def prefetch(self, names: Iterable[str]) -> None:
        """These tensors will be asked for, in this order: a hint, which returns at once."""
        ...

    def release(self, names: Iterable[str]) -> None:
        """These tensors have been used, and their memory is wanted; what `get` gave stays valid."""
        ...


def row_range(name: str, shape: tuple[int, ...], start: int, stop: int | None) -> tuple[int, int]:
    """The rows meant by (start, stop), checked: 0 <= start <= stop <= rows. Raises BadInput."""
    stop = shape[0] if stop is None else stop
    if not 0 <= start <= stop <= shape[0]:
        raise BadInput(f"{name}: rows [{start}, {stop}) outside its {shape[0]} rows")
    return start, stop
