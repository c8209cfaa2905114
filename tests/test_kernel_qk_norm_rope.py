"""Query and window-row kernel against float64 written from the definition."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import illegal_bf16, mutant, on_device, poison_new_memory, uneven
from row_cases import illegal_rows, mutant_through, normed, turned

from optimized.kernels import qk_norm_rope as kernel_file
from optimized.kernels import row_tiles
from optimized.kernels.qk_norm_rope import Tiles, payload_like
from optimized.rope import rope_table
from reference.presets import preset

qk_norm_rope = on_device(kernel_file.qk_norm_rope)

EPS = 0.37  # large, so that a lost epsilon shows
POSITIONS = [0, 1, 127, 128, 65_536, 999_999]
SMALL = Tiles(ROWS=4)
BUILDS = ["2buff", "bf16"]


def case(tokens: int = 6, heads: int = 5, head_dim: int = 512, seed: int = 0):
    """q (a strided view), kv, weight, cos, sin: blocks with scales far apart, one outlier a row, every third row small."""
    generator = torch.Generator().manual_seed(seed)
    wide = torch.full((tokens, heads * head_dim + 24), torch.nan, dtype=torch.bfloat16)
    wide[:, 8:-16] = uneven(generator, tokens, heads * head_dim).bfloat16()
    q = wide[:, 8:-16].unflatten(-1, (heads, head_dim))
    kv = uneven(generator, tokens, head_dim + 8).bfloat16()[:, :head_dim]
    q[1::3], kv[1::3] = q[1::3] * 2.0**-14, kv[1::3] * 2.0**-14  # a norm that leans on epsilon
    kv[2::3, 64:128] *= 2.0**-30  # a block below the amax floor
    weight = uneven(generator, head_dim, spread=4)
    positions = torch.tensor((POSITIONS * tokens)[:tokens])
    return q, kv, weight, *rope_table(preset("mini"), 2, positions)


def expected(q, kv, weight, cos, sin):
    """float64 queries and rows, each with its bound."""
    c, s = cos.double(), sin.double()
    query = turned(*normed(q.double(), torch.ones(q.shape[-1]).double(), EPS), c[:, None], s[:, None])
    return query, turned(*normed(kv.double(), weight.double(), EPS), c, s)


def faults(args, build, module=kernel_file, **how) -> str:
    """What is wrong with the kernel's answer; empty if nothing is."""
    q, kv, weight, cos, sin = args
    payload = payload_like(kv, build)
    got = on_device(module.qk_norm_rope)(q, kv, weight, EPS, cos, sin, *payload, **how)
    (query, query_bound), (row, row_bound) = expected(*args)
    if illegal_bf16(got, query, query_bound).any():
        return "queries"
    return "rows" if illegal_rows(*payload, row, row_bound).any() else ""


@pytest.mark.parametrize("build", BUILDS)
@pytest.mark.parametrize("tiles", [None, SMALL])
@pytest.mark.parametrize("head_dim", [512, 192])
def test_queries_and_rows_within_the_bound(build, tiles, head_dim):
    assert faults(case(head_dim=head_dim), build, tiles=tiles) == ""


@settings(max_examples=10)
@given(st.integers(1, 20), st.integers(1, 9), st.sampled_from([128, 320]), st.sampled_from(BUILDS), st.integers(0, 99))
def test_any_shape(tokens, heads, head_dim, build, seed):
    assert faults(case(tokens, heads, head_dim, seed), build, tiles=Tiles(ROWS=8)) == ""


def test_the_real_widths_of_pro():
    assert faults(case(tokens=2, heads=128), "2buff") == ""


