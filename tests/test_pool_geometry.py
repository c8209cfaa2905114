"""Pool geometry against recorded addresses and by enumeration of every owner; the pool's views by their bytes."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_cases import mutant

from optimized.pool import geometry as geometry_file
from optimized.pool.geometry import BLOCK_TOKENS, KINDS, RATIO, Geometry
from optimized.pool.pool import Pool
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
    assert g.plane_rows(100, 4) - 4 * g.slot_rows - 100 * g.envelope == 39112  # the gap
    assert g.base(0) == 0
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


def test_sizes_of_pro():
    """Per token, per block, of the windows and of the rings."""
    assert pro().envelope / BLOCK_TOKENS == 7.7421875
    index = pro().index_bytes_per_token("fp4")
    block = [BLOCK_TOKENS * n for n in (pro().bytes_per_token, index)]
    assert block == [1_268_480, 130_560] and pro().bytes_per_token + index == 5465
    for build, drafter_blocks, mib in (("2buff", 0, 4.766), ("bf16", 0, 7.625), ("2buff", 1, 4.844), ("bf16", 1, 7.75)):
        g = pro(build, drafter_blocks=drafter_blocks)
        assert round(len(g.kinds) * g.ring * sum(g.row_bytes) / MIB, 3) == mib
    fields = pro().fields
    pairs = [sum(f.nbytes for f in fields if f.name.startswith(name)) / MIB for name in ("csa_main", "csa_idx", "hca")]
    assert pairs == [1.875, 0.46875, 15.5] and sum(f.nbytes for f in fields) == 18_710_528
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


def claimed_rows(g: Geometry, blocks: int, slots: int) -> np.ndarray:
    """Every row that somebody owns, once an owner: compressed rows, window rows and the rows of state arenas."""
    positions = np.arange(slots)[:, None] + g.slot_positions(g.plane_rows(blocks, slots)) - slots
    rows = [(positions * g.slot_rows + np.arange(g.arena_rows)).flatten()]
    for layer, kind in enumerate(g.kinds):
        rows.append((g.base(layer) + g.window_index(kind, positions, np.arange(7, 7 + g.ring))).flatten())
        if RATIO[kind]:
            block, r = np.divmod(np.arange(blocks * g.stride(kind)), g.stride(kind))
            rows.append(g.base(layer) + g.compress_index(block, r))
    return np.concatenate(rows)


def owner_faults(g: Geometry, blocks: int = 3, slots: int = 2) -> list[str]:
    """Rows with two owners, rows outside of the plane, of their region or of their plane's part, and rows lost."""
    rows, plane_rows = claimed_rows(g, blocks, slots), g.plane_rows(blocks, slots)
    if rows.min() < 0 or rows.max() >= plane_rows:
        return ["outside of the plane"]
    owners = np.bincount(rows, minlength=plane_rows)
    slot_space = (g.slot_positions(plane_rows) - slots) * g.slot_rows
    found = ["two owners of a row"] * bool(owners.max() > 1)
    found += ["a hole in the envelopes"] * (not owners[: blocks * g.envelope].all())
    found += ["between blocks and slots"] * bool(owners[blocks * g.envelope : slot_space].any())
    per_slot = owners[slot_space : slot_space + slots * g.slot_rows].reshape(slots, -1).sum(1)
    found += ["a slot without its rows"] * bool((per_slot != g.arena_rows + len(g.kinds) * g.ring).any())
    for plane, width in enumerate(g.row_bytes):
        spans = sorted((f.offset, f.offset + f.nbytes) for f in g.fields if f.plane == plane)
        found += ["fields meet"] * any(end > start for (_, end), (start, _) in itertools.pairwise(spans))
        found += ["a field beyond the arena"] * any(end > g.arena_rows * width for _, end in spans)
    return found


def fewest_window_rows(layers: int, stride: int, ring: int) -> int:
    """Rows that `layers` bases, `stride` rows apart, need for windows of `ring` rows at the same places relative to each:
    the first rows whose copies miss those of all rows before. Only rows that are equal mod `stride` can meet, and among
    those the first that fits is best."""
    last, taken, row = {}, 0, -1
    while taken < ring:
        row += 1
        if row - last.get(row % stride, -layers * stride) >= layers * stride:
            last[row % stride], taken = row, taken + 1
    return (layers - 1) * stride + row + 1


