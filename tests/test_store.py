"""Directories: what they give, what storages they may have, and what damage inside tensors is found."""

from __future__ import annotations

import math
import os
import shutil
import struct
from pathlib import Path

import checkpoint_files as files
import pytest
import torch
from checkpoint_files import FP4, FP8, HASH, LAYER_0, LAYER_1

from reference.checkpoint.dequantize import dequantize
from reference.checkpoint.directory import INDEX, DirectoryStore
from reference.checkpoint.manifest import by_shard, file_header, manifest
from reference.checkpoint.open import open_store
from reference.checkpoint.procedural import ProceduralStore
from reference.checkpoint.values import verify
from reference.checkpoint.writer import render_config, render_index, write_checkpoint
from reference.config import Config
from reference.errors import BadInput
from reference.presets import CONFIG_JSON, preset

EMBED = "model-00001-of-00006.safetensors"
NAN_BF16 = struct.pack("<H", 0x7FC0)
INF_F32 = struct.pack("<f", math.inf)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    path = tmp_path_factory.mktemp("checkpoint") / "tiny"
    files.write_tiny(path)
    return path


@pytest.fixture
def copy(tiny, tmp_path):
    """A copy of the tiny checkpoint that a test may damage."""
    return shutil.copytree(tiny, tmp_path / "copy")


def verify_all(path):
    store = DirectoryStore(path)
    verify(store, store.tensors, str(path))


def bits(tensor):
    return tensor.contiguous().view(torch.uint8)


class TestReading:
    def test_every_tensor_comes_back_bit_for_bit(self, tiny):
        source, store = ProceduralStore(Config.from_dict(files.TINY_JSON)), DirectoryStore(tiny)
        assert store.tensors == source.tensors
        for name in store.tensors:
            assert torch.equal(bits(store.get(name)), bits(source.get(name))), name
        assert store.bytes_read == source.bytes_read == sum(info.nbytes for info in store.tensors.values())

    def test_rows_are_views_of_the_file(self, tiny):
        store = DirectoryStore(tiny)
        whole, rows = store.get("embed.weight"), store.get("embed.weight", 3, 7)
        assert torch.equal(bits(rows), bits(whole[3:7]))
        assert rows.data_ptr() == whole.data_ptr() + 3 * 160 * 2

    def test_writing_to_a_view_leaves_the_file_alone(self, copy):
        before = (copy / EMBED).read_bytes()
        DirectoryStore(copy).get("embed.weight").zero_()
        assert (copy / EMBED).read_bytes() == before

    def test_views_survive_the_store(self, tiny):
        store = DirectoryStore(tiny)
        views = [store.get(name) for name in store.tensors]
        total = sum(int(bits(v).sum()) for v in views)
        del store
        assert sum(int(bits(v).sum()) for v in views) == total

    def test_identity_names_the_files(self, tiny, copy):
        assert DirectoryStore(tiny).identity.startswith("tiny#")
        plain = DirectoryStore(copy).identity
        files.edit_json(copy / "config.json", lambda c: c.update(swiglu_limit=2.0))
        assert DirectoryStore(copy).identity != plain

    def test_open_store_takes_a_path(self, tiny):
        assert open_store(str(tiny)).tensors.keys() == manifest(Config.from_dict(files.TINY_JSON)).keys()

    @pytest.mark.parametrize("release", ["v4-pro-0813", "v4-flash-0731"])
    def test_dspark_directory_loads(self, release, tmp_path):
        """A small model with the block drafter: three mtp blocks although num_nextn_predict_layers says 1."""
        small = {k: v for k, v in files.TINY_JSON.items() if k != "compress_ratios"}
        drafter = {k: v for k, v in CONFIG_JSON[release].items() if k.startswith("dspark")}
        fields = {**small, **drafter, "compress_ratios": [0, 4, 128, 0, 0, 0], "dspark_target_layer_ids": [0, 1, 2]}
        write_checkpoint(ProceduralStore(Config.from_dict(fields)), fields, tmp_path / "d", lambda number, file: None)
        store = DirectoryStore(tmp_path / "d")
        verify(store, store.tensors, "d")
        assert store.get("mtp.0.main_proj.weight").shape == (160, 480)
        assert len({name.split(".")[1] for name in store.tensors if name.startswith("mtp.")}) == 3


