"""Linear maps with their weights in stored form: the one door through which every projection goes.

`y = x Wᵀ`, no bias anywhere. Source: docs/model.md §2 (FP8 and FP4 linears), docs/checkpoint.md §4.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from .checkpoint.dequantize import dequantize
from .rounding import Sites

TILE = 1 << 22  # weights dequantised at a time: a tile stays in cache between dequantisation and product


class Linear:
    """A weight as the checkpoint stores it: BF16 or F32 [out, in], F8_E4M3 [out, in] or packed FP4 [out, in/2] with scale.

    `keep(dtype)` holds on to a dequantised copy; without one, `apply` dequantises tile by tile.
    """

    def __init__(self, weight: Tensor, scale: Tensor | None = None) -> None:
        self.weight = weight
        self.scale = scale
        self._dense: Tensor | None = None

    @property
    def quantized(self) -> bool:
        """Whether the weight is stored in FP8 or FP4: then, and only then, the input of the product is quantised too."""
        return self.weight.dtype in (torch.float8_e4m3fn, torch.int8)

    @property
    def out_features(self) -> int:
        return self.weight.shape[0]

    def dense(self, dtype: torch.dtype, start: int = 0, stop: int | None = None) -> Tensor:
        """Rows [start, stop) dequantised, [rows, in] in `dtype` (float32 or wider: exact)."""
        if self._dense is not None and self._dense.dtype == dtype:
            return self._dense[start:stop]
        return dequantize(self.weight[start:stop], self.scale, dtype, row0=start)

    def keep(self, dtype: torch.dtype) -> Linear:
        self._dense = self.dense(dtype)
        return self

    def apply(self, x: Tensor, start: int = 0, stop: int | None = None) -> Tensor:
        """x [..., in] times the rows [start, stop) of the weight -> [..., stop - start]."""
        stop = self.out_features if stop is None else stop
        if self._dense is not None:
            return x @ self.dense(x.dtype, start, stop).T
        out = x.new_empty(*x.shape[:-1], stop - start)
        step = max(1, TILE // x.shape[-1])
        tile = _scratch(x.dtype, max(TILE, x.shape[-1])).view(-1)[: step * x.shape[-1]].view(step, -1)
        for row in range(start, stop, step):
            end = min(row + step, stop)
            w = dequantize(self.weight[row:end], self.scale, x.dtype, row, tile[: end - row])
            torch.matmul(x, w.T, out=out[..., row - start : end - start])
        return out


@lru_cache(maxsize=2)
def _scratch(dtype: torch.dtype, elements: int) -> Tensor:
    """Where tiles are dequantised: touching fresh memory would cost as much as the work. For one thread at a time."""
    return torch.empty(elements, dtype=dtype)


def project(linear: Linear, x: Tensor, sites: Sites, name: str) -> Tensor:
    """x [..., in] -> [..., out] with the sites `name.input` (FP8 and FP4 weights only) and `name`."""
    if linear.quantized:
        x = sites(f"{name}.input", x)
    return sites(name, linear.apply(x))
