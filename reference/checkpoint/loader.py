"""From tensors with names to modules: which weight goes where, and how long it stays.

A model whose dequantised weights fit into `memory` is kept whole; a larger one is read layer by layer, with experts
fetched when a token asks for them. Source: docs/checkpoint.md §4 and §9.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import lru_cache, partial

import torch
from torch import Tensor

from ..attention import Attention
from ..block import Block
from ..compressor import Compressor
from ..config import Config
from ..errors import BadInput
from ..hyper_connection import HyperConnection, HyperHead
from ..indexer import Indexer
from ..linear import Linear, Products
from ..moe import Expert, MoE
from ..mtp import MTP
from ..rope import Rope
from .store import DTYPE_OF_TAG, WeightStore
from .streaming import HEAD, Streaming

LOOKAHEAD = 2  # layers whose dense parts are on their way while one computes


def dense_bytes(store: WeightStore, dtype: torch.dtype) -> int:
    """Bytes of all weights dequantised to `dtype` (an upper bound: scales count as weights)."""
    elements = 0
    for info in store.tensors.values():
        count = info.nbytes // DTYPE_OF_TAG[info.dtype].itemsize
        elements += 2 * count if info.dtype == "I8" else count
    return elements * dtype.itemsize


class Loader:
    """Builds the modules of `reference` from a store, in the dtype of the run.

    `memory` bounds, in bytes, the weights that are kept between uses. `products` multiply with the weights that they
    admit as those are stored, in a resident model too; all others are dequantised here. `experts_used` names the routed
    experts that tokens have asked for, `experts_read` counts how often one was read, `touched` the bytes of all uses.
    """

    def __init__(self, store: WeightStore, dtype: torch.dtype, memory: int, products: Products | None = None) -> None:
        self.store = store
        self.config: Config = store.config
        self.dtype = dtype
        self.products = products
        self.resident = dense_bytes(store, dtype) <= memory
        self.experts_used: set[str] = set()
        self.experts_read = 0
        self._views = getattr(store, "gives_views", False)  # whose memory `release` frees: a block may hold on to them
        self._streaming = Streaming(store, dtype, sys.maxsize if self.resident else memory)
        self._experts: dict[str, Expert] = {}
        self._blocks: dict[str, Block] = {}
        self._head = lru_cache(lambda: (self._hyper_head(""), self.tensor("norm.weight"), self.linear("head")))
        self._embedding = lru_cache(lambda: self.tensor("embed.weight"))

    @property
    def touched(self) -> int:
        return self._streaming.touched

    def begin(self, ids: Tensor) -> None:
        """A step of these tokens [t] begins: its first layers come, with the experts that their hash tables name."""
        if self.resident:
            return
        parts = []
        for layer in range(min(max(LOOKAHEAD, self.config.num_hash_layers), self.config.num_hidden_layers)):
            parts.append(f"layers.{layer}")
            if self.config.is_hash_layer(layer):
                chosen = self.store.get(f"layers.{layer}.ffn.gate.tid2eid")[ids].unique()
                parts += [f"layers.{layer}.ffn.experts.{e}" for e in chosen.tolist()]
        self._streaming.begin(parts)

    def tensor(self, name: str) -> Tensor:
        """A small tensor (norm, sink, bias, mix) in the dtype of the run."""
        return self.store.get(name).to(self.dtype)

    def linear(self, name: str) -> Linear:
        """`name.weight` with `name.scale` where it is stored quantised."""
        scale = self.store.get(f"{name}.scale") if f"{name}.scale" in self.store.tensors else None
        weight = self.store.get(f"{name}.weight")
        linear = Linear(weight, scale)
        if linear.quantized and scale is None:
            raise BadInput(f"{name}.weight is quantised but {name}.scale is missing")
        if self.products is not None and self.products.admit(f"{self.store.identity}: {name}", weight, scale):
            linear.products = self.products
            return linear
        return linear.keep(self.dtype) if self.resident else linear

    def embed(self, ids: Tensor) -> Tensor:
        """Embedding rows [t, D] of token ids [t]; of a streamed model only these rows are read."""
        if self.resident:
            return self._embedding()[ids]
        rows, place = ids.unique(return_inverse=True)
        table = torch.cat([self.store.get("embed.weight", i, i + 1) for i in rows.tolist()])
        return table[place].to(self.dtype)

    def head(self) -> tuple[HyperHead, Tensor, Linear]:
        """The last mix, the last norm, and the output matrix; held once read."""
        self._use(HEAD)
        return self._head()

    def _use(self, part: str) -> None:
        for gone in self._streaming.use(part):
            self._experts.pop(gone, None)
            if not self._views:
                self._blocks.pop(gone, None)

    def _expect(self, layer: int, name: str, numbers: Sequence[int]) -> None:
        """A router has chosen: its experts come, and behind them what the layers after it need."""
        if not self.resident:
            behind = layer + LOOKAHEAD
            dense = f"layers.{behind}" if behind < self.config.num_hidden_layers else HEAD
            self._streaming.expect([*(f"{name}.experts.{e}" for e in numbers), dense])

    def block(self, layer: int) -> Block:
        """Layer `layer`; drafter block i is layer `num_hidden_layers + i`."""
        c = self.config
        name = f"layers.{layer}" if layer < c.num_hidden_layers else f"mtp.{layer - c.num_hidden_layers}"
        self._use(name)
        if name not in self._blocks:
            self._blocks[name] = self._block(name, layer)
        return self._blocks[name]

    def _block(self, name: str, layer: int) -> Block:
        return Block(
            hc_attn=self._hyper_connection(f"{name}.hc_attn"),
            attn_norm=self.tensor(f"{name}.attn_norm.weight"),
            attn=self._attention(f"{name}.attn", layer),
            hc_ffn=self._hyper_connection(f"{name}.hc_ffn"),
            ffn_norm=self.tensor(f"{name}.ffn_norm.weight"),
            ffn=self._moe(f"{name}.ffn", layer),
            eps=self.config.rms_norm_eps,
        )

    def mtp(self, index: int) -> MTP:
        """Serial MTP block `index`. Raises BadInput where the checkpoint has none, or a DSpark drafter."""
        if self.config.dspark is not None:
            raise BadInput("this checkpoint drafts with DSpark, whose forward is not defined here; it has no serial MTP")
        if index >= self.config.num_drafter_blocks:
            raise BadInput(f"this checkpoint has no mtp.{index}")
        name = f"mtp.{index}"
        return MTP(
            e_proj=self.linear(f"{name}.e_proj"),
            h_proj=self.linear(f"{name}.h_proj"),
            enorm=self.tensor(f"{name}.enorm.weight"),
            hnorm=self.tensor(f"{name}.hnorm.weight"),
            block=self.block(self.config.num_hidden_layers + index),
            hc_head=self._hyper_head(f"{name}."),
            norm=self.tensor(f"{name}.norm.weight"),
            eps=self.config.rms_norm_eps,
        )

    def expert(self, name: str, number: int) -> Expert:
        """One routed expert; the least recently used ones leave when `memory` is full."""
        key = f"{name}.experts.{number}"
        self.experts_used.add(key)
        self._use(key)
        if key not in self._experts:
            self.experts_read += 1
            self._experts[key] = self._swiglu(key)
        return self._experts[key]

    def _swiglu(self, name: str) -> Expert:
        return Expert(self.linear(f"{name}.w1"), self.linear(f"{name}.w2"), self.linear(f"{name}.w3"))

    def _hyper_connection(self, name: str) -> HyperConnection:
        c = self.config
        fn, base, scale = (self.tensor(f"{name}_{part}") for part in ("fn", "base", "scale"))
        return HyperConnection(fn, base, scale, c.hc_sinkhorn_iters, c.hc_eps, c.rms_norm_eps)

    def _hyper_head(self, prefix: str) -> HyperHead:
        fn, base, scale = (self.tensor(f"{prefix}hc_head_{part}") for part in ("fn", "base", "scale"))
        return HyperHead(fn, base, scale, self.config.hc_eps, self.config.rms_norm_eps)

    def _compressor(self, name: str, layer: int, index_keys: bool) -> Compressor:
        return Compressor(
            wkv=self.linear(f"{name}.wkv"),
            wgate=self.linear(f"{name}.wgate"),
            ape=self.tensor(f"{name}.ape"),
            norm=self.tensor(f"{name}.norm.weight"),
            ratio=self.config.ratio(layer),
            rope=Rope.of_layer(self.config, layer),
            eps=self.config.rms_norm_eps,
            index_keys=index_keys,
        )

    def _indexer(self, name: str, layer: int) -> Indexer:
        c = self.config
        compressor = self._compressor(f"{name}.compressor", layer, index_keys=True)
        wq_b, weights_proj = self.linear(f"{name}.wq_b"), self.linear(f"{name}.weights_proj")
        return Indexer(wq_b, weights_proj, compressor, c.index_n_heads, c.index_head_dim, c.index_topk)

    def _attention(self, name: str, layer: int) -> Attention:
        c, kind = self.config, self.config.kind(layer)
        return Attention(
            **{w: self.linear(f"{name}.{w}") for w in ("wq_a", "wq_b", "wkv", "wo_a", "wo_b")},
            q_norm=self.tensor(f"{name}.q_norm.weight"),
            kv_norm=self.tensor(f"{name}.kv_norm.weight"),
            sink=self.tensor(f"{name}.attn_sink"),
            compressor=None if kind == "window" else self._compressor(f"{name}.compressor", layer, index_keys=False),
            indexer=self._indexer(f"{name}.indexer", layer) if kind == "csa" else None,
            rope=Rope.of_layer(c, layer),
            n_heads=c.num_attention_heads,
            head_dim=c.head_dim,
            n_groups=c.o_groups,
            sliding_window=c.sliding_window,
            eps=c.rms_norm_eps,
        )

    def _moe(self, name: str, layer: int) -> MoE:
        c, hashed = self.config, self.config.is_hash_layer(layer)
        return MoE(
            gate=self.linear(f"{name}.gate"),
            bias=None if hashed else self.tensor(f"{name}.gate.bias"),
            tid2eid=self.store.get(f"{name}.gate.tid2eid") if hashed else None,
            expert=partial(self.expert, name),
            shared=self._swiglu(f"{name}.shared_experts"),
            top_k=c.num_experts_per_tok,
            scaling=c.routed_scaling_factor,
            limit=c.swiglu_limit,
            expect=partial(self._expect, layer, name),
        )
