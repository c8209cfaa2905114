"""Index pages, index keys and index queries: layouts by their bytes, kernels against float64 from the definition."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from kernel_cases import DEVICE, illegal_e4m3, mutant, on_device, poison_new_memory, scale_byte, scale_value, uneven
from row_cases import hadamard, illegal_scales, mutant_through, normed, turned
from test_kernel_compress import Case as MainCase
from test_kernel_compress import pooled

from optimized.kernels import compress as compress_file
from optimized.kernels import compress_index as compress_index_file
from optimized.kernels import index_layout, indexer, row_tiles
from optimized.pool import index_rows
from optimized.pool.geometry import BLOCK_TOKENS, Geometry
from optimized.pool.index_rows import LAYOUTS, PAGE_ROWS
from optimized.pool.pool import IndexPool
from optimized.rope import rope_table
from reference.presets import preset

triton, tl = index_layout.triton, index_layout.tl  # importing triton first would settle its mode
index_query = on_device(indexer.index_query)
EPS = 0.37
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
E2M1_VALUES = torch.cat([E2M1, -E2M1])
FORMS = ["fp4", "fp8"]


def random_page(form: str, width: int = 128, seed: int = 0, pages: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes [pages, 64, bytes], and scales [pages, 64, n] of which no two in a page are equal."""
    generator = torch.Generator().manual_seed(seed)
    n = index_rows.scale_count(form, width)
    codes = torch.randint(0, 256, (pages, PAGE_ROWS, index_rows.key_bytes(form, width)), generator=generator, dtype=torch.uint8)
    order = torch.stack([torch.randperm(PAGE_ROWS * n, generator=generator) for _ in range(pages)]).view(pages, PAGE_ROWS, n)
    return codes, order.to(torch.uint8) if form == "fp4" else order.float() + 0.1


