"""Inputs and outputs of single ops as files: written, read, judged by command; layouts of other caches; what is refused."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from safetensors.torch import load_file, save_file

from optimized.pool import flashmla, index_rows
from optimized.pool.rows import pack_2buff
from parity import trace
from parity.budget.bounded import ACCUMULATE
from parity.cli import main
from parity.ops import BY_NAME
from parity.single import files, layouts
from parity.single.drawing import default_batch, draw
from parity.single.given import given_step
from parity.single.verdict import judge_outputs
from reference import formats
from reference.checkpoint.open import open_store
from reference.errors import BadInput

STORE = open_store("procedural:mini")
ROW = "attn.compressor.row"


def case(op, layer, profile="pool-fp8"):
    return draw(op, STORE, layer, "chunk", profile, default_batch(STORE.config, "chunk", 0), 0)


def outputs_of(inputs):
    stored = BY_NAME[inputs.op].candidate(given_step(inputs, ACCUMULATE["fp32"]), inputs.op)
    return {name: x for name, x in stored.items() if name in inputs.contract.outputs}


def flat(outputs):
    """As files hold them."""
    plain = {name: x for name, x in outputs.items() if isinstance(x, torch.Tensor)}
    pairs = {name: x for name, x in outputs.items() if isinstance(x, tuple)}
    return plain | {n: x[0] for n, x in pairs.items()} | {f"{n}.scale": x[1] for n, x in pairs.items()}


def write_trace(path, inputs, tensors, layout=None):
    """An engine's outputs with a manifest."""
    storage = {torch.float32: "f32", torch.bfloat16: "bf16", torch.uint8: "bytes", torch.int64: "i64"}
    entries = tuple(
        trace.TraceTensor(n, f"layers.{inputs.layer}.{n}", inputs.layer, inputs.phase, 0, (), "cd"[: x.ndim],
                          storage[x.dtype], tuple(x.shape), layout=layout if layout and n in ("row", "keys") else "plain")
        for n, x in tensors.items()
    )  # fmt: skip
    config = inputs.config
    made = trace.Trace("another engine", "mini", files.config_json(config), files.config_digest(config),
                       files.profile(inputs.profile), entries)  # fmt: skip
    trace.write_trace(path, made, tensors)


def test_inputs_are_read_back_as_they_were(tmp_path):
    for op, layer in (("attn.core", 2), ("ffn.experts.h", 0), ("attn.indexer.scores", 2), ("head.logits", 5)):
        inputs = case(op, layer)
        files.write_inputs(tmp_path / op, inputs, "procedural:mini")
        back = files.read_inputs(tmp_path / op, op)
        assert (back.config, back.layer, back.phase, back.profile) == (STORE.config, layer, "chunk", "pool-fp8")
        assert set(back) == set(inputs) and all(torch.equal(back[n], inputs[n]) for n in inputs)


def test_cases_then_judge(tmp_path, capsys):
    """The five lines of a kernel author, by command."""
    words = ["attn.wq_b", "--model", "procedural:mini", "--layer", "2", "--phase", "verify"]
    assert main(["cases", *words, "--out", str(tmp_path / "a")]) == 0
    inputs = files.read_inputs(tmp_path / "a", "attn.wq_b")
    right = flat(outputs_of(inputs))
    save_file(right, tmp_path / "b.safetensors")
    judged = ["judge", "attn.wq_b", "--outputs", str(tmp_path / "b.safetensors")]
    assert main([*judged, "--inputs", str(tmp_path / "a")]) == 0
    bare = ["--inputs", str(tmp_path / "a" / trace.TENSORS), "--model", "procedural:mini", "--layer", "2"]
    assert main([*judged, *bare]) == 0
    assert "PASS attn.wq_b (layer 2, csa, verify)" in capsys.readouterr().out
    right["attn.wq_b"][7, 300] *= -1
    save_file(right, tmp_path / "b.safetensors")
    assert main([*judged, "--inputs", str(tmp_path / "a")]) == 1
    said = capsys.readouterr().out
    assert said.startswith("FAIL attn.wq_b") and "token 7, channel 300, sequence 2, position 256" in said
    assert "bound   min(k, λ·sqrt(k))" in said and "candidate" in said


