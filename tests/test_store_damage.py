"""Every lie that headers, index and config can tell, and that opening a directory finds it."""

from __future__ import annotations

import json
import os
import random
import shutil

import checkpoint_files as files
import pytest
from checkpoint_files import FP4, FP8, LAYER_0, LAYER_1
from hypothesis import given
from hypothesis import strategies as st

from reference.checkpoint.directory import INDEX, DirectoryStore
from reference.checkpoint.shard import MAX_HEADER
from reference.checkpoint.values import verify
from reference.errors import BadInput


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    path = tmp_path_factory.mktemp("checkpoint") / "tiny"
    files.write_tiny(path)
    return path


@pytest.fixture
def copy(tiny, tmp_path):
    """A copy of the tiny checkpoint that a test may damage."""
    return shutil.copytree(tiny, tmp_path / "copy")


def header(name, change):
    def damage(directory):
        files.edit_header(directory / LAYER_1, lambda h: change(h[name] if name else h))

    return damage


def index(change):
    return lambda directory: files.edit_json(directory / INDEX, lambda fields: change(fields["weight_map"]))


def index_to(file):
    return index(lambda weight_map: weight_map.update({f"{FP8}.weight": file}))


def config(**fields):
    return lambda directory: files.edit_json(directory / "config.json", lambda c: c.update(fields))


def tensors(change, file=LAYER_1):
    return lambda directory: files.edit_tensors(directory, file, change)


def resize(by):
    def damage(directory):
        path = directory / LAYER_1
        os.truncate(path, path.stat().st_size + by)

    return damage


def raw(length, text=b"", keep=True):
    def damage(directory):
        data = (directory / LAYER_1).read_bytes() if keep else b""
        (directory / LAYER_1).write_bytes(length.to_bytes(8, "little") + text + data[8 + len(text) :])

    return damage


def huge_header(directory):
    with (directory / LAYER_1).open("wb") as file:
        file.write((MAX_HEADER + 1).to_bytes(8, "little"))
        file.truncate(MAX_HEADER + 100)  # sparse


def twice_in_header(directory):
    data = (directory / LAYER_1).read_bytes()
    length = int.from_bytes(data[:8], "little")
    text = data[8 : 8 + length].rstrip()
    entry = json.dumps(json.loads(text)[f"{FP8}.weight"]).encode()
    files.write_raw(directory / LAYER_1, text[:-1] + f', "{FP8}.weight": '.encode() + entry + b"}", data[8 + length :])


def linked_out(directory):
    outside = directory.parent / "outside.safetensors"
    (directory / LAYER_1).rename(outside)
    (directory / LAYER_1).symlink_to(outside)


def move(name, source, target):
    """A tensor in two shards, the index naming one of them."""

    def damage(directory):
        held = files.tensors_of(directory / source)[name]
        files.edit_tensors(directory, target, lambda t: t.update({name: held}))

    return damage


