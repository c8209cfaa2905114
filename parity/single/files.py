"""Inputs and outputs of one op as files: trace directories, or bare safetensors files with the contract's names.

Source: docs/single.md §2 and §3.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from optimized.engine import FORMS
from reference.config import Config
from reference.errors import BadInput
from reference.rounding import profile

from ..cases import layer_name
from ..judge import Stored
from ..records import config_digest
from ..trace import Trace, TraceTensor, block_tap, read_trace, write_trace
from . import layouts
from .contract import ITEMS, weight_prefix
from .drawing import Inputs, as_bytes

_STORAGE = {torch.float32: "f32", torch.bfloat16: "bf16", torch.int32: "i32", torch.int64: "i64"}


def write_inputs(path: Path, inputs: Inputs, model: str) -> None:
    """A trace directory with every input under the name it has in the contract. Raises BadInput where `path` exists."""
    tensors = tuple(_entry(inputs, name) for name in inputs)
    trace = Trace(f"v4parity cases {inputs.op}", model, config_json(inputs.config), config_digest(inputs.config),
                  profile(inputs.profile), tensors)  # fmt: skip
    write_trace(path, trace, inputs.tensors)


def config_json(config: Config) -> dict[str, Any]:
    """A configuration in the words of `config.json`."""
    fields = asdict(config)
    return {**fields, "rope_scaling": {"type": "yarn", **fields["rope_scaling"]}, **(fields.pop("dspark") or {})}


def _entry(inputs: Inputs, name: str) -> TraceTensor:
    x, coded = inputs[name], ITEMS.get(name.removesuffix(".scale"))
    item = ITEMS.get(name) or (coded if coded and coded.coded else None)  # a weight has a scale too
    prefix = weight_prefix(inputs.config, inputs.layer) if item is None else f"{layer_name(inputs.config, inputs.layer)}."
    dims = "d" * x.ndim if item is None else item.dims
    each = x.shape[0] // len(inputs["ids"]) if dims.startswith("t") else 0
    positions = inputs["positions"].repeat_interleave(each).tolist() if each else []
    return TraceTensor(name, f"{prefix}{name}", inputs.layer, inputs.phase, 0, tuple(positions), dims,
                       _STORAGE.get(x.dtype) or _code_storage(name, inputs.profile), tuple(x.shape))  # fmt: skip


def _code_storage(name: str, build: str) -> str:
    """Of bytes: a scale, packed FP4 (routed experts, index keys), or E4M3."""
    if name.endswith(".scale"):
        return "e8m0"
    routed = name.startswith("ffn.experts.") and name.endswith(".weight")
    return "e2m1x2" if routed or (name in ITEMS and ITEMS[name].storage == "key" and build == "pool-fp8") else "e4m3"


def read_inputs(path: Path, op: str, model: tuple[Config, int, str, str] | None = None) -> Inputs:
    """Inputs of an op from a trace, whose layer and phase they have, or from a bare file, of which `model` says the
    configuration, layer, phase and profile. Raises BadInput."""
    if not path.is_dir():
        if model is None:
            raise BadInput(f"{path}: a bare file does not say whose inputs it holds: name them with --model and --layer")
        config, layer, phase, named = model
        return Inputs(op, config, layer, phase, named, read_file(path))
    trace = read_trace(path)
    places = {(t.layer, t.phase) for t in trace.tensors}
    if len(places) != 1:
        raise BadInput(f"{path}: {len(places)} layers and phases; the inputs of one op have one")
    (layer, phase) = places.pop()
    if trace.profile.name not in FORMS or trace.profile != profile(trace.profile.name):
        raise BadInput(f"{path}: profile {trace.profile.name!r} is not one that ops are judged by: {', '.join(FORMS)}")
    tensors = {block_tap(t.tap): trace.get(t) for t in trace.tensors}
    return Inputs(op, Config.from_dict(trace.config), layer, phase, trace.profile.name, tensors)


def read_outputs(path: Path, inputs: Inputs) -> dict[str, Stored]:
    """What a kernel put out, in the form a verdict takes: from a trace (layouts by its manifest) or a bare file (plain)."""
    if not path.is_dir():
        return layouts.stored(inputs, read_file(path), {})
    trace = read_trace(path)
    here = [t for t in trace.tensors if t.layer == inputs.layer]
    said = {block_tap(t.tap): t.layout for t in here}
    return layouts.stored(inputs, {block_tap(t.tap): trace.get(t) for t in here}, said)


def read_file(path: Path) -> dict[str, Tensor]:
    """All tensors of a safetensors file, codes and scales as bytes. Raises BadInput."""
    try:
        with safe_open(path, framework="pt") as file:
            return {name: as_bytes(file.get_tensor(name)) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise BadInput(f"{path}: {error}") from None