def test_describe_names_everything_that_goes_in_and_out(capsys):
    assert main(["cases", "attn.core", "--describe", "--layer", "30"]) == 0
    said = capsys.readouterr().out
    assert all(name in said for name in ("attn.q ", "window", "compressed", "attn.indexer.picks", "attn.attn_sink", "bounds"))
    assert "attn.core in layer 30 (csa)" in said and "(4, 128, 512)" in said


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["cases", "attn.no", "--describe"], "no op 'attn.no'"),
        (["cases", "attn.indexer.rows", "--describe"], "cannot be judged alone"),
        (["cases", "attn.core"], "--out"),
        (["cases", ROW, "--describe", "--model", "procedural:mini", "--layer", "0"], "layer 0 (window) has no"),
        (["cases", "attn.core", "--describe", "--layer", "99"], "no layer 99"),
        (["cases", "attn.core", "--describe", "--phase", "late"], "no phase 'late'"),
        (["cases", "attn.core", "--describe", "--profile", "qat"], "no profile 'qat'"),
        (["cases", "attn.core", "--describe", "--lengths", "4"], "--lengths are those of a prefill"),
        (["cases", "attn.core", "--describe", "--start-pos", "9000000"], "the model has"),
        (["judge", "attn.core", "--inputs", "a", "--outputs", "b", "--accumulate", "bf8"], "no accumulate format"),
        (["judge", "attn.no", "--inputs", "a", "--outputs", "b"], "no op"),
    ],
)
def test_words_that_mean_nothing_are_usage(words, says, capsys):
    assert main(words) == 2
    error = capsys.readouterr().err
    assert says in error and error.count("\n") == 1


def test_flashmla_pages_and_2buff_rows_are_judged_as_they_are(tmp_path):
    inputs = case(ROW, 2)
    own = outputs_of(inputs)
    (codes, scales), rope = own["nope"], own["rope"]
    rows, n = pack_2buff(codes, scales, 512), len(codes)
    both = torch.cat([rows, rope.contiguous().view(torch.uint8)], 1)
    slots = torch.randperm(2 * 64, generator=torch.Generator().manual_seed(1))[:n]
    spread, turned = torch.zeros(128, 512, dtype=torch.uint8), torch.zeros(128, 64, dtype=torch.bfloat16)
    spread[slots], turned[slots] = rows, rope
    spread[:, 448:] = pack_2buff(spread[:, :448], spread[:, 448:462:2].contiguous(), 512)[:, 448:]
    pages = flashmla.to_pages(spread.unflatten(0, (2, 64)), turned.unflatten(0, (2, 64)))
    for layout, tensors in (("2buff", {"row": both}), ("flashmla_64", {"row": pages, "slots": slots})):
        write_trace(tmp_path / layout, inputs, tensors, layout)
        good = judge_outputs(inputs, files.read_outputs(tmp_path / layout, inputs))
        assert good.passed and good.elements >= n * 512 and ("layout" in good.absent) == (layout != "2buff")
    write_trace(tmp_path / "order", inputs, {"row": pages, "slots": slots.flip(0)}, "flashmla_64")
    assert not judge_outputs(inputs, files.read_outputs(tmp_path / "order", inputs)).passed
    both[0, 448] += 1  # one of the two copies of a scale
    write_trace(tmp_path / "copy", inputs, {"row": both}, "2buff")
    bad = judge_outputs(inputs, files.read_outputs(tmp_path / "copy", inputs))
    assert not bad.passed


KEYS = [("fp4_flydsl", "pool-fp8"), ("fp4_split", "pool-fp8"), ("fp8_preshuffled", "pool-bf16")]


@pytest.mark.parametrize(("layout", "profile"), KEYS)
def test_index_keys_are_judged_in_their_layout(tmp_path, layout, profile):
    inputs = case("attn.indexer.compressor.row", 2, profile)
    codes, scales = outputs_of(inputs)["keys"]
    rule = index_rows.LAYOUTS[layout]
    page_codes, page_scales = torch.zeros(64, 128, dtype=torch.uint8), torch.zeros(64, scales.shape[1], dtype=torch.uint8)
    page_codes[: len(codes)], page_scales[: len(codes)] = codes, scales
    if rule.form == "fp4":
        regions = index_rows.pack(formats.e2m1_pack(page_codes)[None], page_scales[None], rule)
    else:
        regions = index_rows.pack(page_codes[None], formats.e8m0_decode(page_scales)[None], rule)
    keys, behind = (x.contiguous().view(torch.uint8) for x in regions)
    tensors = {"keys": torch.cat([keys, behind], 1)} if rule.joined else {"keys": keys, "keys.scale": behind}
    write_trace(tmp_path / "b", inputs, tensors, layout)
    assert judge_outputs(inputs, files.read_outputs(tmp_path / "b", inputs)).passed
    other = {"fp4_flydsl": "fp4_opus", "fp4_split": "fp4_natural", "fp8_preshuffled": "fp8_linear"}[layout]
    wrong = {**tensors, "keys.scale": behind} if layout == "fp4_split" else tensors
    if layout == "fp4_split":
        wrong["keys"] = keys.flip(1)
    write_trace(tmp_path / "c", inputs, wrong, other)
    assert not judge_outputs(inputs, files.read_outputs(tmp_path / "c", inputs)).passed


