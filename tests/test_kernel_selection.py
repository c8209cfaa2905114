"""Indexer scores over paged keys, exact top-k, and translation of picks into pool rows."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import fp8_partial_error, gamma, mutant, on_device, poison_new_memory, scale_value, uneven

from optimized.kernels import index_logits as logits_file
from optimized.kernels import topk as topk_file
from optimized.kernels import translate as translate_file
from optimized.pool import index_rows, plans
from optimized.pool.geometry import Geometry
from optimized.pool.index_rows import LAYOUTS, PAGE_ROWS
from optimized.pool.pool import IndexPool, Pool
from reference import indexer as reference_indexer
from reference.presets import preset

index_logits = on_device(logits_file.index_logits)
topk = on_device(topk_file.topk)

SMALL = logits_file.Tiles(COLS=16)
VISIBLE = [0, 1, 63, 64, 65, 130, 190]
TABLE = torch.tensor([[4, 1, 5], [0, 6, 3]], dtype=torch.int32)


class Scores:
    """Queries of seven tokens of two sequences, three pages each, in mini's second CSA layer; unlisted pages poisoned."""

    def __init__(self, name: str, heads: int = 6, width: int = 128, seed: int = 0):
        self.layout, generator = LAYOUTS[name], torch.Generator().manual_seed(seed)
        config = dataclasses.replace(preset("mini"), index_head_dim=width)
        self.pool = IndexPool(Geometry(config), 8, self.layout)
        self.pool.poison()
        self.pages = self.pool.pages(4)
        self.values = torch.zeros(2, 3 * PAGE_ROWS, width, dtype=torch.float64)
        for b, row in enumerate(TABLE):
            for i, block in enumerate(row):
                codes, scales = index_rows.encode(uneven(generator, PAGE_ROWS, width, spread=3), self.layout.form)
                keys = index_rows.decode(codes, scales, self.layout.form)
                self.values[b, i * PAGE_ROWS : (i + 1) * PAGE_ROWS] = keys
                for page, part in zip(self.pages, index_rows.pack(codes, scales, self.layout), strict=True):
                    page[block] = part
        codes, scales = index_rows.encode(uneven(generator, len(VISIBLE), heads, width, spread=3), self.layout.form)
        self.queries = index_rows.decode(codes, scales, self.layout.form).double()
        if self.layout.form == "fp8":
            scales = (scales.view(torch.int32) >> 23).to(torch.uint8)
            assert torch.equal(scale_value(scales).float(), index_rows.encode(self.queries.float(), "fp8")[1])
        weights = torch.randn(len(VISIBLE), heads, generator=generator)
        self.batch = torch.tensor([-1, 0, 1, 0, 1, 0, 1], dtype=torch.int32)
        self.visible = torch.tensor(VISIBLE, dtype=torch.int32)
        self.args = codes, scales, weights, *self.pages, TABLE, self.batch, self.visible

    def expected(self) -> tuple[torch.Tensor, torch.Tensor]:
        """float64 scores, and the bound: d products and sums per head, two scales, one weight, h sums."""
        keys = self.values[self.batch.long()]
        weights = self.args[2].double()
        heads, width = self.queries.shape[1:]
        dots = torch.einsum("thd,tcd->thc", self.queries, keys).clamp_min(0)
        size = torch.einsum("thd,tcd->thc", self.queries.abs(), keys.abs())
        error = gamma(width + 2) + (fp8_partial_error() if self.layout.form == "fp8" else 0.0)
        bound = (weights.abs()[:, :, None] * (error * size + gamma(heads + 2) * dots)).sum(1)
        return (weights[:, :, None] * dots).sum(1), bound * (1 + 2.0**-10)

    def faults(self, module=logits_file, columns: int = 192, **how) -> str:
        got = on_device(module.index_logits)(*self.args, columns=columns, order=self.layout.order, **how)
        want, bound = self.expected()
        seen = torch.arange(columns) < self.visible[:, None]
        if not ((got.double() - want[:, :columns]).abs() <= bound[:, :columns])[seen].all():
            return "outside the bound"
        return "" if (got.view(torch.int32)[~seen] == -1).all() else "a hidden column was written"


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("tiles", [None, SMALL])
def test_scores_within_the_bound_in_every_layout(name, tiles, monkeypatch):
    case = Scores(name)
    poison_new_memory(monkeypatch)
    assert case.faults(tiles=tiles) == ""