class TestStorages:
    """How a weight is stored is read from its header, never from a flag."""

    def test_one_file_needs_no_index(self, copy):
        tensors = {}
        for path in sorted(copy.glob("*.safetensors")):
            tensors |= files.tensors_of(path)
            path.unlink()
        (copy / INDEX).unlink()
        files.write_tensors(copy / "model.safetensors", tensors)
        verify_all(copy)

    @pytest.mark.parametrize("metadata", [None, [], {}, 3])
    def test_index_metadata_may_say_nothing(self, copy, metadata):
        files.edit_json(copy / INDEX, lambda fields: fields.update(metadata=metadata))
        verify_all(copy)

    def test_odd_header_length_is_read(self, copy):
        """No padding: tensors lie at addresses that no dtype is aligned to."""
        want = bits(DirectoryStore(copy).get("layers.0.hc_attn_fn")).clone()
        data = (copy / LAYER_0).read_bytes()
        length = int.from_bytes(data[:8], "little")
        text = data[8 : 8 + length].rstrip()
        files.write_raw(copy / LAYER_0, text + b" " * (1 - len(text) % 2), data[8 + length :])
        assert torch.equal(bits(DirectoryStore(copy).get("layers.0.hc_attn_fn")), want)

    @pytest.mark.parametrize("name", [FP8, FP4, "layers.1.attn.wo_a"])
    def test_bf16_needs_no_scale(self, copy, name):
        store = DirectoryStore(copy)
        dense = dequantize(store.get(f"{name}.weight"), store.get(f"{name}.scale")).bfloat16()

        def change(tensors):
            del tensors[f"{name}.scale"]
            tensors[f"{name}.weight"] = ("BF16", list(dense.shape), bits(dense).numpy().tobytes())

        files.edit_tensors(copy, LAYER_1, change)
        assert torch.equal(DirectoryStore(copy).get(f"{name}.weight"), dense)

    def test_experts_may_be_fp8(self, copy):
        def change(tensors):
            tensors[f"{FP4}.weight"] = ("F8_E4M3", [96, 160], b"\x38" * 96 * 160)
            tensors[f"{FP4}.scale"] = ("F8_E8M0", [1, 2], b"\x7f\x80")

        files.edit_tensors(copy, LAYER_1, change)
        store = DirectoryStore(copy)
        assert dequantize(store.get(f"{FP4}.weight"), store.get(f"{FP4}.scale"))[95, 127:129].tolist() == [1, 2]

    def test_scales_may_be_f32_and_compressor_values_fp8(self, copy):
        wkv = "layers.1.attn.compressor.wkv"

        def change(tensors):
            shape = tensors[f"{wkv}.weight"][1]
            tensors[f"{wkv}.weight"] = ("F8_E4M3", shape, b"\x38" * math.prod(shape))
            tensors[f"{wkv}.scale"] = ("F32", [2, 2], struct.pack("<4f", 1, 2, 4, 8))

        files.edit_tensors(copy, LAYER_1, change)
        verify_all(copy)

    def test_links_into_a_hub_cache_are_followed(self, tiny, tmp_path):
        """snapshots/REV/file -> ../../blobs/HASH is how a download cache stores files."""
        snapshot, blobs = tmp_path / "snapshots" / "rev", tmp_path / "blobs"
        snapshot.mkdir(parents=True)
        blobs.mkdir()
        for path in tiny.iterdir():
            shutil.copyfile(path, blobs / f"sha-{path.name}")
            (snapshot / path.name).symlink_to(f"../../blobs/sha-{path.name}")
        verify_all(snapshot)


VALUES = {
    "scale byte 255": (LAYER_1, f"{FP8}.scale", 1, b"\xff", "scale byte 255 .* at element 1"),
    "scale byte 255 of an expert": (LAYER_1, f"{FP4}.scale", 7, b"\xff", "scale byte 255 .* at element 7"),
    "NaN weight": (LAYER_1, f"{FP8}.weight", 12_345, b"\x7f", "E4M3 code of no number at element 12345"),
    "negative NaN weight": (LAYER_1, f"{FP8}.weight", 3, b"\xff", "E4M3 code of no number at element 3"),
    "NaN in BF16": (LAYER_1, "layers.1.attn_norm.weight", 8, NAN_BF16, "not finite at element 4"),
    "infinity in F32": (LAYER_1, "layers.1.hc_attn_fn", 400, INF_F32, "not finite at element 100"),
    "expert too large": (LAYER_0, HASH, 80, (12).to_bytes(8, "little"), r"expert outside 0\.\.11 at element 10"),
    "expert negative": (LAYER_0, HASH, 0, b"\xff" * 8, r"expert outside 0\.\.11 at element 0"),
}


