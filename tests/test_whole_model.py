"""A whole model where kernels run in some layers only: the others are evaluated, packed weights and all, and said to be so."""

from __future__ import annotations

import sys
from pathlib import Path

import jsonschema
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent / "meta"))

from judge_cases import HOW, uneven

from parity import cases, cli, flow, records, residual, run, storage, twins
from parity.budget.bounded import Bounded, dot, exact
from parity.flow import Flow, Setting
from parity.metrics import relative_l2
from reference import linear
from reference.checkpoint.open import open_store
from reference.linear import Linear
from reference.rounding import profile

STORE = open_store("procedural:mini")
PLAN = cases.plan([5], [], ["prefill", "decode"])
LAYERS = [*(f"layer_{n:02d}" for n in range(5)), "mtp_0"]
WORDS = ["run", "--model", "procedural:mini", "--lengths", "3", "--start-pos", "", "--phases", "decode", "--ops", "attn_norm"]


def command(out: Path, *words: str) -> tuple[int, list[records.Record]]:
    code = cli.main([*WORDS, *words, "--out", str(out)])
    return code, records.read_lines(out) if (out / records.FILE).exists() else []


@pytest.fixture(scope="module")
def some(tmp_path_factory) -> tuple[int, list[records.Record]]:
    """All layers of mini, kernels in two of them."""
    return command(tmp_path_factory.mktemp("some") / "run", "--candidate-layers", "1,mtp_0", "--drift")


def of(said: list[records.Record], kind: str) -> list[records.Record]:
    return [r for r in said if r["record"] == kind]


def test_kernels_run_where_they_were_asked_to(some):
    code, said = some
    assert code == 0 and [r["layer_id"] for r in of(said, "verdict")] == ["layer_01", "mtp_0"]
    missing = {r["op"]: r for r in of(said, "not_run")}
    assert {r["layers"] for r in missing.values()} == {4} and {r["reason"] for r in missing.values()} == {flow.LEFT_OUT}
    assert set(missing) == {"attn_norm", "drift"}
    assert [r["layer_id"] for r in of(said, "layer") if r["candidate"]] == ["layer_01", "mtp_0"]
    assert [r["layer_id"] for r in of(said, "layer")] == LAYERS


def test_curves_of_the_reference_go_through_all_layers(some):
    curves = {name: [r["layer_id"] for r in of(some[1], "drift") if r["curve"] == name and r["phase"] == "decode"]
              for name in ("rounding", "reference", "forced", "free")}  # fmt: skip
    assert curves == {"rounding": LAYERS, "reference": LAYERS, "forced": ["layer_01", "mtp_0"], "free": []}
    check = jsonschema.Draft202012Validator(records.schema())
    for r in some[1]:
        check.validate(r)


