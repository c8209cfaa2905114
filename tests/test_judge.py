"""Pouring, the layer flow, and inputs that let no parameter hide."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent / "meta"))

from judge_cases import HOW, run_layer

from optimized.pool.geometry import RATIO
from optimized.pool.pool import POISON
from parity import candidates, cases, flow, ops, twins
from parity.drift import Drift
from parity.judge import Bytes, Codes, Dense, Places, judge
from parity.pour import draw, pour
from reference.checkpoint.loader import Loader
from reference.checkpoint.open import open_store
from reference.linear import Linear
from reference.model import Model
from reference.rope import Rope
from reference.rounding import Sites, profile
from reference.state import SequenceState

MANY = 10  # budgets that a neutral parameter must cost
STORE = open_store("procedural:mini")


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def poured_states(layer: int, starts: list[int]):
    attn = Loader(STORE, torch.float64, 0).block(layer).attn
    sites = Sites(profile("pool-fp8")).block("").at("attn")
    states = [cases.synthetic_state(attn, start, sites, generator(start)) for start in starts]
    window = [(start - len(s.window), s.window) for start, s in zip(starts, states, strict=True)]
    return states, pour(STORE.config, layer, states, window, starts, [s + 9 for s in starts], 5)


@pytest.mark.parametrize("layer", [1, 2])
def test_what_is_poured_can_be_drawn(layer):
    starts = [3, 127, 128, 255, 256, 4097]
    states, poured = poured_states(layer, starts)
    for b, (state, start) in enumerate(zip(states, starts, strict=True)):
        held = min(len(state.compressor.values), start)
        back = draw(poured, b, start, indexer=False, held=held)
        assert torch.equal(back.rows, state.compressor.rows) and len(back.rows) == start // RATIO[STORE.config.kind(layer)]
        assert torch.equal(back.values, state.compressor.values[len(state.compressor.values) - held :])
        assert torch.equal(back.gates, state.compressor.gates[len(state.compressor.gates) - held :])
        positions = torch.arange(start - len(state.window), start)
        assert torch.equal(poured.read(poured.window_at(b, positions)), state.window)


def test_whatever_nobody_owns_is_poison():
    starts = [128, 300]
    states, poured = poured_states(2, starts)
    owned = torch.zeros(poured.pool.plane_rows, dtype=torch.bool)
    base = poured.geometry.base(poured.layer)
    for b, (state, start) in enumerate(zip(states, starts, strict=True)):
        owned[base + poured.compressed_at(b, torch.arange(len(state.compressor.rows)))] = True
        owned[base + poured.window_at(b, torch.arange(start - len(state.window), start))] = True
    arena = torch.zeros_like(owned)
    for slot in poured.slots.tolist():
        first = slot * poured.geometry.slot_rows
        arena[first : first + poured.geometry.arena_rows] = True
    for plane in poured.pool.planes:
        assert (plane[~owned & ~arena] == POISON).all() and not (plane[owned] == POISON).all(1).any()


def test_streams_of_the_flow_are_those_of_the_model():
    """Layer outermost and token step outermost compute the same, truth, twin and reference, prefill and decode."""
    plan = cases.plan([5, 17], [], ["prefill", "decode"])
    setting = flow.Setting(STORE, profile("pool-fp8"), plan, (), HOW, 1)
    f = flow.Flow.start(setting)
    f.begin_with_tokens()
    for layer in range(STORE.config.num_hidden_layers):
        assert list(f.run_layer(layer)) == []
    for name, dtype, streams in (
        ("exact", torch.float64, f.streams.truth),
        ("pool-fp8", torch.float64, f.streams.twin),
        ("exact", torch.float32, f.streams.reference),
    ):
        model = Model(STORE, dtype, profile(name))
        states = [SequenceState() for _ in plan.sequences]
        for phase in ("prefill", "decode"):
            batch = f.batch(phase)
            got = model.forward([batch.ids[s] for s in batch.sequences()], states)
            assert torch.equal(got, streams[phase])
    size = {(d.curve, d.layer, d.phase): d.relative_l2 for d in f.drift if isinstance(d, Drift)}
    assert list(size) == [(curve, layer, phase) for layer in range(STORE.config.num_hidden_layers)
                          for phase in plan.judged for curve in ("rounding", "reference")]  # fmt: skip
    for (curve, *where), x in size.items():  # float32 has 16 more bits than bfloat16; half of them are left to sums
        assert 0 < x < (torch.inf if curve == "rounding" else 2**-8 * size["rounding", *where])


@pytest.fixture(scope="module")
def steps() -> dict[int, tuple]:
    """A decode step of a window, an HCA and a CSA layer of mini, with what the candidate stored for every op."""
    found = {}
    for layer in (0, 1, 2):
        kept = []

        def keep(step, chosen, kept=kept):
            stored = {op.name: op.candidate(step, op.name) for op in chosen if op.candidate and step.kind in op.kinds}
            kept.append((step, stored))
            return iter(())

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(flow, "judge_step", keep)
            run_layer(layer, list(ops.OPS), ("decode",))
        found[layer] = kept[0]
    return found


def cost(steps, layer: int, op: str, change) -> float:
    """Budget that the candidate's honest output uses against a twin whose weights are changed."""
    step, stored = steps[layer]
    other = replace(step, block=change(step.block), stored=dict(stored.get(op, {})))
    expected = ops.BY_NAME[op].twin(other, op, stored[op])
    return max(judge(n, stored[op][n], e.expected, HOW, e.places).budget_used for n, e in expected.items())


