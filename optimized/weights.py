"""Weights as the kernels take them: FP8 and FP4 stay packed, and what kernels want side by side is stacked once.

Projections that read the same input become one weight: wq_a over wkv, and in layers with a compressor all its bfloat16
projections. A model whose packed weights fit into `memory` is kept whole; of a larger one a layer is read when it is
used, and experts when a token asks for them. Source: docs/checkpoint.md §4, docs/pool.md §11.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from reference.checkpoint.dequantize import dequantize
from reference.checkpoint.store import WeightStore
from reference.errors import BadInput

BLOCK = 128  # rows that share a scale
DEFAULT_MEMORY = 8 << 30


@dataclass(frozen=True)
class Packed:
    """Codes and scale bytes, both uint8: E4M3 [n, k] with a scale per 128 x 128, or two E2M1 a byte [n, k/2] with a scale
    per row and 32."""

    codes: Tensor
    scales: Tensor

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes


@dataclass(frozen=True)
class HyperWeights:
    """fn [mixes, s*D], base [mixes] and scale [3], or [1] for the last mix; float32."""

    fn: Tensor
    base: Tensor
    scale: Tensor


@dataclass(frozen=True)
class CompressorWeights:
    """ape [ratio, w] and norm [dh], float32; its projections are part of `AttentionWeights.from_x`."""

    ape: Tensor
    norm: Tensor

    @property
    def width(self) -> int:
        return self.ape.shape[1]


@dataclass(frozen=True)
class AttentionWeights:
    """`qkv_a`: wq_a, zeros up to a whole block of rows, then wkv. `from_x` bfloat16 [n, D]: wkv and wgate of the compressor,
    then of the indexer's, then weights_proj; none in window layers."""

    qkv_a: Packed
    q_norm: Tensor
    wq_b: Packed
    kv_norm: Tensor
    sink: Tensor
    wo_a: Packed
    wo_b: Packed
    from_x: Tensor | None
    compressor: CompressorWeights | None
    index_compressor: CompressorWeights | None
    index_wq_b: Packed | None


@dataclass(frozen=True)
class Experts:
    """Routed experts side by side, all FP4 or all FP8: w1 (gate) and w3 (up) [e, i, d], w2 (down) [e, d, i]."""

    w1: Packed
    w3: Packed
    w2: Packed

    @property
    def count(self) -> int:
        return self.w1.codes.shape[0]

    @property
    def nbytes(self) -> int:
        return self.w1.nbytes + self.w3.nbytes + self.w2.nbytes


@dataclass(frozen=True)
class SharedExpert:
    """FP8. `gate_up`: w1, zeros up to a whole block of rows, then w3; `width`: rows of each."""

    gate_up: Packed
    down: Packed
    width: int


@dataclass(frozen=True)
class MoEWeights:
    """gate bfloat16 [e, D] with bias float32 [e], or with tid2eid int64 [vocab, k]; routed experts: `Weights.experts`."""

    gate: Tensor
    bias: Tensor | None
    tid2eid: Tensor | None
    shared: SharedExpert


@dataclass(frozen=True)
class LayerWeights:
    name: str
    hc_attn: HyperWeights
    attn_norm: Tensor
    attn: AttentionWeights
    hc_ffn: HyperWeights
    ffn_norm: Tensor
    ffn: MoEWeights


@dataclass(frozen=True)
class HeadWeights:
    """The last mix, the last norm [D], and the bfloat16 head [vocab, D]."""

    hc_head: HyperWeights
    norm: Tensor
    head: Tensor


@dataclass(frozen=True)
class MTPWeights:
    e_proj: Packed
    h_proj: Packed
    enorm: Tensor
    hnorm: Tensor
    layer: LayerWeights
    head: HeadWeights


