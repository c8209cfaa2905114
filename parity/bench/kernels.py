"""Times of the kernels on a device, beside the least their bytes and products allow."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from statistics import median
from typing import Any, Protocol

from optimized.kernels.costs import Step, layer_costs
from reference.config import Config
from reference.errors import BadInput

from .roofline import DEVICES, Device, describe

WARM_UP = 3  # calls before the clock: compilation, and clocks of the device that rise
FLUSH_BYTES = 512 << 20  # written before every run; the largest cache here holds 256 MiB
SEED = 0


class Clock(Protocol):
    """Time on a device. Marks are put into its queue; their distance is known once everything before them is done."""

    def flush(self) -> None: ...

    def mark(self) -> Any: ...

    def seconds(self, start: Any, end: Any) -> float: ...


class CudaClock:
    """Events of torch's current stream, CUDA and ROCm alike."""

    def __init__(self) -> None:
        import torch

        self._torch = torch
        self._buffer = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")

    def flush(self) -> None:
        """Push what earlier calls left in the caches out of them."""
        self._buffer.zero_()

    def mark(self) -> Any:
        event = self._torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, start: Any, end: Any) -> float:
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3


@dataclass(frozen=True)
class Timed:
    """A call of a step: median seconds of its runs, and its floor."""

    call: str
    seconds: float
    floor: float

    @property
    def share(self) -> float:
        """Of the roofline: 1 is as fast as memory and arithmetic allow."""
        return self.floor / self.seconds


def median_seconds(call: Callable[[], object], clock: Clock, repeats: int) -> float:
    """Median time of a warm call on cold caches. All runs are queued before any is read, so that the host is ahead."""
    for _ in range(WARM_UP):
        call()
    marks = []
    for _ in range(repeats):
        clock.flush()
        start = clock.mark()
        call()
        marks.append((start, clock.mark()))
    return median(clock.seconds(start, end) for start, end in marks)


def measure(config: Config, step: Step, device: Device, clock: Clock, on: str, repeats: int) -> Iterator[Timed]:
    """Every call of `layer_costs` on the torch device `on`, each on operands of its own, which go before the next are drawn."""
    from .calls import layer_calls

    costs = layer_costs(config, step)
    for name, make in layer_calls(config, step, on, SEED).items():
        yield Timed(name, median_seconds(make(), clock, repeats), device.floor(costs[name]))


def lines(step: Step, device: Device, timed: Iterable[Timed]) -> Iterator[str]:
    """A table, a line as soon as its call is measured."""
    yield f"{describe(step)}; roofline of {device.name}"
    yield f"{'call':26} {'measured, µs':>14} {'roofline, µs':>14} {'share':>7}"
    for t in timed:
        yield f"{t.call:26} {t.seconds * 1e6:14,.2f} {t.floor * 1e6:14,.2f} {t.share:7.1%}"
    yield ""


def find_gpu() -> Device:
    """The device on paper for the GPU of this process. Raises BadInput as `device_named`."""
    import torch

    from optimized.kernels.launch import INTERPRETER

    available = torch.cuda.is_available()
    return device_named(torch.cuda.get_device_name() if available else None, INTERPRETER)


def device_named(name: str | None, interpreted: bool) -> Device:
    """The device on paper for a GPU of this name. Raises BadInput without a GPU, for one that has no roofline here, and
    where kernels are interpreted."""
    if name is None:
        raise BadInput("no GPU: kernels can only be timed on one")
    if interpreted:
        raise BadInput(f"kernels are interpreted, not run on {name}: unset TRITON_INTERPRET")
    for device in DEVICES:
        if device.name in name:
            return device
    raise BadInput(f"no roofline for {name}; known are {', '.join(device.name for device in DEVICES)}")
