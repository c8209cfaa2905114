"""A checkpoint whose tensors are on a device: packed weights come through pinned buffers on a stream of their own.

What stays there is the loader's affair, as for any store (docs/checkpoint.md §9). Never run on a GPU: the tests drive a
device that records what it is told.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

import torch
from torch import Tensor

from ..config import Config
from .store import DTYPE_OF_TAG, TensorInfo, WeightStore

STAGING = 64 << 20  # bytes of one pinned buffer
BUFFERS = 2  # one fills while the other is copied from


class Device(Protocol):
    """What is needed of a device. Events are its own."""

    def pinned(self, nbytes: int) -> Tensor:
        """uint8 [nbytes] in host memory that the device reads by itself."""
        ...

    def empty(self, nbytes: int) -> Tensor:
        """uint8 [nbytes] on the device."""
        ...

    def copy(self, to: Tensor, source: Tensor) -> Any:
        """Queue a copy from pinned memory behind all work queued so far -> the event that it is done."""
        ...

    def wait_here(self, event: Any) -> None:
        """The caller waits."""
        ...

    def wait_there(self, event: Any) -> None:
        """Work queued from now on waits; the caller does not."""
        ...


class Cuda:
    """A GPU: copies run on a side stream, products on the default one. Never run."""

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()

    def pinned(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)

    def empty(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device="cuda")

    def copy(self, to: Tensor, source: Tensor) -> Any:
        # The memory of `to` may have been another tensor's, which work on the default stream still reads.
        self._stream.wait_stream(torch.cuda.default_stream())
        with torch.cuda.stream(self._stream):
            to.copy_(source, non_blocking=True)
        to.record_stream(self._stream)
        return self._stream.record_event()

    def wait_here(self, event: Any) -> None:
        event.synchronize()

    def wait_there(self, event: Any) -> None:
        torch.cuda.default_stream().wait_event(event)


class DeviceStore:
    """A store's tensors on a device: those prefetched are there or on their way until they are released, the others are
    copied when asked for. A thread fills the pinned buffers, so that the disk makes nobody else wait."""

    def __init__(self, store: WeightStore, device: Device, staging: int = STAGING) -> None:
        self._store, self._device = store, device
        self._buffers = [device.pinned(staging) for _ in range(BUFFERS)]
        self._events: list[Any] = [None] * BUFFERS
        self._turn = 0
        self._thread = ThreadPoolExecutor(1)
        self._there: dict[str, Future[tuple[Tensor, Any]]] = {}

    @property
    def config(self) -> Config:
        return self._store.config

    @property
    def identity(self) -> str:
        return self._store.identity

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        return self._store.tensors

    @property
    def bytes_read(self) -> int:
        return self._store.bytes_read

    def get(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        """Rows [start, stop) on the device, in the stored dtype; whole tensors stay there until they are released."""
        whole = start == 0 and stop is None
        if whole and name not in self._there:
            self._there[name] = self._thread.submit(self._stage, name, 0, None)
        coming = self._there[name] if name in self._there else self._thread.submit(self._stage, name, start, stop)
        tensor, event = coming.result()
        if event is not None:
            self._device.wait_there(event)
        return tensor[start:stop] if name in self._there else tensor

    def prefetch(self, names: Iterable[str]) -> None:
        """The disk is asked at once; copies to the device are queued in this order."""
        wanted = [name for name in names if name not in self._there]
        self._store.prefetch(wanted)
        for name in wanted:
            self._there[name] = self._thread.submit(self._stage, name, 0, None)

    def release(self, names: Iterable[str]) -> None:
        """These leave the device when work that is queued has used them."""
        for name in names:
            if name in self._there:
                self._there.pop(name).cancel()

    def _stage(self, name: str, start: int, stop: int | None) -> tuple[Tensor, Any]:
        """Work of the thread: rows of a tensor on the device, and the event of their last copy. The host lets go of them."""
        rows = self._store.get(name, start, stop)
        source = rows.contiguous().view(-1).view(torch.uint8)
        target, event = self._device.empty(len(source)), None
        for at in range(0, len(source), len(self._buffers[0])):
            event = self._through_buffer(target, source, at)
        self._store.release([name])
        return target.view(DTYPE_OF_TAG[self.tensors[name].dtype]).view(rows.shape), event

    def _through_buffer(self, target: Tensor, source: Tensor, at: int) -> Any:
        """One piece by way of the buffer whose turn it is, once the copy out of it has ended."""
        buffer, event = self._buffers[self._turn], self._events[self._turn]
        if event is not None:
            self._device.wait_here(event)
        piece = source[at : at + len(buffer)]
        buffer[: len(piece)].copy_(piece)
        done = self._device.copy(target[at : at + len(piece)], buffer[: len(piece)])
        self._events[self._turn], self._turn = done, (self._turn + 1) % BUFFERS
        return done
