"""Plans and attention lists against the rules token by token, and the plan of a whole step against a slow planner."""

from __future__ import annotations

from array import array

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_cases import mutant

from optimized import step as step_file
from optimized.pool import plans
from optimized.pool.allocator import Sequence
from optimized.pool.geometry import KINDS, RATIO, Geometry
from optimized.rope import rope_table
from reference.presets import preset


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
        ("csa", ("count[:, None], picks, last)", "count[:, None], picks, 0)")),  # the undefined tail enters
        ("window", ("np.minimum(positions + 1, geometry.config.sliding_window)", "np.minimum(positions + 1, geometry.ring)")),
        ("window", ("positions[:, None] - np", "positions[:, None] - 1 - np")),  # the token does not see itself
        ("csa", ("(rows[line, :n], last[len(last) - w :])", "(last[len(last) - w :], rows[line, :n])")),  # windows in front
        ("csa", ("last[len(last) - w :]", "last[:w]")),  # the rows before position 0
        ("hca", ("take(entry // per_block", "take(entry % per_block")),
    ],
)
def test_planted_mistakes_in_the_lists_are_seen(tmp_path, kind, edit):
    (indices, indptr), (want, ptr) = verify_step(kind, mutant(plans, tmp_path, edit))
    assert (indices.tolist(), indptr.tolist()) != (want, ptr)


def test_the_largest_block_that_row_numbers_reach():
    g, zero, last = Geometry(preset("v4-pro")), np.array([0]), (2**31 - 1) // 1982
    indices, _ = plans.attention_lists(g, "hca", np.array([255]), zero, zero, np.array([[last]]))
    assert indices[:2].tolist() == [1982 * last, 1982 * last + 1]


def test_lists_need_picks_once_rows_are_dropped():
    g = Geometry(preset("mini"))
    table, slots, zero = np.zeros((1, 1), int), np.array([3]), np.array([0])
    last_lossless = 4 * g.config.index_topk + 2
    _, indptr = plans.attention_lists(g, "csa", np.array([last_lossless]), zero, slots, table)
    assert indptr[1] == g.config.index_topk + 16
    with pytest.raises(ValueError, match="no picks"):
        plans.attention_lists(g, "csa", np.array([last_lossless + 1]), zero, slots, table)


STEPS = {  # start and tokens of each sequence
    "decode and verify": [(0, 1), (126, 2), (127, 1), (4_098, 2), (10_003, 1), (65_535, 2), (999_999, 2), (0, 2)],
    "one token more than a verify step": [(126, 3), (7, 1)],
    "mixed": [(0, 131), (1, 3), (254, 260), (127, 1), (4_099, 2), (255, 1), (1_000_000, 1)],
}