def in_attention(**fields):
    return lambda block: replace(block, attn=replace(block.attn, **{n: f(block.attn) for n, f in fields.items()}))


def in_compressor(**fields):
    def change(attn):
        return replace(attn.compressor, **{n: f(attn.compressor) for n, f in fields.items()})

    return in_attention(compressor=change)


def coarser(linear: Linear) -> Linear:
    """One scale byte of the last block one step up."""
    scale = linear.scale.clone()
    scale.view(torch.uint8)[-1, -1] += 1
    return Linear(linear.weight, scale)


def one_sign(linear: Linear) -> Linear:
    """The largest of the last row's codes negated."""
    weight = linear.weight.clone()
    weight.view(torch.uint8)[-1, linear.weight[-1].float().abs().argmax()] ^= 0x80
    return Linear(weight, linear.scale)


PARAMETERS = [
    *((layer, f"attn.{w}", in_attention(**{w: lambda a, w=w, f=f: f(getattr(a, w))}))
      for layer in (0, 2) for w in ("wq_a", "wq_b", "wkv", "wo_b") for f in (coarser, one_sign)),
    *((layer, "attn.compressor.row", in_compressor(**change)) for layer in (1, 2) for change in (
        {"ape": lambda c: c.ape.roll(1, 0)},
        {"norm": lambda c: torch.ones_like(c.norm)},
        {"eps": lambda c: c.eps / 2},
    )),
    *((layer, "attn.compressor.state", in_compressor(ape=lambda c: c.ape.roll(1, 0))) for layer in (1, 2)),
    *((layer, "attn.rope.table", in_attention(rope=lambda a: Rope(2 * a.rope.base, a.rope.dim, a.rope.yarn)))
      for layer in (0, 1)),
    (1, "attn.rope.table", in_attention(rope=lambda a: Rope(a.rope.base, a.rope.dim, None))),
    *((layer, "attn.core", in_attention(sink=lambda a: 0 * a.sink)) for layer in (0, 1, 2)),
    *((layer, "attn.core", in_attention(sliding_window=lambda a: a.sliding_window - 1)) for layer in (0, 1, 2)),
]  # fmt: skip


@pytest.mark.parametrize(("layer", "op", "change"), PARAMETERS)
def test_every_parameter_moves_the_output_by_many_budgets(steps, layer, op, change):
    assert cost(steps, layer, op, lambda block: block) <= 1
    assert cost(steps, layer, op, change) > MANY


def test_outputs_of_no_rows_judge_nothing_and_pass():
    empty = torch.zeros(0, 64, dtype=torch.float64)
    dense = Dense(twins.exact(empty), "bf16", "td")
    codes = Codes(twins.exact(empty), 64, 1e-4, "cd")
    nothing = [
        judge("a", empty.bfloat16(), dense, HOW, Places()),
        judge("b", (empty.byte(), torch.zeros(0, 1, dtype=torch.uint8)), codes, HOW, Places()),
        judge("c", empty.byte(), Bytes(empty.byte(), "cd"), HOW, Places()),
    ]
    assert all(v.passed and v.elements == 0 for v in nothing)


def test_shapes_must_agree():
    dense = Dense(twins.exact(torch.zeros(3, 4)), "bf16", "td")
    with pytest.raises(ValueError, match=r"\[3, 5\].*\[3, 4\]"):
        judge("a", torch.zeros(3, 5).bfloat16(), dense, HOW, Places())


def test_edges_hold_every_threshold():
    marks = cases.edges(STORE.config)
    for group in (4, 128, 256):
        assert {group - 1, group, group + 1} <= set(marks)
    assert {8, 16, 17, 35, 36} <= set(marks)  # overlap and window first full, top-k lossless for the last time and not
    assert max(cases.default_chunks(STORE.config)) > STORE.config.sliding_window
    near, far = cases.default_lengths(STORE.config), cases.default_starts(STORE.config)
    assert set(marks) <= set(near) | set(far)


def test_every_op_of_the_table_says_who_judges_it_or_why_nobody():
    assert len({op.name for op in ops.OPS}) == len(ops.OPS)
    for op in ops.OPS:
        assert (op.candidate is None) == (op.twin is None) and (op.bound if op.candidate else op.reason)
        assert op.inputs or op.name == "attn.rope.table"
    assert {op.removesuffix(".input") for op in ops.BY_NAME if op.endswith(".input")} >= set(candidates.SOURCE)


@pytest.mark.parametrize(("text", "numbers"), [("all", [0, 1, 2, 3, 4, 5]), ("mtp_0,2", [5, 2]), ("1-3,2", [1, 2, 3])])
def test_layer_numbers(text, numbers):
    assert cases.layer_numbers(text, STORE.config) == numbers


@pytest.mark.parametrize("text", ["9", "a", "1-", "mtp_1", "", "-1"])
def test_layers_that_are_none(text):
    with pytest.raises(ValueError):
        cases.layer_numbers(text, STORE.config)
