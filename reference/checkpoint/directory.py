"""A directory in the released format: config.json, index, shards. Audited whole when opened, read where it is touched.

Source: docs/checkpoint.md §3 and §6.
"""

from __future__ import annotations

import hashlib
import json
import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from torch import Tensor

from ..config import Config
from ..errors import BadInput
from .audit import audit
from .mapping import MappedFile, available_memory, joined
from .shard import Entry, Header, read_header, unique_object, view
from .store import TensorInfo, row_range
from .values import check_values

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
Hints = SimpleQueue[tuple[MappedFile, int, int] | None]  # ranges to read ahead


class DirectoryStore:
    """The weights of a checkpoint directory, as views into its memory-mapped files.

    A thread asks the disk for what is prefetched. What is released leaves the system's cache as well where memory could not
    hold the whole directory.
    """

    def __init__(self, path: Path) -> None:
        """Read config, index and all headers, and audit them. Raises BadInput for any damage that they show."""
        if not path.is_dir():
            raise BadInput(f"{path}: no such directory")
        self._path = path
        self._config = Config.from_json(path / "config.json")
        headers, index = _read_headers(path)
        self._entries: dict[str, Entry] = {}
        self._tensors: dict[str, TensorInfo] = {}
        for file, header in headers.items():
            for name, entry in header.entries.items():
                if name in self._tensors:
                    raise BadInput(f"{path}: {name} is in both {self._tensors[name].shard} and {file}")
                self._entries[name] = entry
                self._tensors[name] = TensorInfo(entry.dtype, entry.shape, file)
        if index is not None:
            _check_index(path / INDEX, index, self._tensors)
        audit(str(path), self._config, self._tensors)
        self._identity = f"{path.resolve().name}#{_digest(path, headers)}"
        self._files: dict[str, MappedFile] = {}
        self._checked: set[str] = set()
        self._short_of_memory = sum(info.nbytes for info in self._tensors.values()) > available_memory()
        self._hints: Hints = SimpleQueue()
        self._reader: threading.Thread | None = None
        self._bytes_read = 0

    @property
    def config(self) -> Config:
        return self._config

    @property
    def identity(self) -> str:
        return self._identity

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        return self._tensors

    @property
    def bytes_read(self) -> int:
        return self._bytes_read

    @property
    def gives_views(self) -> bool:
        """Whether what `get` gives takes no memory of its own, however long it is held."""
        return True

    def get(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        """Rows [start, stop) in the stored dtype, as a view of the file. Scales and hash tables are checked.

        Raises BadInput for an unknown name, a scale byte 255, an expert out of range or twice in a row.
        """
        info = self._tensors.get(name)
        if info is None:
            raise BadInput(f"{self._path}: no tensor {name}")
        start, stop = row_range(name, info.shape, start, stop)
        rows = view(self._file(info.shard).payload, self._entries[name], start, stop)
        if name.endswith((".scale", ".tid2eid")) and name not in self._checked:  # small, and silent when wrong
            check_values(str(self._path / info.shard), name, rows, start, self._config.n_routed_experts)
            if len(rows) == info.shape[0]:
                self._checked.add(name)
        self._bytes_read += rows.nbytes
        return rows

    def prefetch(self, names: Iterable[str]) -> None:
        """Start reading these tensors, in few ranges: an expert's weights are one, its scales another."""
        if self._reader is None:
            self._reader = threading.Thread(target=_read_ahead, args=(self._hints,), daemon=True)
            self._reader.start()
            weakref.finalize(self, self._hints.put, None)
        for part in self._ranges(names):
            self._hints.put(part)

    def release(self, names: Iterable[str]) -> None:
        """The pages of these tensors leave memory; views stay valid and read again when touched."""
        for file, begin, end in self._ranges(names):
            file.drop(begin, end, from_cache=self._short_of_memory)

    def _ranges(self, names: Iterable[str]) -> Iterator[tuple[MappedFile, int, int]]:
        by_file: dict[str, list[tuple[int, int]]] = {}
        for name in names:
            entry = self._entries[name]
            by_file.setdefault(self._tensors[name].shard, []).append((entry.begin, entry.end))
        for shard, ranges in by_file.items():
            for begin, end in joined(ranges):
                yield self._file(shard), begin, end

    def _file(self, shard: str) -> MappedFile:
        if shard not in self._files:
            self._files[shard] = MappedFile(self._path / shard)
        return self._files[shard]


def _read_ahead(hints: Hints) -> None:
    """Work of the reading thread, until it gets None: the disk may make it wait, and nobody else."""
    while (part := hints.get()) is not None:
        file, begin, end = part
        file.fetch(begin, end)


def _read_headers(path: Path) -> tuple[dict[str, Header], dict[str, Any] | None]:
    """Headers of all shards by file name in order, and the index if there is one (a single file needs none)."""
    if not (path / INDEX).exists():
        if not (path / SINGLE).exists():
            raise BadInput(f"{path}: neither {INDEX} nor {SINGLE}")
        return {SINGLE: read_header(path / SINGLE)}, None
    index = _read_index(path / INDEX)
    files = sorted(set(index["weight_map"].values()))
    for file in files:
        _check_inside(path, file)
    return {file: read_header(path / file) for file in files}, index


def _read_index(path: Path) -> dict[str, Any]:
    try:
        index = json.loads(path.read_bytes(), object_pairs_hook=unique_object)
    except (OSError, ValueError, RecursionError) as error:
        raise BadInput(f"{path}: not readable as JSON: {error}") from None
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise BadInput(f"{path}: no weight_map from tensor names to file names")
    unprintable = [name for name in weight_map if not name.isprintable()]
    if unprintable:
        raise BadInput(f"{path}: tensor name {unprintable[0]!r}")
    return index


def _check_inside(path: Path, file: str) -> None:
    """A shard is a plain file of the directory, or a link into the `blobs` of a hub cache (beside `snapshots/REV`)."""
    if not file.isprintable() or file in ("", ".", "..") or "/" in file or "\\" in file:
        raise BadInput(f"{path / INDEX}: {file!r} is not a plain file name")
    home = path.resolve()
    if (home / file).resolve().parent not in (home, home.parent.parent / "blobs"):
        raise BadInput(f"{path / INDEX}: {file} is a link that leads outside the directory")


def _check_index(path: Path, index: dict[str, Any], tensors: Mapping[str, TensorInfo]) -> None:
    weight_map = index["weight_map"]
    for name, file in weight_map.items():
        if name not in tensors:
            raise BadInput(f"{path}: {name} is not in {file}")
        if tensors[name].shard != file:
            raise BadInput(f"{path}: {name} is in {tensors[name].shard}, not in {file}")
    unnamed = tensors.keys() - weight_map.keys()
    if unnamed:
        name = min(unnamed)
        raise BadInput(f"{path}: does not name {name}, which is in {tensors[name].shard} ({len(unnamed)} such tensors)")
    metadata, payload = index.get("metadata"), sum(info.nbytes for info in tensors.values())
    total = metadata.get("total_size", payload) if isinstance(metadata, dict) else payload
    if total != payload:
        raise BadInput(f"{path}: total_size is {total!r}, but the tensors have {payload} bytes")


def _digest(path: Path, headers: Mapping[str, Header]) -> str:
    """Over config and headers: names, dtypes, shapes and places, not values."""
    digest = hashlib.sha256((path / "config.json").read_bytes())
    for file, header in headers.items():
        digest.update(file.encode() + header.raw)
    return digest.hexdigest()[:12]
