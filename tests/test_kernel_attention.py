"""Split-K decode attention over 2buff rows, against float64 written from the definition."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import UNIT, gamma, illegal_bf16, mutant, on_device, poison_new_memory
from row_cases import turned

from optimized.kernels import decode_attention as attention_file
from optimized.kernels.decode_attention import Tiles
from optimized.kernels.inverse_rope import inverse_rope
from optimized.pool import rows
from optimized.rope import rope_table
from reference.presets import preset

decode_attention = on_device(attention_file.decode_attention)

P_ROUNDING = 2.0**-8  # relative error of rounding to bfloat16, which has 8 significant bits
SMALL = Tiles(HEADS=16, ROWS=16, SPLIT=64, JOIN=4)
ONE_STEP = Tiles(HEADS=16, ROWS=64, SPLIT=64, JOIN=16)


def pool_rows(n: int, head_dim: int = 512, seed: int = 0, build: str = "2buff"):
    """Rows in both planes of a build, and the float64 values they hold; tile scales far apart, one row in nine large."""
    x = torch.randn(n, head_dim, generator=torch.Generator().manual_seed(seed))
    tile = torch.randint(-5, 2, (n, head_dim // 64), generator=torch.Generator().manual_seed(seed + 1))
    x *= tile.float().exp2().repeat_interleave(64, -1)
    x[::9] *= 4
    if build == "bf16":
        return x.bfloat16(), None, x.bfloat16().double()
    nope, rope = rows.encode_2buff(x)
    return nope, rope, rows.decode_2buff(nope, rope).double()


def lists(lengths: list[int], n: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """CSR lists of distinct rows; row 0 in none of them."""
    generator = torch.Generator().manual_seed(seed)
    picks = [1 + torch.randperm(n - 1, generator=generator)[:length] for length in lengths]
    return torch.cat(picks).int(), torch.tensor([0, *lengths]).cumsum(0).int()


def expected(q, values, indices, indptr, sink, scale, turn=None) -> tuple[torch.Tensor, torch.Tensor]:
    """float64 output and the bound of a float32 evaluation with bfloat16 numerators.

    Per row: the score is off by gamma(d + 2) of its absolute sum, so its weight by as much, by the rounding of its
    distance to the maximum, by exp (8 roundings a tile passed, at most one tile in 16 rows and a join), by the sum of n.
    The numerator also by P_ROUNDING. `turn`: the inverse RoPE by these cosines and sines of the float32 result.
    """
    out, bound = torch.zeros(q.shape, dtype=torch.float64), torch.zeros(q.shape, dtype=torch.float64)
    for t in range(len(q)):
        row = values[indices[indptr[t] : indptr[t + 1]].long()]  # [n, d]
        n, d = row.shape
        if n == 0:
            continue
        query = q[t].double()
        s = query @ row.T * scale  # [h, n]
        peak = s.amax(1, keepdim=True)
        p, zero = (s - peak).exp(), (sink.double()[:, None] - peak).exp()
        denominator = p.sum(1, keepdim=True) + zero
        s_bound = gamma(d + 2) * scale * (query.abs() @ row.abs().T)
        peak_bound = s_bound.amax(1, keepdim=True)
        relative = s_bound + UNIT * (peak - s) + gamma(n + 8 * (math.ceil(n / 16) + 2))
        sink_relative = peak_bound + UNIT * (peak - sink.double()[:, None]).abs() + gamma(n + 16)
        out[t] = p @ row / denominator
        lower = (p * relative).sum(1, keepdim=True) + zero * sink_relative
        numerator = (p * (relative + P_ROUNDING)) @ row.abs() + n * 2.0**-134 * row.abs().amax()
        bound[t] = (numerator / denominator + out[t].abs() * (lower / denominator + 2 * UNIT)) * (1 + 2.0**-7)
    return (out, bound) if turn is None else turned(out, bound, turn[0][:, None].double(), -turn[1][:, None].double())


def case(heads: int, lengths: list[int], head_dim: int = 512, n: int = 700, seed: int = 0, build: str = "2buff"):
    """q, rows, lists, sink and scale: scores a few units apart, sinks from negligible to dominant."""
    nope, rope, values = pool_rows(n, head_dim, seed, build)
    indices, indptr = lists(lengths, n, seed)
    generator = torch.Generator().manual_seed(seed + 7)
    q = (2 * torch.randn(len(lengths), heads, head_dim, generator=generator)).bfloat16()
    sink = torch.linspace(-8, 8, heads)
    return (q, nope, rope, indices, indptr, sink), values, head_dim**-0.5


def faults(args, values, scale, attention=decode_attention, **how) -> str:
    """What is wrong with the kernel's answer; empty if nothing is."""
    q, _, _, indices, indptr, sink, *turn = args
    got = attention(*args, scale=scale, **how)
    want, bound = expected(q, values, indices, indptr, sink, scale, turn or None)
    if illegal_bf16(got, want, bound).any():
        return "outside the bound"
    empty = indptr.diff() == 0
    if got[empty].abs().sum() != 0:
        return "an empty list gave something"
    return bias(got.double() - want, want)


