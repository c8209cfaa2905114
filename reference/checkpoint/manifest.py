"""Every tensor of a checkpoint: name, storage dtype, shape and shard, from the configuration alone.

Source: docs/checkpoint.md §1, §3 and §4. A `Parameter` is what the model has; `stored` says how a storage dtype
writes it (a weight, perhaps with a scale); `manifest` lists the released form, shard by shard, in file order.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from ..config import Config
from .store import TensorInfo

# Order of the payload inside a file: by dtype, then by name.
FILE_ORDER = ("I64", "F32", "BF16", "F8_E8M0", "F8_E4M3", "I8")
FP8_BLOCK = 128
FP4_BLOCK = 32

Group = Literal[
    "routed experts", "attention", "MTP", "shared experts", "embed + head", "compressor", "indexer", "gates", "mHC",
    "hash tables", "norms",
]  # fmt: skip


@dataclass(frozen=True)
class Parameter:
    """One parameter: its checkpoint name, its logical shape, the dtype releases store it in, its row of the census."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    group: Group

    @property
    def scale_name(self) -> str:
        return self.name.removesuffix("weight") + "scale"


def cdiv(n: int, block: int) -> int:
    return -(-n // block)


@lru_cache(maxsize=4)
def parameters(config: Config) -> Mapping[int, list[Parameter]]:
    """Shard number (0-based: embedding, layers, head, drafter blocks) -> the parameters in it, without scales."""
    c, n = config, config.num_hidden_layers
    embed = Parameter("embed.weight", (c.vocab_size, c.hidden_size), "BF16", "embed + head")
    head = Parameter("head.weight", (c.vocab_size, c.hidden_size), "BF16", "embed + head")
    norm = Parameter("norm.weight", (c.hidden_size,), "BF16", "norms")
    shards = {0: [embed], n + 1: [head, norm, *_hc_head(c, "", "mHC")]}
    shards |= {i + 1: list(_block(c, f"layers.{i}.", i)) for i in range(n)}
    shards |= {n + 2 + j: _drafter_block(c, j) for j in range(c.num_drafter_blocks)}
    return dict(sorted(shards.items()))


def _block(c: Config, at: str, layer: int) -> Iterator[Parameter]:
    hidden, hc = c.hidden_size, c.hc_mult
    for part in ("attn", "ffn"):
        yield Parameter(f"{at}{part}_norm.weight", (hidden,), "BF16", "norms")
        yield Parameter(f"{at}hc_{part}_fn", ((2 + hc) * hc, hc * hidden), "F32", "mHC")
        yield Parameter(f"{at}hc_{part}_base", ((2 + hc) * hc,), "F32", "mHC")
        yield Parameter(f"{at}hc_{part}_scale", (3,), "F32", "mHC")
    yield from _attention(c, f"{at}attn.")
    if c.kind(layer) != "window":
        yield from _compressor(c, f"{at}attn.compressor.", c.ratio(layer), c.head_dim, "compressor")
    if c.kind(layer) == "csa":
        yield from _indexer(c, f"{at}attn.indexer.")
    yield from _moe(c, f"{at}ffn.", c.is_hash_layer(layer))


def _attention(c: Config, at: str) -> Iterator[Parameter]:
    heads_width = c.num_attention_heads * c.head_dim
    lora_width = c.o_groups * c.o_lora_rank
    yield Parameter(f"{at}attn_sink", (c.num_attention_heads,), "F32", "attention")
    yield Parameter(f"{at}q_norm.weight", (c.q_lora_rank,), "BF16", "attention")
    yield Parameter(f"{at}kv_norm.weight", (c.head_dim,), "BF16", "attention")
    yield Parameter(f"{at}wq_a.weight", (c.q_lora_rank, c.hidden_size), "F8_E4M3", "attention")
    yield Parameter(f"{at}wq_b.weight", (heads_width, c.q_lora_rank), "F8_E4M3", "attention")
    yield Parameter(f"{at}wkv.weight", (c.head_dim, c.hidden_size), "F8_E4M3", "attention")
    yield Parameter(f"{at}wo_a.weight", (lora_width, heads_width // c.o_groups), "F8_E4M3", "attention")
    yield Parameter(f"{at}wo_b.weight", (c.hidden_size, lora_width), "F8_E4M3", "attention")


def _compressor(c: Config, at: str, ratio: int, width: int, group: Group) -> Iterator[Parameter]:
    columns = (2 if ratio == 4 else 1) * width  # ratio 4 pools overlapping windows: one half for each role
    yield Parameter(f"{at}ape", (ratio, columns), "F32", group)
    yield Parameter(f"{at}wkv.weight", (columns, c.hidden_size), "BF16", group)
    yield Parameter(f"{at}wgate.weight", (columns, c.hidden_size), "BF16", group)
    yield Parameter(f"{at}norm.weight", (width,), "BF16", group)


def _indexer(c: Config, at: str) -> Iterator[Parameter]:
    yield Parameter(f"{at}wq_b.weight", (c.index_n_heads * c.index_head_dim, c.q_lora_rank), "F8_E4M3", "indexer")
    yield Parameter(f"{at}weights_proj.weight", (c.index_n_heads, c.hidden_size), "BF16", "indexer")
    yield from _compressor(c, f"{at}compressor.", 4, c.index_head_dim, "indexer")


def _moe(c: Config, at: str, hashed: bool) -> Iterator[Parameter]:
    yield Parameter(f"{at}gate.weight", (c.n_routed_experts, c.hidden_size), "BF16", "gates")
    if hashed:
        yield Parameter(f"{at}gate.tid2eid", (c.vocab_size, c.num_experts_per_tok), "I64", "hash tables")
    else:
        yield Parameter(f"{at}gate.bias", (c.n_routed_experts,), "F32", "gates")
    yield from _expert(c, f"{at}shared_experts.", "F8_E4M3", "shared experts")
    for e in range(c.n_routed_experts):
        yield from _expert(c, f"{at}experts.{e}.", "I8", "routed experts")


def _expert(c: Config, at: str, dtype: str, group: Group) -> Iterator[Parameter]:
    yield Parameter(f"{at}w1.weight", (c.moe_intermediate_size, c.hidden_size), dtype, group)
    yield Parameter(f"{at}w2.weight", (c.hidden_size, c.moe_intermediate_size), dtype, group)
    yield Parameter(f"{at}w3.weight", (c.moe_intermediate_size, c.hidden_size), dtype, group)


def _hc_head(c: Config, at: str, group: Group) -> Iterator[Parameter]:
    yield Parameter(f"{at}hc_head_fn", (c.hc_mult, c.hc_mult * c.hidden_size), "F32", group)
    yield Parameter(f"{at}hc_head_base", (c.hc_mult,), "F32", group)
    yield Parameter(f"{at}hc_head_scale", (1,), "F32", group)


def _drafter_block(c: Config, j: int) -> list[Parameter]:
    """Block j under `mtp.`: a window-only block, plus what serial MTP or DSpark adds to it."""
    at, hidden = f"mtp.{j}.", c.hidden_size
    block = list(_block(c, at, c.num_hidden_layers + j))
    last = j == c.num_drafter_blocks - 1
    extra: list[tuple[str, tuple[int, ...], str]] = []
    if c.dspark is None:
        extra += [("e_proj.weight", (hidden, hidden), "F8_E4M3"), ("h_proj.weight", (hidden, hidden), "F8_E4M3")]
        extra += [("enorm.weight", (hidden,), "BF16"), ("hnorm.weight", (hidden,), "BF16")]
    elif j == 0:
        taps = len(c.dspark.dspark_target_layer_ids)
        extra += [("main_proj.weight", (hidden, taps * hidden), "F8_E4M3"), ("main_norm.weight", (hidden,), "BF16")]
    if c.dspark is None or last:
        extra += [("norm.weight", (hidden,), "BF16")]
        block += _hc_head(c, at, "MTP")
    if c.dspark is not None and last:
        rank = c.dspark.dspark_markov_rank
        extra += [(f"markov_head.markov_{w}.weight", (c.vocab_size, rank), "BF16") for w in ("w1", "w2")]
        extra += [("confidence_head.proj.weight", (1, hidden + rank), "BF16")]
    block += [Parameter(at + name, shape, dtype, "MTP") for name, shape, dtype in extra]
    return [Parameter(p.name, p.shape, p.dtype, "MTP") for p in block]


def stored(parameter: Parameter, dtype: str, shard: str) -> dict[str, TensorInfo]:
    """The tensors that hold a parameter when its storage is `dtype`: the weight, and a scale for F8_E4M3 and I8.

    A release scale is F8_E8M0: [ceil(out/128), ceil(in/128)] for F8_E4M3, [out, ceil(in/32)] for I8 (packed FP4).
    """
    if dtype == "F8_E4M3":
        rows, columns = parameter.shape
        scale = TensorInfo("F8_E8M0", (cdiv(rows, FP8_BLOCK), cdiv(columns, FP8_BLOCK)), shard)
        return {parameter.name: TensorInfo(dtype, parameter.shape, shard), parameter.scale_name: scale}
    if dtype == "I8":
        rows, columns = parameter.shape
        scale = TensorInfo("F8_E8M0", (rows, cdiv(columns, FP4_BLOCK)), shard)
        return {parameter.name: TensorInfo(dtype, (rows, cdiv(columns, 2)), shard), parameter.scale_name: scale}
    return {parameter.name: TensorInfo(dtype, parameter.shape, shard)}


def shard_name(number: int, count: int) -> str:
    """File name of a shard, `number` from 0."""
    return f"model-{number + 1:05d}-of-{count:05d}.safetensors"


def manifest(config: Config) -> dict[str, TensorInfo]:
    """Every tensor as the releases store it, in file order, shard after shard."""
    shards = parameters(config)
    tensors: dict[str, TensorInfo] = {}
    for number, members in shards.items():
        file = shard_name(number, len(shards))
        held = {name: info for p in members for name, info in stored(p, p.dtype, file).items()}
        tensors |= dict(sorted(held.items(), key=lambda item: (FILE_ORDER.index(item[1].dtype), item[0])))
    return tensors


def by_shard(tensors: Mapping[str, TensorInfo]) -> dict[str, dict[str, TensorInfo]]:
    """The same tensors, in the same order, grouped by file."""
    shards: dict[str, dict[str, TensorInfo]] = {}
    for name, info in tensors.items():
        shards.setdefault(info.shard, {})[name] = info
    return shards


def file_header(tensors: Mapping[str, TensorInfo]) -> bytes:
    """The first bytes of a shard that holds these tensors in this order: length in 8 bytes, JSON, spaces up to 8."""
    entries, offset = {}, 0
    for name, info in tensors.items():
        end = offset + info.nbytes
        entries[name] = {"dtype": info.dtype, "shape": list(info.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def file_sizes(tensors: Mapping[str, TensorInfo]) -> dict[str, int]:
    """Bytes of every shard, header included."""
    shards = by_shard(tensors)
    return {file: len(file_header(held)) + sum(info.nbytes for info in held.values()) for file, held in shards.items()}
