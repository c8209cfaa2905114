"""What the kernel tests share: where kernels run, mutants of kernel files, legal ranges of results, adversarial data."""

from __future__ import annotations

import importlib.util
import itertools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

UNIT = 2.0**-24  # unit roundoff of float32
_serial = itertools.count()


# Where the kernels under test run. Expectations are always made on the CPU; tests/test_kernel_gpu.py sets this.
DEVICE = os.environ.get("V4PARITY_KERNEL_DEVICE")


def on_device(kernel: Callable[..., Any], device: str | None = DEVICE) -> Callable[..., Any]:
    """The wrapper with its tensors carried to a device and back, outputs in place included; without one, as it is."""
    if device is None:
        return kernel

    def carried(*args: Any, **kwargs: Any) -> Any:
        there = [_with_its_gaps(a, device) if isinstance(a, Tensor) else a for a in args]
        out = kernel(*there, **kwargs)
        for here, a in zip(args, there, strict=True):
            if isinstance(here, Tensor):
                here.copy_(a)
        return tuple(o.cpu() for o in out) if isinstance(out, tuple) else out if out is None else out.cpu()

    return carried


def _with_its_gaps(x: Tensor, device: str) -> Tensor:
    """A copy on a device with the strides of x, and with what lies between its elements."""
    extent = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True)) if x.numel() else 0
    span = x.as_strided((extent,), (1,), x.storage_offset()).to(device, copy=True)
    return span.as_strided(x.shape, x.stride(), 0)


def fp8_partial_error() -> float:
    """Relative error, of the sum of magnitudes, that the hardware adds within a partial of FP8 products: Hopper keeps
    about 14 bits from one of the 4 instructions to the next; the interpreter and others add in float32."""
    hopper = DEVICE is not None and DEVICE.startswith("cuda") and torch.cuda.get_device_capability()[0] == 9
    return 4 * 2.0**-13 if hopper else 0.0


def gamma(n: int) -> float:
    """Relative error bound of n float32 roundings in a row, in any order of summation."""
    return n * UNIT / (1 - n * UNIT)


def mutant(module: ModuleType, tmp_path: Path, *edits: tuple[str, str]) -> ModuleType:
    """The kernel file with planted mistakes: every edit must match exactly once."""
    source = Path(module.__file__).read_text()
    for old, new in edits:
        assert source.count(old) == 1, f"{old!r} stands {source.count(old)} times in {module.__name__}"
        source = source.replace(old, new)
    name = f"{module.__package__}.mutant_{next(_serial)}"
    path = tmp_path / f"{name}.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(name, path)
    mutated = importlib.util.module_from_spec(spec)
    sys.modules[name] = mutated
    spec.loader.exec_module(mutated)
    return mutated


def poison_new_memory(monkeypatch: pytest.MonkeyPatch, byte: int = 0xFF) -> None:
    """From now on `torch.empty` and `empty_like` hand out memory full of this byte; 0xFF is NaN, and -1 in integers."""
    for name in ("empty", "empty_like"):
        original = getattr(torch, name)

        def poisoned(*args: Any, original: Callable[..., Tensor] = original, **kwargs: Any) -> Tensor:
            fresh = original(*args, **kwargs)
            fresh.view(-1).view(torch.uint8).fill_(byte)
            return fresh

        monkeypatch.setattr(torch, name, poisoned)


def bf16(x: Tensor) -> Tensor:
    """float64 -> bfloat16 values in float64, one rounding to nearest even (no double rounding by way of float32)."""
    mantissa, exponent = torch.frexp(x)
    step = torch.ldexp(torch.ones_like(x), exponent.clamp_min(-125) - 8)
    return torch.where(mantissa == 0, x, torch.round(x / step) * step)


def illegal_bf16(got: Tensor, want: Tensor, bound: Tensor) -> Tensor:
    """Where bfloat16 `got` is not the rounding of any value within `bound` of float64 `want`."""
    got = got.double()
    return ~((bf16(want - bound) <= got) & (got <= bf16(want + bound)))


E4M3_VALUES = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
_GRID = E4M3_VALUES[:127]


def e4m3(x: Tensor) -> Tensor:
    """float64 -> E4M3 values in float64: the nearest of the table, ties to the even code, clamped to +-448."""
    upper = torch.searchsorted(_GRID, x.abs().contiguous()).clamp(1, 126)
    down, up = x.abs() - _GRID[upper - 1], _GRID[upper] - x.abs()
    take_upper = (up < down) | ((up == down) & (upper % 2 == 0))
    return torch.copysign(_GRID[torch.where(take_upper, upper, upper - 1)], x)


def illegal_e4m3(code: Tensor, want: Tensor, bound: Tensor) -> Tensor:
    """Where a code is not the rounding of any value within `bound` of float64 `want`."""
    got = E4M3_VALUES[code.int()]
    return ~((e4m3(want - bound) <= got) & (got <= e4m3(want + bound)))


def scale_byte(amax: Tensor) -> Tensor:
    """float64 amax -> scale byte 127 + ceil(log2(max(amax, 1e-4) / 448)), found by trying all powers of two."""
    powers = torch.arange(-126, 127).double().exp2()
    return torch.searchsorted(powers * 448.0, amax.clamp_min(1e-4).contiguous()) + 1


def scale_value(byte: Tensor) -> Tensor:
    return torch.ldexp(torch.ones(byte.shape, dtype=torch.float64), byte.int() - 127)


def uneven(generator: torch.Generator, *shape: int, spread: int = 6) -> Tensor:
    """float32 normals whose blocks of 32 channels have scales up to 2^+-spread apart, with an outlier in each row."""
    x = torch.randn(*shape, generator=generator)
    blocks = -(-shape[-1] // 32)
    exponent = torch.randint(-spread, spread + 1, (*shape[:-1], blocks), generator=generator)
    x = x * exponent.float().exp2().repeat_interleave(32, -1)[..., : shape[-1]]
    where = torch.randint(0, shape[-1], (*shape[:-1], 1), generator=generator)
    return x.scatter(-1, where, 50.0 * 2**spread)