@pytest.mark.parametrize("name", ["fp4_natural", "fp8_linear"])
@pytest.mark.parametrize(("heads", "width"), [(64, 128), (17, 64), (1, 128)])
def test_scores_of_other_shapes(name, heads, width, monkeypatch):
    case = Scores(name, heads, width)
    poison_new_memory(monkeypatch)
    assert case.faults() == ""


@pytest.mark.parametrize("name", ["fp4_flydsl", "fp8_linear"])
@pytest.mark.parametrize("tiles", [None, SMALL])
def test_a_score_does_not_depend_on_company_or_columns(name, tiles):
    case = Scores(name)
    order = case.layout.order
    whole = index_logits(*case.args, columns=192, order=order, tiles=tiles)
    for t in (3, 6):
        one = [x[t : t + 1] for x in case.args[:3]]
        args = *one, *case.pages, TABLE, case.batch[t : t + 1], case.visible[t : t + 1]
        alone = index_logits(*args, columns=VISIBLE[t], order=order, tiles=tiles)
        assert torch.equal(alone[0], whole[t, : VISIBLE[t]])


def test_too_few_columns_give_nan():
    case = Scores("fp4_natural")
    got = index_logits(*case.args, columns=100)
    assert got[5:].isnan().all() and not got[4, :65].isnan().any()


def test_a_nan_key_shows_where_it_is_seen():
    """Scale byte 255 of one key: NaN for the tokens of its sequence that see it, and for nobody else."""
    case = Scores("fp4_natural")
    case.pages[1][TABLE[1, 1], 4 * 3] = 255  # key 67 of sequence 1
    got = index_logits(*case.args, columns=192)
    seen = torch.arange(192) < case.visible[:, None]
    assert (got.isnan() & seen).nonzero().tolist() == [[6, 67]]


def test_pages_behind_two_gib():
    case = Scores("fp8_linear")
    far, stride = 300_000, 8448
    wide = torch.empty(far + 8, stride, dtype=torch.uint8)
    keys, scales = wide[:, :8192], wide[:, 8192:].view(torch.float32)
    keys[far:], scales[far:] = case.pages
    args = *case.args[:3], keys, scales, TABLE + far, *case.args[6:]
    seen = torch.arange(192) < case.visible[:, None]
    want = index_logits(*case.args, columns=192)
    assert far * stride > 2**31
    assert torch.equal(index_logits(*args, columns=192)[seen], want[seen])


SCORE_MISTAKES = {
    "no ReLU": ("tl.where(dot < 0, 0.0, dot)", "dot"),
    "ReLU after the weight": ("tl.where(dot < 0, 0.0, dot) * weight[:, None]", "tl.maximum(dot * weight[:, None], 0.0)"),
    "weights left out": ("* weight[:, None], 0)", "* 1.0, 0)"),
    "low nibble twice": ("tl.join(packed & 15, packed >> 4)", "tl.join(packed & 15, packed & 15)"),
    "scales of the next key": ("scale_at(r, g, GROUPS, ORDER)", "scale_at(r ^ 1, g, GROUPS, ORDER)"),
    "natural scales read as FlyDSL's": ("scale_at(r, g, GROUPS, ORDER)", "scale_at(r, g, GROUPS, 2)"),
    "page table ignored": ("block[:, None] * keys_stride", "(block[:, None] * 0 + 4) * keys_stride"),
    "another sequence": ("block_table + sequence", "block_table + 0 * sequence"),
    "hidden keys scored": ("live = c < tl.minimum(limit, columns)", "live = c < tl.minimum(limit + 1, columns)"),
    "last key lost": ("live = c < tl.minimum(limit, columns)", "live = c < tl.minimum(limit - 1, columns)"),
    "heads in one bfloat16": ("score = tl.sum(tl", "score = tl.sum(0.996 * tl"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", SCORE_MISTAKES)
def test_planted_mistakes_in_scores_are_seen(tmp_path, mistake, monkeypatch):
    case = Scores("fp4_natural")
    poison_new_memory(monkeypatch)
    assert case.faults(mutant(logits_file, tmp_path, SCORE_MISTAKES[mistake]))


def picked(logits: torch.Tensor, visible: torch.Tensor, k: int) -> torch.Tensor:
    """From the definition: sort by (value falling, column rising), take k, sort by column; NaN as +infinity."""
    out = torch.full((len(logits), k), -1, dtype=torch.int32)
    for t, row in enumerate(logits.tolist()):
        seen = row[: max(0, int(visible[t]))]
        best = sorted(range(len(seen)), key=lambda c: (-(seen[c] if seen[c] == seen[c] else np.inf), c))[:k]
        out[t, : len(best)] = torch.tensor(sorted(best), dtype=torch.int32)
    return out


def adversarial(tokens: int, n: int, seed: int) -> torch.Tensor:
    """Few distinct values, huge and tiny ones, both zeros, neighbours one ulp apart, infinities and NaN; strided."""
    generator = torch.Generator().manual_seed(seed)
    wide = torch.full((tokens, n + 3), torch.nan)
    x = torch.randn(tokens, n, generator=generator)
    kind = torch.randint(0, 8, (tokens, n), generator=generator)
    special = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1e-42, -3e38, 1.0])
    ulp = (1.0 + torch.randint(0, 4, (tokens, n), generator=generator) * 2.0**-23) * torch.sign(x)
    chosen = special[torch.randint(0, 8, (tokens, n), generator=generator)]
    wide[:, :n] = torch.where(kind == 0, chosen, torch.where(kind < 4, ulp, torch.where(kind < 6, x.round(), x)))
    return wide[:, :n]


