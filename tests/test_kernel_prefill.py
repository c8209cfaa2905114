"""Two-source prefill attention: the bits of decode attention, whichever source a row comes from."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from kernel_cases import mutant, on_device, poison_new_memory

from optimized.kernels import decode_attention as attention_file
from optimized.kernels import prefill_attention as prefill_file
from optimized.kernels.decode_attention import Tiles
from optimized.kernels.window_write import last_writes, write_window
from optimized.pool import plans, rows
from optimized.pool.geometry import Geometry
from optimized.pool.pool import Pool
from optimized.rope import rope_table
from reference.presets import preset

decode_attention = on_device(attention_file.decode_attention)
prefill_attention = on_device(prefill_file.prefill_attention)

SMALL = Tiles(HEADS=16, ROWS=16, SPLIT=16, JOIN=8)  # lists of up to 24 rows: two parts
STARTS, EXTEND = [1021, 0, 130], [3, 18, 1]  # a long prefix, a first chunk longer than the ring, a short one
HEADS = 8


class Case:
    """A step of three sequences over a pool that holds what came before it, in mini's geometry (window 16)."""

    def __init__(self, build: str = "2buff", kind: str = "csa", seed: int = 0):
        self.config = preset("mini")
        self.geometry = Geometry(self.config, build, lookahead=1, drafter_blocks=1)
        self.layer, self.kind = self.geometry.kinds.index(kind), kind
        self.generator = torch.Generator().manual_seed(seed)
        self.pool = Pool(self.geometry, blocks=7, slots=4)
        self.slots = np.array([self.pool.slot_position(g) for g in (2, 0, 3)])
        self.table = np.array([[4, 1, 2, 5], [0, 0, 0, 0], [6, 6, 6, 6]])
        self.batch = np.repeat(np.arange(3), EXTEND)
        first = np.cumsum(EXTEND) - EXTEND
        self.start = np.array(STARTS)
        self.positions = self.start[self.batch] + np.arange(len(self.batch)) - first[self.batch]
        self.padding = np.where(np.arange(len(self.batch)) == 9, -1, self.batch)  # a padded token amid the others
        self.step = first, self.start
        self.views = (*self.pool.layer_rows(self.layer), None)[:2]
        self.payload = self.random_rows(len(self.batch))
        for view, values in zip(self.views, self.random_rows(len(self.views[0])), strict=True):
            if view is not None:
                view.copy_(values)
        tokens = len(self.batch)
        self.q = (2 * torch.randn(tokens, HEADS, self.config.head_dim, generator=self.generator)).bfloat16()
        self.sink = torch.linspace(-4, 4, HEADS)
        self.turn = rope_table(self.config, self.layer, torch.from_numpy(self.positions))
        self.scale = self.config.head_dim**-0.5

    def random_rows(self, n: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Rows of any bytes that are numbers of moderate size, a scale of its own in every tile."""
        d = self.config.head_dim
        if self.geometry.build == "bf16":
            return torch.randn(n, d, generator=self.generator).bfloat16(), None
        codes = torch.randint(0, 120, (n, d - 64), generator=self.generator, dtype=torch.uint8)
        codes |= torch.randint(0, 2, codes.shape, generator=self.generator, dtype=torch.uint8) << 7
        scales = torch.randint(114, 121, (n, d // 64 - 1), generator=self.generator, dtype=torch.uint8)
        return rows.pack_2buff(codes, scales, d), torch.randn(n, 64, generator=self.generator).bfloat16()

    def lists(self, two_sources: bool) -> tuple[torch.Tensor, torch.Tensor]:
        picks = None
        if self.kind == "csa":
            seen = np.minimum((self.positions + 1) // 4, self.config.index_topk)
            picks = np.tile(np.arange(self.config.index_topk), (len(self.batch), 1)) * np.where(seen == 8, 17, 1)[:, None]
        args = self.geometry, self.kind, self.positions, self.padding, self.slots, self.table, picks
        indices, indptr = plans.attention_lists(*args, self.step if two_sources else None)
        return torch.from_numpy(indices), torch.from_numpy(indptr)

    def prefill(self, tiles=SMALL):
        args = self.q, *self.views, *self.payload, *self.lists(True), self.sink, *self.turn
        return prefill_attention(*args, scale=self.scale, tiles=tiles)

    def decode_token_by_token(self, tiles=SMALL):
        """Every token alone, its own row and those before it written into the ring first."""
        indices, indptr = self.lists(False)
        ring, out = self.geometry.ring, []
        for t in range(len(self.batch)):
            row = self.geometry.window_index(self.kind, self.slots[self.batch[t]], self.positions[t])
            now = [p if p is None else p[t : t + 1] for p in self.payload]
            end = torch.tensor([int(self.positions[t]) + 1])
            destination = last_writes(torch.tensor([int(row)]), end - 1, end, ring)
            on_device(write_window)(*now, *self.views, destination)
            ptr = (indptr[t : t + 2] - indptr[t]).int()
            own = indices[indptr[t] : indptr[t + 1]]
            turn = [x[t : t + 1] for x in self.turn]
            args = self.q[t : t + 1], *self.views, own, ptr, self.sink, *turn
            out.append(decode_attention(*args, scale=self.scale, tiles=tiles))
        return torch.cat(out)


@pytest.mark.parametrize("build", ["2buff", "bf16"])
@pytest.mark.parametrize("kind", ["window", "hca", "csa"])
def test_a_chunk_has_the_bits_of_token_by_token_decoding(build, kind):
    tiles = None if (build, kind) == ("2buff", "csa") else SMALL
    case = Case(build, kind)
    got = case.prefill(tiles=tiles)
    indices, indptr = case.lists(True)
    assert (indices < 0).any() and (indices >= 0).any()
    assert got[9].abs().sum() == 0 and indptr[9] == indptr[10]
    assert torch.equal(got, case.decode_token_by_token(tiles))


def test_any_row_may_come_from_either_source():
    """The payload copied into free pool rows: one list, any mixture of sources, one answer."""
    case = Case()
    indices, indptr = case.lists(True)
    here = -1 - indices[indices < 0]
    moved = indices.clone()
    moved[indices < 0] = here
    views = [torch.cat([p, v]) for p, v in zip(case.payload, case.views, strict=True)]
    moved[indices >= 0] += len(case.batch)
    args = case.sink, *case.turn
    want = decode_attention(case.q, *views, moved, indptr, *args, scale=case.scale, tiles=SMALL)
    assert torch.equal(case.prefill(), want)
    mixed = torch.where(torch.arange(len(moved)) % 2 == 0, moved, torch.where(indices < 0, indices, moved))
    got = prefill_attention(case.q, *views, *case.payload, mixed, indptr, *args, scale=case.scale, tiles=SMALL)
    assert torch.equal(got, want)


def test_what_no_list_names_is_never_read(monkeypatch):
    """NaN in every unlisted row of the payload, in every unlisted pool row, and in scratch and output."""
    case = Case()
    case.payload = tuple(torch.cat([p, p[:1]]) for p in case.payload)  # a row that no list names
    clean = case.prefill()
    indices, _ = case.lists(True)
    for source, named in ((case.views, indices[indices >= 0]), (case.payload, -1 - indices[indices < 0])):
        unlisted = torch.ones(len(source[0]), dtype=torch.bool)
        unlisted[named.long()] = False
        assert unlisted.any()
        source[0][unlisted], source[1][unlisted] = 0xFF, torch.nan
    poison_new_memory(monkeypatch)
    assert torch.equal(case.prefill(), clean)


def test_many_tokens_cross_the_blocks_of_the_scratch(monkeypatch):
    case = Case()
    whole = case.prefill()
    monkeypatch.setattr(prefill_file, "TOKENS", 4)
    assert torch.equal(case.prefill(), whole)


def test_payload_rows_behind_two_gib():
    case = Case()
    far, tokens = 4_300_000, len(case.batch)
    indices, indptr = case.lists(True)
    step = [torch.empty(far + tokens, p.shape[1], dtype=p.dtype) for p in case.payload]
    for wide, p in zip(step, case.payload, strict=True):
        wide[far:] = p
    there = torch.where(indices < 0, indices - far, indices)
    args = case.q, *case.views, *step, there.int(), indptr, case.sink, *case.turn
    assert far * 512 > 2**31
    assert torch.equal(prefill_attention(*args, scale=case.scale, tiles=SMALL), case.prefill())


def test_sources_of_two_builds_are_refused():
    case, other = Case(), Case("bf16")
    args = case.q, *case.views, *other.payload, *case.lists(True), case.sink
    with pytest.raises(ValueError, match="builds"):
        prefill_attention(*args, scale=case.scale, tiles=SMALL)


MISTAKES = {
    "payload off by one": ("(-1 - row)[:, None]", "tl.maximum(-2 - row, 0)[:, None]"),
    "rotated channels of payload row 0": ("step_row * step_rope_stride", "0 * step_row"),
    "codes of payload row 0": ("step_row * step_main_stride", "0 * step_row"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_planted_mistakes_are_seen(tmp_path, monkeypatch, mistake):
    case = Case("2buff", "window")
    want = case.prefill()
    monkeypatch.setattr(prefill_file, "attend", mutant(attention_file, tmp_path, MISTAKES[mistake]).attend)
    assert not torch.equal(case.prefill(), want)
