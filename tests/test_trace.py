"""The trace contract: what is written is read back; every kind of damage is refused in one line."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from parity import records, trace
from parity.trace import Shard, Trace, TraceTensor
from reference.errors import BadInput
from reference.presets import CONFIG_JSON, preset
from reference.rounding import profile


def sample(path):
    config = preset("mini")
    values = {
        "q": torch.randn(3, 2, 512).bfloat16(),
        "codes": torch.arange(24, dtype=torch.uint8).reshape(3, 8),
    }
    tensors = (
        TraceTensor("q", "layers.2.attn.q", 2, "decode", 0, (5, 6, 7), "thd", "bf16", (3, 2, 512), shard=Shard("h", 0, 4)),
        TraceTensor("codes", "mtp.0.block.attn.wq_b.input", 5, "verify", 1, (1, 2, 3), "td", "e4m3", (3, 8)),
    )
    made = Trace("an engine", "mini", CONFIG_JSON["mini"], records.config_digest(config), profile("pool-fp8"), tensors)
    trace.write_trace(path, made, values)
    return made, values


def test_a_trace_is_read_back_as_it_was(tmp_path):
    made, values = sample(tmp_path / "t")
    back = trace.read_trace(tmp_path / "t")
    assert back == made and back.profile == profile("pool-fp8")
    assert all(torch.equal(back.get(t), values[t.key]) for t in back.tensors)
    assert [p.name for p in tmp_path.iterdir()] == ["t"]


def test_a_trace_is_never_overwritten_and_a_wrong_one_never_stands(tmp_path):
    made, values = sample(tmp_path / "t")
    with pytest.raises(BadInput, match="never overwritten"):
        trace.write_trace(tmp_path / "t", made, values)
    wrong = replace(made, tensors=(replace(made.tensors[0], storage="f32"),))
    with pytest.raises(BadInput, match=r"bfloat16 .*says f32"):
        trace.write_trace(tmp_path / "u", wrong, values)
    assert [p.name for p in tmp_path.iterdir()] == ["t"]



@pytest.mark.parametrize(
    ("edit", "says"),
    [
        (lambda m: m.pop("profile"), "no profile"),
        (lambda m: m.update(schema=2), "schema version"),
        (lambda m: m["config"].update(model_type="deepseek_v3"), "DeepSeek-V3"),
        (lambda m: m["profile"]["formats"]["bf16"].update(format="e5m2"), "e5m2"),
        (lambda m: m["tensors"][0].update(tap="layers.2.attn.qq"), "unknown tap"),
        (lambda m: m["tensors"][0].update(dims="td"), "dims"),
        (lambda m: m["tensors"][0].update(positions=[5, 6]), "2 positions for 3 tokens"),
        (lambda m: m["tensors"][0].update(file="../tensors.safetensors"), "inside the trace"),
        (lambda m: m["tensors"][0].update(storage="fp8"), "unknown storage"),
        (lambda m: m["tensors"][0].update(phase="later"), "unknown phase"),
        (lambda m: m["tensors"][0].update(shard={"axis": "e", "index": 0, "count": 2}), "shard"),
        (lambda m: m["tensors"][0].pop("dims"), "dims"),
        (lambda m: m["tensors"].insert(0, 7), "tensor 0: expected an object, is 7"),
        (lambda m: m["tensors"][0].update(more=1), "tensor 0 .*unknown field 'more'"),
    ],
)
def test_a_damaged_manifest_is_refused(tmp_path, edit, says):
    sample(tmp_path / "t")
    path = tmp_path / "t" / trace.MANIFEST
    manifest = json.loads(path.read_text())
    edit(manifest)
    path.write_text(json.dumps(manifest))
    with pytest.raises(BadInput, match=says) as caught:
        trace.read_trace(tmp_path / "t")
    assert "\n" not in str(caught.value) and trace.MANIFEST in str(caught.value)


SHARD = {"axis": "h", "index": 0, "count": 4}
MISTYPED = {
    "positions": [["a", 6, 7], [None, 6, 7], "567", 5, None, [5, 6, 10**30], [-1, 0, 1], [5, 6, 7.0], [True, 2, 3]],
    "request": ["x", None, -1, 1.0, True, 10**30], "layer": ["2", None, 2.0], "key": [5, None, ""], "dims": [None, 2],
    "tap": [5, None], "phase": [[], {}], "file": [None, 5, "a\0b", "x" * 5000], "storage": [["bf16"], None], "layout": [[], 0],
    "shape": [5, None, ["3", 2, 512], [3.0, 2, 512]], "partial_sum": ["no", 1, None],
    "shard": [5, "h", {}, {**SHARD, "index": "0"}, {**SHARD, "axis": 5}, {**SHARD, "count": None}, {**SHARD, "count": 10**12},
              {**SHARD, "of": 1}],
}  # fmt: skip


@pytest.mark.parametrize(("name", "value"), [(name, x) for name, values in MISTYPED.items() for x in values])
def test_a_field_of_another_type_is_refused_by_number_and_name(tmp_path, name, value):
    sample(tmp_path / "t")
    path = tmp_path / "t" / trace.MANIFEST
    manifest = json.loads(path.read_text())
    manifest["tensors"][1][name] = value
    path.write_text(json.dumps(manifest))
    with pytest.raises(BadInput, match=rf"tensor 1.*{name}") as caught:
        trace.read_trace(tmp_path / "t")
    assert "\n" not in str(caught.value) and trace.MANIFEST in str(caught.value)


@pytest.mark.parametrize("name", ["engine", "model", "config", "config_sha256", "profile", "tensors"])
@pytest.mark.parametrize("value", [5, True])
def test_a_field_of_the_manifest_of_another_type_is_refused(tmp_path, name, value):
    sample(tmp_path / "t")
    path = tmp_path / "t" / trace.MANIFEST
    path.write_text(json.dumps({**json.loads(path.read_text()), name: value}))
    with pytest.raises(BadInput, match=rf"{name}: expected .*, is {value}"):
        trace.read_trace(tmp_path / "t")


def test_a_position_is_one_of_the_models_and_nesting_has_an_end(tmp_path):
    made, _ = sample(tmp_path / "t")
    path = tmp_path / "t" / trace.MANIFEST
    manifest, longest = json.loads(path.read_text()), made.config["max_position_embeddings"]
    for last, fits in ((longest - 1, True), (longest, False)):
        manifest["tensors"][0]["positions"] = [last - 2, last - 1, last]
        path.write_text(json.dumps(manifest))
        if fits:
            assert trace.read_trace(tmp_path / "t").tensors[0].positions[-1] == last
        else:
            with pytest.raises(BadInput, match=f"tensor 0 .*positions: {last}, the model has {longest}"):
                trace.read_trace(tmp_path / "t")
    path.write_text("[" * 10**5 + "]" * 10**5)
    with pytest.raises(BadInput, match="JSON"):
        trace.read_trace(tmp_path / "t")


def test_half_a_file_is_refused_when_it_is_read(tmp_path):
    sample(tmp_path / "t")
    file = tmp_path / "t" / trace.TENSORS
    file.write_bytes(file.read_bytes()[:-100])
    back = trace.read_trace(tmp_path / "t")
    with pytest.raises(BadInput, match=trace.TENSORS):
        back.get(back.tensors[0])
    (tmp_path / "t" / trace.MANIFEST).write_text('{"schema": 1,')
    with pytest.raises(BadInput, match="JSON"):
        trace.read_trace(tmp_path / "t")


def test_taps_lose_block_and_expert_number():
    assert trace.local_tap("layers.30.ffn.experts.17.w1.input") == "ffn.experts.w1.input"
    assert trace.local_tap("mtp.0.e_proj") == "e_proj" and trace.local_tap("mtp.0.block.attn.kv") == "attn.kv"
    assert trace.local_tap("head.logits") == "head.logits"
