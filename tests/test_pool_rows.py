"""Pool geometry against recorded addresses and by enumeration; row bytes; plans and attention lists."""

from __future__ import annotations

import dataclasses
import itertools

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_cases import mutant, uneven

from optimized.pool import plans, rows
from optimized.pool.geometry import KINDS, RATIO, Geometry
from optimized.pool.pool import Pool
from optimized.rope import frequencies, rope_table
from reference.errors import BadInput
from reference.presets import preset

PRO = preset("v4-pro")
MIB = 2**20
BUILDS = ("2buff", "bf16")

LAST_DIGIT = 0.0005  # sizes are written with three decimals


def pro(build="2buff", lookahead=0, drafter_blocks=0) -> Geometry:
    return Geometry(PRO, build, lookahead, drafter_blocks)


@pytest.mark.parametrize(
    ("build", "lookahead", "arena", "slot", "slot_with_mtp", "mib", "mib_with_mtp"),
    [
        ("bf16", 0, 18272, 26080, 26208, 25.469, 25.594),
        ("2buff", 0, 31744, 39552, 39680, 24.141, 24.219),
        ("bf16", 1, 18696, 28422, 28552, 27.756, 27.883),
        ("2buff", 1, 31992, 41718, 41848, 25.463, 25.542),
    ],
)
def test_slot_sizes_of_pro(build, lookahead, arena, slot, slot_with_mtp, mib, mib_with_mtp):
    for blocks, want_rows, want_mib in ((0, slot, mib), (1, slot_with_mtp, mib_with_mtp)):
        g = pro(build, lookahead, blocks)
        assert (g.arena_rows, g.slot_rows) == (arena, want_rows)
        assert round(g.slot_rows * sum(g.row_bytes) / MIB, 3) == want_mib


def test_state_fields_of_pro():
    fields = {f.name: (f.plane, f.offset) for f in pro().fields}
    assert fields == {
        "csa_main_kv": (1, 0), "csa_main_score": (1, 983040), "csa_idx_kv": (1, 1966080), "csa_idx_score": (1, 2211840),
        "hca_kv": (0, 0), "hca_score": (0, 8126464),
    }  # fmt: skip
    assert [f.offset for f in pro("bf16").fields] == [0, 983040, 1966080, 2211840, 2457600, 10584064]
    for lookahead, total in ((0, 17.84375), (1, 18.258), (3, 19.086)):
        assert sum(f.nbytes for f in pro(lookahead=lookahead).fields) / MIB == pytest.approx(total, abs=LAST_DIGIT)


@pytest.mark.parametrize(
    ("lookahead", "drafter_blocks", "entry", "live"),
    [(0, 0, 7808, 7808), (1, 0, 9726, 7869), (1, 1, 9855, 7998), (3, 1, 9921, 8122)],
)
def test_window_rows_of_pro(lookahead, drafter_blocks, entry, live):
    g = pro(lookahead=lookahead, drafter_blocks=drafter_blocks)
    assert sum(map(g.entry_rows, KINDS)) == entry
    assert len(g.kinds) * g.ring == live


def test_golden_addresses_of_pro_fp8():
    g = pro()
    assert g.envelope == 1982
    assert g.plane_rows(100, 4) == 395520
    assert g.slot_positions(395520) == 10
    assert (g.ring_start("hca"), g.ring_start("csa")) == (31744, 35650)
    compressed = {(0, 1): 9911, (3, 1): 9915, (2, 63): 10035, (60, 63): 11891}
    for (layer, r), row in compressed.items():
        assert g.base(layer) + g.compress_index(5, r) == row
    slot = 9  # group 0
    assert [g.window_index("hca", slot, p) for p in (127, 128, 20000)] == [391619, 387712, 388704]
    assert [g.window_index("csa", slot, p) for p in (127, 128, 20000)] == [393601, 391618, 391650]
    assert [g.base(2) + g.window_index("csa", slot, p) for p in (127, 128, 20000)] == [393663, 391680, 391712]
    assert g.base(60) + g.window_index("csa", slot, 127) == 395519


