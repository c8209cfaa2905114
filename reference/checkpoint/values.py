"""Damage inside tensors: what no header shows. Source: docs/checkpoint.md §6."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ..errors import BadInput
from .store import TensorInfo, WeightStore

ROWS_BYTES = 1 << 26  # bytes examined at a time


def check_values(where: str, name: str, values: Tensor, row0: int, experts: int) -> None:
    """Check rows of a tensor in stored dtype, the first of which is row `row0`.

    Refused: scale byte 255, NaN codes in E4M3, NaN or infinity in BF16 and F32, an F32 scale that is not positive,
    and in tid2eid an expert outside [0, experts) or twice in a row. Raises BadInput with file, tensor and element.
    """
    bad, what = _faults(name, values, experts)
    if bad.any():
        element = int(bad.flatten().int().argmax()) + row0 * (values[0].numel() if values.dim() > 1 else 1)
        raise BadInput(f"{where}: {name}: {what} at element {element}")


def _faults(name: str, values: Tensor, experts: int) -> tuple[Tensor, str]:
    """Where elements are damaged (bool, shape of values), and what the damage is."""
    if values.dtype == torch.float8_e8m0fnu:
        return values.view(torch.uint8) == 255, "scale byte 255 (not a number)"
    if values.dtype == torch.float8_e4m3fn:
        return (values.view(torch.uint8) & 0x7F) == 0x7F, "E4M3 code of no number"
    if values.dtype == torch.int64:
        outside = (values < 0) | (values >= experts)
        if outside.any():
            return outside, f"expert outside 0..{experts - 1}"
        return _repeated(values), "expert twice in a row"
    if values.dtype == torch.int8:
        return torch.zeros(1, dtype=torch.bool), ""  # every byte is two numbers
    if name.endswith(".scale"):
        return ~((values > 0) & values.isfinite()), "scale that is not positive and finite"
    return ~values.isfinite(), "value that is not finite"


def _repeated(ids: Tensor) -> Tensor:
    """[t, k] -> bool [t, k]: elements equal to an earlier one of their row."""
    earlier = [(ids[:, :k] == ids[:, k : k + 1]).any(1) for k in range(ids.shape[1])]
    return torch.stack(earlier, dim=1)


def verify(store: WeightStore, held: Mapping[str, TensorInfo], where: str) -> None:
    """Read and check every value of the tensors `held`, which are in the file `where`. Raises BadInput at the first damage."""
    for name, info in held.items():
        step = max(1, ROWS_BYTES * info.shape[0] // max(info.nbytes, 1))
        for row in range(0, info.shape[0], step):
            rows = store.get(name, row, min(row + step, info.shape[0]))
            check_values(where, name, rows, row, store.config.n_routed_experts)