STRUCTURE = {
    "truncated": (resize(-1), rf"{LAYER_1}: truncated: \d+ bytes"),
    "oversized": (resize(+1), rf"{LAYER_1}: oversized: \d+ bytes"),
    "empty file": (raw(0, keep=False), rf"{LAYER_1}: header at offset 8"),
    "header longer than the file": (raw(1 << 40), rf"{LAYER_1}: truncated"),
    "header over the limit": (huge_header, r"header of 100000001 bytes at offset 0"),
    "header no JSON": (raw(8, b"[1, 2, 3"), rf"{LAYER_1}: header at offset 8"),
    "header no object": (raw(8, b"[1,2,3] "), rf"{LAYER_1}: header at offset 8 is not a JSON object"),
    "header deeply nested": (raw(99_999, b"[" * 99_999), rf"{LAYER_1}: header at offset 8"),
    "header no UTF-8": (raw(8, b'{"\xff": 0'), rf"{LAYER_1}: header at offset 8"),
    "tensor twice in a header": (twice_in_header, rf"'{FP8}.weight' appears twice"),
    "entry no object": (header("", lambda h: h.update({f"{FP8}.weight": 3})), rf"{FP8}.weight: header entry"),
    "entry without dtype": (header(f"{FP8}.weight", lambda e: e.pop("dtype")), rf"{FP8}.weight: header entry"),
    "unknown storage": (header(f"{FP8}.weight", lambda e: e.update(dtype="F16")), rf"{FP8}.weight: storage 'F16'"),
    "storage a list": (header(f"{FP8}.weight", lambda e: e.update(dtype=["I8"])), rf"{FP8}.weight: storage \['I8'\]"),
    "negative size": (header(f"{FP8}.weight", lambda e: e.update(shape=[-256, -96])), rf"{FP8}.weight: shape"),
    "size true": (header(f"{FP8}.weight", lambda e: e.update(shape=[True, 96])), rf"{FP8}.weight: shape"),
    "size over 64 bits": (header(f"{FP8}.weight", lambda e: e.update(shape=[2**70, 96])), rf"{FP8}.weight: F8_E4M3"),
    "lying size": (header(f"{FP8}.weight", lambda e: e.update(shape=[256, 95])), rf"{FP8}.weight: F8_E4M3 .* bytes"),
    "gap": (header("", lambda h: shift(h, 8)), rf"{LAYER_1}: .* begins at offset"),
    "overlap": (header("", lambda h: alias(h)), rf"{LAYER_1}: .* begins at offset"),
    "name of two lines": (header("", lambda h: h.update({"a\nb": 1})), r"tensor name 'a\\nb'"),
    "index with a name of two lines": (index(lambda m: m.update({"a\nb": LAYER_1})), r"tensor name 'a\\nb'"),
    "index to an absolute path": (index_to("/etc/passwd"), "'/etc/passwd' is not a plain file name"),
    "index to a parent": (index_to("../x.safetensors"), r"'\.\./x.safetensors' is not a plain file name"),
    "index to the directory": (index_to(".."), r"'\.\.' is not a plain file name"),
    "index with a NUL": (index_to("a\0b"), r"'a\\x00b' is not a plain file name"),
    "index to no name": (index_to(""), "'' is not a plain file name"),
    "link out of the directory": (linked_out, rf"{LAYER_1} is a link that leads outside"),
    "index to a missing file": (index_to("no.safetensors"), "no.safetensors: no such file"),
    "index to the wrong shard": (index_to(LAYER_0), rf"{FP8}.weight is in {LAYER_1}, not in {LAYER_0}"),
    "index with an entry too many": (index(lambda m: m.update({"stale.scale": LAYER_0})), rf"stale.scale is not in {LAYER_0}"),
    "index without an entry": (index(lambda m: m.pop(FP8 + ".weight")), rf"does not name {FP8}.weight"),
    "index no map": (lambda d: (d / INDEX).write_text('{"weight_map": [1]}'), f"{INDEX}: no weight_map"),
    "index no JSON": (lambda d: (d / INDEX).write_text("{"), f"{INDEX}: not readable as JSON"),
    "index with a wrong total": (
        lambda d: files.edit_json(d / INDEX, lambda f: f["metadata"].update(total_size=5)),
        "total_size is 5",
    ),
    "no weights": (lambda d: (d / INDEX).unlink(), "neither"),
    "tensor in two shards": (move(f"{FP8}.weight", LAYER_1, LAYER_0), rf"{FP8}.weight is in both {LAYER_0} and {LAYER_1}"),
    "missing tensor": (tensors(lambda t: t.pop(f"{FP8}.weight")), rf"missing tensors: {FP8}.weight"),
    "fp8 without scale": (tensors(lambda t: t.pop(f"{FP8}.scale")), rf"1 missing tensors: {FP8}.scale"),
    "fp4 without scale": (tensors(lambda t: t.pop(f"{FP4}.scale")), rf"1 missing tensors: {FP4}.scale"),
    "unexpected tensor": (tensors(lambda t: t.update(extra=("F32", [1], b"\0" * 4))), "1 unexpected tensors: extra"),
    "many unexpected tensors": (
        tensors(lambda t: t.update({f"x{i}": ("F32", [1], b"\0" * 4) for i in range(9)})),
        "9 unexpected tensors: x0, x1, x2, x3, x4 and 4 more",
    ),
    "engram": (tensors(lambda t: t.update({"layers.1.engram.w": ("F32", [1], b"\0" * 4)})), "belongs to DeepSeek-V4.1"),
    "wrong dtype": (
        tensors(lambda t: t.update({"layers.1.attn.q_norm.weight": ("I8", [96], b"\1" * 96)})),
        "layers.1.attn.q_norm.weight is stored as I8",
    ),
    "attention in fp4": (
        tensors(lambda t: t.update({f"{FP8}.weight": ("I8", [256, 48], b"\1" * 256 * 48)})),
        rf"{FP8}.weight is stored as I8",
    ),
    "scale of another dtype": (
        tensors(lambda t: t.update({f"{FP8}.scale": ("BF16", [2, 1], b"\0" * 4)})),
        rf"{FP8}.scale is stored as BF16",
    ),
    "wrong shape": (
        tensors(lambda t: t.update({f"{FP8}.weight": ("F8_E4M3", [96, 256], b"\1" * 96 * 256)})),
        rf"{LAYER_1}: {FP8}.weight has shape \[96, 256\], expected \[256, 96\]",
    ),
    "wrong scale shape": (
        tensors(lambda t: t.update({f"{FP8}.scale": ("F8_E8M0", [1, 2], b"\1\1")})),
        rf"{FP8}.scale has shape \[1, 2\]",
    ),
    "no config": (lambda d: (d / "config.json").unlink(), "config.json: no such file"),
    "config no JSON": (lambda d: (d / "config.json").write_text("{"), "config.json: not readable as JSON"),
    "config of V4.1": (config(engram_layers=[1]), r"DeepSeek-V4\.1"),
    "config of V4.1 by ratios": (config(compress_ratios=[0, 1, 2, 0]), r"DeepSeek-V4\.1"),
    "config of V3": (config(model_type="deepseek_v3"), "DeepSeek-V3"),
    "unknown kind of layer": (config(compress_ratios=[0, 4, 64, 0]), r"unknown compress ratios \[64\]"),
    "too few kinds": (config(compress_ratios=[0, 4]), "2 compress_ratios for 3 layers"),
    "config with absurdly many experts": (config(n_routed_experts=10**15), "cannot hold 1000000000000000 experts"),
    "config with a broken drafter": (
        config(dspark_block_size=5, dspark_noise_token_id=1, dspark_target_layer_ids=7, dspark_markov_rank=8),
        "dspark settings must be integers",
    ),
    "config of another width": (config(hidden_size=128), r"has shape .* expected"),
    "config with more layers": (config(num_hidden_layers=4, compress_ratios=[0, 4, 128, 0, 0]), "missing tensors"),
}


