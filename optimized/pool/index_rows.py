"""Index keys of CSA layers in pages of 64: how a key is quantised, and, apart from that, where its bytes lie.

A page holds the keys of one block and layer. Form: `fp4`, E2M1 with a scale byte per 32 channels, or `fp8`, E4M3 with one
float32 scale a key. A layout permutes the bytes within the page's key region and its scale region; converting moves
bytes and loses none. Source: docs/pool.md §2.1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from reference import formats

Form = Literal["fp4", "fp8"]
Order = Literal["natural", "preshuffled", "flydsl", "opus", "page8"]
PAGE_ROWS = 64
GROUP = {"fp4": 32, "fp8": 128}  # channels a scale


@dataclass(frozen=True)
class Layout:
    """Order of bytes in a page, and whether scales follow the keys of their page (`joined`) or have a region apart."""

    form: Form
    order: Order
    joined: bool


LAYOUTS = {
    "fp8_linear": Layout("fp8", "natural", joined=True),
    "fp8_preshuffled": Layout("fp8", "preshuffled", joined=True),
    "fp4_natural": Layout("fp4", "natural", joined=False),
    "fp4_split": Layout("fp4", "natural", joined=True),
    "fp4_flydsl": Layout("fp4", "flydsl", joined=False),
    "fp4_opus": Layout("fp4", "opus", joined=False),
    "fp4_page8": Layout("fp4", "page8", joined=False),
}


def key_bytes(form: Form, width: int) -> int:
    """Bytes of a key of `width` channels, without its scale."""
    return width // 2 if form == "fp4" else width


def scale_count(form: Form, width: int) -> int:
    """Scales of a key: uint8 (fp4) or float32 (fp8)."""
    return width // 32 if form == "fp4" else 1


def key_order(layout: Layout, width: int) -> Tensor:
    """int64 [64, key_bytes]: place of byte j of row r in the page's key region. Tiles of 16 bytes by 16 rows, by 64,
    or by 2 rows that stand 4 apart."""
    n = key_bytes(layout.form, width)
    r, j = torch.arange(PAGE_ROWS)[:, None], torch.arange(n)[None, :]
    if layout.order == "natural":
        return r * n + j
    if layout.order == "preshuffled":
        return r // 16 * (16 * n) + j // 16 * 256 + r % 16 * 16 + j % 16
    if layout.order == "page8":
        return r // 8 * (8 * n) + r % 4 * (2 * n) + j // 16 * 32 + r % 8 // 4 * 16 + j % 16
    return j // 16 * (16 * PAGE_ROWS) + r * 16 + j % 16


def scale_order(layout: Layout, width: int) -> Tensor:
    """int64 [64, scales]: place of scale g of row r in the page's scale region. Raises ValueError for OPUS off width 128."""
    n = scale_count(layout.form, width)
    r, g = torch.arange(PAGE_ROWS)[:, None], torch.arange(n)[None, :]
    if layout.order == "flydsl":
        return g * PAGE_ROWS + r % 16 * 4 + r // 16
    if layout.order == "opus":
        if n != 4:
            raise ValueError(f"the OPUS layout has 4 scales a key, not {n}")
        return g % 2 * 128 + r % 32 * 4 + g // 2 * 2 + r // 32
    if layout.order == "page8":
        return r // 8 * (8 * n) + g * 8 + r % 8
    return r * n + g


def encode(values: Tensor, form: Form) -> tuple[Tensor, Tensor]:
    """float32 [..., d] -> codes uint8 [..., key_bytes] and scales [..., n], uint8 (fp4) or float32 (fp8)."""
    if form == "fp4":
        codes, scales = formats.quantize_e2m1(values, GROUP[form])
        return formats.e2m1_pack(codes), scales
    codes, scales = formats.quantize_e4m3(values, values.shape[-1])
    return codes, formats.e8m0_decode(scales)


def decode(codes: Tensor, scales: Tensor, form: Form) -> Tensor:
    """Codes and scales as `encode` gives them -> float32 [..., d], exact for scales that are powers of two."""
    if form == "fp4":
        return formats.dequantize_blocks(formats.e2m1_decode(formats.e2m1_unpack(codes)), scales, GROUP[form])
    return formats.e4m3_decode(codes.contiguous()) * scales


def pack(codes: Tensor, scales: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
    """Codes [..., 64, key_bytes] and scales [..., 64, n] of whole pages -> key region and scale region, each [..., flat]."""
    width = codes.shape[-1] * (2 if layout.form == "fp4" else 1)
    return _scatter(codes, key_order(layout, width)), _scatter(scales, scale_order(layout, width))


def unpack(keys: Tensor, scales: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
    """Key region and scale region of whole pages, [..., flat] -> codes [..., 64, key_bytes] and scales [..., 64, n]."""
    width = keys.shape[-1] // PAGE_ROWS * (2 if layout.form == "fp4" else 1)
    return keys[..., key_order(layout, width)], scales[..., scale_order(layout, width)]


def convert(keys: Tensor, scales: Tensor, source: Layout, target: Layout) -> tuple[Tensor, Tensor]:
    """Pages moved from one layout to another of the same form, byte for byte. Raises ValueError if the forms differ."""
    if source.form != target.form:
        raise ValueError(f"{source.form} keys cannot become {target.form} by moving bytes")
    return pack(*unpack(keys, scales, source), target)


def _scatter(x: Tensor, order: Tensor) -> Tensor:
    out = x.new_empty(*x.shape[:-2], order.numel())
    out[..., order.flatten()] = x.flatten(-2)
    return out
