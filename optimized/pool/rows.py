"""The bytes of a pool row.

2buff: one plane holds, per row, the E4M3 codes of the channels without rotation, then one scale byte per 64 of them,
each written twice (a block-scaled product reads them as one per 32), then zeros up to head_dim bytes; the other plane
holds the 64 rotated channels in bfloat16. bf16: all channels in bfloat16. Source: docs/pool.md §2.
"""

from __future__ import annotations

import torch
from torch import Tensor

from reference import formats

from .geometry import SCALE_TILE


def pack_2buff(codes: Tensor, scales: Tensor, row_bytes: int) -> Tensor:
    """E4M3 codes [..., n] and scale bytes [..., n/64], both uint8 -> row bytes uint8 [..., row_bytes]."""
    n, tiles = codes.shape[-1], scales.shape[-1]
    rows = codes.new_zeros(*codes.shape[:-1], row_bytes)
    rows[..., :n] = codes
    rows[..., n : n + 2 * tiles] = scales.repeat_interleave(2, -1)
    return rows


def unpack_2buff(rows: Tensor, rope: int = 64) -> tuple[Tensor, Tensor]:
    """Row bytes uint8 [..., n + rope] -> codes [..., n] and scale bytes [..., n/64], the first of each pair."""
    n = rows.shape[-1] - rope
    return rows[..., :n], rows[..., n : n + 2 * n // SCALE_TILE : 2]


def encode_2buff(values: Tensor, rope: int = 64) -> tuple[Tensor, Tensor]:
    """float32 [..., d] -> row bytes uint8 [..., d] and rotated channels bfloat16 [..., rope]; quantises per 64."""
    codes, scales = formats.quantize_e4m3(values[..., :-rope].float(), SCALE_TILE)
    return pack_2buff(codes, scales, values.shape[-1]), values[..., -rope:].to(torch.bfloat16)


def decode_2buff(rows: Tensor, rotated: Tensor) -> Tensor:
    """Row bytes uint8 [..., d] and rotated channels bfloat16 [..., rope] -> float32 [..., d], exact."""
    codes, scales = unpack_2buff(rows, rotated.shape[-1])
    nope = formats.dequantize_blocks(formats.e4m3_decode(codes.contiguous()), scales.contiguous(), SCALE_TILE)
    return torch.cat([nope, rotated.float()], -1)


def encode_bf16(values: Tensor) -> Tensor:
    """float32 [..., d] -> row bytes uint8 [..., 2d], nearest even."""
    return values.float().to(torch.bfloat16).view(torch.uint8)


def decode_bf16(rows: Tensor) -> Tensor:
    """Row bytes uint8 [..., 2d] -> float32 [..., d], exact."""
    return rows.view(torch.bfloat16).float()
