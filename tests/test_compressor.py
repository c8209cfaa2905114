"""Compressed rows: what they depend on, what gates do, where they stand, how they stream."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from bounds import assert_within, rounding_bound
from hypothesis import strategies as st
from strategies import TINY, adversarial, holds, normal, refuted, seeds
from torch import Tensor

from reference import compressor as module
from reference.compressor import Compressor, overlap, pool
from reference.linear import Linear
from reference.norm import rms_norm
from reference.rope import Rope, rotate
from reference.rounding import Sites
from reference.state import CompressorState

D, DH, EPS = 24, 64, 2e-6
SITES = Sites()


def compressor(ratio: int, seed: int = 0, rotated: bool = False, ape_size: float = 1.0) -> Compressor:
    columns = DH * (2 if ratio == 4 else 1)
    return Compressor(
        wkv=Linear(normal(seed, columns, D) / 5),
        wgate=Linear(normal(seed + 1, columns, D) / 3),
        ape=ape_size * normal(seed + 2, ratio, columns),
        norm=1 + normal(seed + 3, DH) / 4,
        ratio=ratio,
        rope=Rope(160000, 32, TINY.rope_scaling),
        eps=EPS,
        index_keys=rotated,
    )


def rows(c: Compressor, x: Tensor, cuts: list[int] | None = None) -> Tensor:
    """Rows of inputs x [t, D], cut before the positions of `cuts`."""
    state, first = c.initial_state(), 0
    for part in torch.tensor_split(x, cuts or []):
        positions = torch.arange(first, first + len(part))
        state = c.extend(*c.project(part, positions, SITES), state, SITES)
        first += len(part)
    return state.rows


Extend = Callable[..., CompressorState]
ratios = st.sampled_from([4, 128])
lengths = st.one_of(st.sampled_from([1, 3, 4, 5, 7, 8, 9, 127, 128, 129, 255, 256, 257]), st.integers(1, 260))
cases = st.tuples(seeds, ratios, lengths, st.lists(st.integers(1, 259), max_size=5, unique=True))
Case = tuple[int, int, int, list[int]]


def follows_the_definition(of: Callable[..., Tensor], case: Case) -> None:
    """Each row from the tokens of its window, slot by slot; position r*j; a partial block gives none."""
    seed, r, n, _ = case
    c, x = compressor(r, seed % 1000), normal(seed, n, D)
    got = of(c, x)
    assert got.shape == (n // r, DH)
    for j in range(0, n // r, max(1, n // r // 3)):
        slots = [(p, 0) for p in range(r * j - r, r * j) if p >= 0 and r == 4]
        slots += [(p, DH if r == 4 else 0) for p in range(r * j, r * j + r)]
        a = torch.stack([c.wkv.weight[h : h + DH] @ x[p] for p, h in slots])
        g = torch.stack([c.wgate.weight[h : h + DH] @ x[p] + c.ape[p % r, h : h + DH] for p, h in slots])
        weight = torch.exp(g - g.amax(0)) / torch.exp(g - g.amax(0)).sum(0)
        row = rms_norm((weight * a).sum(0), c.norm, EPS)
        want = rotate(row[None], c.rope.table(torch.tensor([r * j]), torch.float64, SITES))[0]
        assert_within(rounding_bound(4 * D + 4 * len(slots), want, a), got[j], want)


def any_cut_gives_the_same_rows(of: Callable[..., Tensor], case: Case) -> None:
    seed, r, n, cuts = case
    c, x = compressor(r, seed % 1000), normal(seed, n, D)
    whole, cut = of(c, x), of(c, x, sorted(k for k in cuts if k < n))
    assert_within(rounding_bound(4 * D, whole), cut, whole)


def depends_on_its_window(of: Callable[..., Tensor], case: Case) -> None:
    """Changing token p changes row j if and only if r*j - r*overlap <= p < r*j + r."""
    seed, r, n, _ = case
    c, x, p = compressor(r, seed % 1000), normal(seed, n, D), seed % n
    other = x.clone()
    other[p] += 1
    changed = (of(c, x) != of(c, other)).any(-1)
    for j in range(len(changed)):
        assert bool(changed[j]) == (r * (j - (r == 4)) <= p < r * (j + 1))


def constants_on_gates_do_nothing(of: Callable[..., Tensor], case: Case) -> None:
    """A constant per channel added to all position biases moves no row."""
    seed, r, n, _ = case
    c, x = compressor(r, seed % 1000), normal(seed, n, D)
    shift = normal(seed + 5, DH)
    moved = dataclasses.replace(c, ape=c.ape + (torch.cat([shift, shift]) if r == 4 else shift))
    assert_within(rounding_bound(64, of(c, x)), of(moved, x), of(c, x))


def mean(values: Tensor, gates: Tensor) -> Tensor:
    """What pooling is when all gates are equal: the plain mean over slots whose gate is not -inf."""
    present = torch.isfinite(gates)
    return torch.where(present, values, 0).sum(1) / present.sum(1)


def equal_gates_give_means(pooling: Callable[..., Tensor], case: Case) -> None:
    seed, r, _, _ = case
    values, gates = adversarial(seed, 3, 2 * r, DH), torch.full((3, 2 * r, DH), 1.75, dtype=torch.float64)
    gates[0, :r] = -torch.inf  # the first window has no older block
    values[0, :r] = 0
    assert_within(rounding_bound(4 * r, values), pooling(values, gates), mean(values, gates))


def gates_act_by_channel(pooling: Callable[..., Tensor], case: Case) -> None:
    """One channel's gate changes that channel only."""
    values, gates = normal(case[0], 2, 8, DH), normal(case[0] + 1, 2, 8, DH)
    raised = gates.clone()
    raised[:, 3, 5] += 2
    changed = (pooling(values, raised) != pooling(values, gates)).any(0)
    assert changed.nonzero().flatten().tolist() == [5]