def bias(error: torch.Tensor, want: torch.Tensor) -> str:
    """Rounding is unbiased: the share of the answer in its error, one sample a token and head because the channels share
    their weights' roundings, averages to zero within 6 sigma."""
    live = want.abs().sum(-1) > 0
    share = (error * want).sum(-1)[live] / want.square().sum(-1)[live]
    z = share.mean() / (share.std() / math.sqrt(share.numel()))
    return f"biased by {z:.1f} sigma" if abs(z) > 6 else ""


LENGTHS = [1, 15, 16, 17, 0, 63, 64, 65, 129, 300]


@pytest.mark.parametrize("heads", [8, 16, 24])
@pytest.mark.parametrize("tiles", [None, SMALL, ONE_STEP])
def test_attention_within_the_bound_around_every_tile_edge(heads, tiles):
    args, values, scale = case(heads, LENGTHS if heads == 8 else [0, 17, 65])
    assert faults(args, values, scale, tiles=tiles) == ""


@settings(max_examples=10)
@given(
    st.lists(st.integers(0, 90), min_size=1, max_size=3).filter(any),
    st.integers(1, 20),
    st.sampled_from([16, 32]),
    st.sampled_from([32, 64]),
    st.integers(0, 99),
)
def test_any_lengths_heads_and_tiles(lengths, heads, rows_of_tile, split, seed):
    args, values, scale = case(heads, lengths, 192, n=100, seed=seed)
    got = decode_attention(*args, scale=scale, tiles=Tiles(HEADS=16, ROWS=rows_of_tile, SPLIT=split, JOIN=8))
    want, bound = expected(args[0], values, *args[3:], scale)
    assert not illegal_bf16(got, want, bound).any()


@pytest.mark.parametrize("head_dim", [128, 192])
def test_attention_of_other_head_widths(head_dim):
    args, values, scale = case(8, [3, 0, 90], head_dim)
    assert faults(args, values, scale, tiles=SMALL) == ""