def test_golden_addresses_with_lookahead_and_of_bf16():
    g = pro(lookahead=1, drafter_blocks=1)
    assert (g.plane_rows(100, 4), g.slot_positions(376632)) == (376632, 9)
    assert [g.ring_start(k) for k in KINDS] == [31992, 32121, 36088]
    assert [g.window_index("csa", 8, p) for p in (127, 128, 20000)] == [372855, 374712, 370877]
    g = pro("bf16")
    assert (g.plane_rows(100, 4), g.slot_positions(312960)) == (312960, 12)
    assert (g.window_index("csa", 11, 20000), g.base(2)) == (309090, 62)


def test_sizes_per_token_of_pro():
    assert (pro("bf16").bytes_per_token, pro().bytes_per_token) == (7928, 4955)
    assert (pro().index_bytes_per_token("fp4"), pro().index_bytes_per_token("fp8")) == (510, 990)


@pytest.mark.parametrize("name", ["mini", "v4-pro-slim"])
def test_small_presets_have_the_expected_rows(name):
    """Slim has Pro's schedule and head_dim, so Pro's rows. Mini has two layers of each kind."""
    config = preset(name)
    if name == "v4-pro-slim":
        assert (Geometry(config).envelope, Geometry(config).slot_rows) == (1982, 39552)
        return
    g = Geometry(config, drafter_blocks=1)
    assert g.kinds == ("window", "hca", "csa", "hca", "csa", "window")
    assert g.envelope == 2 * 2 + 2 * 64
    assert [g.base(i) for i in range(6)] == [0, 0, 4, 2, 68, 16]
    assert [g.entry_rows(k) for k in KINDS] == [2 * 16, 2 * 16, 64 + 16]
    assert sum(f.nbytes for f in g.fields) == 2 * 4 * (2 * 8 * 1024 + 2 * 8 * 256 + 2 * 128 * 512)


def row_owners(g: Geometry, blocks: int, slots: int) -> np.ndarray:
    """How often every row of the row space is claimed: compressed rows, window rows and the rows of state arenas."""
    plane_rows = g.plane_rows(blocks, slots)
    owners = np.zeros(plane_rows, np.int64)
    positions = [g.slot_positions(plane_rows) - 1 - group for group in range(slots)]
    for layer, kind in enumerate(g.kinds):
        for slot in positions:
            np.add.at(owners, g.base(layer) + g.window_index(kind, slot, np.arange(7, 7 + g.ring)), 1)
        if RATIO[kind]:
            block, r = np.divmod(np.arange(blocks * g.stride(kind)), g.stride(kind))
            np.add.at(owners, g.base(layer) + g.compress_index(block, r), 1)
    for slot in positions:
        owners[slot * g.slot_rows :][: g.arena_rows] += 1
    return owners


def check_owners(g: Geometry) -> None:
    owners = row_owners(g, 3, 2)
    assert owners.max() == 1
    assert (owners[: 3 * g.envelope] == 1).all()
    assert owners.sum() == 3 * g.envelope + 2 * (g.arena_rows + len(g.kinds) * g.ring)
    for plane, width in enumerate(g.row_bytes):
        spans = sorted((f.offset, f.offset + f.nbytes) for f in g.fields if f.plane == plane)
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
        assert all(end <= g.arena_rows * width for _, end in spans)


@pytest.mark.parametrize("build", BUILDS)
@pytest.mark.parametrize(("name", "lookahead", "drafter_blocks"), [("mini", 0, 1), ("mini", 3, 0), ("v4-pro", 1, 1)])
def test_no_two_owners_share_a_row(build, name, lookahead, drafter_blocks):
    check_owners(Geometry(preset(name), build, lookahead, drafter_blocks))


