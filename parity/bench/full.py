"""Products at the shapes of a model beside the limits of the machine, as ratios from one run. Source: docs/cpu.md §5."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from optimized.cpu.fused import Products
from reference.checkpoint.loader import Loader
from reference.checkpoint.store import WeightStore
from reference.linear import Job, Linear
from reference.moe import TOGETHER

from .limits import REPEATS, Limits

SWEPT = 1 << 30  # bytes of weights of one kind that a measurement goes through: more than caches hold


@dataclass(frozen=True)
class Ratio:
    """One kind of weight with so many tokens: the share reached of the read limit and of the peak of multiply-adds."""

    name: str
    tokens: int
    of_read: float
    of_peak: float


def ratios(store: WeightStore, limits: Limits, tokens: tuple[int, ...], swept: int = SWEPT) -> Iterator[Ratio]:
    """FP8, FP4 and BF16 weights of the model's layers, each swept until `swept` bytes have been read; best of `REPEATS`."""
    products = Products()
    loader = Loader(store, torch.float32, 0, products)
    for part in ("attn.wo_b", "attn.wq_b", "ffn.experts.{e}.w1", "ffn.experts.{e}.w2", "attn.compressor.wkv"):
        linears = _linears(loader, part, swept)
        for t in tokens:
            few = linears if t == 1 else linears[: max(1, len(linears) // t)]
            nbytes = sum(_nbytes(w) for w in few)
            x = torch.randn(t, few[0].dense(torch.float32, 0, 1).shape[1])
            before = products.multiply_adds
            seconds = min(_seconds(products, few, x) for _ in range(REPEATS))
            done = (products.multiply_adds - before) / REPEATS
            yield Ratio(part, t, nbytes / seconds / limits.read, done / seconds / limits.fma)


def _linears(loader: Loader, part: str, swept: int) -> list[Linear]:
    """Weights of that name of different layers and experts, together of `swept` bytes or all there are."""
    c, found, nbytes = loader.config, [], 0
    for e in range(c.n_routed_experts if "{e}" in part else 1):
        for layer in range(c.num_hidden_layers):
            name = f"layers.{layer}.{part.format(e=e)}"
            if f"{name}.weight" not in loader.store.tensors:
                continue
            found.append(loader.linear(name))
            nbytes += _nbytes(found[-1])
            if nbytes >= swept:
                return found
    return found


def _nbytes(linear: Linear) -> int:
    return linear.weight.nbytes + (0 if linear.scale is None else linear.scale.nbytes)


def _seconds(products: Products, linears: list[Linear], x: Tensor) -> float:
    began = time.perf_counter()
    for i in range(0, len(linears), TOGETHER):
        products([Job(w.weight, w.scale, x, 0, w.out_features) for w in linears[i : i + TOGETHER]])
    return time.perf_counter() - began