class Weights:
    """A store's weights on a device. `memory` bounds the bytes that are kept between uses, and the experts of a step; the
    embedding, the head and one layer are there in any case."""

    def __init__(self, store: WeightStore, device: str = "cpu", memory: int = DEFAULT_MEMORY) -> None:
        self.store, self.device, self.memory = store, device, memory
        self.config = store.config
        self.resident = sum(info.nbytes for info in store.tensors.values()) <= memory
        self._layers: dict[str, LayerWeights] = {}
        self._experts: OrderedDict[str, Experts] = OrderedDict()
        self._mtp: MTPWeights | None = None
        self.embedding = lru_cache(lambda: self.bf16("embed.weight"))
        self.head = lru_cache(lambda: self._head("", "norm.weight"))
        self._projection = lru_cache(lambda: self.bf16("head.weight"))

    def layer(self, number: int) -> LayerWeights:
        """Layer `number`; drafter block i is layer `num_hidden_layers + i`."""
        drafter = number - self.config.num_hidden_layers
        name = f"layers.{number}" if drafter < 0 else f"mtp.{drafter}"
        if name in self._layers:
            return self._layers[name]
        layer = LayerWeights(
            name=name,
            hc_attn=self._hyper(f"{name}.hc_attn"),
            attn_norm=self.f32(f"{name}.attn_norm.weight"),
            attn=self._attention(f"{name}.attn", self.config.ratio(number)),
            hc_ffn=self._hyper(f"{name}.hc_ffn"),
            ffn_norm=self.f32(f"{name}.ffn_norm.weight"),
            ffn=self._moe(f"{name}.ffn", self.config.is_hash_layer(number)),
        )
        if self.resident:
            self._layers[name] = layer
        return layer

    def mtp(self) -> MTPWeights:
        """The serial MTP block. Raises BadInput where the checkpoint has none."""
        if not self.config.has_mtp:
            raise BadInput("this checkpoint has no serial MTP block")
        mtp = self._mtp or MTPWeights(
            e_proj=self.packed("mtp.0.e_proj"),
            h_proj=self.packed("mtp.0.h_proj"),
            enorm=self.f32("mtp.0.enorm.weight"),
            hnorm=self.f32("mtp.0.hnorm.weight"),
            layer=self.layer(self.config.num_hidden_layers),
            head=self._head("mtp.0.", "mtp.0.norm.weight"),
        )
        if self.resident:
            self._mtp = mtp
        return mtp

    def pieces(self, layer: str, chosen: Tensor) -> list[Tensor]:
        """int32 `chosen` [t, k] in parts whose experts fit into memory together: each a copy with -1 for the other parts."""
        if self.resident:
            return [chosen]
        numbers = chosen[chosen >= 0].unique()
        return [torch.where(torch.isin(chosen, part), chosen, -1) for part in numbers.split(self._experts_at_once(layer))]

    def experts(self, layer: str, chosen: Tensor) -> tuple[Experts, Tensor]:
        """The routed experts of a layer that int32 `chosen` [t, k] names (-1: none), and `chosen` as numbers among them.

        Of a resident model all are there and nothing is renumbered; else the least recently used ones leave when `memory` is
        full.
        """
        if self.resident:
            return self._kept(f"{layer}.ffn.experts", self._all_experts), chosen
        numbers = chosen[chosen >= 0].unique()  # ascending
        used = [self._kept(f"{layer}.ffn.experts.{e}", self._expert) for e in numbers.tolist()]
        local = torch.searchsorted(numbers.int(), chosen.contiguous()).int()
        return side_by_side(used), torch.where(chosen < 0, -1, local)

    def _kept(self, key: str, read: Callable[[str], Experts]) -> Experts:
        if key not in self._experts:
            self._experts[key] = read(key)
        self._experts.move_to_end(key)
        while sum(e.nbytes for e in self._experts.values()) > self._room and len(self._experts) > 1:
            self._experts.popitem(last=False)
        return self._experts[key]

    @property
    def _room(self) -> int:
        """Bytes for experts that are kept: what embedding and head leave, less those that lie side by side for a step."""
        return (self.memory - self._bytes("embed.weight") - self._bytes("head.weight")) // 2

    def _experts_at_once(self, layer: str) -> int:
        first = f"{layer}.ffn.experts.0"
        one = sum(self._bytes(f"{first}.{part}.{what}") for part in ("w1", "w2", "w3") for what in ("weight", "scale"))
        return max(1, self._room // one)

    def _bytes(self, name: str) -> int:
        return self.store.tensors[name].nbytes

    def _all_experts(self, name: str) -> Experts:
        return side_by_side([self._expert(f"{name}.{e}") for e in range(self.config.n_routed_experts)])

    def _expert(self, name: str) -> Experts:
        parts = [self.packed(f"{name}.{part}") for part in ("w1", "w3", "w2")]
        if len({p.scales.shape[0] == p.codes.shape[0] for p in parts}) > 1:
            raise BadInput(f"{name} is FP4 in one part and FP8 in another; the engine has no kernel for that")
        return Experts(*(Packed(p.codes[None], p.scales[None]) for p in parts))

    def f32(self, name: str) -> Tensor:
        return self.store.get(name).to(self.device, torch.float32).contiguous()

    def bf16(self, name: str) -> Tensor:
        """A product's weight in bfloat16: stored so, or FP8 that bfloat16 holds exactly. Raises BadInput for another."""
        weight = self.store.get(name)
        if weight.dtype == torch.float8_e4m3fn:
            scale = name.removesuffix("weight") + "scale"
            wide = dequantize(weight, self.store.get(scale) if scale in self.store.tensors else None, torch.float32)
            weight = wide.to(torch.bfloat16)
            if not torch.equal(weight.float(), wide):
                raise BadInput(f"{name} times its scales does not fit into bfloat16, which the engine computes it in")
        if weight.dtype != torch.bfloat16:
            raise BadInput(f"{name} is stored as {weight.dtype}; the engine computes it in bfloat16 only")
        return weight.to(self.device)

    def packed(self, name: str) -> Packed:
        """Weight and scale of a linear as stored. Raises BadInput unless they are FP8 or FP4, with scales that E8M0 holds."""
        if f"{name}.scale" not in self.store.tensors:
            raise BadInput(f"{name}.weight has no scale; the engine computes it from FP8 or FP4 only")
        codes, scales = self.store.get(f"{name}.weight"), self.store.get(f"{name}.scale")
        if codes.dtype not in (torch.float8_e4m3fn, torch.int8):
            raise BadInput(f"{name} is stored as {codes.dtype}; the engine has no kernel for that")
        return Packed(codes.view(torch.uint8).to(self.device), scale_bytes(scales, name).to(self.device))

    def _attention(self, name: str, ratio: int) -> AttentionWeights:
        indexed = ratio == 4
        index = f"{name}.indexer"
        owners = ([f"{name}.compressor"] if ratio else []) + ([f"{index}.compressor"] if indexed else [])
        parts = [self.bf16(f"{owner}.{part}.weight") for owner in owners for part in ("wkv", "wgate")]
        parts += [self.bf16(f"{index}.weights_proj.weight")] if indexed else []
        return AttentionWeights(
            qkv_a=stack(self.packed(f"{name}.wq_a"), self.packed(f"{name}.wkv")),
            q_norm=self.f32(f"{name}.q_norm.weight"),
            wq_b=self.packed(f"{name}.wq_b"),
            kv_norm=self.f32(f"{name}.kv_norm.weight"),
            sink=self.f32(f"{name}.attn_sink"),
            wo_a=self.packed(f"{name}.wo_a"),
            wo_b=self.packed(f"{name}.wo_b"),
            from_x=torch.cat(parts) if parts else None,
            compressor=self._compressor(f"{name}.compressor") if ratio else None,
            index_compressor=self._compressor(f"{index}.compressor") if indexed else None,
            index_wq_b=self.packed(f"{index}.wq_b") if indexed else None,
        )

    def _compressor(self, name: str) -> CompressorWeights:
        return CompressorWeights(self.f32(f"{name}.ape"), self.f32(f"{name}.norm.weight"))

    def _moe(self, name: str, hashed: bool) -> MoEWeights:
        return MoEWeights(
            gate=self.bf16(f"{name}.gate.weight"),
            bias=None if hashed else self.f32(f"{name}.gate.bias"),
            tid2eid=self.store.get(f"{name}.gate.tid2eid").to(self.device) if hashed else None,
            shared=self._shared(f"{name}.shared_experts"),
        )

    def _shared(self, name: str) -> SharedExpert:
        w1, w3, w2 = (self.packed(f"{name}.{part}") for part in ("w1", "w3", "w2"))
        return SharedExpert(stack(w1, w3), w2, w1.codes.shape[0])

    def _hyper(self, name: str) -> HyperWeights:
        return HyperWeights(*(self.f32(f"{name}_{part}") for part in ("fn", "base", "scale")))

    def _head(self, prefix: str, norm: str) -> HeadWeights:
        return HeadWeights(self._hyper(f"{prefix}hc_head"), self.f32(norm), self._projection())


def scale_bytes(scales: Tensor, name: str) -> Tensor:
    """Scales in E8M0, or float32 powers of two (base models) -> uint8. Raises BadInput for anything between."""
    if scales.dtype == torch.float32:
        stored, scales = scales, scales.to(torch.float8_e8m0fnu)
        if not torch.equal(scales.float(), stored):
            raise BadInput(f"{name}.scale holds a float32 that is no power of two; the engine has no kernel for that")
    if scales.dtype != torch.float8_e8m0fnu:
        raise BadInput(f"{name}.scale is stored as {scales.dtype}; the engine has no kernel for that")
    return scales.view(torch.uint8)


def whole_blocks(rows: int) -> int:
    return -(-rows // BLOCK) * BLOCK


def stack(upper: Packed, lower: Packed) -> Packed:
    """Two FP8 weights of one input as one: the rows of `upper`, zeros up to a whole block, the rows of `lower`."""
    rows, depth = upper.codes.shape
    gap = upper.codes.new_zeros(whole_blocks(rows) - rows, depth)
    return Packed(torch.cat([upper.codes, gap, lower.codes]), torch.cat([upper.scales, lower.scales]))


def side_by_side(experts: Sequence[Experts]) -> Experts:
    """Raises BadInput where some are FP4 and some FP8."""
    if len({e.w1.codes.shape for e in experts}) > 1:
        raise BadInput("some experts of a layer are FP4 and some FP8; the engine has no kernel for that")

    def join(parts: list[Packed]) -> Packed:
        return Packed(torch.cat([p.codes for p in parts]), torch.cat([p.scales for p in parts]))

    return Experts(join([e.w1 for e in experts]), join([e.w3 for e in experts]), join([e.w2 for e in experts]))
