"""What a model is made of: the fields of `config.json`, word for word, and what follows from them.

Source: docs/model.md §1, docs/checkpoint.md §6.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from .errors import BadInput

Kind = Literal["window", "csa", "hca"]
KIND_OF_RATIO: dict[int, Kind] = {0: "window", 4: "csa", 128: "hca"}

# Fields with only one value in every release. Another value is another model.
FIXED: dict[str, Any] = {
    "model_type": "deepseek_v4",
    "hidden_act": "silu",
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "num_key_value_heads": 1,
    "n_shared_experts": 1,
    "tie_word_embeddings": False,
    "attention_bias": False,
}


@dataclass(frozen=True)
class RopeScaling:
    """YaRN settings of the layers with a compressor."""

    factor: float = 16
    original_max_position_embeddings: int = 65536
    beta_fast: float = 32
    beta_slow: float = 1


@dataclass(frozen=True)
class DSpark:
    """Settings of the block drafter that replaces serial MTP in the later releases."""

    dspark_block_size: int
    dspark_noise_token_id: int
    dspark_target_layer_ids: tuple[int, ...]
    dspark_markov_rank: int


@dataclass(frozen=True)
class Config:
    """A DeepSeek-V4 model, fields as in `config.json`. `compress_ratios`: one entry per layer, then per drafter block."""

    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    head_dim: int
    qk_rope_head_dim: int
    q_lora_rank: int
    o_groups: int
    o_lora_rank: int
    sliding_window: int
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    moe_intermediate_size: int
    n_routed_experts: int
    num_experts_per_tok: int
    routed_scaling_factor: float
    num_hash_layers: int
    swiglu_limit: float
    vocab_size: int
    compress_ratios: tuple[int, ...]
    hc_mult: int = 4
    hc_sinkhorn_iters: int = 20
    hc_eps: float = 1e-6
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000
    compress_rope_theta: float = 160000
    rope_scaling: RopeScaling = RopeScaling()
    max_position_embeddings: int = 1048576
    bos_token_id: int = 0
    eos_token_id: int = 1
    dspark: DSpark | None = None

    def __post_init__(self) -> None:
        _validate(self)

    @property
    def num_drafter_blocks(self) -> int:
        """Blocks under `mtp.`: `num_nextn_predict_layers` says 1 even where a checkpoint holds three."""
        return len(self.compress_ratios) - self.num_hidden_layers

    @property
    def has_mtp(self) -> bool:
        """Whether `mtp.0` is a serial MTP block (and not the first block of a DSpark drafter)."""
        return self.num_drafter_blocks > 0 and self.dspark is None

    def ratio(self, layer: int) -> int:
        """Compress ratio of a layer; drafter block i counts as layer `num_hidden_layers + i`."""
        return self.compress_ratios[layer]

    def kind(self, layer: int) -> Kind:
        return KIND_OF_RATIO[self.compress_ratios[layer]]

    def is_hash_layer(self, layer: int) -> bool:
        """Hash layers choose experts by token id, not by score."""
        return layer < self.num_hash_layers

    @classmethod
    def from_json(cls, path: Path) -> Config:
        """Read a `config.json`. Raises BadInput for damage, and for any other model under the same or a similar name."""
        try:
            fields = json.loads(path.read_text())
        except FileNotFoundError:
            raise BadInput(f"{path}: no such file; a checkpoint directory holds config.json") from None
        except (OSError, ValueError) as error:
            raise BadInput(f"{path}: not readable as JSON: {error}") from None
        if not isinstance(fields, dict):
            raise BadInput(f"{path}: expected a JSON object")
        try:
            return cls.from_dict(fields)
        except BadInput as error:
            raise BadInput(f"{path}: {error}") from None

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Config:
        refuse_other_models(fields)
        for name, only in FIXED.items():
            if fields.get(name, only) != only:
                raise BadInput(f"{name} is {fields[name]!r}; every DeepSeek-V4 has {only!r}")
        values = {f.name: fields[f.name] for f in dataclasses.fields(cls) if f.name in fields}
        missing = [f.name for f in dataclasses.fields(cls) if f.default is dataclasses.MISSING and f.name not in values]
        if missing:
            raise BadInput(f"missing fields: {', '.join(missing)}")
        _check_types(values)
        values["compress_ratios"] = tuple(values["compress_ratios"])
        values["rope_scaling"] = _rope_scaling(fields.get("rope_scaling"))
        values["dspark"] = _dspark(fields)
        return cls(**values)


def refuse_other_models(fields: Mapping[str, Any]) -> None:
    """Raise BadInput, saying which model it is, for V4.1 and for other DeepSeek generations."""
    model_type = fields.get("model_type", "deepseek_v4")
    if isinstance(model_type, str) and model_type != "deepseek_v4":
        known = {"deepseek_v2": "DeepSeek-V2", "deepseek_v3": "DeepSeek-V3 / R1", "deepseek_v32": "DeepSeek-V3.2"}
        what = "DeepSeek-V4.1" if "v4" in model_type else known.get(model_type, f"model_type {model_type!r}")
        raise BadInput(f"this is {what}, not DeepSeek-V4: its mathematics differs and is not defined here")
    engram = sorted(name for name in fields if "engram" in name.lower())
    ratios = fields.get("compress_ratios", ())
    ratios_41 = isinstance(ratios, (list, tuple)) and any(r in (1, 2) for r in ratios)
    if engram or ratios_41:
        why = f"field {engram[0]}" if engram else "compress ratios 1 or 2"
        raise BadInput(
            f"this is DeepSeek-V4.1 ({why}), a different model with the same field names: delayed stream mixing, "
            "no per-head query norm, other cache formats; it is not defined here"
        )


def _check_types(values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        want = Config.__dataclass_fields__[name].type
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if want == "int" and not (number and isinstance(value, int)):
            raise BadInput(f"{name} must be an integer, got {value!r}")
        if want == "float" and not number:
            raise BadInput(f"{name} must be a number, got {value!r}")
    ratios = values["compress_ratios"]
    if not isinstance(ratios, (list, tuple)) or not all(isinstance(r, int) and not isinstance(r, bool) for r in ratios):
        raise BadInput(f"compress_ratios must be a list of integers, got {ratios!r}")


def _rope_scaling(fields: Any) -> RopeScaling:
    if not isinstance(fields, Mapping) or fields.get("type", fields.get("rope_type")) != "yarn":
        raise BadInput(f"rope_scaling must be an object of type yarn, got {fields!r}")
    if any("mscale" in name for name in fields):
        raise BadInput("rope_scaling has an mscale; DeepSeek-V4 has none")
    names = [f.name for f in dataclasses.fields(RopeScaling)]
    bad = [name for name in names if not _is_number(fields.get(name)) or not 0 < fields[name] < math.inf]
    if bad:
        raise BadInput(f"rope_scaling.{bad[0]} must be a positive number, got {fields.get(bad[0])!r}")
    return RopeScaling(**{name: fields[name] for name in names})


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _dspark(fields: Mapping[str, Any]) -> DSpark | None:
    if "dspark_block_size" not in fields:
        return None
    try:
        values = {f.name: fields[f.name] for f in dataclasses.fields(DSpark)}
    except KeyError as error:
        raise BadInput(f"dspark_block_size is set but {error} is missing") from None
    layers = values["dspark_target_layer_ids"]
    numbers = [n for name, n in values.items() if name != "dspark_target_layer_ids"]
    if not isinstance(layers, (list, tuple)) or any(type(n) is not int or n < 0 for n in (*layers, *numbers)):
        raise BadInput(f"dspark settings must be integers from 0, and a list of them: {values}")
    values["dspark_target_layer_ids"] = tuple(layers)
    return DSpark(**values)


def _validate(c: Config) -> None:
    """Consistency of the sizes. Raises BadInput."""
    for field in dataclasses.fields(c):
        value = getattr(c, field.name)
        counted = field.type == "int" and field.name not in ("num_hash_layers", "bos_token_id", "eos_token_id")
        if (counted or field.type == "float") and not 0 < value < math.inf:
            raise BadInput(f"{field.name} must be positive and finite, got {value}")
    if not 0 <= c.num_hash_layers <= c.num_hidden_layers:
        raise BadInput(f"num_hash_layers {c.num_hash_layers} of {c.num_hidden_layers} layers")
    unknown = sorted({r for r in c.compress_ratios if r not in KIND_OF_RATIO})
    if unknown:
        raise BadInput(f"unknown compress ratios {unknown}; known are {sorted(KIND_OF_RATIO)}")
    if len(c.compress_ratios) < c.num_hidden_layers:
        raise BadInput(f"{len(c.compress_ratios)} compress_ratios for {c.num_hidden_layers} layers")
    if any(c.compress_ratios[c.num_hidden_layers :]):
        raise BadInput("drafter blocks are window-only: compress_ratios past the layers must be 0")
    if c.num_attention_heads % c.o_groups:
        raise BadInput(f"{c.num_attention_heads} heads do not split into {c.o_groups} groups")
    for head, name in ((c.head_dim, "head_dim"), (c.index_head_dim, "index_head_dim")):
        if c.qk_rope_head_dim % 2 or c.qk_rope_head_dim > head:
            raise BadInput(f"qk_rope_head_dim {c.qk_rope_head_dim} must be even and at most {name} {head}")
    if c.index_head_dim & (c.index_head_dim - 1):
        raise BadInput(f"index_head_dim {c.index_head_dim} is no power of two: the Hadamard rotation needs one")
    if c.num_experts_per_tok > c.n_routed_experts:
        raise BadInput(f"top-{c.num_experts_per_tok} of {c.n_routed_experts} experts")