def sequences_of(step: list[tuple[int, int]]) -> list[Sequence]:
    """Slots and blocks out of order, other sequences' blocks between."""
    found = []
    for i, (start, tokens) in enumerate(step):
        blocks = (np.arange(-(-(start + tokens) // 256)) * 7 + 3 * i + 1) % 4096
        found.append(Sequence(slot=900 - 5 * i, blocks=array("i", blocks.tolist()), length=start))
    return found


def planned(step: list[tuple[int, int]], module=step_file) -> dict:
    """What the planner makes of a step of Pro with one draft token, as lists by name."""
    g = Geometry(preset("v4-pro"), "2buff", lookahead=1, drafter_blocks=1)
    ids = [torch.arange(n) + 10 * i for i, (_, n) in enumerate(step)]
    plan = module.plan_step(g, set(KINDS), ids, sequences_of(step), [s for s, _ in step], "cpu")
    found = {name: getattr(plan, name) for name in ("ids", "positions", "batch_ids", "visible", "slots", "columns", "direct")}
    for kind, of in plan.kinds.items():
        parts = {name: getattr(of, name) for name in ("indices", "indptr", "longest", "destination")} | {"turn": of.turn[0]}
        if of.compression:
            parts |= {"complete": of.compression.complete, "keep": of.compression.keep, "angle": of.compression.turn[1]}
        found |= {f"{kind}.{name}": value for name, value in parts.items()}
    return {name: value.tolist() if isinstance(value, torch.Tensor) else value for name, value in found.items()}


def planned_slowly(step: list[tuple[int, int]]) -> dict:
    """The same from the rules of docs/pool.md §5, a token at a time."""
    g = Geometry(preset("v4-pro"), "2buff", lookahead=1, drafter_blocks=1)
    sequences, window, ring = sequences_of(step), 128, 129
    tokens = [(b, start + j, start, start + n) for b, (start, n) in enumerate(step) for j in range(n)]
    first = {b: t for t, (b, p, start, _) in reversed(list(enumerate(tokens))) if p == start}
    direct = max(n for _, n in step) <= 2
    found = {
        "ids": [j + 10 * b for b, (_, n) in enumerate(step) for j in range(n)], "positions": [p for _, p, _, _ in tokens],
        "batch_ids": [b for b, *_ in tokens], "visible": [(p + 1) // 4 for _, p, _, _ in tokens],
        "slots": [s.slot for s in sequences], "columns": max(1, *((p + 1) // 4 for _, p, _, _ in tokens)), "direct": direct,
    }  # fmt: skip
    for kind, ratio in RATIO.items():
        indices, indptr, longest, destination, complete, keep = [], [0], 0, [], [], []
        for t, (b, p, start, end) in enumerate(tokens):
            entries = range((p + 1) // ratio) if ratio else ()
            if kind == "csa":
                indices += [0] * min(len(entries), 1024)  # their places are kept, the picks come later
            else:
                indices += [1982 * sequences[b].blocks[c // 2] + c % 2 for c in entries]
            for q in range(max(0, p - window + 1), p + 1):
                fresh = q >= start and not direct
                indices.append(-1 - (first[b] + q - start) if fresh else int(g.window_index(kind, sequences[b].slot, q)))
            longest = max(longest, len(indices) - indptr[-1])
            indptr.append(len(indices))
            taken = p + ring < end
            destination.append(-1 if taken else int(g.window_index(kind, sequences[b].slot, p)))
            pooled = {0: 0, 4: 8, 128: 128}[ratio]
            row = [t, b, p, max(0, pooled - (p - start + 1))]
            complete += [row] if ratio and (p + 1) % ratio == 0 else []
            keep += [row] if ratio and p >= end - pooled - 1 else []
        layer = g.kinds.index(kind)
        table = rope_table(g.config, layer, torch.tensor([p for _, p, _, _ in tokens]))[0]
        lists = {"indices": indices, "indptr": indptr, "longest": longest, "destination": destination, "turn": table.tolist()}
        if ratio:
            starts = torch.tensor([p // ratio * ratio for _, _, p, _ in complete], dtype=torch.int64)
            angle = rope_table(g.config, layer, starts)[1].tolist()
            lists |= {"complete": complete, "keep": keep, "angle": angle}
        found |= {f"{kind}.{name}": value for name, value in lists.items()}
    return found


@pytest.mark.parametrize("name", STEPS)
def test_the_plan_of_a_step_equals_a_slow_planner(name):
    assert planned(STEPS[name]) == planned_slowly(STEPS[name])


@pytest.mark.parametrize(
    "edit",
    [
        ("positions + geometry.ring < places", "positions + geometry.ring <= places"),  # one token too many is dropped
        ("<= geometry.lookahead + 1", "<= geometry.lookahead + 2"),  # a row that a token needs is overwritten
        ("complete[:, 2] // ratio * ratio", "complete[:, 2]"),  # turned at the group's last token
        ("None if direct else (places.first, places.start)", "None"),
        ("max(1, int(seen.max()))", "int(seen.min())"),
    ],
)
def test_planted_mistakes_in_the_plan_of_a_step_are_seen(tmp_path, edit):
    wrong = mutant(step_file, tmp_path, edit)
    assert any(planned(step, wrong) != planned_slowly(step) for step in STEPS.values())


@pytest.mark.parametrize("edit", [("start - 1 - first - at", "start - first - at"), ("at >= start,", "at > start,")])
def test_planted_mistakes_in_rows_of_the_step_are_seen(tmp_path, monkeypatch, edit):
    monkeypatch.setattr(step_file, "plans", mutant(plans, tmp_path, edit))
    assert planned(STEPS["mixed"]) != planned_slowly(STEPS["mixed"])
