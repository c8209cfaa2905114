"""Traces of the twin and of the engine, captured and compared; where two part, and what cannot be compared."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from parity import comparing, trace
from parity.cli import main
from parity.trace import Shard, Trace, TraceTensor
from reference.errors import BadInput
from reference.presets import CONFIG_JSON, preset
from reference.rounding import profile

IDS = "3,141,59,26,53,58"


def captured(path, *words):
    assert main(["capture", "--ids", IDS, "--out", str(path), *words]) == 0
    return trace.read_trace(path)


@pytest.fixture(scope="module")
def twin(tmp_path_factory):
    return captured(tmp_path_factory.mktemp("twin") / "t")


def test_the_twin_shows_its_payloads_in_any_schedule(twin, tmp_path, capsys):
    """Every layer, every tap with a row a token; the same bits or nearly, whatever the schedule."""
    stepwise = captured(tmp_path / "s", "--prefill", "4")
    taps = {trace.block_tap(t.tap) for t in twin.tensors}
    assert {"embed", "attn.q", "attn.kv", "attn.o_rotated", "ffn.gate.experts", "hc_ffn.streams", "head.logits"} <= taps
    assert {t.layer for t in twin.tensors} == {0, 1, 2, 3, 4}
    assert {t.storage for t in twin.tensors if t.tap.endswith("attn.kv")} == {"bf16"}
    assert {t.phase for t in stepwise.tensors} == {"prefill", "decode"}
    found, _ = comparing.compare(twin, stepwise)
    found = [d for d in found if "picks" not in d.tap]
    assert len(found) > 100 and not any(d.beyond for d in found)
    assert all(d.tokens == (1 if d.tap.endswith("compressor.row") else 6) for d in found)  # one group is complete
    capsys.readouterr()
    assert main(["compare", str(twin.root), str(stepwise.root)]) == 0
    assert "no tap is beyond its storage" in capsys.readouterr().out


def test_the_engine_is_near_the_twin(twin, tmp_path):
    engine = captured(tmp_path / "e", "--engine", "optimized")
    found, alone = comparing.compare(twin, engine)
    assert [d.tap for d in found] == [*(f"layers.{i}.hc_ffn.streams" for i in range(5)), "head.logits"]
    assert len(alone) > 100 and found[0].differs
    assert all(d.relative_l2 < comparing.UNIT["e4m3"] for d in found)  # what one rounding of everything to codes may do


def spoiled(twin, path, tap, row):
    """The same trace with the signs of one row turned."""
    values = {t.key: twin.get(t) for t in twin.tensors}
    key = next(t.key for t in twin.tensors if t.tap == tap)
    values[key] = values[key].clone()
    values[key][row] *= -1
    trace.write_trace(path, replace(twin, engine="spoiled"), values)
    return path


def test_the_first_divergence_is_named(twin, tmp_path, capsys):
    early = spoiled(twin, tmp_path / "a", "layers.2.attn.q", 4)
    both = spoiled(trace.read_trace(early), tmp_path / "b", "layers.3.attn_norm", 1)
    assert main(["compare", str(twin.root), str(both)]) == 0
    said = capsys.readouterr().out
    assert "first divergence: layers.2.attn.q, request 0, position 4, relative L2" in said
    assert "layers.3.attn_norm" in said and "layers.1." not in said
    assert main(["compare", str(twin.root), str(both), "--gate"]) == 1
    assert main(["compare", str(twin.root), str(twin.root), "--all", "--gate"]) == 0
    assert "layers.1.attn.q " in capsys.readouterr().out


def test_causal_order_is_that_of_the_ops(twin):
    taps = [d.tap for d in comparing.compare(twin, twin)[0] if d.tap.startswith("layers.2.")]
    wanted = ["hc_attn.u", "attn_norm", "attn.wq_a", "attn.wq_b", "attn.q", "attn.o_rotated", "ffn_norm", "ffn.out"]
    at = [taps.index(f"layers.2.{tap}") for tap in wanted]
    assert at == sorted(at)


def small(path, tensors, values, sha="x"):
    made = Trace("an engine", "mini", CONFIG_JSON["mini"], sha, profile("pool-fp8"), tuple(tensors))
    trace.write_trace(path, made, values)
    return trace.read_trace(path)


def entry(key, x, **words):
    storage = {torch.float32: "f32", torch.bfloat16: "bf16", torch.uint8: "e4m3"}[x.dtype]
    return TraceTensor(key, "layers.2.attn.wq_b", 2, "decode", 0, tuple(range(len(x))), "td", storage, tuple(x.shape), **words)


def test_shards_and_partial_sums_are_put_together(tmp_path):
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(0)).bfloat16().float()
    whole = small(tmp_path / "w", [entry("x", x)], {"x": x})
    halves = {"a": x[:, :4].contiguous(), "b": x[:, 4:].contiguous()}
    cut = [entry(k, v, shard=Shard("d", i, 2)) for i, (k, v) in enumerate(halves.items())]
    sharded = small(tmp_path / "s", reversed(cut), halves)
    sums = {"a": 0.25 * x, "b": 0.75 * x}
    parts = [entry(k, v, shard=Shard("d", i, 2), partial_sum=True) for i, (k, v) in enumerate(sums.items())]
    summed = small(tmp_path / "p", parts, sums)
    for other in (sharded, summed):
        assert [d.differs for d in comparing.compare(whole, other)[0]] == [False]
    with pytest.raises(BadInput, match="has not all of its 2 shards"):
        comparing.compare(whole, small(tmp_path / "h", cut[:1], {"a": halves["a"]}))
    with pytest.raises(BadInput, match="is there 2 times"):
        comparing.compare(whole, small(tmp_path / "d", [entry("x", x), entry("y", x)], {"x": x, "y": x.clone()}))
    with pytest.raises(BadInput, match=r"\[3, 4\]"):
        comparing.compare(whole, small(tmp_path / "n", [entry("a", halves["a"])], {"a": halves["a"]}))


def test_codes_are_compared_by_their_scales(tmp_path):
    codes, scales = torch.tensor([[56, 60, 48, 57]], dtype=torch.uint8), torch.tensor([[127, 130]], dtype=torch.uint8)
    own = small(tmp_path / "a", [entry("c", codes), replace(entry("s", scales), tap="layers.2.attn.wq_b.scale")],
                {"c": codes, "s": scales})  # fmt: skip
    as_numbers = torch.tensor([[1.0, 1.5, 4.0, 9.0]])
    plain = small(tmp_path / "b", [entry("x", as_numbers)], {"x": as_numbers})
    assert not comparing.compare(own, plain)[0][0].differs
    assert comparing.compare(own, small(tmp_path / "c", [entry("c", codes)], {"c": codes}))[0][0].beyond


def test_rows_of_last_tokens_and_several_rows_a_token(tmp_path):
    """Logits are the last token's, whatever the step; of a token with several rows each is compared with its own."""
    x = torch.arange(8.0).reshape(4, 2)
    several = replace(entry("x", x), positions=(0, 0, 1, 1))
    last = replace(several, key="y", tap="head.logits", layer=4, dims="bd", shape=(1, 2), positions=(0, 1))
    a = small(tmp_path / "a", [several, last], {"x": x, "y": x[:1].clone()})
    found, _ = comparing.compare(a, a)
    assert [(d.tokens, d.differs) for d in found] == [(4, False), (1, False)]
    y = x.clone()
    y[2] *= -1
    b = small(tmp_path / "b", [several, last], {"x": y, "y": -x[:1] - 1})
    assert [(d.position, d.differs) for d in comparing.compare(a, b)[0]] == [(1, True), (1, True)]


