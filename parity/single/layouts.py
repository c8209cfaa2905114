"""Outputs as engines lay them out -> codes, scales and values as a verdict takes them. Source: docs/single.md §3."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from optimized.engine import FORMS
from reference.errors import BadInput

from .. import payloads, row_forms
from ..judge import Stored
from .contract import ITEMS
from .drawing import Inputs

ROWS = ("2buff", *(f"flashmla_{n}" for n in (2, 64, 128, 256)))
LAYOUTS = ("plain", *ROWS, *payloads.KEY_LAYOUTS)


def stored(inputs: Inputs, tensors: Mapping[str, Tensor], layouts: Mapping[str, str]) -> dict[str, Stored]:
    """Outputs by the contract's names. Codes are paired with their scales; `row` and `keys` in a layout of `LAYOUTS` are
    read out of it, at `slots` where that tensor is there, else in order. Raises BadInput."""
    left = dict(tensors)
    out: dict[str, Stored] = {}
    slots = left.pop("slots", None)
    for name, layout in layouts.items():
        if layout == "plain" or name.endswith(".scale"):
            continue
        if name not in ("row", "keys") or (name == "row") != (layout in ROWS):
            raise BadInput(f"output {name}: layout {layout!r} is not one of its own")
        pages, scales = left.pop(name), left.pop(f"{name}.scale", None)
        out |= _rows(inputs, pages, layout, slots) if name == "row" else _keys(inputs, pages, scales, layout, slots)
    for name in [n for n in left if not n.endswith(".scale")]:
        out[name] = _plain(inputs, name, left.pop(name), left)
    if left:
        raise BadInput(f"output {next(iter(left))}: scales without codes")
    return out


def _plain(inputs: Inputs, name: str, x: Tensor, left: dict[str, Tensor]) -> Stored:
    item = ITEMS.get(name)
    if item is None or not item.coded:
        return x
    if f"{name}.scale" not in left:
        raise BadInput(f"output {name}.scale: missing; codes come with their scales")
    scales = left.pop(f"{name}.scale")
    return row_forms.key_codes(x, scales, FORMS[inputs.profile].keys.form) if item.storage == "key" else (x, scales)


def expected_rows(inputs: Inputs) -> int:
    """Rows that the op completes: a token's own in `attn.kv`, else one a finished group."""
    if inputs.op == "attn.kv":
        return len(inputs["ids"])
    ratio = inputs.config.ratio(inputs.layer)
    batch = inputs.batch
    ends = [(int(batch.positions[s.start]), int(batch.positions[s.stop - 1]) + 1) for s in batch.sequences()]
    return sum(end // ratio - start // ratio for start, end in ends)


def _slots(inputs: Inputs, slots: Tensor | None) -> payloads.Numbers:
    n = expected_rows(inputs)
    if slots is None:
        return np.arange(n)
    if slots.dtype != torch.int64 or tuple(slots.shape) != (n,):
        raise BadInput(f"output slots: {slots.dtype} {list(slots.shape)}, expected int64 [{n}]")
    return slots.numpy()


def _rows(inputs: Inputs, x: Tensor, layout: str, slots: Tensor | None) -> dict[str, Stored]:
    if FORMS[inputs.profile].rows != "2buff":
        raise BadInput(f"output row: {layout} holds FP8 rows, profile {inputs.profile} stores bfloat16")
    at = _slots(inputs, slots)
    if layout == "2buff":
        if x.ndim != 2 or x.shape[1] != 640 or (len(at) and int(at.max()) >= len(x)):
            least = int(at.max(initial=-1)) + 1
            raise BadInput(f"output row: {list(x.shape)}, expected at least [{least}, 640]: both planes side by side")
        bytes_ = x.numpy()[at]
        read = payloads.rows_2buff(bytes_[:, :512], bytes_[:, 512:])
    else:
        read = payloads.rows_flashmla(x.numpy(), at, int(layout.removeprefix("flashmla_")))
    spare = {"layout": torch.from_numpy(read.spare)} if layout == "2buff" else {}
    rotated = torch.from_numpy(read.rotated).to(torch.bfloat16)
    return {"nope": (torch.from_numpy(read.codes), torch.from_numpy(read.scales)), "rope": rotated, **spare}


def _keys(inputs: Inputs, x: Tensor, scales: Tensor | None, layout: str, slots: Tensor | None) -> dict[str, Stored]:
    form = FORMS[inputs.profile].keys.form
    if not layout.startswith(form):
        raise BadInput(f"output keys: {layout}, profile {inputs.profile} stores {form}")
    read = payloads.index_keys(layout, x.numpy(), None if scales is None else scales.numpy(), _slots(inputs, slots))
    codes = torch.from_numpy(read.codes)
    packed = codes[:, ::2] | codes[:, 1::2] << 4 if form == "fp4" else codes
    return {"keys": row_forms.key_codes(packed, torch.from_numpy(read.scales), form)}