def turn_of(tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines of positions from 0 to far."""
    return rope_table(preset("mini"), 2, torch.tensor([65_536, 0, 999_999, 4097, 1] * tokens)[:tokens])


@pytest.mark.parametrize("build", ["2buff", "bf16"])
@pytest.mark.parametrize("tiles", [None, SMALL])
@pytest.mark.parametrize("head_dim", [512, 192])
def test_both_builds_and_the_fused_inverse_rope(build, tiles, head_dim):
    args, values, scale = case(8, [3, 0, 90, 64, 17], head_dim, build=build)
    assert faults(args, values, scale, tiles=tiles) == ""
    assert faults((*args, *turn_of(5)), values, scale, tiles=tiles) == ""


def test_rotating_after_the_rounding_is_another_result():
    """Why the inverse RoPE is fused: rounding twice leaves the legal range that one rounding has."""
    args, values, scale = case(16, [300, 200, 250])
    turn = turn_of(3)
    twice = on_device(inverse_rope)(decode_attention(*args, scale=scale), *turn)
    once = decode_attention(*args, *turn, scale=scale)
    want, _ = expected(args[0], values, *args[3:], scale, turn)
    error = [(x.double() - want)[..., -64:].square().mean() for x in (twice, once)]
    assert error[0] > 1.2 * error[1]
    assert torch.equal(twice[..., :-64], once[..., :-64])


def test_attention_at_the_real_widths_of_pro():
    """128 heads over 1152 rows, 1024 chosen and a window of 128."""
    args, values, scale = case(128, [1152], n=1300)
    assert faults(args, values, scale) == ""


def test_unlisted_rows_may_hold_anything():
    """NaN in every row that no list names, row 0 included: dead lanes of a tile must not read them."""
    args, _, scale = case(8, [5, 0, 70])
    clean = decode_attention(*args, scale=scale)
    _, nope, rope, indices, *_ = args
    unlisted = torch.ones(len(nope), dtype=torch.bool)
    unlisted[indices.long()] = False
    nope[unlisted], rope[unlisted] = 0xFF, torch.nan
    assert torch.equal(decode_attention(*args, scale=scale), clean)


def test_scratch_and_output_may_hold_anything_before(monkeypatch):
    """Every element of the output is written, and no part that nobody wrote is read."""
    args, _, scale = case(8, [0, 65, 300, 7])
    clean = decode_attention(*args, scale=scale, tiles=SMALL)
    poison_new_memory(monkeypatch)
    assert torch.equal(decode_attention(*args, scale=scale, tiles=SMALL), clean)


@pytest.mark.parametrize("tiles", [None, SMALL])
def test_bits_do_not_depend_on_the_other_tokens(tiles):
    """Each token alone, and with a larger `longest`, gives the bits it has in company."""
    (q, nope, rope, indices, indptr, sink), _, scale = case(8, LENGTHS)
    whole = decode_attention(q, nope, rope, indices, indptr, sink, scale=scale, tiles=tiles)
    for t in (1, 7, 9):
        own = indices[indptr[t] : indptr[t + 1]]
        ptr = torch.tensor([0, len(own)], dtype=torch.int32)
        for longest in (None, 1000):
            alone = decode_attention(q[t : t + 1], nope, rope, own, ptr, sink, scale=scale, longest=longest, tiles=tiles)
            assert torch.equal(alone[0], whole[t])


def test_a_longest_that_is_too_small_gives_nan():
    args, _, scale = case(8, [65, 130])
    out = decode_attention(*args, scale=scale, longest=100, tiles=SMALL)
    assert not out[0].isnan().any() and out[1].isnan().all()


def test_sinks_at_their_extremes():
    """-inf: no sink; +inf or far above every score: all of the weight, so nothing is left."""
    args, values, scale = case(8, [40, 100])
    args = (*args[:5], torch.tensor([-torch.inf, torch.inf, 1e30, -1e30, 300.0, -300.0, 0.0, 8.0]))
    out = decode_attention(*args, scale=scale)
    assert out[:, [1, 2, 4]].abs().sum() == 0
    finite = torch.where(args[5].abs() > 100, -1e6, args[5])
    want, bound = expected(args[0], values, *args[3:5], finite, scale)
    keep = [0, 3, 5, 6, 7]
    assert not illegal_bf16(out[:, keep], want[:, keep], bound[:, keep]).any()


def test_equal_scores_average_the_rows():
    (q, nope, rope, indices, indptr, sink), values, scale = case(8, [64])
    out = decode_attention(q * 0, nope, rope, indices, indptr, sink - torch.inf, scale=scale)
    want = values[indices.long()].mean(0).expand(1, 8, -1)
    assert not illegal_bf16(out, want, gamma(70) * values[indices.long()].abs().mean(0)).any()


def test_rows_behind_two_gib_in_wide_strided_planes():
    """Rows whose byte offset passes 2^31, in planes with gaps between rows; memory is reserved, hardly touched."""
    args, values, scale = case(8, [33, 5], n=64)
    stride, far = 4096, 600_000
    nope = torch.empty(far + 64, stride, dtype=torch.uint8)[:, 256:768]
    rope = torch.empty(far + 64, stride, dtype=torch.bfloat16)[:, 64:128]
    nope[far:], rope[far:] = args[1], args[2]
    want = decode_attention(*args, scale=scale)
    assert far * stride > 2**31
    got = decode_attention(args[0], nope, rope, args[3] + far, *args[4:], scale=scale)
    assert torch.equal(got, want)
    assert faults(args, values, scale) == ""


def test_lists_of_another_length_are_refused():
    args, _, scale = case(8, [33, 5])
    with pytest.raises(ValueError, match="indptr"):
        decode_attention(*args[:4], args[4][:-1], args[5], scale=scale)


def test_rounding_to_bfloat16_may_take_a_256th():
    """Why P_ROUNDING is 2^-8: just above one, half the spacing of 2^-7 is 2^-8 of the value. 2^-9 is what it is below two."""
    just_above = torch.tensor(1 + 2.0**-8 - 2.0**-20)
    error = (just_above.bfloat16().double() - just_above.double()).abs() / just_above.double()
    assert P_ROUNDING / 2 < error < P_ROUNDING


def test_a_truncated_numerator_is_biased(tmp_path):
    """Flat scores, so that many weights round; the interpreter's own cast truncates."""
    wrong = mutant(attention_file, tmp_path, ("mma_bf16(bf16_rn(p)", "mma_bf16(p.to(tl.bfloat16)"))
    args, values, scale = case(32, [200])
    args = (args[0] * 0.1, *args[1:])
    want, _ = expected(args[0], values, *args[3:], scale)
    assert bias(decode_attention(*args, scale=scale).double() - want, want) == ""
    assert bias(on_device(wrong.decode_attention)(*args, scale=scale).double() - want, want)


MISTAKES = {
    "sink scaled": ("tl.load(sink + h, mask=head, other=0.0)", "0.044 * tl.load(sink + h, mask=head, other=0.0)"),
    "sink left out": ("total = tl.exp(tl.load(sink + h, mask=head, other=0.0) - peak)", "total = tl.zeros_like(peak)"),
    "sink in every part": ("total += tl.load(part_sum", "total += tl.exp(tl.load(sink + h) - peak) + tl.load(part_sum"),
    "part not rescaled": ("mask=whole, other=0.0) * share[:, None]", "mask=whole, other=0.0)"),
    "tile not rescaled": ("acc * carry[:, None])", "acc)"),
    "denominator not rescaled": ("total = total * carry", "total = total"),
    "last part lost": ("acc = tl.zeros((JOIN, LANES), tl.float32)\n    for part in range(0, tl.minimum(used, parts))",
                       "acc = tl.zeros((JOIN, LANES), tl.float32)\n    for part in range(0, tl.minimum(used, parts) - 1)"),
    "dead lanes count": ("s = tl.where(live[None, :], s, float(\"-inf\"))", "s = s"),
    "last row lost": ("live = j < tl.minimum(end, start + SPLIT)", "live = j < tl.minimum(end - 1, start + SPLIT)"),
    "neighbour's scale": ("main + NOPE + 2 * tile,", "main + NOPE + 2 * tile + 2,"),
    "rotated channels left out of the score": ("LANES)), rotated)", "LANES)), tl.zeros_like(rotated))"),
    "score not scaled": ("tl.zeros((HEADS, ROWS), tl.float32)) * scale", "tl.zeros((HEADS, ROWS), tl.float32))"),
    "output truncated": ("bf16_rn(result)", "result.to(tl.bfloat16)"),
    "rotated forwards": ("token, head, -1.0", "token, head, 1.0"),
    "rotated as token 0": ("token = t + tl", "token = t * 0 + tl"),
    "not rotated back": ("if TURN:", "if not TURN:"),
    "another token's query": ("q + (t * H + h)", "q + h"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_planted_mistakes_are_seen(tmp_path, mistake):
    wrong = mutant(attention_file, tmp_path, MISTAKES[mistake])
    args, values, scale = case(8, [70, 0, 33])
    args = (*args, *turn_of(3))
    assert faults(args, values, scale, attention=on_device(wrong.decode_attention), tiles=Tiles(HEADS=16, ROWS=16, SPLIT=32))
