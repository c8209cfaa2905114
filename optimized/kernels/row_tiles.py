"""Steps that several kernels do on a tile of rows in registers: norm, rotation, Hadamard, and the forms of a pool row.

A tile is float32 [R, LANES]; lanes past a row's width are 0 on the way in and out. Rows never meet: the result of a row
does not depend on the tile's other rows. Source: docs/pool.md §2 and §8.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .numeric import bf16_rn, bf16_up, e2m1_rn, e2m1_scale, e4m3_rn, e4m3_scale, e8m0_inverse, magnitude_bits


@triton.jit
def load_bf16_tile(x, at, live, WIDTH: tl.constexpr, LANES: tl.constexpr):
    """Rows of WIDTH bfloat16 that begin at element offsets `at` [R] -> float32 [R, LANES]."""
    d = tl.arange(0, LANES)[None, :]
    return bf16_up(tl.load(x + at[:, None] + d, mask=live[:, None] & (d < WIDTH), other=0.0))


@triton.jit
def store_bf16_tile(x, at, live, y, WIDTH: tl.constexpr, LANES: tl.constexpr):
    """float32 [R, LANES] -> rows of WIDTH bfloat16, one rounding."""
    d = tl.arange(0, LANES)[None, :]
    tl.store(x + at[:, None] + d, bf16_rn(y), mask=live[:, None] & (d < WIDTH))


@triton.jit
def inverse_rms(x, eps, WIDTH: tl.constexpr):
    """1 / sqrt(mean square + eps) of each row, float32 [R, 1]."""
    return tl.rsqrt(tl.sum(x * x, 1) / WIDTH + eps)[:, None]


@triton.jit
def rotate_tail(y, cos, sin, at, live, sign, WIDTH: tl.constexpr, LANES: tl.constexpr):
    """Turn the last 64 of WIDTH channels in adjacent pairs, by cos and sign * sin of table row `at` [R]."""
    even, odd = tl.split(y.reshape(y.shape[0], LANES // 2, 2))  # [R, LANES / 2] each
    pair = tl.arange(0, LANES // 2)[None, :] - (WIDTH - 64) // 2
    turned = (pair >= 0) & (pair < 32)
    c = tl.load(cos + at[:, None] * 32 + pair, mask=live[:, None] & turned, other=1.0)
    s = tl.load(sin + at[:, None] * 32 + pair, mask=live[:, None] & turned, other=0.0) * sign
    new_even = tl.where(turned, even * c - odd * s, even)
    new_odd = tl.where(turned, odd * c + even * s, odd)
    return tl.join(new_even, new_odd).reshape(y.shape[0], LANES)


@triton.jit
def hadamard(x, LANES: tl.constexpr, STEPS: tl.constexpr):
    """Sylvester's Hadamard rotation of [R, LANES], over sqrt(LANES); LANES = 2^STEPS.

    Every step adds and subtracts neighbours and puts sums before differences: STEPS equal steps give natural order.
    """
    for _ in tl.static_range(STEPS):
        even, odd = tl.split(x.reshape(x.shape[0], LANES // 2, 2))
        x = tl.permute(tl.join(even + odd, even - odd), (0, 2, 1)).reshape(x.shape[0], LANES)
    return x * LANES**-0.5


@triton.jit
def store_2buff_tile(main, rope, at_main, at_rope, live, y, WIDTH: tl.constexpr, LANES: tl.constexpr):
    """Quantise and write 2buff rows: codes, scale bytes twice each, zeros; the last 64 channels in bfloat16."""
    NOPE: tl.constexpr = WIDTH - 64
    TILES: tl.constexpr = NOPE // 64
    d = tl.arange(0, LANES)[None, :]
    tile = tl.arange(0, LANES // 64)[None, :]
    pad = tl.arange(0, 64)[None, :]
    row = main + at_main[:, None]
    blocks = y.reshape(y.shape[0], LANES // 64, 64)
    scale = e4m3_scale(tl.max(magnitude_bits(blocks), 2))  # [R, LANES / 64]
    code = e4m3_rn(blocks * e8m0_inverse(scale)[:, :, None]).reshape(y.shape[0], LANES)
    tl.store(row + d, code, mask=live[:, None] & (d < NOPE))
    tl.store(row + NOPE + 2 * tile, scale, mask=live[:, None] & (tile < TILES))
    tl.store(row + NOPE + 2 * tile + 1, scale, mask=live[:, None] & (tile < TILES))
    zeros = tl.zeros((y.shape[0], 64), tl.uint8)
    tl.store(row + NOPE + pad, zeros, mask=live[:, None] & (pad >= 2 * TILES))
    tl.store(rope + at_rope[:, None] + (d - NOPE), bf16_rn(y), mask=live[:, None] & (d >= NOPE) & (d < WIDTH))


@triton.jit
def encode_e4m3(y, LANES: tl.constexpr):
    """[R, LANES] -> codes [R, LANES] and one scale byte a row [R], both uint8."""
    scale = e4m3_scale(tl.max(magnitude_bits(y), 1))
    return e4m3_rn(y * e8m0_inverse(scale)[:, None]), scale


@triton.jit
def encode_e2m1(y, LANES: tl.constexpr):
    """[R, LANES] -> packed codes [R, LANES / 2], even channel in the low half, and scale bytes [R, LANES / 32], uint8."""
    blocks = y.reshape(y.shape[0], LANES // 32, 32)
    scale = e2m1_scale(tl.max(magnitude_bits(blocks), 2))
    code = e2m1_rn(blocks * e8m0_inverse(scale)[:, :, None]).reshape(y.shape[0], LANES // 2, 2)
    low, high = tl.split(code)
    return low | (high << 4), scale