def patched(name: str, wrong: Any) -> Callable[..., Tensor]:
    """`rows` with one function of the module, or one method of Compressor, replaced."""

    def of(c: Compressor, x: Tensor, cuts: list[int] | None = None) -> Tensor:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Compressor if hasattr(Compressor, name) else module, name, wrong)
            return rows(c, x, cuts)

    return of


def halves_swapped(blocks: Tensor) -> Tensor:
    dh = blocks.shape[-1] // 2
    return torch.cat([blocks[:-1, :, dh:], blocks[1:, :, :dh]], dim=1)


def newer_only(blocks: Tensor) -> Tensor:
    dh = blocks.shape[-1] // 2
    return torch.cat([blocks[1:, :, :dh], blocks[1:, :, dh:]], dim=1)


right_extend, right_finish, right_project = Compressor.extend, Compressor.finish, Compressor.project


def forgets_the_buffer(self: Compressor, values: Tensor, gates: Tensor, state: CompressorState, sites: Sites) -> Any:
    return right_extend(self, values, gates, CompressorState(*self.initial_state().__dict__.values())
                        if len(state.values) > self.ratio else state, sites)  # fmt: skip


def counts_rows_from_zero(self: Compressor, pooled: Tensor, first: int, sites: Sites) -> Tensor:
    return right_finish(self, pooled, 0, sites)


def stands_at_its_last_token(self: Compressor, pooled: Tensor, first: int, sites: Sites) -> Tensor:
    rope = self.rope
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Rope, "table", lambda me, at, dtype, s, right=Rope.table: right(rope, at + self.ratio - 1, dtype, s))
        return right_finish(self, pooled, first, sites)


def bias_on_values_too(self: Compressor, x: Tensor, positions: Tensor, sites: Sites) -> tuple[Tensor, Tensor]:
    values, gates = right_project(self, x, positions, sites)
    return values + self.ape[positions % self.ratio], gates


def one_gate_per_token(values: Tensor, gates: Tensor) -> Tensor:
    return pool(values, gates.mean(-1, keepdim=True).expand_as(gates))


def softmax_over_channels(values: Tensor, gates: Tensor) -> Tensor:
    return (torch.softmax(gates, dim=2) * values).sum(1)


def empty_slots_count(values: Tensor, gates: Tensor) -> Tensor:
    return pool(values, gates.masked_fill(torch.isinf(gates), 0.0))


ROW_LAWS = [follows_the_definition, any_cut_gives_the_same_rows, depends_on_its_window, constants_on_gates_do_nothing]


@pytest.mark.parametrize("law", ROW_LAWS)
def test_rows(law: Callable[..., None]) -> None:
    holds(law, cases, rows)


@pytest.mark.parametrize("law", [equal_gates_give_means, gates_act_by_channel])
def test_pool(law: Callable[..., None]) -> None:
    holds(law, cases, pool)


@pytest.mark.parametrize(
    ("law", "wrong"),
    [
        (follows_the_definition, patched("overlap", halves_swapped)),
        (follows_the_definition, patched("finish", stands_at_its_last_token)),
        (follows_the_definition, patched("pool", one_gate_per_token)),
        (any_cut_gives_the_same_rows, patched("extend", forgets_the_buffer)),
        (any_cut_gives_the_same_rows, patched("finish", counts_rows_from_zero)),
        (depends_on_its_window, patched("overlap", newer_only)),
        (constants_on_gates_do_nothing, patched("project", bias_on_values_too)),
    ],
)
def test_row_laws_see(law: Callable[..., None], wrong: Callable[..., Tensor]) -> None:
    refuted(law, cases, wrong)


@pytest.mark.parametrize(
    ("law", "wrong"),
    [
        (equal_gates_give_means, softmax_over_channels),
        (equal_gates_give_means, empty_slots_count),
        (gates_act_by_channel, one_gate_per_token),
        (gates_act_by_channel, softmax_over_channels),
    ],
)
def test_pool_laws_see(law: Callable[..., None], wrong: Callable[..., Tensor]) -> None:
    refuted(law, cases, wrong)


def test_overlap_pairs_older_first_halves_with_newer_second_halves() -> None:
    blocks = torch.arange(3 * 4 * 2).view(3, 4, 2)
    windows = overlap(blocks)
    assert windows.shape == (2, 8, 1)
    assert windows[0, :, 0].tolist() == [0, 2, 4, 6, 9, 11, 13, 15]


def test_index_keys_are_turned_after_the_rotation() -> None:
    """RoPE first, then the Hadamard matrix over all channels."""
    from reference.hadamard import hadamard

    x = normal(8, 12, D)
    plain, turned = rows(compressor(4), x), rows(compressor(4, rotated=True), x)
    assert_within(rounding_bound(2 * DH, turned), turned, hadamard(plain))


def test_the_state_keeps_what_later_rows_need_and_no_more() -> None:
    for ratio, n, kept in ((4, 4, 4), (4, 6, 6), (4, 9, 5), (128, 127, 127), (128, 128, 0), (128, 130, 2)):
        c = compressor(ratio)
        state = c.extend(*c.project(normal(1, n, D), torch.arange(n), SITES), c.initial_state(), SITES)
        assert len(state.values) == len(state.gates) == kept