@pytest.mark.parametrize("damage", VALUES)
def test_damage_in_values_is_found_by_verify(damage, copy):
    file, name, offset, new, message = VALUES[damage]
    files.poke(copy / file, name, offset, new)
    with pytest.raises(BadInput, match=f"{name}: .*{message}"):
        verify_all(copy)


@pytest.mark.parametrize("damage", [d for d in VALUES if "scale" in d or "expert" in d])
def test_scales_and_hash_tables_are_checked_whenever_they_are_read(damage, copy):
    file, name, offset, new, message = VALUES[damage]
    files.poke(copy / file, name, offset, new)
    store = DirectoryStore(copy)
    with pytest.raises(BadInput, match=f"{file}: {name}: {message}"):
        store.get(name)


def test_an_expert_twice_in_a_row(copy):
    row = files.tensors_of(copy / LAYER_0)[HASH][2][5 * 24 : 6 * 24]
    files.poke(copy / LAYER_0, HASH, 5 * 24 + 16, row[:8])
    with pytest.raises(BadInput, match="expert twice in a row at element 17"):
        verify_all(copy)
    assert DirectoryStore(copy).get(HASH, 6, 9).shape == (3, 3)
    with pytest.raises(BadInput, match="expert twice in a row at element 17"):
        DirectoryStore(copy).get(HASH, 4, 6)


@pytest.mark.parametrize("value", [0.0, -1.0, math.inf, math.nan])
def test_an_f32_scale_must_be_positive_and_finite(copy, value):
    files.edit_tensors(copy, LAYER_1, lambda t: t.update({f"{FP8}.scale": ("F32", [2, 1], struct.pack("<2f", 1, value))}))
    with pytest.raises(BadInput, match="scale that is not positive and finite at element 1"):
        DirectoryStore(copy).get(f"{FP8}.scale")


@pytest.fixture(scope="module")
def full_size(tmp_path_factory):
    """V4-Pro with all its headers and sizes, 865 GB of holes: what a disk of a few MB can hold of it."""
    path = tmp_path_factory.mktemp("full") / "v4-pro"
    path.mkdir()
    held = manifest(preset("v4-pro"))
    for file, members in by_shard(held).items():
        header = file_header(members)
        with (path / file).open("wb") as out:
            out.write(header)
            out.truncate(len(header) + sum(info.nbytes for info in members.values()))
    (path / INDEX).write_text(render_index(held))
    (path / "config.json").write_text(render_config(CONFIG_JSON["v4-pro"]))
    yield path
    shutil.rmtree(path)


def test_a_directory_of_full_size_opens_and_reads_far_offsets(full_size):
    """Offsets past 4 GiB, in the file of layer 30; the last expert in file order ends at the last byte."""
    store = DirectoryStore(full_size)
    assert len(store.tensors) == 145_116
    name, file = "layers.30.ffn.experts.99.w3.weight", "model-00032-of-00064.safetensors"
    info = store.tensors[name]
    assert (info.shard, info.shape) == (file, (3072, 3584))
    with (full_size / file).open("r+b") as out:
        out.seek(-3, os.SEEK_END)
        out.write(b"\x12\x34\x56")
    assert (full_size / file).stat().st_size > 2**33
    assert bits(store.get(name, 3071))[0, -4:].tolist() == [0, 0x12, 0x34, 0x56]
    assert store.bytes_read == 3584


def test_a_sound_directory_passes(tiny):
    verify_all(tiny)


def test_no_directory(tmp_path):
    with pytest.raises(BadInput, match="no such directory"):
        open_store(str(tmp_path / "absent"))


def test_unknown_tensors_and_rows_are_refused(tiny):
    store = DirectoryStore(tiny)
    with pytest.raises(BadInput, match=r"no tensor layers\.9\.x"):
        store.get("layers.9.x")
    for start, stop in ((-1, 2), (3, 2), (0, 51)):
        with pytest.raises(BadInput, match="50 rows"):
            store.get("embed.weight", start, stop)


@pytest.mark.parametrize("case", ["pro-a", "flash-b"])
def test_the_oracle_cases_load(case):
    """Written by other software: one with BF16 weights without scales, one quantised."""
    path = Path(__file__).parents[2] / "shared" / "oracle" / case
    if not path.is_dir():
        pytest.skip("no oracle cases beside this checkout")
    verify_all(path)