def topk_faults(logits, visible, k, module=topk_file, **how) -> bool:
    got = on_device(module.topk)(logits, visible, k, **how)
    return not torch.equal(got, picked(logits, visible, k))


@settings(max_examples=40)
@given(st.integers(0, 90), st.integers(1, 40), st.sampled_from([16, 64, 1024]), st.integers(0, 9999))
def test_topk_of_adversarial_rows(n, k, columns, seed):
    visible = torch.randint(0, n + 1, (4,), generator=torch.Generator().manual_seed(seed)).int()
    visible[0] = n
    assert not topk_faults(adversarial(4, n, seed), visible, k, tiles=topk_file.Tiles(COLS=columns))


@pytest.mark.parametrize("visible", [0, 1, 1023, 1024, 1025, 5000])
def test_topk_of_pro_around_its_threshold(visible, monkeypatch):
    logits = torch.randn(2, 5000, generator=torch.Generator().manual_seed(visible)).mul(8).round().div(8)
    poison_new_memory(monkeypatch, 0x55)
    assert not topk_faults(logits, torch.tensor([visible, 4097], dtype=torch.int32), 1024, tiles=topk_file.Tiles(COLS=512))


def test_topk_of_a_million_tokens_context():
    logits = torch.randn(1, 250_000, generator=torch.Generator().manual_seed(0)).mul(1000).round()
    assert not topk_faults(logits, torch.tensor([250_000], dtype=torch.int32), 1024)


def test_topk_equals_the_references_selection():
    logits = adversarial(6, 700, 5)
    visible = torch.tensor([700, 0, 3, 65, 64, 650], dtype=torch.int32)
    assert torch.equal(topk(logits, visible, 64).long(), reference_indexer.select_topk(logits, visible, 64))


def test_what_topk_must_not_see_may_hold_anything():
    logits = adversarial(3, 100, 1)
    visible = torch.tensor([40, 7, 99], dtype=torch.int32)
    clean = topk(logits, visible, 16)
    for t, v in enumerate(visible):
        logits[t, v:] = torch.nan
    assert torch.equal(topk(logits, visible, 16), clean)