def test_the_report_says_what_did_not_run_and_how_long_it_took(tmp_path, some, capsys):
    records.write_lines(tmp_path / records.FILE, some[1])
    assert cli.main(["report", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert f"{flow.LEFT_OUT}: drift, attn_norm" in out
    assert "layers without kernels: 4, " in out and "; layers with kernels: 2, " in out and "; peak RSS " in out


def test_a_wrong_kernel_is_found_where_it_runs_and_runs_nowhere_else(tmp_path, monkeypatch):
    honest, calls = residual.rms_norm_quantize, []

    def wrong(x, *rest, **options):
        calls.append(x)
        y, *codes = honest(x, *rest, **options)
        return -y, *codes

    monkeypatch.setattr(residual, "rms_norm_quantize", wrong)
    code, said = command(tmp_path / "run", "--candidate-layers", "2")
    assert code == 1 and [(r["layer_id"], r["verdict"]) for r in of(said, "verdict")] == [("layer_02", "fail")]
    assert len(calls) == 1


def test_an_op_that_only_other_layers_have_was_asked_for_and_not_run(tmp_path):
    code, said = command(tmp_path / "run", "--layers", "0,2", "--ops", "attn.compressor.row", "--candidate-layers", "0")
    assert code == 3 and [(r["reason"], r["required"]) for r in of(said, "not_run")] == [(flow.LEFT_OUT, True)]


@pytest.mark.parametrize("layers", ["5", "x", "0-"])
def test_candidate_layers_are_layers_of_the_run(tmp_path, layers, capsys):
    assert command(tmp_path / "run", "--layers", "0-2", "--candidate-layers", layers) == (2, [])
    assert capsys.readouterr().err.count("\n") == 1


def flowing() -> Flow:
    run.one_thread()
    f = Flow.start(Setting(STORE, profile("pool-fp8"), PLAN, (), HOW, 1))
    f.begin_with_tokens()
    for layer in range(len(LAYERS)):
        list(f.run_layer(layer))
    return f


def test_a_model_beyond_memory_is_multiplied_as_it_is_packed(monkeypatch):
    """The same truth within float64's rounding, the same reference within float32's; no weight is dequantised."""

    def refuse(weight, *rest, **options):
        raise AssertionError(f"dequantised a weight {tuple(weight.shape)} of {weight.dtype}")

    resident = flowing()
    monkeypatch.setattr(flow, "EXPERT_MEMORY", 1 << 20)
    monkeypatch.setattr(linear, "dequantize", refuse)
    packed = flowing()
    for name, u in (("truth", 2.0**-53), ("reference", 2.0**-24)):
        for phase, x in getattr(packed.streams, name).items():
            other = getattr(resident.streams, name)[phase]
            assert relative_l2(x.double(), other.double()) < 2**10 * u and (name == "truth" or not torch.equal(x, other))


@pytest.mark.parametrize("form", ["fp8", "fp4", "bf16", "f32"])
@pytest.mark.parametrize("whole", [True, False])
def test_bounds_of_products_are_those_of_a_dense_weight(form, whole):
    """Value and bound of `product` beside `dot` on the dequantised matrix, with errors that come in; every code of a byte."""
    g = torch.Generator().manual_seed(3)
    weight, scale = stored(form, g)
    w = Linear(weight, scale)
    width = w.dense(torch.float64).shape[1]
    x = Bounded(uneven(g, 3, width).double(), uneven(g, 3, width).abs().double() * 2**-20)
    rows = (0, len(weight)) if whole else (128, 192)
    step = type("Step", (), {"how": HOW})
    y, expected = twins.product(x, w, step, *rows), dot(x, exact(w.dense(torch.float64)[slice(*rows)]), HOW)
    u = 2 * width * 2.0**-53  # two float64 sums of as many terms in two orders, each off by width * 2^-53 of their sizes
    sizes = x.value.abs() @ w.dense(torch.float64)[slice(*rows)].abs().T
    assert bool(((y.value - expected.value).abs() <= u * sizes).all())
    assert bool(((y.bound - expected.bound).abs() <= 2 * u * expected.bound).all() and (y.bound > 0).all())  # of terms >= 0


def stored(form: str, g: torch.Generator) -> tuple[torch.Tensor, torch.Tensor | None]:
    """A weight of 256 rows with negative numbers in every place that a byte has."""
    if form == "bf16" or form == "f32":
        return uneven(g, 256, 128).to(torch.bfloat16 if form == "bf16" else torch.float32), None
    width = 256 if form == "fp8" else 128
    codes = torch.arange(256 * width).reshape(256, width).mul(37).add(torch.arange(256)[:, None]).to(torch.uint8)
    if form == "fp4":
        return codes.view(torch.int8), torch.randint(120, 134, (256, 8), generator=g).to(torch.uint8).view(torch.float8_e8m0fnu)
    codes[(codes & 0x7F) == 0x7F] = 0x81  # of no number
    return codes.view(torch.float8_e4m3fn), torch.tensor([[120, 130], [127, 125]], dtype=torch.uint8).view(torch.float8_e8m0fnu)


@pytest.mark.parametrize(("form", "mask"), [("fp8", 0x77), ("fp4", 0x7F)])
def test_a_sign_left_in_a_weight_is_found(monkeypatch, form, mask):
    """The bytes of one form with the mask of the other are not absolute values."""
    weight, scale = stored(form, torch.Generator().manual_seed(3))
    right = storage.unsigned(Linear(weight, scale)).dense(torch.float64)
    assert torch.equal(right, Linear(weight, scale).dense(torch.float64).abs())
    wrong = (weight.view(torch.uint8) & mask).view(weight.dtype)
    assert not torch.equal(Linear(wrong, scale).dense(torch.float64), right)