# One byte of every layout by hand, from the layouts' published forms: (row, key byte) -> place, (row, scale) -> place.
PLACES = {
    "fp8_linear": ((37, 101), 37 * 128 + 101, (37, 0), 37),
    "fp8_preshuffled": ((37, 101), 2 * 2048 + 6 * 256 + 5 * 16 + 5, (37, 0), 37),
    "fp4_natural": ((37, 53), 37 * 64 + 53, (37, 3), 37 * 4 + 3),
    "fp4_split": ((37, 53), 37 * 64 + 53, (37, 3), 37 * 4 + 3),
    "fp4_flydsl": ((37, 53), 3 * 1024 + 37 * 16 + 5, (37, 3), 3 * 64 + 5 * 4 + 2),
    "fp4_opus": ((37, 53), 3 * 1024 + 37 * 16 + 5, (37, 3), 1 * 128 + 5 * 4 + 3),
    "fp4_page8": ((37, 53), 4 * 512 + (1 * 4 + 3) * 32 + 1 * 16 + 5, (37, 3), 4 * 32 + 3 * 8 + 5),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_is_a_permutation_with_the_published_places(name):
    key, key_place, scale, scale_place = PLACES[name]
    keys, scales = index_rows.key_order(LAYOUTS[name], 128), index_rows.scale_order(LAYOUTS[name], 128)
    assert keys[key] == key_place and scales[scale] == scale_place
    for order in (keys, scales):
        assert torch.equal(order.flatten().sort().values, torch.arange(order.numel()))


@pytest.mark.parametrize(("source", "target"), list(itertools.permutations(LAYOUTS, 2)))
def test_converting_moves_every_byte_and_loses_none(source, target):
    source, target = LAYOUTS[source], LAYOUTS[target]
    page = random_page(source.form)
    there = index_rows.pack(*page, source)
    if source.form != target.form:
        with pytest.raises(ValueError, match="cannot become"):
            index_rows.convert(*there, source, target)
        return
    moved = index_rows.convert(*there, source, target)
    assert all(torch.equal(a, b) for a, b in zip(index_rows.unpack(*moved, target), page, strict=True))
    same = source.order == target.order
    assert torch.equal(moved[1], there[1]) == (same or source.form == "fp8")  # where the orders differ, scales move
    assert all(torch.equal(a, b) for a, b in zip(index_rows.convert(*moved, target, source), there, strict=True))


@pytest.mark.parametrize("form", FORMS)
def test_encoding_a_decoded_key_gives_its_bytes_again(form):
    values = uneven(torch.Generator().manual_seed(1), 64, 128)
    codes, scales = index_rows.encode(values, form)
    again = index_rows.encode(index_rows.decode(codes, scales, form), form)
    assert torch.equal(index_rows.decode(*again, form), index_rows.decode(codes, scales, form))
    unit = torch.ldexp(torch.ones(1), torch.tensor(-126)) + scales if form == "fp8" else scale_value(scales)
    step = unit.double().repeat_interleave(128 // unit.shape[-1], -1)
    largest = {"fp4": 1.0, "fp8": 16.0}[form]  # half the widest spacing of codes
    assert ((index_rows.decode(codes, scales, form).double() - values).abs() <= largest * step).all()


@pytest.mark.parametrize("name", LAYOUTS)
def test_pages_of_the_pool_do_not_meet(name):
    """Every element of every layer's pages is a place of its own, and together they are the pool."""
    geometry = Geometry(preset("mini"))
    pool = IndexPool(geometry, blocks=3, layout=LAYOUTS[name])
    csa = [i for i, kind in enumerate(geometry.kinds) if kind == "csa"]
    for count, layer in enumerate(csa):
        for part in pool.pages(layer):
            assert (part.contiguous().view(torch.uint8) == 0).all()
            part.copy_(torch.full(part.shape, count + 1.0).to(part.dtype))
    assert len(csa) == 2
    for count, layer in enumerate(csa):
        assert all((part == count + 1).all() for part in pool.pages(layer))
    assert pool.memory.numel() == 3 * BLOCK_TOKENS * geometry.index_bytes_per_token(LAYOUTS[name].form)
    pool.poison()
    assert (pool.memory == 0xFF).all()


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_kernels_addresses_are_the_layouts(name):
    layout = LAYOUTS[name]
    order = index_layout.ORDERS[layout.order]
    keys, scales = index_rows.key_order(layout, 128), index_rows.scale_order(layout, 128)
    for want, at in ((keys, index_layout.key_at), (scales, index_layout.scale_at)):
        got = torch.empty(want.shape, dtype=torch.int64, device=DEVICE)
        places[(1,)](got, AT=at, N=want.shape[1], ORDER=order)
        assert torch.equal(got.cpu(), want)


@triton.jit
def places(out, AT: tl.constexpr, N: tl.constexpr, ORDER: tl.constexpr):
    r = tl.arange(0, 64)[:, None]
    j = tl.arange(0, N)[None, :]
    tl.store(out + r * N + j, AT(r, j, N, ORDER))


def e2m1(x: torch.Tensor) -> torch.Tensor:
    """float64 -> E2M1 values: the nearest of the table, ties to the even code, clamped to +-6."""
    a = x.abs().clamp_max(6)
    upper = torch.searchsorted(E2M1, a.contiguous()).clamp(1, 7)
    down, up = a - E2M1[upper - 1], E2M1[upper] - a
    return torch.copysign(E2M1[torch.where((up < down) | ((up == down) & (upper % 2 == 0)), upper, upper - 1)], x)


def e2m1_byte(amax: torch.Tensor) -> torch.Tensor:
    """float64 amax -> scale byte 127 + ceil(log2(max(amax, 6 * 2^-126) / 6)), found by trying all powers of two."""
    powers = torch.arange(-126, 127).double().exp2()
    return torch.searchsorted(powers * 6.0, amax.clamp_min(6 * 2.0**-126).contiguous()) + 1


def illegal_key(codes, scales, want, bound, form) -> torch.Tensor:
    """Where codes [n, ...] and scale bytes [n, ...] are not a quantisation of a float64 [n, d] within the bound."""
    block, bytes_of = (32, e2m1_byte) if form == "fp4" else (want.shape[-1], scale_byte)
    unit = scale_value(scales).repeat_interleave(block, -1)
    if form == "fp8":
        wrong = illegal_e4m3(codes, want / unit, bound / unit)
    else:
        got = E2M1_VALUES[torch.stack([codes & 15, codes >> 4], -1).flatten(-2).int()]
        wrong = ~((e2m1((want - bound) / unit) <= got) & (got <= e2m1((want + bound) / unit)))
    return wrong.any(-1) | illegal_scales(scales, want, bound, block, bytes_of).any(-1)


def query_case(tokens: int = 5, heads: int = 6, width: int = 128, seed: int = 0):
    """q (a strided view; blocks with scales far apart), projected weights (half of a wider product), cos, sin."""
    generator = torch.Generator().manual_seed(seed)
    wide = uneven(generator, tokens, heads * width + 16, spread=3).bfloat16()
    wide[2::3] *= 2.0**-20
    q = wide[:, 16:].unflatten(-1, (heads, width))
    projected = torch.randn(tokens, 2 * heads, generator=generator)[:, heads:]
    positions = torch.tensor([0, 1, 4099, 65_536, 999_999] * tokens)[:tokens]
    return q, projected, *rope_table(preset("mini"), 2, positions)


def query_faults(args, form, module=indexer, **how) -> str:
    q, projected, cos, sin = args
    codes, scales, weights = on_device(module.index_query)(*args, form=form, **how)
    exact = q.double(), torch.zeros(q.shape).double()
    want, bound = hadamard(*turned(*exact, cos[:, None].double(), sin[:, None].double()))
    if illegal_key(codes, scales, want, bound, form).any():
        return "codes or scales"
    factor = torch.tensor(q.shape[2] ** -0.5 * q.shape[1] ** -0.5, dtype=torch.float32)
    return "" if torch.equal(weights, projected * factor) else "weights"


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("width", [128, 64])
@pytest.mark.parametrize("tiles", [None, indexer.Tiles(ROWS=4)])
def test_index_queries_within_the_bound(form, width, tiles, monkeypatch):
    args = query_case(width=width)
    poison_new_memory(monkeypatch)
    assert query_faults(args, form, tiles=tiles) == ""


def test_index_queries_of_pro_and_of_no_tokens():
    assert query_faults(query_case(2, 64), "fp4") == query_faults(query_case(0, 64), "fp8") == ""


@pytest.mark.parametrize("form", FORMS)
def test_a_query_does_not_depend_on_its_company(form):
    q, projected, cos, sin = query_case(9)
    whole = index_query(q, projected, cos, sin, form=form)
    one = index_query(q[4:5], projected[4:5], cos[4:5], sin[4:5], form=form)
    assert all(torch.equal(a[0], b[4]) for a, b in zip(one, whole, strict=True))


@pytest.mark.parametrize("form", FORMS)
def test_infinity_shows_in_the_scale(form):
    q, projected, cos, sin = query_case()
    q[1, 2, 3] = torch.inf
    _, scales, _ = index_query(q, projected, cos, sin, form=form)
    assert (scales == 255).any(-1).nonzero().tolist() == [[1, 2]]


QUERY_MISTAKES = {
    "no Hadamard": ("y = hadamard(y, LANES, STEPS)", "y = y"),
    "Hadamard before RoPE": (
        "y = rotate_tail(load_bf16_tile(q, t * q_stride + h * LANES, live, LANES, LANES), cos",
        "y = rotate_tail(hadamard(load_bf16_tile(q, t * q_stride + h * LANES, live, LANES, LANES), LANES, STEPS), cos",
    ),
    "one step of Hadamard lost": ("STEPS=width.bit_length() - 1", "STEPS=width.bit_length() - 2"),
    "turned backwards": ("live, 1.0, LANES", "live, -1.0, LANES"),
    "weights not scaled by heads": (" * heads**-0.5", ""),
    "scale of another head": ("scales + row[:, None] * (LANES // 32) + g", "scales + (row[:, None] ^ 1) * (LANES // 32) + g"),
}


@pytest.mark.parametrize("mistake", QUERY_MISTAKES)
def test_planted_mistakes_in_queries_are_seen(tmp_path, mistake, monkeypatch):
    args = query_case()
    poison_new_memory(monkeypatch)
    assert query_faults(args, "fp4", mutant(indexer, tmp_path, QUERY_MISTAKES[mistake]))


PACKING_MISTAKES = [
    ("low | (high << 4)", "high | (low << 4)"),
    ("x * LANES**-0.5", "x * LANES**-0.25"),
    ("tl.join(even + odd, even - odd)", "tl.join(even - odd, even + odd)"),
]


@pytest.mark.parametrize("edit", PACKING_MISTAKES)
def test_planted_mistakes_in_rotation_and_packing_are_seen(tmp_path, edit):
    assert query_faults(query_case(), "fp4", mutant_through(indexer, row_tiles, tmp_path, edit))


class IndexCase(MainCase):
    """The compressor's history of three sequences at the index width, its keys in pages of every layout."""

    def __init__(self, name: str):
        super().__init__(4, 512)
        self.head_dim, self.width = 128, 256
        generator = self.generator
        self.kv, self.score = uneven(generator, 3, 420, 256, spread=3), 3 * torch.randn(3, 420, 256, generator=generator)
        self.ape, self.norm_weight = 2 * torch.randn(4, 256, generator=generator), uneven(generator, 128, spread=2)
        self.layout = LAYOUTS[name]
        self.index_pool = IndexPool(self.geometry, 7, self.layout)
        self.index_pool.poison()
        self.pool.poison()
        self.pour()

    @property
    def state(self):
        name = "csa_idx" if self.width == 256 else "csa_main"  # while the main case sets itself up
        return self.pool.state(f"{name}_kv", self.layer), self.pool.state(f"{name}_score", self.layer)

    def into_pages(self, *args, module=compress_index_file, **how):
        """Stands in for the main compressor: same arguments, pages instead of rows."""
        front, table = args[:11], args[13]
        on_device(module.compress_index)(*front, *self.index_pool.pages(self.layer), table, order=self.layout.order)

    def illegal(self, b: int, entry: int) -> bool:
        keys, scales = index_rows.unpack(*self.index_pool.pages(self.layer), self.layout)
        at = self.table[b, entry // PAGE_ROWS], entry % PAGE_ROWS
        byte = scales[at] if self.layout.form == "fp4" else (scales[at].view(torch.int32) >> 23).to(torch.uint8)
        exact = self.layout.form == "fp4" or torch.equal(scale_value(byte).float(), scales[at])
        want, bound = (x[None] for x in self.expected_key(b, entry))
        return not exact or bool(illegal_key(keys[at][None], byte[None], want, bound, self.layout.form).any())

    def expected_key(self, b: int, entry: int):
        value, bound = pooled(*self.pooled_tokens(b, entry))
        y, own = normed(value, self.norm_weight.double(), EPS)
        mean_square = value.square().mean() + EPS
        through = (value.abs() * bound).mean() / mean_square  # of the mean square, by half of twice its error
        own = own + self.norm_weight.double().abs() * mean_square.rsqrt() * (bound + value.abs() * through)
        cos, sin = (t[0].double() for t in rope_table(self.config, self.layer, torch.tensor([entry * 4])))
        return hadamard(*turned(y, own, cos, sin))


def index_faults(name: str, steps: int = 3, module=compress_index_file) -> list[str]:
    """Run steps; every wrong key, and every lost byte of the rest of the index pool."""
    case, found, written = IndexCase(name), [], []
    for extend in [[0, 1, 0], [3, 2, 9], [2, 1, 4], [7, 0, 5]][: steps + 1]:
        for _, b, position, _ in case.step(extend, compress=lambda *a, **how: case.into_pages(*a, module=module)):
            written.append((int(b), int(position) // 4))
            found += [f"key {written[-1]}"] if case.illegal(*written[-1]) else []
    keys, scales = case.index_pool.pages(case.layer)
    kb, sb = index_rows.key_order(case.layout, 128), index_rows.scale_order(case.layout, 128)
    for b, entry in written:
        block, r = case.table[b, entry // PAGE_ROWS], entry % PAGE_ROWS
        keys[block, kb[r]] = 0xFF
        if case.layout.form == "fp4":
            scales[block, sb[r]] = 0xFF
        else:
            scales.view(torch.int32)[block, sb[r]] = -1
    assert len(written) > 4
    return found + ([] if (case.index_pool.memory == 0xFF).all() else ["a byte outside its keys was written"])


@pytest.mark.parametrize("name", LAYOUTS)
def test_index_keys_over_a_run_of_steps(name):
    assert index_faults(name) == []


INDEX_MISTAKES = {
    "no Hadamard": ("y = hadamard(y, LANES, STEPS)", "y = y"),
    "row of another key": ("scales, entry % BLOCK_ROWS, FORM", "scales, (entry + 1) % BLOCK_ROWS, FORM"),
    "block table ignored": ("main_rows + block * main_stride", "main_rows + 0 * block * main_stride"),
    "scales in another page": ("rope_rows + block * rope_stride", "rope_rows + 0 * block * rope_stride"),
    "key of the next group": ("entry = position // RATIO", "entry = (position + 1) // RATIO"),
}


@pytest.mark.parametrize("mistake", INDEX_MISTAKES)
def test_planted_mistakes_in_index_keys_are_seen(tmp_path, monkeypatch, mistake):
    wrong = mutant(compress_file, tmp_path, INDEX_MISTAKES[mistake])
    monkeypatch.setattr(compress_index_file, "Group", wrong.Group)
    monkeypatch.setattr(compress_index_file, "launch_compress", wrong.launch_compress)
    assert index_faults("fp4_natural", steps=2)


@pytest.mark.parametrize("order", ["preshuffled", "none"])
def test_an_order_of_another_form_is_refused(order):
    case = IndexCase("fp4_natural")
    case.layout = dataclasses.replace(case.layout, order=order)
    with pytest.raises(ValueError, match=order):
        case.step([4, 4, 4], compress=case.into_pages)
