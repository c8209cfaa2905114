"""Hyper-connections: the mix of the residual streams before and after a sub-layer, apart and fused, and the last mix.

Contract (docs/pool.md §9.2)
    x        bfloat16 [t, s, d], streams; any token stride, last two dimensions dense; s a power of two (4)
    fn       float32 [(2+s)*s, s*d], base float32 [(2+s)*s], scale float32 [3]; for the head [s, s*d], [s], [1]
    z        bfloat16 [t, d], a sub-layer's output, any row stride
    u        bfloat16 [t, d]; post float32 [t, s]; comb float32 [t, s, s], comb[j, k] from stream j to stream k
    All outputs are contiguous, written whole and alias nothing; inputs are read only.
    rounding u and the new streams: one bfloat16 each. Everything else stays float32: products without TF32, Sinkhorn on
             m = (v fn^T) * rsqrt(mean(v^2) + rms_eps), v being all streams of a token.
The product is cut along d into parts of SPLIT channels, each part walked in steps of STEP channels, streams ascending
within a step; the parts meet in ascending order. The fused kernel walks the same way over the streams it has just
rounded, so that it gives the bits of `hc_post` followed by `hc_pre`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import ceil_div, power_of_two, require, tiles_for_mode
from .numeric import bf16_rn, bf16_up


@dataclass(frozen=True)
class Tiles:
    """ROWS tokens (at least 16) by SPLIT channels a program of the product, STEP at a time; MIX_ROWS tokens by COLS channels
    a program that collapses or spreads streams. Powers of two."""

    ROWS: int
    STEP: int
    SPLIT: int
    MIX_ROWS: int
    COLS: int
    num_warps: int = 4


GPU = Tiles(ROWS=16, STEP=32, SPLIT=256, MIX_ROWS=1, COLS=1024)
INTERPRETER = Tiles(ROWS=16, STEP=1024, SPLIT=4096, MIX_ROWS=16, COLS=8192)


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def add_products(acc, squares, v, fn, column, inside, width, MIXES: tl.constexpr, LANES: tl.constexpr):
    """acc [rows, LANES] + v [rows, STEP] times these columns of fn; squares [rows] + the sums of v^2."""
    n = tl.arange(0, LANES)
    w = tl.load(fn + n[:, None] * width + column[None, :], mask=(n < MIXES)[:, None] & inside[None, :], other=0.0)
    return tl.dot(v, tl.trans(w), acc, input_precision="ieee"), squares + tl.sum(v * v, 1)


@triton.jit
def store_partial(partials, acc, squares, t, T, MIXES: tl.constexpr, LANES: tl.constexpr):
    """This program's part of the product, [t, parts, LANES]: MIXES sums, then the sum of squares, then zeros."""
    n = tl.arange(0, LANES)[None, :]
    at = (t * tl.num_programs(1) + tl.program_id(1))[:, None] * LANES + n
    tl.store(partials + at, tl.where(n == MIXES, squares[:, None], acc), mask=(t < T)[:, None])


