"""Products at the shapes of a model beside the limits of the machine, as ratios from one run. Source: docs/cpu.md §5."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from optimized.cpu.fused import Products
from reference.checkpoint.loader import Loader
from reference.checkpoint.store import WeightStore
from reference.linear import Job, Linear
from reference.model import Model
from reference.moe import TOGETHER
from reference.state import SequenceState

from .limits import REPEATS, Limits, multiply_add_peak

SWEPT = 1 << 30  # bytes of weights of one kind that a measurement goes through: more than caches hold
TOKENS, TOKENS_DOUBLE = (1, 4, 16, 1024), (1, 4, 16)
PREFILL = 1024  # tokens that go through a whole layer


@dataclass(frozen=True)
class Ratio:
    """One kind of weight with so many tokens: the share reached of the read limit and of the peak of multiply-adds of
    the same dtype."""

    name: str
    dtype: torch.dtype
    tokens: int
    of_read: float
    of_peak: float


def lines(store: WeightStore, limits: Limits) -> Iterator[str]:
    """What `v4parity bench full` prints below the limits."""
    double = multiply_add_peak(torch.float64)
    yield f"{double / 1e9:.0f} G multiply-adds/s in float64"
    for dtype, peak, tokens in ((torch.float32, limits.fma, TOKENS), (torch.float64, double, TOKENS_DOUBLE)):
        for r in ratios(store, limits.read, peak, tokens, dtype=dtype):
            shares = f"{r.of_read:6.1%} of the read limit  {r.of_peak:6.1%} of the peak"
            yield f"{r.name:20} {r.tokens:5} tokens  {str(r.dtype).removeprefix('torch.')}  {shares}"
    for p in prefill(store, limits.fma):
        parts = f"{p.of_peak:.1%} of the peak over all it does, {p.in_products:.1%} in its products"
        yield f"layer {p.layer} ({p.kind}), prefill of {p.tokens} tokens in {p.seconds:.2f} s: {parts}"


def ratios(store: WeightStore, read: float, peak: float, tokens: tuple[int, ...], swept: int = SWEPT,
           dtype: torch.dtype = torch.float32) -> Iterator[Ratio]:  # fmt: skip
    """FP8, FP4 and BF16 weights of the model's layers, each swept until `swept` bytes have been read; best of `REPEATS`."""
    products = Products()
    loader = Loader(store, dtype, 0, products)
    for part in ("attn.wo_b", "attn.wq_b", "ffn.experts.{e}.w1", "ffn.experts.{e}.w2", "attn.compressor.wkv"):
        linears = _linears(loader, part, swept)
        for t in tokens:
            few = linears if t == 1 else linears[: max(1, len(linears) // t)]
            nbytes = sum(_nbytes(w) for w in few)
            x = torch.randn(t, few[0].dense(torch.float32, 0, 1).shape[1], dtype=dtype)
            before = products.multiply_adds
            seconds = min(_seconds(products, few, x) for _ in range(REPEATS))
            done = (products.multiply_adds - before) / REPEATS
            yield Ratio(part, dtype, t, nbytes / seconds / read, done / seconds / peak)


@dataclass(frozen=True)
class Prefill:
    """A layer that takes in a prompt: its multiply-adds a second as shares of the peak, over all it does and over the
    time of its products."""

    layer: int
    kind: str
    tokens: int
    seconds: float
    of_peak: float
    in_products: float


def prefill(store: WeightStore, peak: float, tokens: int = PREFILL) -> Iterator[Prefill]:
    """One layer of each kind, all its parts: attention from an empty state, router, experts, mixing of the streams.

    The first run meets the weights (examines them, draws what is drawn); the second is measured. Only the products with
    stored weights count as multiply-adds.
    """
    c, products = store.config, _Timed(Products())
    model = Model(store, memory=0, products=products)
    ids = torch.arange(tokens) % c.vocab_size
    for kind in ("window", "csa", "hca"):
        layers = [i for i in range(c.num_hidden_layers) if c.kind(i) == kind]
        if not layers:
            continue
        block, batch = model.loader.block(layers[-1]), model.batch([ids], [SequenceState()])
        x = torch.randn(tokens, c.hc_mult, c.hidden_size, generator=torch.Generator().manual_seed(0))
        for _ in range(2):
            products.seconds, products.multiply_adds, began = 0.0, 0, time.perf_counter()
            block(x, batch, [block.attn.initial_state()], model.sites.block(f"layers.{layers[-1]}"))
            seconds = time.perf_counter() - began
        done = products.multiply_adds / peak
        yield Prefill(layers[-1], kind, tokens, seconds, done / seconds, done / products.seconds)


class _Timed:
    """Products that know how long they took."""

    def __init__(self, products: Products) -> None:
        self._products = products
        self.seconds, self.multiply_adds = 0.0, 0

    def admit(self, name: str, weight: Tensor, scale: Tensor | None) -> bool:
        return bool(self._products.admit(name, weight, scale))

    def __call__(self, jobs: Sequence[Job]) -> list[Tensor]:
        began, before = time.perf_counter(), self._products.multiply_adds
        out: list[Tensor] = self._products(jobs)
        self.seconds += time.perf_counter() - began
        self.multiply_adds += self._products.multiply_adds - before
        return out


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