@given(
    st.lists(st.sampled_from([0, 4, 128]), min_size=1, max_size=7),
    st.integers(1, 300),
    st.integers(0, 9),
    st.sampled_from([128, 192, 512]),
    st.sampled_from(BUILDS),
)
def test_no_two_owners_share_a_row_in_any_model(ratios, window, lookahead, head_dim, build):
    config = dataclasses.replace(
        preset("mini"), num_hidden_layers=len(ratios), num_hash_layers=0, compress_ratios=tuple(ratios),
        sliding_window=window, head_dim=head_dim,
    )  # fmt: skip
    check_owners(Geometry(config, build, lookahead))


def test_a_layer_major_window_would_collide():
    """Without the interleave two CSA layers share window rows: the base already steps by 64."""
    g = pro()
    naive = {layer: g.base(layer) + np.arange(128) for layer in (2, 4)}
    assert np.intersect1d(naive[2], naive[4]).size
    good = {layer: g.base(layer) + g.window_index("csa", 0, np.arange(128)) for layer in (2, 4)}
    assert not np.intersect1d(good[2], good[4]).size


def test_a_head_without_a_2buff_row_is_refused():
    with pytest.raises(BadInput, match="2buff"):
        Geometry(dataclasses.replace(PRO, head_dim=500))
    assert Geometry(dataclasses.replace(PRO, head_dim=500), "bf16").row_bytes == (1000,)