@triton.jit
def project_kernel(
    x, fn, partials, T, D, x_stride,
    STREAMS: tl.constexpr, MIXES: tl.constexpr, LANES: tl.constexpr,
    ROWS: tl.constexpr, STEP: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    t = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    part = tl.program_id(1)
    acc = tl.zeros((ROWS, LANES), tl.float32)
    squares = tl.zeros((ROWS,), tl.float32)
    for first in range(part * SPLIT, tl.minimum((part + 1) * SPLIT, D), STEP):
        d = first + tl.arange(0, STEP)
        for s in tl.static_range(STREAMS):
            mask = (t < T)[:, None] & (d < D)[None, :]
            v = bf16_up(tl.load(x + t[:, None] * x_stride + (s * D + d)[None, :], mask=mask, other=0.0))
            acc, squares = add_products(acc, squares, v, fn, s * D + d, d < D, STREAMS * D, MIXES, LANES)
    store_partial(partials, acc, squares, t, T, MIXES, LANES)


@triton.jit
def spread(z, x, post, comb, t, d, k, T, D, x_stride, STREAMS: tl.constexpr):
    """Stream k after the sub-layer: post[k] * z + sum_j comb[j, k] * x[j], bfloat16 [rows, channels]."""
    mask = (t < T)[:, None] & (d < D)[None, :]
    total = tl.load(post + t * STREAMS + k, mask=t < T, other=0.0)[:, None] * z
    for j in tl.static_range(STREAMS):
        share = tl.load(comb + (t * STREAMS + j) * STREAMS + k, mask=t < T, other=0.0)
        v = bf16_up(tl.load(x + t[:, None] * x_stride + (j * D + d)[None, :], mask=mask, other=0.0))
        total += share[:, None] * v
    return bf16_rn(total)


@triton.jit
def post_kernel(
    z, x, post, comb, out, T, D, z_stride, x_stride,
    STREAMS: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    t = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    d = tl.program_id(1) * COLS + tl.arange(0, COLS)
    mask = (t < T)[:, None] & (d < D)[None, :]
    value = bf16_up(tl.load(z + t[:, None] * z_stride + d[None, :], mask=mask, other=0.0))
    for k in tl.static_range(STREAMS):
        stream = spread(value, x, post, comb, t, d, k, T, D, x_stride, STREAMS)
        tl.store(out + (t[:, None] * STREAMS + k) * D + d[None, :], stream, mask=mask)


@triton.jit
def post_project_kernel(
    z, x, post, comb, out, fn, partials, T, D, z_stride, x_stride,
    STREAMS: tl.constexpr, MIXES: tl.constexpr, LANES: tl.constexpr,
    ROWS: tl.constexpr, STEP: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    t = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    part = tl.program_id(1)
    acc = tl.zeros((ROWS, LANES), tl.float32)
    squares = tl.zeros((ROWS,), tl.float32)
    for first in range(part * SPLIT, tl.minimum((part + 1) * SPLIT, D), STEP):
        d = first + tl.arange(0, STEP)
        mask = (t < T)[:, None] & (d < D)[None, :]
        value = bf16_up(tl.load(z + t[:, None] * z_stride + d[None, :], mask=mask, other=0.0))
        for k in tl.static_range(STREAMS):
            stream = spread(value, x, post, comb, t, d, k, T, D, x_stride, STREAMS)
            tl.store(out + (t[:, None] * STREAMS + k) * D + d[None, :], stream, mask=mask)
            acc, squares = add_products(acc, squares, bf16_up(stream), fn, k * D + d, d < D, STREAMS * D, MIXES, LANES)
    store_partial(partials, acc, squares, t, T, MIXES, LANES)


@triton.jit
def total(partials, t, column, mask, parts, LANES: tl.constexpr):
    """Sum over the parts, ascending, of a column of the product; t and column broadcast."""
    at = t * parts * LANES + column
    value = tl.load(partials + at, mask=mask, other=0.0)
    for part in range(1, parts):
        value += tl.load(partials + at + part * LANES, mask=mask, other=0.0)
    return value


@triton.jit
def first_mix(
    partials, base, scale, t, T, width, parts, rms_eps, STREAMS: tl.constexpr, MIXES: tl.constexpr, LANES: tl.constexpr
):
    """The first STREAMS mixes through the sigmoid [rows, STREAMS], and the factor of the norm [rows]."""
    s = tl.arange(0, STREAMS)
    rstd = tl.rsqrt(total(partials, t, MIXES, t < T, parts, LANES) / width + rms_eps)
    m = total(partials, t[:, None], s[None, :], (t < T)[:, None], parts, LANES) * rstd[:, None]
    return sigmoid(m * tl.load(scale) + tl.load(base + s)[None, :]), rstd


@triton.jit
def collapse(x, weight, u, t, T, D, x_stride, STREAMS: tl.constexpr, COLS: tl.constexpr):
    """Store sum_s weight[s] * x[s], bfloat16, for this program's channels."""
    d = tl.program_id(1) * COLS + tl.arange(0, COLS)
    mask = (t < T)[:, None] & (d < D)[None, :]
    s = tl.arange(0, STREAMS)[None, :]
    value = tl.zeros((t.shape[0], COLS), tl.float32)
    for j in tl.static_range(STREAMS):
        share = tl.sum(tl.where(s == j, weight, 0.0), 1)
        value += share[:, None] * bf16_up(tl.load(x + t[:, None] * x_stride + (j * D + d)[None, :], mask=mask, other=0.0))
    tl.store(u + t[:, None] * D + d[None, :], bf16_rn(value), mask=mask)


@triton.jit
def sinkhorn(c, iterations, eps):
    """Logits [rows, j, k] -> nearly doubly stochastic: a softmax over k is the first row step, a column step the last."""
    c = tl.exp(c - tl.max(c, 2)[:, :, None])
    c = c / tl.sum(c, 2)[:, :, None] + eps
    c = c / (tl.sum(c, 1)[:, None, :] + eps)
    for _ in range(1, iterations):
        c = c / (tl.sum(c, 2)[:, :, None] + eps)
        c = c / (tl.sum(c, 1)[:, None, :] + eps)
    return c


@triton.jit
def mix_kernel(
    partials, base, scale, x, u, post, comb, T, D, parts, x_stride, iterations, hc_eps, rms_eps,
    STREAMS: tl.constexpr, MIXES: tl.constexpr, LANES: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    t = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    pre, rstd = first_mix(partials, base, scale, t, T, STREAMS * D, parts, rms_eps, STREAMS, MIXES, LANES)
    collapse(x, pre + hc_eps, u, t, T, D, x_stride, STREAMS, COLS)
    if tl.program_id(1) == 0:
        s = tl.arange(0, STREAMS)
        rows = (t < T)[:, None]
        m = total(partials, t[:, None], STREAMS + s[None, :], rows, parts, LANES) * rstd[:, None]
        gate = 2.0 * sigmoid(m * tl.load(scale + 1) + tl.load(base + STREAMS + s)[None, :])
        tl.store(post + t[:, None] * STREAMS + s[None, :], gate, mask=rows)
        pair = (s[:, None] * STREAMS + s[None, :])[None, :, :]  # [1, j, k]
        token = t[:, None, None]
        m = total(partials, token, 2 * STREAMS + pair, token < T, parts, LANES) * rstd[:, None, None]
        logits = m * tl.load(scale + 2) + tl.load(base + 2 * STREAMS + pair)
        tl.store(comb + token * STREAMS * STREAMS + pair, sinkhorn(logits, iterations, hc_eps), mask=token < T)


@triton.jit
def head_kernel(
    partials, base, scale, x, u, T, D, parts, x_stride, hc_eps, rms_eps,
    STREAMS: tl.constexpr, LANES: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    t = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    weight, _ = first_mix(partials, base, scale, t, T, STREAMS * D, parts, rms_eps, STREAMS, STREAMS, LANES)
    collapse(x, weight + hc_eps, u, t, T, D, x_stride, STREAMS, COLS)


def tiles_for_width(width: int) -> Tiles:
    """Tiles of this mode for streams of this many channels: an interpreter pays for lanes past the end."""
    lanes = max(power_of_two(max(width, 1)), 16)
    step, cols = min(INTERPRETER.STEP, lanes), min(INTERPRETER.COLS, lanes)
    rows = min(128, INTERPRETER.MIX_ROWS * INTERPRETER.COLS // cols)
    return tiles_for_mode(GPU, replace(INTERPRETER, STEP=step, COLS=cols, MIX_ROWS=rows))


def hc_pre(
    x: Tensor, fn: Tensor, base: Tensor, scale: Tensor, iterations: int, hc_eps: float, rms_eps: float,
    tiles: Tiles | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Streams [t, s, d] -> the sub-layer's input u [t, d], and post [t, s], comb [t, s, s] for afterwards. Raises
    ValueError."""
    tiles = tiles or tiles_for_width(x.shape[2])
    mixes = _check(x, fn, base, scale, 3)
    return _mix(x, _project(x, fn, mixes, tiles), base, scale, iterations, hc_eps, rms_eps, tiles)


def hc_post(z: Tensor, x: Tensor, post: Tensor, comb: Tensor, tiles: Tiles | None = None) -> Tensor:
    """Sub-layer output [t, d] and the streams it came from [t, s, d] -> the streams after it. Raises ValueError."""
    tiles = tiles or tiles_for_width(x.shape[2])
    _check_post(z, x, post, comb)
    tokens, streams, width = x.shape
    out = torch.empty(x.shape, dtype=torch.bfloat16, device=x.device)
    if x.numel():
        post_kernel[(ceil_div(tokens, tiles.MIX_ROWS), ceil_div(width, tiles.COLS))](
            z, x, post, comb, out, tokens, width, z.stride(0), x.stride(0),
            STREAMS=streams, ROWS=tiles.MIX_ROWS, COLS=tiles.COLS, num_warps=tiles.num_warps,
        )  # fmt: skip
    return out


def hc_post_pre(
    z: Tensor, x: Tensor, post: Tensor, comb: Tensor,
    fn: Tensor, base: Tensor, scale: Tensor, iterations: int, hc_eps: float, rms_eps: float,
    tiles: Tiles | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """`hc_post`, then `hc_pre` of the next sub-layer over the result: its streams, u, post and comb. Raises ValueError."""
    tiles = tiles or tiles_for_width(x.shape[2])
    mixes = _check(x, fn, base, scale, 3)
    _check_post(z, x, post, comb)
    tokens, streams, width = x.shape
    out = torch.empty(x.shape, dtype=torch.bfloat16, device=x.device)
    partials = _partials(x, mixes, tiles)
    if x.numel():
        post_project_kernel[(ceil_div(tokens, tiles.ROWS), partials.shape[1])](
            z, x, post, comb, out, fn, partials, tokens, width, z.stride(0), x.stride(0),
            STREAMS=streams, MIXES=mixes, LANES=partials.shape[2],
            ROWS=tiles.ROWS, STEP=tiles.STEP, SPLIT=tiles.SPLIT, num_warps=tiles.num_warps,
        )  # fmt: skip
    return out, *_mix(out, partials, base, scale, iterations, hc_eps, rms_eps, tiles)


def hc_head(
    x: Tensor, fn: Tensor, base: Tensor, scale: Tensor, hc_eps: float, rms_eps: float, tiles: Tiles | None = None
) -> Tensor:
    """Streams [t, s, d] -> bfloat16 [t, d], the last mix of the model. Raises ValueError."""
    tiles = tiles or tiles_for_width(x.shape[2])
    mixes = _check(x, fn, base, scale, 1)
    tokens, streams, width = x.shape
    u = torch.empty(tokens, width, dtype=torch.bfloat16, device=x.device)
    partials = _project(x, fn, mixes, tiles)
    if x.numel():
        head_kernel[(ceil_div(tokens, tiles.MIX_ROWS), ceil_div(width, tiles.COLS))](
            partials, base, scale, x, u, tokens, width, partials.shape[1], x.stride(0), hc_eps, rms_eps,
            STREAMS=streams, LANES=partials.shape[2],
            ROWS=tiles.MIX_ROWS, COLS=tiles.COLS, num_warps=tiles.num_warps,
        )  # fmt: skip
    return u


def _partials(x: Tensor, mixes: int, tiles: Tiles) -> Tensor:
    shape = (x.shape[0], ceil_div(x.shape[2], tiles.SPLIT), max(power_of_two(mixes + 1), 16))
    return torch.empty(shape, dtype=torch.float32, device=x.device)


def _project(x: Tensor, fn: Tensor, mixes: int, tiles: Tiles) -> Tensor:
    """Partial products of the streams with fn, and their sums of squares: [t, parts, lanes]."""
    tokens, streams, width = x.shape
    partials = _partials(x, mixes, tiles)
    if x.numel():
        project_kernel[(ceil_div(tokens, tiles.ROWS), partials.shape[1])](
            x, fn, partials, tokens, width, x.stride(0),
            STREAMS=streams, MIXES=mixes, LANES=partials.shape[2],
            ROWS=tiles.ROWS, STEP=tiles.STEP, SPLIT=tiles.SPLIT, num_warps=tiles.num_warps,
        )  # fmt: skip
    return partials


def _mix(
    x: Tensor, partials: Tensor, base: Tensor, scale: Tensor, iterations: int, hc_eps: float, rms_eps: float, tiles: Tiles
) -> tuple[Tensor, Tensor, Tensor]:
    tokens, streams, width = x.shape
    u = torch.empty(tokens, width, dtype=torch.bfloat16, device=x.device)
    post = torch.empty(tokens, streams, dtype=torch.float32, device=x.device)
    comb = torch.empty(tokens, streams, streams, dtype=torch.float32, device=x.device)
    if x.numel():
        mix_kernel[(ceil_div(tokens, tiles.MIX_ROWS), ceil_div(width, tiles.COLS))](
            partials, base, scale, x, u, post, comb, tokens, width, partials.shape[1], x.stride(0),
            iterations, hc_eps, rms_eps,
            STREAMS=streams, MIXES=base.shape[0], LANES=partials.shape[2],
            ROWS=tiles.MIX_ROWS, COLS=tiles.COLS, num_warps=tiles.num_warps,
        )  # fmt: skip
    return u, post, comb


def _check(x: Tensor, fn: Tensor, base: Tensor, scale: Tensor, scales: int) -> int:
    """The number of mixes; raises ValueError for weights that do not belong to these streams."""
    require(x, "x", torch.bfloat16, (None, None, None), dense=2)
    streams = x.shape[1]
    if streams != power_of_two(max(streams, 1)):
        raise ValueError(f"x has {streams} streams, expected a power of two")
    mixes = streams if scales == 1 else (2 + streams) * streams
    require(fn, "fn", torch.float32, (mixes, streams * x.shape[2]), dense=2)
    require(base, "base", torch.float32, (mixes,))
    require(scale, "scale", torch.float32, (scales,))
    return mixes


def _check_post(z: Tensor, x: Tensor, post: Tensor, comb: Tensor) -> None:
    tokens, streams, width = x.shape
    require(x, "x", torch.bfloat16, (None, None, None), dense=2)
    require(z, "z", torch.bfloat16, (tokens, width))
    require(post, "post", torch.float32, (tokens, streams), dense=2)
    require(comb, "comb", torch.float32, (tokens, streams, streams), dense=3)