def test_anomalies_agree_or_are_infinitely_apart(tmp_path):
    x = torch.tensor([[1.0, torch.nan, torch.inf]])
    a = small(tmp_path / "a", [entry("x", x)], {"x": x})
    assert not comparing.compare(a, a)[0][0].differs
    y = torch.tensor([[1.0, 2.0, torch.inf]])
    d = comparing.compare(a, small(tmp_path / "b", [entry("x", y)], {"x": y}))[0][0]
    assert d.beyond and d.relative_l2 == torch.inf and d.position == 0


def test_what_cannot_be_compared(twin, tmp_path, capsys):
    x = torch.ones(3, 8)
    one = small(tmp_path / "one", [entry("x", x)], {"x": x})
    assert main(["compare", str(twin.root), str(one.root)]) == 4
    nothing = small(tmp_path / "none", [replace(entry("x", x), tap="layers.4.attn.wq_b", layer=4)], {"x": x})
    assert main(["compare", str(one.root), str(nothing.root)]) == 3
    manifest = one.root / trace.MANIFEST
    table = json.loads(manifest.read_text())
    manifest.write_text(json.dumps({**table, "profile": None}))
    assert main(["compare", str(one.root), str(nothing.root)]) == 2
    table["tensors"][0]["tap"] = "layers.2.attn.qq"
    manifest.write_text(json.dumps(table))
    assert main(["compare", str(one.root), str(nothing.root)]) == 4
    manifest.write_text("{")
    assert main(["compare", str(one.root), str(nothing.root)]) == 4
    assert main(["capture", "--profile", "no", "--out", str(tmp_path / "x")]) == 2
    assert main(["capture", "--ids", "1,2", "--prefill", "3", "--out", str(tmp_path / "x")]) == 2
    assert main(["capture", "--ids", "99999", "--out", str(tmp_path / "x")]) == 4
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 7 and "unknown tap" in errors[2] and "another model" in errors[0]
    assert preset("mini").num_hidden_layers == 5 and not (tmp_path / "x").exists()