@pytest.mark.parametrize("build", BUILDS)
def test_rows_go_to_their_destination_and_nowhere_else(build):
    """Straight into a wide pool, two tokens skipped: the same bytes as the payload; the rest keeps its poison."""
    q, kv, weight, cos, sin = case()
    payload = payload_like(kv, build)
    plain = qk_norm_rope(q, kv, weight, EPS, cos, sin, *payload)
    planes = [None if p is None else torch.zeros(9, 2 * p.shape[1], dtype=p.dtype) for p in payload]
    for plane in planes:
        if plane is not None:
            plane.view(torch.uint8).fill_(0xFF)
    views = [None if p is None else p[:, : p.shape[1] // 2] for p in planes]
    destination = torch.tensor([7, -1, 0, 3, -1, 8])
    got = qk_norm_rope(q, kv, weight, EPS, cos, sin, *views, destination)
    assert torch.equal(got, plain)
    for plane, view, rows in zip(planes, views, payload, strict=True):
        if plane is not None:
            kept = destination >= 0
            assert torch.equal(view[destination[kept]].view(torch.uint8), rows[kept].view(torch.uint8))
            view.view(torch.uint8)[destination[kept]] = 0xFF
            assert (plane.view(torch.uint8) == 0xFF).all()


def test_a_token_does_not_depend_on_its_company():
    q, kv, weight, cos, sin = case(tokens=11)
    whole_rows = payload_like(kv, "2buff")
    whole = qk_norm_rope(q, kv, weight, EPS, cos, sin, *whole_rows)
    for t in (0, 5, 10):
        one = slice(t, t + 1)
        rows = payload_like(kv[one], "2buff")
        assert torch.equal(qk_norm_rope(q[one], kv[one], weight, EPS, cos[one], sin[one], *rows)[0], whole[t])
        assert all(torch.equal(a[0], b[t]) for a, b in zip(rows, whole_rows, strict=True))


def test_outputs_are_written_whole(monkeypatch):
    args = case()
    poison_new_memory(monkeypatch)
    assert faults(args, "2buff") == faults(args, "bf16") == ""


def test_no_tokens():
    assert faults(case(tokens=0), "2buff") == ""


def test_a_nan_stays_in_its_head_and_shows_in_its_row():
    q, kv, weight, cos, sin = case()
    q[1, 2, 3], kv[2, 5] = torch.nan, torch.inf
    main, rope = payload_like(kv, "2buff")
    out = qk_norm_rope(q, kv, weight, EPS, cos, sin, main, rope)
    assert out[1, 2].isnan().all() and out.isnan().any(-1).sum() == 1
    assert main[2, 448] == 255 and not (main[[0, 1, 3, 4, 5], 448] == 255).any()


def test_rows_behind_two_gib():
    q, kv, weight, cos, sin = case(tokens=2)
    far = 5_000_000
    main, rope = torch.empty(far + 2, 512, dtype=torch.uint8), torch.empty(far + 2, 64, dtype=torch.bfloat16)
    qk_norm_rope(q, kv, weight, EPS, cos, sin, main, rope, torch.tensor([far + 1, far]))
    near = payload_like(kv, "2buff")
    qk_norm_rope(q, kv, weight, EPS, cos, sin, *near)
    assert far * 512 > 2**31
    assert torch.equal(main[far:].flip(0), near[0]) and torch.equal(rope[far:].flip(0), near[1])


def test_what_does_not_fit_is_refused():
    q, kv, weight, cos, sin = case()
    with pytest.raises(ValueError, match="destination"):
        qk_norm_rope(q, kv, weight, EPS, cos, sin, *payload_like(kv, "2buff"), torch.zeros(6).int())
    with pytest.raises(ValueError, match="do not hold"):
        qk_norm_rope(q, kv, weight, EPS, cos, sin, *payload_like(kv[:5], "bf16"))


MISTAKES = {
    "queries not normalised": ("x * inverse_rms(x, eps, HEAD_DIM), cos", "x, cos"),
    "rows without weight": ("weight[None, :] * (x", "1.0 * (x"),
    "epsilon lost": ("inverse_rms(x, eps, HEAD_DIM))\n", "inverse_rms(x, 0.0, HEAD_DIM))\n"),
    "queries turned backwards": ("cos, sin, t, live, 1.0", "cos, sin, t, live, -1.0"),
    "rows not turned": ("y = rotate_tail(y, cos, sin, t, t < T, 1.0", "y = rotate_tail(y, cos, sin, t, t < T, 0.0"),
    "position of another token": ("t = row // H\n", "t = row // (H + 1)\n"),
    "mean over the padded lanes": ("x * inverse_rms(x, eps, HEAD_DIM), cos", "x * inverse_rms(x, eps, LANES), cos"),
    "last row of a program lost": ("live = row < T * H", "live = row < T * H - 1"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_planted_mistakes_are_seen(tmp_path, mistake, monkeypatch):
    wrong = mutant(kernel_file, tmp_path, MISTAKES[mistake])
    poison_new_memory(monkeypatch)
    assert faults(case(head_dim=192), "2buff", wrong)


TILE_MISTAKES = {
    "scale written once": ("row + NOPE + 2 * tile + 1, scale", "row + NOPE + 2 * tile + 1, scale * 0"),
    "padding not cleared": ("pad >= 2 * TILES", "pad >= 2 * TILES + 8"),
    "last code lost": ("mask=live[:, None] & (d < NOPE))", "mask=live[:, None] & (d < NOPE - 1))"),
    "floored exponent": ("blocks * e8m0_inverse(scale)[:, :, None]).reshape(y.shape[0], LANES)",
                         "blocks * 2 * e8m0_inverse(scale)[:, :, None]).reshape(y.shape[0], LANES)"),
    "pairs of two halves": ("odd * c + even * s", "odd * c - even * s"),
    "table of the first pair": ("cos + at[:, None] * 32 + pair", "cos + at[:, None] * 32 + 0 * pair"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", TILE_MISTAKES)
def test_planted_mistakes_in_row_tiles_are_seen(tmp_path, mistake, monkeypatch):
    wrong = mutant_through(kernel_file, row_tiles, tmp_path, TILE_MISTAKES[mistake])
    poison_new_memory(monkeypatch)
    assert faults(case(head_dim=192), "2buff", wrong)
