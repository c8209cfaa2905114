"""2buff rows as FlashMLA's pages and back: the same codes, scales and rotated channels in other places, byte for byte.

A page of P tokens holds their data one after another, 576 bytes each: 448 E4M3 codes, then 64 rotated channels in bfloat16;
behind the data of all, 8 bytes each: 7 scale bytes and a pad. A page is a whole number of 576 bytes. Source:
docs/pool.md §2.2.
"""

from __future__ import annotations

import torch
from torch import Tensor

from reference.errors import BadInput

from .geometry import SCALE_TILE, round_up
from .rows import pack_2buff, unpack_2buff

NOPE, ROPE = 448, 64  # channels without and with rotation
DATA = NOPE + 2 * ROPE
TILES = NOPE // SCALE_TILE
SCALES = TILES + 1  # with the pad


def page_bytes(tokens: int) -> int:
    """Bytes from one page of this many tokens to the next."""
    return round_up(tokens * (DATA + SCALES), DATA)


def to_pages(rows: Tensor, rotated: Tensor) -> Tensor:
    """2buff rows uint8 [..., P, 512] and rotated channels bfloat16 [..., P, 64] -> pages uint8 [..., page_bytes(P)], pads 0.

    Raises BadInput for a row whose padding is not zero or whose two copies of a scale differ: a page has no place for that.
    """
    codes, scales = unpack_2buff(rows)
    _check(rows, pack_2buff(codes, scales, rows.shape[-1]))
    tokens = rows.shape[-2]
    pages = rows.new_zeros(*rows.shape[:-2], page_bytes(tokens))
    data, behind = _regions(pages, tokens)
    data[..., :NOPE] = codes
    data[..., NOPE:] = rotated.contiguous().view(torch.uint8)
    behind[..., :TILES] = scales
    return pages


def from_pages(pages: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
    """Pages uint8 [..., page_bytes(tokens)] -> 2buff rows uint8 [..., tokens, 512] and rotated channels bfloat16
    [..., tokens, 64]. What pads hold is undefined there, and is dropped. Raises BadInput for pages of another size."""
    if pages.shape[-1] != page_bytes(tokens):
        raise BadInput(f"FlashMLA pages of {pages.shape[-1]} bytes: {tokens} tokens take {page_bytes(tokens)}")
    data, behind = _regions(pages, tokens)
    rows = pack_2buff(data[..., :NOPE], behind[..., :TILES], NOPE + ROPE)
    return rows, data[..., NOPE:].contiguous().view(torch.bfloat16)


def _regions(pages: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
    """Views of data [..., tokens, 576] and of scales [..., tokens, 8]."""
    data, behind = pages[..., : tokens * (DATA + SCALES)].split([tokens * DATA, tokens * SCALES], -1)
    return data.unflatten(-1, (tokens, DATA)), behind.unflatten(-1, (tokens, SCALES))


def _check(rows: Tensor, clean: Tensor) -> None:
    wrong = (rows != clean).nonzero()
    if len(wrong):
        *row, byte = wrong[0].tolist()
        raise BadInput(f"2buff row {row}: byte {byte} is {int(rows[*row, byte])}, expected {int(clean[*row, byte])}")
