"""Whole layers beside the twin: the engine's own bits, what is predicted, what departs, and where a run goes wrong first."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from pathlib import Path

import jsonschema
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent / "meta"))

from judge_cases import HOW, generator

from optimized import attention as wiring
from optimized.engine import Engine
from parity import alone, cases, drift, ops, records, run
from parity.flow import Flow, Setting
from parity.journal import Journal
from parity.locate import APART, DEPARTS, first_divergence, headline
from reference.checkpoint.open import open_store
from reference.errors import BadInput
from reference.rounding import profile

STORE = open_store("procedural:mini")
CONFIG = STORE.config
HALF = 2.0**-20  # half of float64's digits are left of a finite difference, less a few for sums
CSA = 2


def start(plan: cases.Plan, build: str = "pool-fp8", chosen=()) -> Flow:
    run.one_thread()
    return Flow.start(Setting(STORE, profile(build), plan, chosen, HOW, 1, whole=True))


def flowing(plan: cases.Plan, layers: int = 3) -> Flow:
    """Free-running streams through the first layers of `mini`: one of each kind."""
    f = start(plan)
    f.begin_with_tokens()
    for layer in range(layers):
        assert list(f.run_layer(layer)) == []
    return f


PROMPT = cases.plan([5], [], ["prefill", "decode"])


@pytest.fixture(scope="module")
def clean() -> Flow:
    return flowing(PROMPT)


def curve(f: Flow, name: str) -> list[drift.Drift]:
    return [d for d in f.drift if isinstance(d, drift.Drift) and d.curve == name]


class Stop(Exception):
    """Enough layers."""


def test_free_streams_are_the_engine_s_own_to_the_bit(clean):
    """Layer outermost on small pools, and token step outermost in one pool, are the same computation."""
    engine, seen = Engine(STORE), {}

    def on_layer(layer: int, x: torch.Tensor) -> None:
        seen["x"] = x
        if layer == len({d.layer for d in clean.drift}) - 1:
            raise Stop

    sequence = engine.allocator.open()
    for phase in ("prefill", "decode"):
        with pytest.raises(Stop):
            engine.step([clean.batch(phase).ids], [sequence], on_layer)
        engine.allocator.advance(sequence, len(clean.batch(phase).ids))
        assert torch.equal(seen["x"].double(), clean.streams.free[phase])
    assert not torch.equal(clean.streams.free["prefill"], clean.streams.twin["prefill"])


def test_curves_of_a_clean_run(clean):
    """Rounding against the truth in every layer and phase; the candidate nearer to the twin than rounding explains."""
    for name in ("rounding", "forced", "free"):
        assert [(d.layer, d.phase) for d in curve(clean, name)] == [(i, p) for i in range(3) for p in ("prefill", "decode")]
    for forced, free in zip(curve(clean, "forced"), curve(clean, "free"), strict=True):
        assert 0 < forced.relative_l2 < APART * forced.rounding and 0 < free.relative_l2 < DEPARTS["free"] * free.rounding
        assert 1 - forced.relative_l2**2 < forced.cosine <= 1 and forced.predicted is None and free.predicted > 0
        assert forced.flips["experts"] == 0 and ("picks" in forced.flips) == (forced.layer == CSA)
    first = [d for d in clean.drift if d.layer == 0 and d.phase == "prefill"]
    assert first[1].relative_l2 == first[2].relative_l2  # one layer: forced and free agree, and so does what is predicted
    assert abs(first[2].predicted / first[2].relative_l2 - 1) < HALF
    assert headline([header(), *map(record, clean.drift)]) == ""


def record(d) -> records.Record:
    return records.drift_record(CONFIG, d)


def header() -> records.Record:
    names = [cases.layer_id(CONFIG, i) for i in range(6)]
    return {"record": "run", "layers": names, "phases": list(cases.PHASES)}


def test_records_fit_the_schema(clean):
    check = jsonschema.Draft202012Validator(records.schema())
    for d in clean.drift:
        check.validate(record(d))
    assert not check.is_valid({**record(clean.drift[0]), "curve": "bold"})


def test_streams_of_the_candidate_survive_a_kill(clean, tmp_path):
    journal = Journal.open(tmp_path, resume=False)
    journal.keep("layer_02", [], clean.streams)
    back = journal.streams("layer_02")
    for name in ("free", "grown"):
        kept, held = getattr(back, name), getattr(clean.streams, name)
        assert kept.keys() == held.keys() and all(torch.equal(kept[p], held[p]) for p in held)


def planted(monkeypatch, layer: int, change) -> None:
    """What layer `layer` of the candidate puts out, changed."""
    honest = alone.block

    def block(x, weights, *rest):
        y = honest(x, weights, *rest)
        return change(y) if weights.name == f"layers.{layer}" else y

    monkeypatch.setattr(alone, "block", block)


def louder(y: torch.Tensor) -> torch.Tensor:
    noise = torch.randn(y.shape, generator=generator(9))
    return (y.float() * (1 + 0.3 * noise)).to(torch.bfloat16)


def test_the_prediction_follows_a_large_local_error(clean, monkeypatch):
    """An error far above what later roundings add grows by the slope of the layers behind it; without the gain, or with all
    errors but this one, the prediction would be elsewhere."""
    planted(monkeypatch, 0, louder)
    f = flowing(cases.plan([5], [], ["prefill"]), layers=2)
    free = {d.layer: d for d in curve(f, "free")}
    before = {d.layer: d for d in curve(clean, "free") if d.phase == "prefill"}
    assert free[1].predicted > 5 * before[1].predicted
    assert abs(free[1].predicted / free[1].relative_l2 - 1) < 0.25  # a quarter: what later roundings may add at right angles
    assert curve(f, "forced")[1].relative_l2 < 0.1 * free[1].relative_l2  # layer 1 itself is right


def test_growth_is_exact_for_linear_layers():
    """Orthogonal errors through orthogonal layers, and one error through any: the prediction is the error."""
    g = generator(3)
    turn = [torch.linalg.qr(torch.randn(12, 12, generator=g, dtype=torch.float64)).Q for _ in range(5)]
    any_ = [torch.randn(12, 12, generator=g, dtype=torch.float64) for _ in range(5)]
    x = torch.randn(12, generator=g, dtype=torch.float64)
    for maps, errors in ((turn, 5), (any_, 1)):
        true, predicted = torch.zeros(12, dtype=torch.float64), torch.zeros(12, dtype=torch.float64)
        for i, a in enumerate(maps):
            moved = drift.pushed(lambda y, a=a: a @ y, x, a @ x, predicted)
            local = torch.randn(12, generator=g, dtype=torch.float64) * float(i < errors)
            local -= (a @ true) * float((a @ true) @ local) / max(float((a @ true).square().sum()), 1e-300)
            true, predicted = a @ true + local, drift.grown(moved, local)
            assert abs(float(predicted.norm() / true.norm()) - 1) < HALF
            x = a @ x


def test_growth_adds_errors_like_legs_of_a_right_angle():
    a, b = torch.tensor([3.0, 0.0]).double(), torch.tensor([4.0, 0.0]).double()
    assert torch.equal(drift.grown(a, b), torch.tensor([5.0, 0.0]).double())
    assert torch.equal(drift.grown(a, -a), a)
    assert drift.pushed(lambda x: x, a, a, torch.full((2,), math.nan)).isnan().all()


@pytest.mark.parametrize("build", ["pool-fp8", "pool-bf16"])
def test_a_layer_alone_from_a_poured_start(build):
    """CSA behind the last lossless selection, on synthetic streams: no streams of its own, picks as the twin's."""
    f = start(cases.plan([], [131], ["decode"]), build)
    assert list(f.run_layer(CSA)) == []
    assert not curve(f, "free") and f.streams is None
    for d in curve(f, "forced"):
        assert 0 < d.relative_l2 < APART * d.rounding and d.worst["position"] >= 131
        assert d.flips["picks"] == 0


