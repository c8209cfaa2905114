"""Caches of other engines, as bytes: pool rows and index keys in every layout of docs/pool.md §2, read into values.

Written from the layouts' definitions in numpy, and not from the codecs of `optimized`, which they check. Source:
docs/single.md §3, docs/pool.md §2 and §2.1.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reference.errors import BadInput

Bytes = NDArray[np.uint8]
Numbers = NDArray[np.int64]

NOPE, ROPE, TILE = 448, 64, 64  # channels of a row without and with rotation, and how many share a scale
TOKEN_BYTES, SCALE_BYTES = NOPE + 2 * ROPE, 8  # of a token in a FlashMLA page: data, then 7 scales and a pad
KEY, KEY_GROUP, PAGE_ROWS = 128, 32, 64

_MAGNITUDES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])


@dataclass(frozen=True)
class Payload:
    """Rows as an engine stored them: codes [n, c] one a byte, scales [n, g] (bytes, or float32 where the layout has such),
    rotated channels float64 [n, r] (none in keys), and `spare`, the bytes [n, x] that hold no number."""

    codes: Bytes
    scales: NDArray[Any]
    rotated: NDArray[np.float64]
    spare: Bytes
    decode: Callable[[Bytes], NDArray[np.float64]]

    @property
    def values(self) -> NDArray[np.float64]:
        """[n, c + r], exact."""
        group = self.codes.shape[1] // self.scales.shape[1]
        scale = _power(self.scales) if self.scales.dtype == np.uint8 else self.scales.astype(np.float64)
        return np.concatenate([self.decode(self.codes) * scale.repeat(group, 1), self.rotated], 1)


def e4m3(codes: Bytes) -> NDArray[np.float64]:
    """Sign, 4 bits of exponent with bias 7, 3 of mantissa; magnitude 127 is NaN."""
    exponent, mantissa = (codes >> 3 & 15).astype(np.int64), (codes & 7) / 8.0
    size = np.where(exponent > 0, (1 + mantissa) * 2.0 ** (exponent - 7), mantissa * 2.0**-6)
    size = np.where((codes & 127) == 127, np.nan, size)
    return np.where(codes >> 7 == 1, -size, size)


def e2m1(codes: Bytes) -> NDArray[np.float64]:
    """Codes 0..15: eight magnitudes, then the same with a sign."""
    return np.where(codes >> 3 == 1, -1.0, 1.0) * _MAGNITUDES[codes & 7]


def _power(scales: Bytes) -> NDArray[np.float64]:
    """2^(byte - 127); byte 255 is NaN."""
    return np.where(scales == 255, np.nan, 2.0 ** (scales.astype(np.float64) - 127))


def bf16(data: Bytes) -> NDArray[np.float64]:
    """Little-endian bytes [..., 2n] -> [..., n]."""
    high = np.ascontiguousarray(data).view("<u2").astype(np.uint32) << 16
    with np.errstate(invalid="ignore"):  # a signalling NaN
        return high.view(np.float32).astype(np.float64)


def rows_2buff(nope: Bytes, rope: Bytes) -> Payload:
    """Both planes of the unified pool, [n, 512] and [n, 128]: codes, seven scale bytes each twice, 50 spare bytes."""
    _sized("2buff rows", nope, NOPE + ROPE)
    _sized("2buff rotated rows", rope, 2 * ROPE)
    end = NOPE + 2 * (NOPE // TILE)
    return Payload(nope[:, :NOPE], nope[:, NOPE:end:2], bf16(rope), nope[:, NOPE:], e4m3)


def flashmla_stride(page_rows: int) -> int:
    """Bytes of a FlashMLA page: tokens' data, their scales, rounded up to whole tokens' data."""
    return -(-(TOKEN_BYTES + SCALE_BYTES) * page_rows // TOKEN_BYTES) * TOKEN_BYTES


def rows_flashmla(pages: Bytes, slots: Numbers, page_rows: int = 64) -> Payload:
    """Pages [p, stride] of 584 bytes a token: 448 codes and 64 bfloat16 of each token, then 7 scale bytes and a pad of each.
    `slots` [n] counts tokens through all pages. Raises BadInput for another stride or a slot outside."""
    _sized("FlashMLA pages", pages, flashmla_stride(page_rows))
    page, at = _where(slots, len(pages), page_rows)
    data = pages[page[:, None], TOKEN_BYTES * at[:, None] + np.arange(TOKEN_BYTES)]
    tail = pages[page[:, None], TOKEN_BYTES * page_rows + SCALE_BYTES * at[:, None] + np.arange(SCALE_BYTES)]
    groups = NOPE // TILE
    return Payload(data[:, :NOPE], tail[:, :groups], bf16(data[:, NOPE:]), tail[:, groups:], e4m3)


def _natural(r: Numbers, j: Numbers, width: int) -> Numbers:
    return r * width + j


def _preshuffled(r: Numbers, j: Numbers, width: int) -> Numbers:
    """Tiles of 16 rows by 16 bytes."""
    return r // 16 * (16 * width) + j // 16 * 256 + r % 16 * 16 + j % 16


def _by_groups(r: Numbers, j: Numbers, width: int) -> Numbers:
    """16 bytes of one group of channels, for all rows, then the next group."""
    return j // 16 * (16 * PAGE_ROWS) + r * 16 + j % 16


def _page8(r: Numbers, j: Numbers, width: int) -> Numbers:
    """Sub-pages of 8 rows: rows 0 to 3 and 4 to 7 of a group lie 16 bytes apart."""
    t, g = r % 8, j // 16
    return r // 8 * 512 + (t % 4 * 4 + g) * 32 + t // 4 * 16 + j % 16


def _scale_flydsl(r: Numbers, g: Numbers, count: int) -> Numbers:
    return g * PAGE_ROWS + r % 16 * 4 + r // 16


def _scale_opus(r: Numbers, g: Numbers, count: int) -> Numbers:
    return g % 2 * 128 + r % 32 * 4 + g // 2 * 2 + r // 32


def _scale_page8(r: Numbers, g: Numbers, count: int) -> Numbers:
    return r // 8 * 32 + g * 8 + r % 8


@dataclass(frozen=True)
class KeyLayout:
    """FP4 or FP8; places of key bytes and of scales in a page of 64; whether scales follow the keys of their page."""

    fp4: bool
    keys: Callable[[Numbers, Numbers, int], Numbers]
    scales: Callable[[Numbers, Numbers, int], Numbers]
    joined: bool


KEY_LAYOUTS = {
    "fp8_preshuffled": KeyLayout(False, _preshuffled, _natural, True),
    "fp8_linear": KeyLayout(False, _natural, _natural, True),
    "fp4_flydsl": KeyLayout(True, _by_groups, _scale_flydsl, False),
    "fp4_opus": KeyLayout(True, _by_groups, _scale_opus, False),
    "fp4_natural": KeyLayout(True, _natural, _natural, False),
    "fp4_split": KeyLayout(True, _natural, _natural, True),
    "fp4_page8": KeyLayout(True, _page8, _scale_page8, False),
}


def index_keys(layout: str, pages: Bytes, scales: Bytes | None, slots: Numbers) -> Payload:
    """Keys in pages of 64, [p, bytes]; scales in pages of their own unless the layout joins them. `slots` [n] counts keys
    through all pages. Raises BadInput for an unknown layout, for pages of another size, or a slot outside."""
    if layout not in KEY_LAYOUTS:
        raise BadInput(f"index layout {layout!r}: known are {', '.join(KEY_LAYOUTS)}")
    rule = KEY_LAYOUTS[layout]
    width, count = (KEY // 2, KEY // KEY_GROUP) if rule.fp4 else (KEY, 1)
    scale_bytes = count * (1 if rule.fp4 else 4)
    _sized(f"{layout} keys", pages, PAGE_ROWS * (width + scale_bytes * rule.joined))
    if rule.joined == (scales is not None):
        raise BadInput(f"{layout}: scales {'follow the keys in their page' if rule.joined else 'are missing'}")
    apart = pages[:, PAGE_ROWS * width :] if scales is None else scales
    _sized(f"{layout} scales", apart, PAGE_ROWS * scale_bytes)
    page, at = _where(slots, len(pages), PAGE_ROWS)
    codes = pages[page[:, None], rule.keys(at[:, None], np.arange(width)[None], width)]
    places = rule.scales(at[:, None], np.arange(count)[None], count)
    held = apart if rule.fp4 else np.ascontiguousarray(apart).view("<f4")
    nothing = np.zeros((len(slots), 0))
    if rule.fp4:
        codes = np.stack([codes & 15, codes >> 4], -1).reshape(len(slots), KEY)  # the even channel is the low half
    return Payload(codes, held[page[:, None], places], nothing, nothing.astype(np.uint8), e2m1 if rule.fp4 else e4m3)


def _sized(what: str, x: Bytes, width: int) -> None:
    if x.dtype != np.uint8 or x.ndim != 2 or x.shape[1] != width:
        raise BadInput(f"{what}: {x.dtype} {list(x.shape)}, expected uint8 [n, {width}]")


def _where(slots: Numbers, pages: int, page_rows: int) -> tuple[Numbers, Numbers]:
    """Page and row of each slot."""
    outside = np.flatnonzero((slots < 0) | (slots >= pages * page_rows))
    if len(outside):
        raise BadInput(f"slot {slots[outside[0]]} of row {outside[0]} is outside of {pages} pages of {page_rows}")
    return slots // page_rows, slots % page_rows
