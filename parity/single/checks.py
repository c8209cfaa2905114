"""Whether what was handed in is what the contract of an op asks for. Source: docs/single.md §1."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from optimized.engine import FORMS
from reference.config import Config
from reference.errors import BadInput

from ..drift import CHOICES
from .contract import ITEMS, Item, Sizes
from .drawing import Inputs

EXPERTS = CHOICES[0]


def check(inputs: Inputs) -> None:
    """Raises BadInput, naming the tensor, for an input that is missing or has not the contract's shape or dtype."""
    t = len(inputs["ids"]) if "ids" in inputs else -1
    for name in inputs.contract.inputs:
        item = ITEMS[name]
        for part in (name, *([f"{name}.scale"] if item.coded else [])):
            if part not in inputs:
                raise BadInput(f"input {part}: missing; {inputs.op} takes {', '.join(inputs.contract.inputs)}")
        if name == "bounds":
            check_batch(inputs["ids"], inputs["positions"], inputs["bounds"])
        elif name in ("ids", "positions"):
            fits = inputs[name].dtype == torch.int64 and tuple(inputs[name].shape) == (t,)
            if not fits:
                raise BadInput(f"input {name}: {inputs[name].dtype} {list(inputs[name].shape)}, expected int64 [{t}]")
    for name in inputs.contract.inputs:
        item = ITEMS[name]
        shape, dtype = stored_form(item, inputs.sizes, inputs.profile)
        if tuple(inputs[name].shape) != shape or inputs[name].dtype != dtype:
            said = f"{inputs[name].dtype} {list(inputs[name].shape)}"
            raise BadInput(f"input {name}: {said}, expected {dtype} {list(shape)}")
        if name in CHOICES and (wrong := wrong_choice(name, inputs[name], inputs["positions"], inputs.config, inputs.layer)):
            raise BadInput(f"input {wrong}")


def wrong_choice(name: str, chosen: Tensor, positions: Tensor, config: Config, layer: int) -> str | None:
    """What a choice [t, k] of tokens at positions [t] names that there is none of, in words: an expert, or a compressed row
    that the token cannot see (-1: none)."""
    experts = name == EXPERTS
    limit = torch.full_like(positions, config.n_routed_experts) if experts else (positions + 1) // config.ratio(layer)
    bad = (chosen >= limit[:, None]) | (chosen < (0 if experts else -1))
    if not bool(bad.any()):
        return None
    t, slot = (int(i) for i in bad.nonzero()[0])
    return f"{name}: token {t} names {int(chosen[t, slot])} of {int(limit[t])}"


def check_batch(ids: Tensor, positions: Tensor, bounds: Tensor) -> None:
    """Raises BadInput for bounds that do not cut the tokens, or positions that are not consecutive inside a sequence."""
    cuts = bounds.tolist()
    if cuts[:1] != [0] or cuts[-1] != len(ids) or any(a >= b for a, b in pairwise(cuts)):
        raise BadInput(f"input bounds: {cuts} does not cut {len(ids)} tokens into sequences")
    for b, (first, last) in enumerate(pairwise(cuts)):
        here = positions[first:last]
        if here[0] < 0 or not torch.equal(here, torch.arange(int(here[0]), int(here[0]) + last - first)):
            raise BadInput(f"input positions: those of sequence {b} are not consecutive from 0 or later")


def stored_form(item: Item, sizes: Sizes, profile_name: str) -> tuple[tuple[int, ...], torch.dtype]:
    """Shape and dtype of a tensor of the contract as it stands in a file."""
    shape = sizes.shape(item)
    if item.storage == "key" and FORMS[profile_name].keys.form == "fp4":
        shape = (*shape[:-1], shape[-1] // 2)
    dtypes = {"bf16": torch.bfloat16, "row": torch.bfloat16, "f32": torch.float32, "i32": torch.int32, "i64": torch.int64}
    return shape, dtypes.get(item.storage, torch.uint8)