def fewest_arena_rows(g: Geometry) -> int:
    """Of all ways to give each of the six fields to a plane, in order, each at a multiple of 256 bytes."""
    sizes, best = [f.nbytes for f in g.fields], []
    for planes in itertools.product(range(len(g.row_bytes)), repeat=len(sizes)):
        end = [0] * len(g.row_bytes)
        for size, plane in zip(sizes, planes, strict=True):
            end[plane] = -(-end[plane] // 256) * 256 + size
        best.append(max(-(-e // width) for e, width in zip(end, g.row_bytes, strict=True)))
    return min(best)


def waste(g: Geometry, blocks: int = 3, slots: int = 2) -> list[str]:
    """What takes more rows than it must."""
    entries = {kind: g.entry_rows(kind) for kind in KINDS if g.count(kind)}
    found = [k for k, n in entries.items() if n != fewest_window_rows(g.count(k), g.stride(k), g.ring)]
    found += ["arena"] * (g.arena_rows != fewest_arena_rows(g))
    found += ["slot"] * (g.slot_rows - g.arena_rows - sum(entries.values()) not in (0, 1))
    gap = g.plane_rows(blocks, slots) - slots * g.slot_rows - blocks * g.envelope
    return found + ["plane"] * (not 0 <= gap < g.slot_rows)


@pytest.mark.parametrize("build", BUILDS)
@pytest.mark.parametrize("drafter_blocks", [0, 1])
@pytest.mark.parametrize("name", ["v4-pro", "v4-flash", "v4-pro-slim", "mini"])
def test_every_row_has_one_owner_and_none_is_wasted(name, drafter_blocks, build):
    for lookahead in range(8):
        g = Geometry(preset(name), build, lookahead, drafter_blocks)
        assert (owner_faults(g), waste(g)) == ([], []), lookahead


def test_boundary_moves_change_no_address():
    """Blocks in place of slots: what stays claimed lies where it lay."""
    g = pro(lookahead=1, drafter_blocks=1)
    per_slot = g.slot_rows // g.envelope
    assert g.plane_rows(10 + per_slot, 3) == g.plane_rows(10, 4) and per_slot == 21
    before, after = (np.sort(claimed_rows(g, blocks, slots)) for blocks, slots in ((10, 4), (10 + per_slot, 3)))
    last_slots = (g.slot_positions(g.plane_rows(10, 4)) - 3) * g.slot_rows
    for first, end in ((0, 10 * g.envelope), (last_slots, g.plane_rows(10, 4))):
        here, there = (rows[(first <= rows) & (rows < end)] for rows in (before, after))
        assert len(here) and np.array_equal(here, there)


MISTAKES = {
    "windows layer after layer": ("q // s * (self.count(kind) * s)", "q // s * s"),
    "anchor forgotten": (" - self.anchor(kind)\n", "\n"),
    "windows over the arena": ("return self.arena_rows + sum(", "return sum("),
    "envelope too short": ('+ self.count("csa") * self.stride("csa")', '+ self.count("csa") * self.stride("csa") - 1'),
    "interleave with a gap": ("q // s * (self.count(kind) * s)", "q // s * (self.count(kind) * s + s)"),
    "entry with a spare row": ("self.ring - 1) + 1 if n", "self.ring - 1) + 2 if n"),
    "first arena that comes": ("return min(layouts, key=self._rows_of)", "return next(layouts)"),
    "slots aligned to 64": ("SLOT_ALIGN = 2", "SLOT_ALIGN = 64"),
    "a slot too many": ("return (slots + -(-blocks", "return (slots + 1 + -(-blocks"),
    "fields unaligned": ("end[plane] += round_up(placed[-1].nbytes, FIELD_ALIGN)", "end[plane] += placed[-1].nbytes - 256"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_planted_mistakes_in_the_geometry_are_seen(tmp_path, mistake):
    wrong = mutant(geometry_file, tmp_path, MISTAKES[mistake]).Geometry
    found = [wrong(preset("mini"), "2buff", lookahead, 1) for lookahead in (0, 3)]
    assert any(owner_faults(g) or waste(g) for g in found)


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
    g = Geometry(config, build, lookahead)
    assert (owner_faults(g), waste(g)) == ([], [])


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