def damaged(inputs, **changes):
    return replace(inputs, tensors={n: x for n, x in {**inputs.tensors, **changes}.items() if x is not None})


def test_ill_shaped_inputs_and_outputs_are_refused_in_one_line():
    inputs = case("attn.core", 2)
    good = {"attn.o_rotated": torch.zeros_like(inputs["attn.q"])}
    bad_inputs = {
        "input attn.q: missing": {"attn.q": None},
        r"input attn.q: torch.float32": {"attn.q": inputs["attn.q"].float()},
        r"input window: .* expected torch.bfloat16": {"window": inputs["window"][1:]},
        "does not cut": {"bounds": inputs["bounds"] + 1},
        "not consecutive": {"positions": inputs["positions"].flip(0)},
        "checkpoint has": {"attn.attn_sink": inputs["attn.attn_sink"][1:]},
    }
    for says, change in bad_inputs.items():
        with pytest.raises(BadInput, match=says) as caught:
            judge_outputs(damaged(inputs, **change), good)
        assert "\n" not in str(caught.value)
    for says, outputs in {
        "output attn.o_rotated: missing": {},
        "no output attn.o": good | {"attn.o": good["attn.o_rotated"]},
        "the twin": {"attn.o_rotated": good["attn.o_rotated"][1:]},
        "float16, the profile stores bf16": {"attn.o_rotated": good["attn.o_rotated"].half()},
        "one tensor": {"attn.o_rotated": (good["attn.o_rotated"], good["attn.o_rotated"])},
    }.items():
        with pytest.raises(BadInput, match=says):
            judge_outputs(inputs, outputs)


def test_layouts_are_refused_where_they_do_not_belong():
    row, keys = case(ROW, 2), case("attn.indexer.compressor.row", 2)
    pages = torch.zeros(1, 37_440, dtype=torch.uint8)
    for inputs, tensors, said, says in [
        (row, {"row": pages}, {"row": "fp4_split"}, "not one of its own"),
        (row, {"row": pages[:, 1:]}, {"row": "flashmla_64"}, "FlashMLA pages"),
        (row, {"row": pages, "slots": torch.zeros(1, dtype=torch.int64)}, {"row": "flashmla_64"}, "output slots"),
        (row, {"row": pages[:, :640]}, {"row": "2buff"}, "at least"),
        (keys, {"keys": torch.zeros(1, 8448, dtype=torch.uint8)}, {"keys": "fp8_linear"}, "stores fp4"),
        (replace(row, profile="pool-bf16"), {"row": pages}, {"row": "flashmla_64"}, "stores bfloat16"),
        (row, {"nope": pages}, {}, "come with their scales"),
        (row, {"nope.scale": pages}, {}, "scales without codes"),
    ]:
        with pytest.raises(BadInput, match=says):
            layouts.stored(inputs, tensors, said)


def test_traces_that_cannot_be_inputs(tmp_path, capsys):
    inputs = case("attn.wq_a", 2)
    files.write_inputs(tmp_path / "a", inputs, "procedural:mini")
    judged = ["judge", "attn.wq_a", "--outputs", str(tmp_path / "none"), "--inputs"]
    assert main([*judged, str(tmp_path / "a")]) == 4  # no outputs
    manifest = json.loads((tmp_path / "a" / trace.MANIFEST).read_text())
    for name, edit, code in [
        ("unsaid", lambda m: m.pop("profile"), 2),
        ("qat", lambda m: m.update(profile=files.profile("qat").to_json()), 4),
        ("two", lambda m: m["tensors"][0].update(phase="verify"), 4),
    ]:
        shutil.copytree(tmp_path / "a", tmp_path / name)
        changed = json.loads(json.dumps(manifest))
        edit(changed)
        (tmp_path / name / trace.MANIFEST).write_text(json.dumps(changed))
        assert main([*judged, str(tmp_path / name)]) == code
    bare = tmp_path / "a" / trace.TENSORS
    assert main([*judged, str(bare)]) == 4
    bare.write_bytes(bare.read_bytes()[:-9])
    assert main([*judged, str(bare), "--model", "procedural:mini", "--layer", "2"]) == 4
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 6 and all(line.startswith("v4parity") for line in errors)
    assert load_file(tmp_path / "qat" / trace.TENSORS).keys() == set(inputs)
    assert all(a <= b for a, b in pairwise(inputs["bounds"].tolist()))
