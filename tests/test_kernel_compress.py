"""Compressor and state kernels, step by step against a float64 row made from the token history."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

import pytest
import torch
from kernel_cases import (
    UNIT,
    bf16,
    e4m3,
    gamma,
    illegal_bf16,
    illegal_e4m3,
    mutant,
    on_device,
    scale_byte,
    scale_value,
    uneven,
)
from row_cases import mutant_through

from optimized.kernels import compress as compress_file
from optimized.kernels import numeric, row_tiles
from optimized.kernels import state_write as state_file
from optimized.pool import plans, rows
from optimized.pool.geometry import BLOCK_TOKENS, Geometry
from optimized.pool.pool import Pool
from optimized.rope import rope_table
from reference.presets import preset

EPS = 0.37  # large, so that a lost epsilon shows
LAYER = {4: 4, 128: 3}  # of mini: the second of each kind
FIELD = {4: "csa_main", 128: "hca"}
EXP = 8  # float32 roundings an online-softmax chunk costs: exp within 3 ulp, one product, one addition
START = {4: [253, 0, 0], 128: [126, 250, 0]}  # tokens before the first step; near the end of a group or block
STEPS = {  # tokens by which each sequence grows, step by step
    4: [[0, 1, 0], [1, 2, 9], [2, 1, 4], [1, 1, 1], [0, 8, 2], [7, 3, 1], [13, 0, 3]],
    128: [[1, 1, 127], [1, 6, 1], [130, 1, 3]],
}


@dataclass
class Case:
    """One layer of one pool, the whole history of three sequences, and what has been computed so far."""

    ratio: int
    head_dim: int = 512
    lookahead: int = 2
    seed: int = 0
    context: list[int] = field(default_factory=list)
    build: str = "2buff"

    def __post_init__(self):
        config = dataclasses.replace(preset("mini"), head_dim=self.head_dim)
        self.config, self.layer = config, LAYER[self.ratio]
        self.geometry = Geometry(config, self.build, lookahead=self.lookahead)
        self.pool = Pool(self.geometry, blocks=7, slots=4)
        self.pool.poison()
        self.generator = torch.Generator().manual_seed(self.seed)
        self.width = self.head_dim * (2 if self.ratio == 4 else 1)
        tokens = 420
        self.kv = uneven(self.generator, 3, tokens, self.width, spread=3)
        self.kv[:, 8:16] *= 1e-7  # a CSA group below the amax floor before its norm
        self.score = 3 * torch.randn(3, tokens, self.width, generator=self.generator)
        self.ape = 2 * torch.randn(self.ratio, self.width, generator=self.generator)
        self.norm_weight = uneven(self.generator, self.head_dim, spread=4)
        self.slots = torch.tensor([self.pool.slot_position(g) for g in (2, 0, 3)], dtype=torch.int32)
        self.table = torch.tensor([[4, 1], [0, 6], [5, 2]], dtype=torch.int32)
        self.context = self.context or START[self.ratio]
        self.pour()

    def pour(self):
        """The rings as the tokens before the first step left them."""
        kv_state, score_state = self.state
        for b, context in enumerate(self.context):
            for p in range(max(0, context - kv_state.shape[1]), context):
                at = self.slots[b], p % kv_state.shape[1]
                kv_state[at], score_state[at] = self.kv[b, p], self.score[b, p] + self.ape[p % self.ratio]

    @property
    def state(self) -> tuple[torch.Tensor, torch.Tensor]:
        name = FIELD[self.ratio]
        return self.pool.state(f"{name}_kv", self.layer), self.pool.state(f"{name}_score", self.layer)

    def step(self, extend, tiles=None, compress=compress_file.compress, write=state_file.write_state, order="cw"):
        """Run one step and return its compress plan."""
        self.context = [x + e for x, e in zip(self.context, extend, strict=True)]
        args = extend, self.context, self.ratio
        plan = plans.pad_plan(plans.compress_plan(*args), len(plans.compress_plan(*args)) + 1)
        writes = torch.from_numpy(plans.pad_plan(plans.write_plan(*args), len(plans.write_plan(*args)) + 2))
        ends = list(zip(range(3), self.context, extend, strict=True))
        wide = torch.full((sum(extend), 2 * self.width + 8), torch.nan)  # one GEMM output holding both projections
        wide[:, : self.width] = torch.cat([self.kv[b, x - e : x] for b, x, e in ends])
        wide[:, self.width : 2 * self.width] = torch.cat([self.score[b, x - e : x] for b, x, e in ends])
        now = wide[:, : self.width], wide[:, self.width : 2 * self.width]
        cos, sin = rope_table(self.config, self.layer, torch.from_numpy(plan[:, 2] // self.ratio * self.ratio))
        for what in order:
            if what == "w":
                on_device(write)(*now, *self.state, writes, self.slots, self.ape)
            else:
                on_device(compress)(
                    *now, *self.state, torch.from_numpy(plan), self.slots, self.ape, self.norm_weight, EPS, cos, sin,
                    *(*self.pool.layer_rows(self.layer), None)[:2], self.table, ratio=self.ratio,
                    envelope=self.geometry.envelope, block_rows=BLOCK_TOKENS // self.ratio, tiles=tiles,
                )  # fmt: skip
        return plan[:-1]

    def row_index(self, b: int, entry: int) -> int:
        per_block = BLOCK_TOKENS // self.ratio
        return self.geometry.compress_index(int(self.table[b, entry // per_block]), entry % per_block)

    def expected(self, b: int, entry: int) -> tuple[torch.Tensor, torch.Tensor]:
        """float64 row before quantisation, made from the history, and the bound of a float32 evaluation."""
        value, gate = self.pooled_tokens(b, entry)
        y, bound = normed(*pooled(value, gate), self.norm_weight.double())
        return rotated(self.config, self.layer, entry * self.ratio, y, bound)

    def pooled_tokens(self, b: int, entry: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Values and gates [k, head_dim] of the tokens that a group pools."""
        d, start = self.head_dim, entry * self.ratio
        spans = [(start, slice(self.width - d, self.width))]
        if self.ratio == 4 and entry > 0:
            spans.insert(0, (start - 4, slice(0, d)))
        gate = self.score.double() + self.ape.double().repeat(420 // self.ratio + 1, 1)[:420]
        parts = [(self.kv[b, s : s + self.ratio, cut].double(), gate[b, s : s + self.ratio, cut]) for s, cut in spans]
        return torch.cat([v for v, _ in parts]), torch.cat([g for _, g in parts])


def pooled(value: torch.Tensor, gate: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax-weighted mean over tokens per channel, and its float32 bound: each weight is off by the rounding of its
    gate and of its distance to the maximum, by exp, and by the sums; the chunks of the online softmax add EXP each."""
    weight = gate.softmax(0)
    chunks = max(1, len(gate) // 8)
    relative = UNIT * (gate.abs() + gate.amax(0) - gate) + gamma(len(gate) + EXP * (chunks + 1))
    mean = (weight * value).sum(0)
    return mean, (weight * relative * value.abs()).sum(0) + mean.abs() * ((weight * relative).sum(0) + UNIT)


def normed(x, bound, weight) -> tuple[torch.Tensor, torch.Tensor]:
    """RMSNorm, and the bound: the error of x directly and through the mean square; rsqrt within 2 ulp."""
    mean_square = x.square().mean() + EPS
    rstd = mean_square.rsqrt()
    relative = (2 * (x.abs() * bound).mean() / mean_square + gamma(x.numel() + 3)) / 2 + 6 * UNIT
    return weight * x * rstd, weight.abs() * rstd * (bound + x.abs() * relative)


def rotated(config, layer, position, y, bound) -> tuple[torch.Tensor, torch.Tensor]:
    """RoPE on the last 64 channels with the float32 table, and the bound of its two products and one sum."""
    cos, sin = (t[0].double() for t in rope_table(config, layer, torch.tensor([position])))
    even, odd, e_bound, o_bound = y[-64::2], y[-63::2], bound[-64::2], bound[-63::2]
    out, out_bound = y.clone(), bound.clone()
    out[-64::2], out[-63::2] = even * cos - odd * sin, odd * cos + even * sin
    for start, a, b, a_bound, b_bound in ((-64, even, odd, e_bound, o_bound), (-63, odd, even, o_bound, e_bound)):
        own = a_bound * cos.abs() + b_bound * sin.abs() + gamma(2) * ((a * cos).abs() + (b * sin).abs())
        out_bound[start::2] = own
    return out, out_bound * (1 + 2.0**-10)  # terms of second order


def illegal(case: Case, b: int, entry: int) -> str:
    """What is wrong with a written row; empty if nothing is."""
    want, bound = case.expected(b, entry)
    nope, *rest = (view[case.row_index(b, entry)] for view in case.pool.layer_rows(case.layer))
    if not rest:
        return "bfloat16 row" if illegal_bf16(nope, want, bound).any() else ""
    rope = rest[0]
    n = case.head_dim - 64
    codes, scales = rows.unpack_2buff(nope)
    if not torch.equal(nope, rows.pack_2buff(codes, scales, case.head_dim)):
        return "scale bytes are not written twice, or the padding is not zero"
    tiles, tile_bounds = want[:n].view(-1, 64), bound[:n].view(-1, 64)
    low = (tiles.abs() - tile_bounds).clamp_min(0).amax(-1)
    high = (tiles.abs() + tile_bounds).amax(-1)
    if not ((scale_byte(low) <= scales) & (scales <= scale_byte(high))).all():
        return f"scales {scales.tolist()} outside {scale_byte(low).tolist()}..{scale_byte(high).tolist()}"
    unit = scale_value(scales)[:, None]
    if illegal_e4m3(codes.reshape(-1, 64), tiles / unit, tile_bounds / unit).any():
        return "codes"
    return "rotated channels" if illegal_bf16(rope, want[n:], bound[n:]).any() else ""


def faults(case: Case, steps: int | None = None, **how) -> list[str]:
    """Run the first steps; every wrong row, and every wrong or lost byte of the rest of the pool."""
    found, written = [], set()
    for extend in STEPS[case.ratio][:steps]:
        for _, b, position, _ in case.step(extend, **how):
            entry = int(position) // case.ratio
            written.add(case.geometry.base(case.layer) + case.row_index(int(b), entry))
            if why := illegal(case, int(b), entry):
                found.append(f"sequence {b} entry {entry}: {why}")
    return found + state_faults(case) + poison_faults(case, written)


def state_faults(case: Case) -> list[str]:
    """The last pooled tokens of every sequence must stand in its ring, as they are; ape added once."""
    kv_state, score_state = case.state
    found = []
    for b, context in enumerate(case.context):
        for p in range(max(0, context - case.width // case.head_dim * case.ratio), context):
            at = case.slots[b], p % kv_state.shape[1]
            want = case.score[b, p] + case.ape[p % case.ratio]
            if not (torch.equal(kv_state[at], case.kv[b, p]) and torch.equal(score_state[at], want)):
                found.append(f"sequence {b} state {p}")
    return found


def poison_faults(case: Case, written: set[int]) -> list[str]:
    """Bytes outside the written rows and the three sequences' rings of this layer must keep their poison."""
    for view in case.state:
        view[case.slots.long()] = torch.nan
        view.view(torch.int32)[case.slots.long()] = -1
    for plane in case.pool.planes:
        plane[sorted(written)] = 0xFF
    return [] if (case.pool.memory == 0xFF).all() else ["a byte outside its rows was written"]


TILES = [None, compress_file.Tiles(SLOTS=8), compress_file.Tiles(SLOTS=2)]


@pytest.mark.parametrize("ratio", [4, 128])
@pytest.mark.parametrize(("head_dim", "build"), [(512, "2buff"), (192, "2buff"), (192, "bf16")])
def test_rows_states_and_poison_over_a_run_of_steps(ratio, head_dim, build):
    assert faults(Case(ratio, head_dim, build=build)) == []


@pytest.mark.parametrize(("ratio", "tiles"), [(4, TILES[1]), (4, TILES[2]), (128, TILES[1])])
def test_gpu_like_tiles_give_legal_rows(ratio, tiles):
    assert faults(Case(ratio, 192), tiles=tiles) == []


@pytest.mark.parametrize("ratio", [4, 128])
def test_the_bound_leaves_nine_results_in_ten_one_choice(ratio):
    """How much the gate above sees: where the bound spans no rounding boundary, only one code passes."""
    case = Case(ratio)
    want, bound = case.expected(1, 1)
    tiles, tile_bounds = want[:-64].view(-1, 64), bound[:-64].view(-1, 64)
    unit = scale_value(scale_byte(tiles.abs().amax(-1)))[:, None]
    free = e4m3((tiles - tile_bounds) / unit) != e4m3((tiles + tile_bounds) / unit)
    assert free.double().mean() < 0.1
    assert (bf16(want - bound) != bf16(want + bound))[-64:].double().mean() < 0.1


def test_state_writes_with_small_tiles():
    tiles = state_file.Tiles(ROWS=2, COLS=64)
    assert faults(Case(4, 192), write=lambda *args: state_file.write_state(*args, tiles=tiles)) == []


@pytest.mark.parametrize("ratio", [4, 128])
def test_a_row_does_not_depend_on_the_chunking(ratio):
    """One step or many, alone or in company, with or without lookahead: the same bytes."""
    stepped, at_once = Case(ratio), Case(ratio, lookahead=0)
    for extend in STEPS[ratio]:
        stepped.step(extend)
    grown = [x - s for x, s in zip(stepped.context, START[ratio], strict=True)]
    at_once.step([grown[0], 0, 0])
    at_once.step([0, *grown[1:]])
    for b in range(3):
        for entry in range(START[ratio][b] // ratio, stepped.context[b] // ratio):
            index = stepped.row_index(b, entry)
            for one, other in zip(stepped.pool.layer_rows(stepped.layer), at_once.pool.layer_rows(at_once.layer), strict=True):
                assert torch.equal(one[index].view(torch.uint8), other[index].view(torch.uint8))


def test_rejected_drafts_leave_no_trace():
    """A verify step of 1 + k tokens whose drafts are taken back equals never having seen them."""
    case, clean = (Case(4, context=[1, 2, 3]) for _ in range(2))
    for c in (case, clean):
        c.step([13, 4, 0])
    drafts = case.kv.clone(), case.score.clone()
    case.kv[0, 15:17], case.score[0, 15:17] = 77.0, 5.0
    case.step([3, 1, 0])
    case.kv, case.score = drafts
    case.context[0] -= 2
    clean.step([1, 1, 0])
    for c in (case, clean):
        c.step([5, 1, 9])
    for b in range(3):
        for entry in range(1, clean.context[b] // 4):
            assert illegal(case, b, entry) == illegal(clean, b, entry) == ""


def test_rows_behind_two_gib():
    """The row's byte offset passes 2^31 in both planes' strides; memory is reserved, hardly touched."""
    case = Case(4, context=[0, 1, 1])
    plane_rows = 5_300_000
    nope, rope = torch.empty(plane_rows, 512, dtype=torch.uint8), torch.empty(plane_rows, 64, dtype=torch.bfloat16)
    far = 5_200_000 // case.geometry.envelope
    case.pool.layer_rows = lambda layer: (nope, rope)
    case.table = torch.tensor([[far, 1], [0, 6], [5, 2]], dtype=torch.int32)
    case.step([4, 0, 0])
    assert case.row_index(0, 0) * 512 > 2**31
    assert illegal(case, 0, 0) == ""


def test_projections_of_another_width_are_refused():
    case = Case(4)
    with pytest.raises(ValueError, match="score"):
        plan = torch.zeros(1, 4, dtype=torch.int32)
        state_file.write_state(case.kv[0], case.score[0, :, :512], *case.state, plan, case.slots, case.ape)


MISTAKES = {
    "overlap halves swapped": (4, ("tl.where(k >= RATIO, HEAD_DIM, 0)", "tl.where(k < RATIO, HEAD_DIM, 0)")),
    "stale ring row": (4, ("tl.where(source >= 0, source, 0) % ring", "tl.where(source >= 1, source - 1, 0) % ring")),
    "ring of K, not K + k": (4, (").to(tl.int64) * WIDTH", "// ring * 0 + source % POOLED).to(tl.int64) * WIDTH")),
    "first group pools tokens before the start": (4, ("(k < window_len) & (source >= 0)", "(k < window_len)")),
    "ape missing": (4, ("new_gate += tl.load(ape", "new_gate += 0 * tl.load(ape")),
    "ape of another token": (128, ("ape + (k % RATIO)", "ape + ((k + 1) % RATIO)")),
    "first token of the group lost": (128, ("(k >= window_len)[:, None]", "((k >= window_len) & (k > 0))[:, None]")),
    "shares of one peak": (128, ("* carry + tl.sum(e * value, 0)", "+ tl.sum(e * value, 0)")),
    "epsilon lost": (4, ("inverse_rms(x, eps, HEAD_DIM)", "inverse_rms(x, 0.0, HEAD_DIM)")),
    "mean over the padded lanes": (4, ("inverse_rms(x, eps, HEAD_DIM)", "inverse_rms(x, eps, LANES)")),
    "norm without weight": (4, ("y = weight[None, :] * (x", "y = 0 * weight[None, :] + (x")),
    "inverse rotation": (4, ("live, 1.0, HEAD_DIM", "live, -1.0, HEAD_DIM")),
    "no rotation": (4, ("live, 1.0, HEAD_DIM", "live & False, 1.0, HEAD_DIM")),
    "main row under the stride of the other plane": (4, ("rope_rows, target * main_stride", "rope_rows, target * rope_stride")),
    "block table ignored": (4, ("block * envelope", "0 * block * envelope")),
    "row of another layer": (4, ("envelope + entry % BLOCK_ROWS", "envelope + entry % BLOCK_ROWS + 1")),
}  # fmt: skip
ROW_MISTAKES = {
    "scale written once": ("NOPE + 2 * tile + 1, scale", "NOPE + 2 * tile + 1, scale * 0"),
    "padding not cleared": ("(pad >= 2 * TILES)", "(pad >= 2 * TILES + 8)"),
    "floored exponent": ("e4m3_rn(blocks * e8m0_inverse(scale)", "e4m3_rn(blocks * e8m0_inverse((scale - 1).to(tl.uint8))"),
    # As the interpreter's cast does.
    "rotated part truncated": ("(d - NOPE), bf16_rn(y)", "(d - NOPE), y.to(tl.bfloat16)"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_planted_mistakes_are_seen(tmp_path, mistake):
    ratio, edit = MISTAKES[mistake]
    tiles = TILES[1] if mistake == "shares of one peak" else None
    wrong = mutant(compress_file, tmp_path, edit)
    assert faults(Case(ratio, 192), steps=3, compress=wrong.compress, tiles=tiles)


@pytest.mark.parametrize("mistake", ROW_MISTAKES)
def test_planted_mistakes_in_the_row_are_seen(tmp_path, mistake):
    wrong = mutant_through(compress_file, row_tiles, tmp_path, ROW_MISTAKES[mistake])
    assert faults(Case(4, 192), steps=3, compress=wrong.compress)


def test_a_truncated_bfloat16_row_is_seen(tmp_path):
    wrong = mutant_through(compress_file, row_tiles, tmp_path, ("+ d, bf16_rn(y)", "+ d, y.to(tl.bfloat16)"))
    assert faults(Case(4, 192, build="bf16"), steps=3, compress=wrong.compress)


@pytest.mark.parametrize(
    "edit",
    [
        ("gate += tl.load(ape", "gate += 0 * tl.load(ape"),
        ("place % ring", "place % (ring - 1)"),
        ("place % RATIO", "(place + 1) % RATIO"),
        ("mask=known, other=-1)", "mask=known, other=0)"),  # rows past the plan write position 0
    ],
)
def test_planted_mistakes_in_the_state_are_seen(tmp_path, edit):
    wrong = mutant(state_file, tmp_path, edit)
    assert faults(Case(4, 192), steps=3, write=wrong.write_state)


def test_writing_states_before_pooling_is_seen():
    """A chunk longer than the ring overwrites tokens that its first group still needs."""
    assert faults(Case(4, 192, lookahead=0), order="wc")


def test_the_scale_rule_is_the_shared_one():
    assert row_tiles.e4m3_scale is numeric.e4m3_scale
