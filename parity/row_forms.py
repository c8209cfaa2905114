"""Rows and index keys as a build stores them: bytes from values, what a verdict looks at, and what is expected there.

A 2buff row has codes, scale bytes, their repetition with padding (`layout`) and rotated channels; a row of the bf16 build
is one vector. A key has codes, four bits or eight, and scale bytes. Source: docs/judge.md §5 and §8.
"""

from __future__ import annotations

import torch
from torch import Tensor

from optimized.pool import rows as codec
from optimized.pool.geometry import SCALE_TILE, Build
from optimized.pool.index_rows import GROUP, Form
from optimized.pool.pool import Pool
from reference import formats

from .budget import codes
from .budget.bounded import Bounded
from .judge import Codes, Dense, Expected, Stored

Planes = tuple[Tensor, Tensor | None]  # main and rope rows, as kernels take them

PLANES: dict[Build, tuple[str, ...]] = {"2buff": ("nope", "rope"), "bf16": ("row",)}


def planes(pool: Pool, layer: int) -> Planes:
    """Rows of a layer from its base on, in a pool of either build."""
    main, *rope = pool.layer_rows(layer)
    return main, rope[0] if rope else None


def take(rows: Planes, numbers: Tensor) -> Planes:
    """The rows of these numbers [n]."""
    return rows[0][numbers], None if rows[1] is None else rows[1][numbers]


def to(rows: Planes, device: str) -> Planes:
    """The same rows on a device."""
    return rows[0].to(device), None if rows[1] is None else rows[1].to(device)


def encode(values: Tensor, build: Build) -> Planes:
    """Values [n, d] -> rows of either build."""
    if build == "bf16":
        return values.to(torch.bfloat16), None
    return codec.encode_2buff(values.float())


def decode(rows: Planes) -> Tensor:
    """Rows -> float64 [n, d], exact."""
    main, rope = rows
    return main.double() if rope is None else codec.decode_2buff(main, rope).double()


def outputs(rows: Planes) -> dict[str, Stored]:
    """What a verdict looks at in stored rows [n, ...], by name."""
    main, rope = rows
    if rope is None:
        return {"row": main}
    stored_codes, scales = codec.unpack_2buff(main)
    return {"nope": (stored_codes, scales), "layout": main[:, stored_codes.shape[1] :], "rope": rope}


def row_bytes(stored: dict[str, Stored]) -> dict[str, Tensor]:
    """The bytes behind `outputs`, uint8 [n, row bytes], by name of their plane."""
    if "row" in stored:
        return {"row": _bytes(stored["row"])}
    nope, layout = stored["nope"], stored["layout"]
    assert isinstance(nope, tuple) and isinstance(layout, Tensor)
    return {"nope": torch.cat([nope[0], layout], 1), "rope": _bytes(stored["rope"])}


def _bytes(x: Stored) -> Tensor:
    assert isinstance(x, Tensor)
    return x.contiguous().view(torch.uint8)


def expected(row: Bounded, build: Build, dims: str, rope: int = 64) -> dict[str, Expected]:
    """What rows should hold, from their unrounded values [n, d]; `layout`, which follows from stored scales, apart."""
    if build == "bf16":
        return {"row": Dense(row, "bf16", dims)}
    nope, rotated = row.split_last(rope)
    return {"nope": Codes(nope, SCALE_TILE, formats.E4M3_AMAX_FLOOR, dims), "rope": Dense(rotated, "bf16", dims)}


def key_codes(stored: Tensor, scales: Tensor, form: Form) -> tuple[Tensor, Tensor]:
    """Bytes of keys or index queries -> codes, one a byte, and scale bytes; a float32 scale that is no power of two becomes
    255, which is no scale."""
    unpacked = formats.e2m1_unpack(stored) if form == "fp4" else stored
    if scales.dtype == torch.uint8:
        return unpacked, scales
    bits = scales.contiguous().view(torch.int32)
    power = (bits > 0) & (bits & 0x7FFFFF == 0)
    return unpacked, torch.where(power, bits >> 23, 255).to(torch.uint8)


def key_expected(key: Bounded, form: Form, dims: str) -> Codes:
    """What keys or index queries should be, from their unrounded values [..., d]."""
    if form == "fp4":
        return Codes(key, GROUP[form], formats.E2M1_AMAX_FLOOR, dims, codes.E2M1)
    return Codes(key, GROUP[form], formats.E4M3_AMAX_FLOOR, dims)


def quantise_queries(q: Tensor, form: Form) -> tuple[Tensor, Tensor]:
    """Quantised index queries [t, h, d], which the form holds exactly -> their bytes as `index_logits` takes them."""
    if form == "fp8":
        return formats.quantize_e4m3(q, q.shape[-1])
    stored, scales = formats.quantize_e2m1(q, GROUP[form])
    return formats.e2m1_pack(stored), scales
