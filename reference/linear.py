"""Linear maps with their weights in stored form: the one door through which every projection goes.

`y = x Wᵀ`, no bias anywhere. Source: docs/model.md §2 (FP8 and FP4 linears), docs/checkpoint.md §4.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from .checkpoint.dequantize import dequantize
from .rounding import Sites

TILE = 1 << 22  # weights dequantised at a time: a tile stays in cache between dequantisation and product


class Job(NamedTuple):
    """One product: x [t, in] times rows [start, stop) of a stored weight."""

    weight: Tensor
    scale: Tensor | None
    x: Tensor
    start: int
    stop: int


class Products(Protocol):
    """Who multiplies with stored weights in the reference's place: in x's dtype, to within its accumulation error.

    `multiply_adds` counts what was done so far.
    """

    multiply_adds: int

    def admit(self, name: str, weight: Tensor, scale: Tensor | None) -> bool:
        """Whether `name` is stored in a way that is taken here. Raises BadInput where its values are damaged."""
        ...

    def __call__(self, jobs: Sequence[Job]) -> list[Tensor]:
        """[t, stop - start] of each job."""
        ...


class Linear:
    """A weight as the checkpoint stores it: BF16 or F32 [out, in], F8_E4M3 [out, in] or packed FP4 [out, in/2] with scale.

    `keep(dtype)` holds on to a dequantised copy; without one, `apply` leaves the product to `products`, which have
    admitted the weight, or dequantises tile by tile.
    """

    def __init__(self, weight: Tensor, scale: Tensor | None = None, products: Products | None = None) -> None:
        self.weight = weight
        self.scale = scale
        self.products = products
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
        if self.products is not None:
            flat = x.reshape(-1, x.shape[-1])
            return self.products([Job(self.weight, self.scale, flat, start, stop)])[0].view(*x.shape[:-1], -1)
        out = x.new_empty(*x.shape[:-1], stop - start)
        step = max(1, TILE // x.shape[-1])
        tile = _scratch(x.dtype, max(TILE, x.shape[-1])).view(-1)[: step * x.shape[-1]].view(step, -1)
        for row in range(start, stop, step):
            end = min(row + step, stop)
            w = dequantize(self.weight[row:end], self.scale, x.dtype, row, tile[: end - row])
            torch.matmul(x, w.T, out=out[..., row - start : end - start])
        return out


def apply_all(linears: Sequence[Linear], xs: Sequence[Tensor]) -> list[Tensor]:
    """x [t, in] of each times its whole weight -> [t, out] of each: one call where the same products take them all."""
    products = linears[0].products if linears else None
    if products is None or any(linear.products is not products for linear in linears):
        return [linear.apply(x) for linear, x in zip(linears, xs, strict=True)]
    jobs = (Job(w.weight, w.scale, x, 0, w.out_features) for w, x in zip(linears, xs, strict=True))
    return products(list(jobs))


def apply_parts(linear: Linear, xs: Sequence[Tensor]) -> list[Tensor]:
    """x [t, in] of each times its own equal share of the rows, in their order -> [t, out / n] of each."""
    rows = linear.out_features // len(xs)
    if linear.products is None:
        return [linear.apply(x, i * rows, (i + 1) * rows) for i, x in enumerate(xs)]
    return linear.products([Job(linear.weight, linear.scale, x, i * rows, (i + 1) * rows) for i, x in enumerate(xs)])


@lru_cache(maxsize=2)
def _scratch(dtype: torch.dtype, elements: int) -> Tensor:
    """Where tiles are dequantised: touching fresh memory would cost as much as the work. For one thread at a time."""
    return torch.empty(elements, dtype=dtype)


def project(linear: Linear, x: Tensor, sites: Sites, name: str) -> Tensor:
    """x [..., in] -> [..., out] with the sites `name.input` (FP8 and FP4 weights only) and `name`."""
    return sites(name, linear.apply(_input(linear, x, sites, name)))


def project_all(linears: Sequence[Linear], xs: Sequence[Tensor], sites: Sequence[Sites], names: Sequence[str]) -> list[Tensor]:
    """`project` of each, all products in one call."""
    xs = [_input(*one) for one in zip(linears, xs, sites, names, strict=True)]
    return [at(name, y) for at, name, y in zip(sites, names, apply_all(linears, xs), strict=True)]


def _input(linear: Linear, x: Tensor, sites: Sites, name: str) -> Tensor:
    return sites(f"{name}.input", x) if linear.quantized else x