def test_choices_that_differ_are_counted(monkeypatch):
    """Picks of the next keys, and the reference side's experts with none of the other's."""
    honest = wiring.topk

    def shifted(logits, visible, k, **tiles):
        return (honest(logits, visible, k, **tiles) + 1) % visible[:, None]

    monkeypatch.setattr(wiring, "topk", shifted)
    f = start(cases.plan([], [131], ["decode"]))
    list(f.run_layer(CSA))
    assert curve(f, "forced")[0].flips["picks"] > 0.1
    mine, theirs = torch.tensor([[1, 2, -1], [3, 4, 5]]), torch.tensor([[2, 9, -1], [5, 4, 3]])
    assert drift.missing_share(mine, theirs) == 1 / 5 and drift.missing_share(mine[:0], theirs[:0]) == 0


def swapped(monkeypatch) -> None:
    """A layer whose two mixes are exchanged: every op of it is right."""
    honest = alone.block

    def block(x, w, *rest):
        return honest(x, replace(w, hc_attn=w.hc_ffn, hc_ffn=w.hc_attn), *rest)

    monkeypatch.setattr(alone, "block", block)


def test_a_layer_that_is_wired_wrongly_is_told_from_a_wrong_op(monkeypatch):
    swapped(monkeypatch)
    f = start(cases.plan([], [127], ["decode"]), chosen=[ops.BY_NAME["hc_attn.pre"]])
    judged = list(f.run_layer(1))
    said = [header(), *(records.verdict_record(CONFIG, j, 0.0) for j in judged), *map(record, f.drift)]
    assert all(v.passed for j in judged for v in j.verdicts)
    found = first_divergence(said)
    assert (found.cause, found.layer_id, found.phase, found.place) == ("layer", "layer_01", "decode", "sequence 0 position 127")
    assert headline(said).startswith("first wrong layer: layer_01, decode, sequence 0 position 127: every op is right")


