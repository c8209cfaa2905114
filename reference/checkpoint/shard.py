"""One safetensors file: its header, distrusted and checked, and views into its payload.

The header is parsed here, so that every lie in it is found before a byte of payload is read.
Source: docs/checkpoint.md §3.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import BadInput
from .store import DTYPE_OF_TAG

MAX_HEADER = 100_000_000  # as in the safetensors library; a released header has 260 kB


@dataclass(frozen=True)
class Entry:
    """One tensor of a file: storage tag, shape, and where its bytes begin in the file."""

    dtype: str
    shape: tuple[int, ...]
    begin: int

    @property
    def row_bytes(self) -> int:
        return DTYPE_OF_TAG[self.dtype].itemsize * math.prod(self.shape[1:])

    @property
    def end(self) -> int:
        return self.begin + DTYPE_OF_TAG[self.dtype].itemsize * math.prod(self.shape)


@dataclass(frozen=True)
class Header:
    """All of a file but its payload; `raw` are the bytes it was read from."""

    entries: dict[str, Entry]
    raw: bytes


def read_header(path: Path) -> Header:
    """Read and check a header: sizes before allocation, then JSON, then that tensors fill the payload without a gap.

    Raises BadInput that names the file, and the tensor and offset where there is one.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            prefix = file.read(8)
            length = int.from_bytes(prefix, "little")
            if len(prefix) < 8 or length > size - 8:
                raise BadInput(f"{path}: truncated: {size} bytes cannot hold a header of {length} bytes")
            if length > MAX_HEADER:
                raise BadInput(f"{path}: header of {length} bytes at offset 0; at most {MAX_HEADER} are allowed")
            text = file.read(length)
    except FileNotFoundError:
        raise BadInput(f"{path}: no such file") from None
    except OSError as error:
        raise BadInput(f"{path}: not readable: {error}") from None
    fields = _parse(path, text)
    entries = {name: _entry(path, name, value, 8 + length) for name, value in fields.items()}
    _check_payload(path, entries, 8 + length, size)
    return Header(entries, prefix + text)


def unique_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """`object_pairs_hook` that refuses a name given twice."""
    fields = dict(pairs)
    if len(fields) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(n for n in names if names.count(n) > 1)!r} appears twice")
    return fields


def _parse(path: Path, text: bytes) -> dict[str, Any]:
    try:
        fields = json.loads(text, object_pairs_hook=unique_object)
    except (ValueError, RecursionError) as error:
        raise BadInput(f"{path}: header at offset 8: {error}") from None
    if not isinstance(fields, dict):
        raise BadInput(f"{path}: header at offset 8 is not a JSON object")
    unprintable = [name for name in fields if not name.isprintable()]
    if unprintable:
        raise BadInput(f"{path}: tensor name {unprintable[0]!r}")
    fields.pop("__metadata__", None)
    return fields


def _entry(path: Path, name: str, value: Any, payload: int) -> Entry:
    where = f"{path}: {name}"
    if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
        raise BadInput(f"{where}: header entry must have dtype, shape and data_offsets")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_OF_TAG:
        raise BadInput(f"{where}: storage {dtype!r}; DeepSeek-V4 uses {', '.join(DTYPE_OF_TAG)}")
    if not (_naturals(shape) and _naturals(offsets) and len(offsets) == 2):
        raise BadInput(f"{where}: shape {shape} and data_offsets {offsets} must be lists of integers from 0")
    nbytes = math.prod(shape) * DTYPE_OF_TAG[dtype].itemsize
    if offsets[1] - offsets[0] != nbytes:
        raise BadInput(f"{where}: {dtype} {shape} has {nbytes} bytes, but data_offsets are {offsets}")
    return Entry(dtype, tuple(shape), payload + offsets[0])


def _naturals(values: Any) -> bool:
    return isinstance(values, list) and all(type(v) is int and v >= 0 for v in values)


def _check_payload(path: Path, entries: dict[str, Entry], payload: int, size: int) -> None:
    end = payload
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)):
        if entry.begin != end:
            raise BadInput(f"{path}: {name} begins at offset {entry.begin}, but the bytes before it end at {end}")
        end = entry.end
    if size != end:
        what = "truncated" if size < end else "oversized"
        raise BadInput(f"{path}: {what}: {size} bytes, but its header accounts for {end}")




def view(payload: Any, entry: Entry, start: int, stop: int) -> Tensor:
    """Rows [start, stop) of a tensor in its stored dtype: a view, or a copy where the file does not align elements."""
    begin = entry.begin + start * entry.row_bytes
    held = payload[begin : begin + (stop - start) * entry.row_bytes]
    dtype = DTYPE_OF_TAG[entry.dtype]
    if begin % dtype.itemsize:
        held = held.copy()
    return torch.from_numpy(held).view(dtype).view(stop - start, *entry.shape[1:])
