"""What a checkpoint weighs and what a token costs: parameters, bytes, KV bytes, rows read, flops.

Source: docs/checkpoint.md §7, docs/pool.md (row widths). Everything is exact integer arithmetic on the manifest.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import get_args

from ..config import KIND_OF_RATIO, Config, Kind
from .manifest import FILE_ORDER, Group, Parameter, parameters
from .store import TensorInfo

KINDS: tuple[Kind, ...] = ("window", "csa", "hca")
_F32 = 4


@dataclass(frozen=True)
class Row:
    """One row of the census: scales count as tensors and bytes but not as parameters, nor do hash tables."""

    name: str
    tensors: int
    parameters: int
    bytes: int


@dataclass(frozen=True)
class Census:
    """A checkpoint by group and by storage dtype. `activated`: parameters a token uses, embedding and head included."""

    total: Row
    groups: tuple[Row, ...]
    dtypes: tuple[Row, ...]
    activated: int


@dataclass(frozen=True)
class KvBytes:
    """What the pool holds: bytes a token adds (mean over tokens), and bytes a sequence needs whatever its length."""

    main: dict[str, Fraction]
    index: dict[str, Fraction]
    window: dict[str, int]
    compressor_state: int


@dataclass(frozen=True)
class LayerCost:
    """One decode step of one layer at a context: rows attended, index keys scored, bytes read and flops."""

    kind: Kind
    layers: int
    window_rows: int
    compressed_rows: int
    index_keys: int
    kv_bytes: dict[str, int]
    weight_bytes: int
    attention_flops: int
    index_flops: int
    weight_flops: int


def census(config: Config, tensors: Mapping[str, TensorInfo]) -> Census:
    """Count the tensors of a store (`manifest(config)` for a release)."""
    owners = {name: p for members in parameters(config).values() for p in members for name in (p.name, p.scale_name)}
    by_group: dict[str, list[str]] = {group: [] for group in get_args(Group)}
    by_dtype: dict[str, list[str]] = {dtype: [] for dtype in FILE_ORDER}
    for name, info in tensors.items():
        by_group[owners[name].group].append(name)
        by_dtype[info.dtype].append(name)
    groups = {group: _row(group, owners, tensors, names) for group, names in by_group.items()}
    dtypes = [_row(dtype, owners, tensors, names) for dtype, names in by_dtype.items()]
    total = _row("total", owners, tensors, tensors)
    routed = groups["routed experts"].parameters
    idle = groups["MTP"].parameters + routed - routed * config.num_experts_per_tok // config.n_routed_experts
    return Census(
        total=total,
        groups=tuple(row for row in groups.values() if row.tensors),
        dtypes=tuple(row for row in dtypes if row.tensors),
        activated=total.parameters - idle,
    )


def _size(parameter: Parameter) -> int:
    """Parameters, of which expert numbers of a hash table are none."""
    size = 0 if parameter.dtype == "I64" else 1
    for n in parameter.shape:
        size *= n
    return size


def _row(title: str, owners: Mapping[str, Parameter], tensors: Mapping[str, TensorInfo], names: Iterable[str]) -> Row:
    held = list(names)
    params = sum(_size(owners[n]) for n in held if n == owners[n].name)
    return Row(title, len(held), params, sum(tensors[n].nbytes for n in held))


def row_bytes(config: Config) -> dict[str, int]:
    """Bytes of one KV row by pool build: BF16, or E4M3 with scales inside the head width plus a BF16 RoPE part."""
    return {"bf16": 2 * config.head_dim, "fp8": config.head_dim + 2 * config.qk_rope_head_dim}


def index_row_bytes(config: Config) -> dict[str, int]:
    """Bytes of one index key: E2M1 with a scale byte per 32, or E4M3 with one float32 scale."""
    n = config.index_head_dim
    return {"fp4": n // 2 + n // 32, "fp8": n + _F32}


def kv_bytes(config: Config) -> KvBytes:
    """KV bytes of the layers (drafters left out) for every build of the pool."""
    kinds = [config.kind(i) for i in range(config.num_hidden_layers)]
    rows = sum((Fraction(1, config.ratio(i)) for i, kind in enumerate(kinds) if kind != "window"), Fraction(0))
    keys = Fraction(kinds.count("csa"), 4)
    window_rows = config.num_hidden_layers * config.sliding_window
    overlapping = 8 * (2 * config.head_dim + 2 * config.index_head_dim)  # two blocks of 4, two roles, main and index
    state = kinds.count("csa") * overlapping + kinds.count("hca") * 128 * config.head_dim
    return KvBytes(
        main={build: rows * size for build, size in row_bytes(config).items()},
        index={build: keys * size for build, size in index_row_bytes(config).items()},
        window={build: window_rows * size for build, size in row_bytes(config).items()},
        compressor_state=2 * _F32 * state,  # values and gates
    )


def layer_costs(config: Config, tensors: Mapping[str, TensorInfo], context: int) -> list[LayerCost]:
    """What one token costs in a layer of each kind when the context, that token included, is `context` tokens long."""
    layers = range(config.num_hidden_layers)
    of_kind = {kind: [i for i in layers if config.kind(i) == kind] for kind in KINDS}
    return [_layer_cost(config, tensors, context, kind, of_kind[kind]) for kind in KINDS if of_kind[kind]]


def _layer_cost(c: Config, tensors: Mapping[str, TensorInfo], context: int, kind: Kind, layers: list[int]) -> LayerCost:
    ratio = next(r for r, k in KIND_OF_RATIO.items() if k == kind)
    visible = context // ratio if ratio else 0
    keys = visible if kind == "csa" else 0
    attended = min(visible, c.index_topk) if kind == "csa" else visible
    rows = min(context, c.sliding_window) + attended
    main, index = row_bytes(c), index_row_bytes(c)
    # The last layer of a kind is none of the first hash layers wherever there are others.
    weights, size = _active_weights(c, tensors, layers[-1])
    return LayerCost(
        kind=kind,
        layers=len(layers),
        window_rows=rows - attended,
        compressed_rows=attended,
        index_keys=keys,
        kv_bytes={
            "pool-fp8": rows * main["fp8"] + keys * index["fp4"],
            "pool-bf16": rows * main["bf16"] + keys * index["fp8"],
        },
        weight_bytes=size,
        attention_flops=4 * rows * c.num_attention_heads * c.head_dim,
        index_flops=2 * keys * c.index_n_heads * c.index_head_dim,
        weight_flops=2 * weights,
    )


def _active_weights(c: Config, tensors: Mapping[str, TensorInfo], layer: int) -> tuple[int, int]:
    """Matrix elements and bytes of a layer that one token multiplies with: of routed experts, the chosen share."""
    elements = Fraction(0)
    size = Fraction(0)
    for p in parameters(c)[layer + 1]:
        share = Fraction(c.num_experts_per_tok, c.n_routed_experts) if p.group == "routed experts" else Fraction(1)
        held = [tensors[n] for n in (p.name, p.scale_name) if n in tensors]
        if len(p.shape) == 2 and p.dtype != "I64" and not p.name.endswith(".ape"):
            elements += share * _size(p)
            size += share * sum(info.nbytes for info in held)
    return int(elements), int(size)
