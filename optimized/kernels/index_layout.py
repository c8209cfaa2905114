"""Where the bytes of an index key lie in its page, inside kernels, and writing one. Source: docs/pool.md §2.1."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import require
from .numeric import e8m0_up
from .row_tiles import encode_e2m1, encode_e4m3

PAGE_ROWS = 64
ORDERS = {"natural": 0, "preshuffled": 1, "flydsl": 2, "opus": 3, "page8": 4}  # ORDER of the kernels


@triton.jit
def key_at(r, j, BYTES: tl.constexpr, ORDER: tl.constexpr):
    """Place of byte j of row r in the keys of a page, BYTES a key."""
    if ORDER == 0:
        at = r * BYTES + j
    elif ORDER == 1:
        at = r // 16 * (16 * BYTES) + j // 16 * 256 + r % 16 * 16 + j % 16
    elif ORDER == 4:
        at = r // 8 * (8 * BYTES) + r % 4 * (2 * BYTES) + j // 16 * 32 + r % 8 // 4 * 16 + j % 16
    else:
        at = j // 16 * 1024 + r * 16 + j % 16
    return at


@triton.jit
def scale_at(r, g, SCALES: tl.constexpr, ORDER: tl.constexpr):
    """Place of scale g of row r in the scales of a page, SCALES a key."""
    if ORDER == 2:
        at = g * 64 + r % 16 * 4 + r // 16
    elif ORDER == 3:
        at = g % 2 * 128 + r % 32 * 4 + g // 2 * 2 + r // 32
    elif ORDER == 4:
        at = r // 8 * (8 * SCALES) + g * 8 + r % 8
    else:
        at = r * SCALES + g
    return at


@triton.jit
def store_key(y, keys, scales, r, FP4: tl.constexpr, ORDER: tl.constexpr, LANES: tl.constexpr):
    """Quantise one key [1, LANES] and write it as row r of the page that `keys` and `scales` point to."""
    if FP4:
        code, scale = encode_e2m1(y, LANES)
        j = tl.arange(0, LANES // 2)[None, :]
        tl.store(keys + key_at(r, j, LANES // 2, ORDER), code)
        tl.store(scales + scale_at(r, tl.arange(0, LANES // 32)[None, :], LANES // 32, ORDER), scale)
    else:
        code, scale = encode_e4m3(y, LANES)
        tl.store(keys + key_at(r, tl.arange(0, LANES)[None, :], LANES, ORDER), code)
        tl.store(scales + r + tl.zeros_like(scale).to(tl.int32), e8m0_up(scale))


def require_pages(keys: Tensor, scales: Tensor, order: str, width: int) -> bool:
    """Whether these pages [blocks, ...] hold FP4 keys. Raises ValueError unless they hold keys of `width` in this order."""
    fp4 = scales.dtype == torch.uint8
    require(keys, "keys", torch.uint8, (None, PAGE_ROWS * (width // 2 if fp4 else width)))
    scales_of_page = PAGE_ROWS * (width // 32 if fp4 else 1)
    require(scales, "scales", torch.uint8 if fp4 else torch.float32, (keys.shape[0], scales_of_page))
    if order not in (("natural", "flydsl", "opus", "page8") if fp4 else ("natural", "preshuffled")):
        raise ValueError(f"no {order} order of {'FP4' if fp4 else 'FP8'} keys")
    if width & (width - 1) or not 64 <= width <= 128 or (order == "opus" and width != 128):
        raise ValueError(f"no index keys of {width} channels in {order} order: powers of two from 64 to 128, OPUS 128")
    return fp4