def shift(entries, by):
    """Every tensor but the first moves back, which leaves a gap after the first."""
    for name in sorted(entries, key=lambda n: entries[n]["data_offsets"])[1:]:
        entries[name]["data_offsets"] = [n + by for n in entries[name]["data_offsets"]]


def alias(entries):
    """Two experts share their bytes."""
    entries[f"{FP4}.weight"]["data_offsets"] = entries["layers.1.ffn.experts.11.w1.weight"]["data_offsets"]


@pytest.mark.parametrize("damage", STRUCTURE)
def test_damage_that_headers_show_is_found_on_opening(damage, copy):
    apply, message = STRUCTURE[damage]
    apply(copy)
    with pytest.raises(BadInput, match=message) as caught:
        DirectoryStore(copy)
    assert "\n" not in str(caught.value)


@given(st.sampled_from([LAYER_1, INDEX, "config.json"]), st.integers(0, 2**32 - 1), st.integers(1, 4))
def test_any_change_of_a_header_is_read_or_refused(copy, file, seed, count):
    """Bytes overwritten at random in a header, index or config: opening ends in a store or in BadInput, in nothing else."""
    rng, path = random.Random(seed), copy / file
    good = path.read_bytes()
    length = 8 + int.from_bytes(good[:8], "little") if file == LAYER_1 else len(good)
    damaged = bytearray(good)
    for _ in range(count):
        damaged[rng.randrange(length)] = rng.choice(b'"{}[]:,0123456789eE.-atn\\ \n\0\xff')
    path.write_bytes(damaged)
    try:
        store = DirectoryStore(copy)
        verify(store, store.tensors, str(copy))
    except BadInput as error:
        assert "\n" not in str(error)
    finally:
        path.write_bytes(good)
