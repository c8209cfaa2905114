"""float64 expectations and bounds of row-wise kernels, and what is legal in a pool row that holds them."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import torch
from kernel_cases import UNIT, gamma, illegal_bf16, illegal_e4m3, mutant, scale_byte, scale_value
from torch import Tensor

from optimized.pool import rows as row_codec

SECOND_ORDER = 1 + 2.0**-10  # products of two of these errors


def normed(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """RMSNorm of exact x [..., n] and its float32 bound: half the mean square's error, rsqrt within 2 ulp, two products."""
    y = weight * x * (x.square().mean(-1, keepdim=True) + eps).rsqrt()
    return y, y.abs() * (gamma(x.shape[-1] + 3) / 2 + 6 * UNIT)


def turned(y: Tensor, bound: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """RoPE on the last 64 channels of [..., n] by cos, sin [..., 32], and the bound of two products and one sum."""
    even, odd, e_bound, o_bound = y[..., -64::2], y[..., -63::2], bound[..., -64::2], bound[..., -63::2]
    out, out_bound = y.clone(), bound.clone()
    out[..., -64::2], out[..., -63::2] = even * cos - odd * sin, odd * cos + even * sin
    for start, a, b, a_bound, b_bound in ((-64, even, odd, e_bound, o_bound), (-63, odd, even, o_bound, e_bound)):
        own = a_bound * cos.abs() + b_bound * sin.abs() + gamma(2) * ((a * cos).abs() + (b * sin).abs())
        out_bound[..., start::2] = own
    return out, out_bound * SECOND_ORDER


def hadamard(y: Tensor, bound: Tensor) -> tuple[Tensor, Tensor]:
    """Hadamard rotation of [..., n] from its definition, and the bound: log2(n) additions and one product."""
    n = y.shape[-1]
    parity = torch.tensor([[bin(i & j).count("1") % 2 for j in range(n)] for i in range(n)])
    matrix = (1.0 - 2.0 * parity).double()
    own = gamma(n.bit_length() + 2) * (y.abs().sum(-1, keepdim=True)) + bound.sum(-1, keepdim=True)
    return y @ matrix / n**0.5, own.expand_as(y) / n**0.5 * SECOND_ORDER


def illegal_scales(scales: Tensor, want: Tensor, bound: Tensor, block: int, bytes_of=scale_byte) -> Tensor:
    """Where a block's scale byte is not the one of an amax within the bound; [..., n/block]."""
    tiles, tile_bounds = want.unflatten(-1, (-1, block)), bound.unflatten(-1, (-1, block))
    low = (tiles.abs() - tile_bounds).clamp_min(0).amax(-1)
    high = (tiles.abs() + tile_bounds).amax(-1)
    return ~((bytes_of(low) <= scales) & (scales <= bytes_of(high)))


def illegal_blocks(codes: Tensor, scales: Tensor, want: Tensor, bound: Tensor, block: int) -> Tensor:
    """Where E4M3 codes [..., n] with scale bytes [..., n/block] are not a quantisation of a value within the bound."""
    unit = scale_value(scales).repeat_interleave(block, -1)
    wrong = illegal_e4m3(codes, want / unit, bound / unit).unflatten(-1, (-1, block))
    return wrong.any(-1) | illegal_scales(scales, want, bound, block)


def illegal_rows(main: Tensor, rope: Tensor | None, want: Tensor, bound: Tensor) -> Tensor:
    """Which rows of a pool [n, ...] do not hold float64 want [n, d] within the bound; 2buff, or bfloat16 without rope."""
    if rope is None:
        return illegal_bf16(main, want, bound).any(-1)
    codes, scales = row_codec.unpack_2buff(main)
    shape = (main != row_codec.pack_2buff(codes, scales, main.shape[-1])).any(-1)
    nope = illegal_blocks(codes, scales, want[:, :-64], bound[:, :-64], 64).any(-1)
    return shape | nope | illegal_bf16(rope, want[:, -64:], bound[:, -64:]).any(-1)


def mutant_through(module: ModuleType, helper: ModuleType, tmp_path: Path, *edits: tuple[str, str]) -> ModuleType:
    """The kernel file over a helper file with planted mistakes."""
    old, new = (m.__name__.rsplit(".", 1)[-1] for m in (helper, mutant(helper, tmp_path, *edits)))
    return mutant(module, tmp_path, (f"from .{old} import", f"from .{new} import"))