TOPK_MISTAKES = {
    "negative values in wrong order": ("tl.where((u >> 31) == 1, u ^ 0xFFFFFFFF, u | 0x80000000)", "u"),
    "minus zero below zero": ("tl.where(x == 0, 0.0, x)", "x"),
    "NaN dropped": ('float("inf"), tl', '-float("inf"), tl'),
    "one tie too many": ("tl.cumsum(equal, 0) <= ties", "tl.cumsum(equal, 0) <= ties + 1"),
    "ties to the higher column of a tile": ("tl.cumsum(equal, 0) <= ties", "tl.sum(equal, 0) - tl.cumsum(equal, 0) < ties"),
    "all ties taken": ("(equal == 1) & (tied", "(equal == 1) & (0 * tied"),
    "ties forgotten between tiles": ("tied += tl.sum(equal, 0)", "tied += 0"),
    "tail not filled": ("mask=(k >= tl.minimum(limit, K))", "mask=(k >= limit + 1)"),
    "last byte ignored": ("tl.static_range(24, -8, -8)", "tl.static_range(24, 0, -8)"),
    "row limit ignored": ("limit = tl.minimum(tl.load(visible + t), n)", "limit = n"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", TOPK_MISTAKES)
def test_planted_mistakes_in_topk_are_seen(tmp_path, mistake, monkeypatch):
    inside = ("1, c, mask=take)", "1, c, mask=take & (taken + tl.cumsum(count, 0) <= K))")  # no mistake leaves its row
    wrong = mutant(topk_file, tmp_path, TOPK_MISTAKES[mistake], inside)
    poison_new_memory(monkeypatch, 0x55)
    visible = torch.tensor([90, 85, 5, 77], dtype=torch.int32)
    logits = adversarial(4, 90, 0)
    logits[1] = torch.randn(90, generator=torch.Generator().manual_seed(2)).round()  # many ties in one tile
    assert topk_faults(logits, visible, 30, wrong, tiles=topk_file.Tiles(COLS=16))


class Translation:
    """A mixed step of mini: picks whose tails hold poison, a padded token, lists built without and with the kernel."""

    def __init__(self, seed: int = 0):
        rng = np.random.default_rng(seed)
        self.config = preset("mini")
        self.geometry = Geometry(self.config, lookahead=1)
        pool = Pool(self.geometry, blocks=9, slots=3)
        self.positions = np.array([0, 2, 3, 4, 31, 700, 254, 255, 256, 9], np.int32)
        self.batch = np.array([0, 0, 0, 0, 0, 1, 1, 2, 2, -1], np.int32)
        self.table = np.array([[3, 1, 0], [7, 2, 5], [4, 8, 6]], np.int32)
        seen = np.minimum((self.positions + 1) // 4, self.config.index_topk)
        self.picks = np.full((len(self.batch), self.config.index_topk + 4), 190, np.int32)[:, :-4]  # wrong, not wild
        for t, n in enumerate(seen):
            self.picks[t, :n] = np.sort(rng.permutation((self.positions[t] + 1) // 4)[:n])
        slots = np.array([pool.slot_position(g) for g in range(3)])
        args = self.geometry, "csa", self.positions, self.batch, slots, self.table, self.picks.copy()
        self.want, self.indptr = plans.attention_lists(*args)

    def faults(self, module=translate_file, **how) -> bool:
        indices = torch.from_numpy(self.want.copy())
        window = self.config.sliding_window
        for t, (start, end) in enumerate(zip(self.indptr, self.indptr[1:], strict=False)):
            if self.batch[t] >= 0:
                indices[start : end - min(int(self.positions[t]) + 1, window)] = -7  # what the kernel is to write
        assert (indices == -7).sum() > 20
        picks, table = (torch.from_numpy(x) for x in (self.picks, self.table))
        args = picks, *map(torch.from_numpy, (self.positions, self.batch)), table, torch.from_numpy(self.indptr), indices
        on_device(module.translate)(*args, window=window, envelope=self.geometry.envelope, block_rows=64, **how)
        return not np.array_equal(indices.numpy(), self.want)


@pytest.mark.parametrize("tiles", [None, translate_file.Tiles(ROWS=2, COLS=4)])
@pytest.mark.parametrize("seed", range(3))
def test_translation_gives_the_lists_of_the_plan(tiles, seed):
    assert not Translation(seed).faults(tiles=tiles)


TRANSLATE_MISTAKES = {
    "window not skipped": ("- start - in_window", "- start"),
    "window of a full ring": ("tl.minimum(tl.load(positions + t, mask=live, other=0) + 1, window)", "window + 0 * start"),
    "another sequence's blocks": ("sequence[:, None] * table_stride", "0 * sequence[:, None] * table_stride"),
    "first block only": ("+ entry // block_rows", "+ 0 * entry // block_rows"),
    "row within the block lost": ("+ entry % block_rows", "+ 0 * entry % block_rows"),
    "picks past the count": ("tl.minimum(count, K)", "tl.minimum(count + 1, K)"),
    "last pick lost": ("tl.minimum(count, K)", "tl.minimum(count - 1, K)"),
}


@pytest.mark.parametrize("mistake", TRANSLATE_MISTAKES)
def test_planted_mistakes_in_translation_are_seen(tmp_path, mistake):
    assert Translation().faults(mutant(translate_file, tmp_path, TRANSLATE_MISTAKES[mistake]))


def test_what_does_not_fit_is_refused():
    case = Scores("fp4_natural")
    with pytest.raises(ValueError, match="pages"):
        index_logits(*case.args, columns=193)
    with pytest.raises(ValueError, match="preshuffled"):
        index_logits(*case.args, columns=64, order="preshuffled")
    with pytest.raises(ValueError, match="top-0"):
        topk(torch.zeros(1, 4), torch.zeros(1, dtype=torch.int32), 0)