@pytest.mark.parametrize("build", BUILDS)
def test_pool_views_meet_the_byte_addresses(build):
    """State views and layer views, checked against byte addresses worked out from the formulas."""
    g = Geometry(preset("mini"), build, lookahead=1, drafter_blocks=1)
    pool = Pool(g, blocks=3, slots=2)
    plane_start = [0, -(-pool.plane_rows * g.row_bytes[0] // 256) * 256]
    slot = pool.slot_position(1)
    for layer, names in ((4, ("csa_main_kv", "csa_idx_score")), (3, ("hca_kv", "hca_score"))):
        for name in names:
            field = next(f for f in g.fields if f.name == name)
            pool.memory.zero_()
            pool.state(name, layer)[slot, 5, 7] = 1.0
            in_field = ((1 * field.ring + 5) * field.width + 7) * 4
            want = plane_start[field.plane] + slot * g.slot_rows * g.row_bytes[field.plane] + field.offset + in_field
            assert pool.memory.nonzero().flatten().tolist() == [want + 2, want + 3]
    pool.memory.zero_()
    for plane, view in enumerate(pool.layer_rows(4)):
        view.view(torch.uint8)[9, 3] = 1
        want = plane_start[plane] + (g.base(4) + 9) * g.row_bytes[plane] + 3
        assert pool.memory.nonzero().flatten().tolist() == [want]
        pool.memory.zero_()


def test_open_slot_resets_its_rings_and_nothing_else():
    pool = Pool(Geometry(preset("mini"), lookahead=2), blocks=1, slots=2)
    pool.poison()
    slot = pool.slot_position(0)
    pool.open_slot(slot)
    state_bytes = sum(f.nbytes for f in pool.geometry.fields)
    assert (pool.memory != 0xFF).sum() <= state_bytes
    for field in pool.geometry.fields:
        for layer, kind in enumerate(pool.geometry.kinds):
            if field.name.startswith(kind):
                ring = pool.state(field.name, layer)
                assert (ring[slot] == (-torch.inf if field.name.endswith("score") else 0)).all()
                others = [i for i in range(pool.slots) if i != slot]
                assert ring[others].isnan().all()


def row_values(n: int, width: int = 512) -> torch.Tensor:
    x = uneven(torch.Generator().manual_seed(n), n, width)
    x[1::5] *= 1e-6
    x[2::5] = 0
    return x


def decoded_by_spec(row: np.ndarray, rotated: np.ndarray) -> np.ndarray:
    """One 2buff row byte by byte."""
    nope = row.size - 64
    values = row[:nope].view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    for tile in range(nope // 64):
        first, second = row[nope + 2 * tile : nope + 2 * tile + 2]
        assert first == second
        values[tile * 64 : tile * 64 + 64] *= 2.0 ** (int(first) - 127)
    assert not row[nope + 2 * (nope // 64) :].any()
    return np.concatenate([values, rotated.astype(np.float64)])


@pytest.mark.parametrize("width", [512, 192, 128])
def test_2buff_rows_decode_byte_by_byte(width):
    x = row_values(12, width)
    nope, rotated = rows.encode_2buff(x)
    assert (nope.shape, rotated.shape) == ((12, width), (12, 64))
    back = rows.decode_2buff(nope, rotated)
    for i in range(12):
        spec = decoded_by_spec(nope[i].numpy(), rotated[i].float().numpy())
        assert np.array_equal(back[i].double().numpy(), spec)
    assert torch.equal(rotated, x[:, -64:].bfloat16())
    codes, scales = rows.unpack_2buff(nope)
    assert scales[2].eq(105).all() and scales.min() == 105  # the floor 1e-4 / 448 -> 2^-22
    step = (codes.float() * 0 + 1) * torch.exp2(scales.float() - 127).repeat_interleave(64, -1)
    error = (back[:, :-64] - x[:, :-64]).abs()
    assert (error <= torch.maximum(x[:, :-64].abs() / 16, step * 2.0**-10)).all()


def test_encoding_decoded_rows_changes_no_value():
    x = row_values(40)
    once = rows.decode_2buff(*rows.encode_2buff(x))
    assert torch.equal(rows.decode_2buff(*rows.encode_2buff(once)), once)
    assert torch.equal(rows.decode_bf16(rows.encode_bf16(x)), x.bfloat16().float())


def plan_by_hand(extend, context, ratio, *, write):
    pooled = 8 if ratio == 4 else 128
    out, ragged = [], 0
    for b, (e, x) in enumerate(zip(extend, context, strict=True)):
        for j in range(e):
            p = x - e + j
            if (p >= max(0, x - pooled)) if write else ((p + 1) % ratio == 0):
                out.append((ragged, b, p, max(0, pooled - min(j + 1, pooled))))
            ragged += 1
    return np.array(out, np.int32).reshape(-1, 4)


@given(st.lists(st.tuples(st.integers(0, 140), st.integers(0, 400)), min_size=1, max_size=4), st.sampled_from([4, 128]))
def test_plans_equal_the_rule_token_by_token(sequences, ratio):
    extend = [e for e, _ in sequences]
    context = [e + before for e, before in sequences]
    for write, make in ((False, plans.compress_plan), (True, plans.write_plan)):
        assert np.array_equal(make(extend, context, ratio), plan_by_hand(extend, context, ratio, write=write))


def test_padded_plans_end_in_minus_one():
    plan = plans.compress_plan([3], [8], 4)
    assert plan.tolist() == [[2, 0, 7, 5]]
    assert plans.pad_plan(plan, 3).tolist() == [[2, 0, 7, 5], [-1] * 4, [-1] * 4]
    with pytest.raises(ValueError, match="do not fit"):
        plans.pad_plan(plan, 0)


def lists_by_hand(g, kind, positions, batch_ids, slots, table, picks):
    out, ptr = [], [0]
    for t, (p, b) in enumerate(zip(positions, batch_ids, strict=True)):
        if b >= 0:
            r = RATIO[kind]
            entries = range((p + 1) // r) if r else ()
            if picks is not None:
                entries = sorted(picks[t][: min((p + 1) // r, g.config.index_topk)])
            per = 256 // r if r else 1
            out += [g.envelope * table[b][c // per] + c % per for c in entries]
            window = range(max(0, p - g.config.sliding_window + 1), p + 1)
            out += [g.window_index(kind, slots[b], q) for q in window]
        ptr.append(len(out))
    return out, ptr


def verify_step(kind, module=plans):
    """Lists of tokens on both sides of 128 and of 4, a padded token, a first token; blocks out of order; 2 drafts. As the
    module makes them, and by hand."""
    g = Geometry(preset("mini"), lookahead=2, drafter_blocks=1)
    positions = np.array([0, 126, 127, 128, 15, 511, 17, 512])
    batch_ids = np.array([0, 1, 1, 1, 2, 3, -1, 3])
    slots, table = np.array([5, 3, 9, 4]), np.array([[4, 0, 0], [2, 0, 0], [1, 0, 0], [7, 3, 6]])
    picks = None
    if kind == "csa":
        generator = np.random.default_rng(0)
        picks = np.full((8, 8), 10**6)  # what lies past the count is poison
        for t, p in enumerate(positions):
            n = min((p + 1) // 4, 8)
            picks[t, :n] = generator.permutation((p + 1) // 4)[:n]
    made = module.attention_lists(g, kind, positions, batch_ids, slots, table, picks)
    want, ptr = lists_by_hand(g, kind, positions.tolist(), batch_ids.tolist(), slots, table, picks)
    return made, ([int(i) for i in want], ptr)


@pytest.mark.parametrize("kind", KINDS)
def test_attention_lists_of_a_verify_step(kind):
    (indices, indptr), (want, ptr) = verify_step(kind)
    assert (indices.dtype, indptr.dtype) == (np.int32, np.int32)
    assert (indices.tolist(), indptr.tolist()) == (want, ptr)
    if kind == "hca":
        assert [ptr[t + 1] - ptr[t] for t in (1, 2, 3)] == [16, 17, 17]  # each token counts for itself


@pytest.mark.parametrize(
    ("kind", "edit"),
    [
        ("hca", ("visible(positions, ratio)", "visible(positions.max(), ratio)")),  # drafts see groups of later drafts
        ("csa", ("visible(positions, ratio)", "positions // ratio")),  # a group hidden from its own last token
        ("csa", ("np.where(valid, picks, np.iinfo(np.int32).max)", "np.where(valid, picks, 0)")),  # the undefined tail enters
        ("window", ("np.minimum(positions + 1, geometry.config.sliding_window)", "np.minimum(positions + 1, geometry.ring)")),
        ("window", ("- windows[token] + 1 + j", "- windows[token] + j")),  # the token does not see itself
        ("csa", ("indptr[token] + count[token] + j", "indptr[token] + j")),  # windows over compressed rows
    ],
)
def test_planted_mistakes_in_the_lists_are_seen(tmp_path, kind, edit):
    (indices, indptr), (want, ptr) = verify_step(kind, mutant(plans, tmp_path, edit))
    assert (indices.tolist(), indptr.tolist()) != (want, ptr)


def test_lists_need_picks_once_rows_are_dropped():
    g = Geometry(preset("mini"))
    table, slots, zero = np.zeros((1, 1), int), np.array([3]), np.array([0])
    last_lossless = 4 * g.config.index_topk + 2
    _, indptr = plans.attention_lists(g, "csa", np.array([last_lossless]), zero, slots, table)
    assert indptr[1] == g.config.index_topk + 16
    with pytest.raises(ValueError, match="no picks"):
        plans.attention_lists(g, "csa", np.array([last_lossless + 1]), zero, slots, table)


DIGITS = 3e-7  # the spots have seven digits, float32 as many


def test_rope_frequencies_of_pro():
    f = frequencies(PRO, 2)
    spots = {0: 1, 1: 0.68765604, 14: 5.286857e-3, 15: 3.635539e-3, 16: 2.265625e-3, 20: 2.969778e-4,
             24: 1.953125e-5, 25: 5.372312e-6, 31: 5.680529e-7}  # fmt: skip
    for pair, value in spots.items():
        assert f[pair].item() == pytest.approx(value, rel=DIGITS)
    plain = frequencies(preset("v4-flash"), 0)
    assert plain.tolist() == pytest.approx([10000 ** (-i / 32) for i in range(32)], rel=DIGITS)
    cos, sin = rope_table(PRO, 2, torch.tensor([0, 3, 1000000]))
    angle = (torch.tensor(1e6) * f).double()
    ulp = torch.finfo(torch.float32).eps
    assert (cos[2] - angle.cos()).abs().max() <= ulp
    assert (sin[2] - angle.sin()).abs().max() <= ulp
    assert (cos[0] == 1).all() and (sin[0] == 0).all()
