"""The number formats of the model and how values get into them: E4M3, E2M1, UE8M0, bfloat16.

Only this file knows the rules: value tables, ties, clamps, scale choice, packing. Everything is exact where the
format is exact; quantisers work on float32, as every kernel does, whatever dtype surrounds them.
Source: docs/model.md §2 (quantisers, weight dequantisation).
"""

from __future__ import annotations

import torch
from torch import Tensor

E4M3_MAX = 448.0
E2M1_MAX = 6.0
E4M3_AMAX_FLOOR = 1e-4
E2M1_AMAX_FLOOR = 6 * 2.0**-126

E8M0_VALUES = torch.ldexp(torch.ones(256, dtype=torch.float64), torch.arange(256) - 127).to(torch.float32)
E8M0_VALUES[255] = torch.nan
E2M1_VALUES = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float32)

# A magnitude on a midpoint goes to the even code: down at .25 1.25 2.5 5, up at .75 1.75 3.5. `bucketize` sends a
# value equal to a boundary down, so the boundaries that send their tie up sit one float32 below the midpoint.
_E2M1_BOUNDARIES = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], dtype=torch.float32)
_E2M1_BOUNDARIES[1::2] = torch.nextafter(_E2M1_BOUNDARIES[1::2], torch.zeros(3, dtype=torch.float32))


def e4m3_encode(x: Tensor) -> Tensor:
    """float32 -> E4M3 codes (uint8): nearest even, clamped to +-448 first; NaN becomes a NaN code."""
    return x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)


def e4m3_decode(code: Tensor) -> Tensor:
    """E4M3 codes (uint8) -> float32, exact."""
    return code.view(torch.float8_e4m3fn).to(torch.float32)


def e2m1_encode(x: Tensor) -> Tensor:
    """float32 -> E2M1 codes 0..15 (uint8): nearest, ties to the even code, clamped to +-6. NaN is not representable."""
    magnitude = torch.bucketize(x.abs().contiguous(), _E2M1_BOUNDARIES.to(x.device), out_int32=True)
    return (magnitude + 8 * torch.signbit(x)).to(torch.uint8)


def e2m1_decode(code: Tensor) -> Tensor:
    """E2M1 codes 0..15 -> float32, exact."""
    return E2M1_VALUES.to(code.device)[code.int()]


def e2m1_unpack(packed: Tensor) -> Tensor:
    """Packed bytes [..., n] -> codes [..., 2n]: the low nibble is the even element, the high nibble the odd one."""
    byte = packed.view(torch.uint8)
    return torch.stack([byte & 15, byte >> 4], dim=-1).flatten(-2)


def e2m1_pack(code: Tensor) -> Tensor:
    """Codes [..., 2n] -> packed bytes [..., n] (uint8)."""
    return code[..., 0::2] | (code[..., 1::2] << 4)


def e8m0_decode(byte: Tensor) -> Tensor:
    """Scale bytes -> float32 powers of two, 2^(byte-127); byte 255 is NaN."""
    return E8M0_VALUES.to(byte.device)[byte.view(torch.uint8).int()]


def e8m0_ceil(x: Tensor) -> Tensor:
    """Normal positive float32 -> scale byte of the smallest power of two >= x; not-finite x -> 255.

    Reads the exponent from the bits: a float log2 is wrong at exact powers of two.
    """
    bits = x.contiguous().view(torch.int32)
    exponent = (bits >> 23) + ((bits & 0x7FFFFF) != 0).int()
    return torch.where(torch.isfinite(x), exponent, 255).clamp(0, 255).to(torch.uint8)


def _blocks(x: Tensor, block: int) -> Tensor:
    """[..., n] -> [..., ceil(n/block), block]; a short last block is filled with zeros, which no amax sees."""
    short = -x.shape[-1] % block
    x = torch.nn.functional.pad(x, (0, short)) if short else x
    return x.unflatten(-1, (-1, block))


def _block_scale(blocks: Tensor, largest: float, amax_floor: float) -> Tensor:
    amax = blocks.abs().amax(-1).clamp_min(amax_floor)
    reciprocal = torch.tensor(1 / largest, dtype=torch.float32)
    return e8m0_ceil(amax * reciprocal)


def quantize_e4m3(x: Tensor, block: int, amax_floor: float = E4M3_AMAX_FLOOR) -> tuple[Tensor, Tensor]:
    """float32 [..., n] -> E4M3 codes [..., n] and scale bytes [..., ceil(n/block)], one power of two per block.

    scale = 2^ceil(log2(amax * fl32(1/448))); amax = 448 * 2^k gives 2^k exactly; an all-zero block gives 2^-22.
    """
    blocks = _blocks(x.float(), block)
    scale = _block_scale(blocks, E4M3_MAX, amax_floor)
    code = e4m3_encode(blocks / e8m0_decode(scale).unsqueeze(-1))
    return code.flatten(-2)[..., : x.shape[-1]], scale


def quantize_e2m1(x: Tensor, block: int, amax_floor: float = E2M1_AMAX_FLOOR) -> tuple[Tensor, Tensor]:
    """float32 [..., n] -> E2M1 codes [..., n] (one a byte) and scale bytes [..., ceil(n/block)]."""
    blocks = _blocks(x.float(), block)
    scale = _block_scale(blocks, E2M1_MAX, amax_floor)
    code = e2m1_encode(blocks / e8m0_decode(scale).unsqueeze(-1))
    return code.flatten(-2)[..., : x.shape[-1]], scale


def dequantize_blocks(values: Tensor, scale: Tensor, block: int) -> Tensor:
    """Decoded values [..., n] times their block's scale bytes [..., ceil(n/block)] -> float32."""
    return (_blocks(values, block) * e8m0_decode(scale).unsqueeze(-1)).flatten(-2)[..., : values.shape[-1]]


def round_bf16(x: Tensor) -> Tensor:
    """Nearest even to bfloat16 by way of float32, kept in the dtype of x."""
    return x.float().to(torch.bfloat16).to(x.dtype)