def test_rows_that_nothing_looks_at_yet_are_found_wrong(monkeypatch, clean):
    """Position biases of the compressor in the other order: streams hardly move, and the rows of the pool are others."""
    honest = alone.Listening.f32

    def turned(weights, name: str) -> torch.Tensor:
        return honest(weights, name).flip([0] if name.endswith(".ape") else [])

    monkeypatch.setattr(alone.Listening, "f32", turned)
    said = [header(), *map(record, flowing(cases.plan([4], [], ["prefill"])).drift)]
    found = first_divergence(said)
    assert (found.cause, found.layer_id, found.output, found.place) == ("layer", "layer_02", "compressed rows that it left", "")
    assert headline(said).endswith("the layer as a whole is not: compressed rows that it left")
    right = [d.rows for d in curve(clean, "forced") if d.layer == CSA]
    assert [set(rows) for rows in right] == [{"window", "compressed"}, {"window"}]  # the sixth token ends no group
    assert all(x["relative_l2"] <= x["rounding"] for rows in right for x in rows.values())


def test_a_layer_that_raises_is_a_record_and_no_crash(monkeypatch):
    def broken(*operands):
        raise ZeroDivisionError("no\nway")

    monkeypatch.setattr(alone, "block", broken)
    f = flowing(cases.plan([5], [], ["prefill"]), layers=2)
    first, second = curve(f, "free")
    assert first.error == "ZeroDivisionError: no" and second.error == "its streams are not finite"
    said = [header(), *map(record, f.drift)]
    check = jsonschema.Draft202012Validator(records.schema())
    for r in said[1:]:
        check.validate(r)
    assert record(first)["relative_l2"] is None and first_divergence(said).cause == "layer"


def test_weights_that_no_kernel_takes_are_not_run(monkeypatch):
    def refuse(*past, **options):
        raise BadInput("layers.0.attn.wq_a is stored as bf16")

    monkeypatch.setattr(alone.Alone, "start", refuse)
    f = flowing(cases.plan([5], [], ["prefill"]), layers=2)
    assert {d.curve for d in f.drift} == {"rounding", "reference"} and f.streams.free == {}
    assert f.unfit == dict.fromkeys((0, 1), "layers.0.attn.wq_a is stored as bf16")


def verdict(op: str, layer: int, phase: str, outcome: str, **output) -> records.Record:
    worst = {"token": 3, "head": 5, "sequence": 2, "position": 257, "channels": [448, 512], "page": 7, "page_row": 1}
    return {"record": "verdict", "op": op, "layer": layer, "layer_id": f"layer_{layer:02d}", "phase": phase, "verdict": outcome,
            "outputs": [{"output": op, "verdict": outcome, "worst": worst, "pattern": None, **output}]}  # fmt: skip


def distance(name: str, layer: int, phase: str, size: float | None) -> records.Record:
    return {"record": "drift", "layer": layer, "layer_id": f"layer_{layer:02d}", "phase": phase, "curve": name,
            "relative_l2": size, "rounding": 0.01, "worst": {"sequence": 1, "position": 9}}  # fmt: skip


def test_the_first_divergence_is_the_first_in_causal_order():
    pattern = {"kind": "row_permuted", "text": "the expected rows shifted by one token", "fields": {}}
    wrong = verdict("attn.core", 3, "decode", "fail", pattern=pattern)
    said = [header(), verdict("attn.kv", 3, "decode", "pass"), wrong, verdict("norm", 4, "prefill", "fail")]
    assert headline(said) == (
        "first wrong op: attn.core, layer_03, decode, sequence 2 position 257, head 5, page 7, page row 1, "
        "channels 448..511: output is the expected rows shifted by one token"
    )
    earlier = verdict("ffn.out", 3, "prefill", "fail", output="x")
    assert headline([*said, earlier]).startswith("first wrong op: ffn.out, layer_03, prefill") and "output x" in headline(
        [*said, earlier]
    )
    far = distance("free", 2, "prefill", 1.0)
    assert first_divergence([*said, far]).op == "attn.core"  # what came in differed, and yet this op is wrong by itself
    layer = distance("forced", 2, "prefill", 1.0)
    assert first_divergence([*said, far, layer]).cause == "layer"


def test_inputs_that_were_different_already_are_nobody_s_fault():
    said = [
        header(),
        verdict("attn.core", 3, "decode", "pass"),
        distance("free", 4, "chunk", 0.05),
        distance("free", 2, "verify", 0.05),
    ]
    found = first_divergence(said)
    assert (found.cause, found.layer_id, found.phase) == ("inputs", "layer_02", "verify")
    assert "different already" in found.words and "layer_02, verify, sequence 1 position 9" in found.words


@pytest.mark.parametrize("name", ["forced", "free"])
def test_what_departs_is_beyond_rounding(name):
    limit = DEPARTS[name] * 0.01
    for size, departs in ((limit, False), (math.nextafter(limit, 1), True), (None, True)):
        assert (first_divergence([header(), distance(name, 1, "decode", size)]) is not None) == departs
    assert first_divergence([header(), distance("rounding", 1, "decode", 1.0)]) is None
