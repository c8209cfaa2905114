"""The manifest against the published figures of the four releases."""

from __future__ import annotations

import hashlib
import re
from functools import cache

import pytest

from reference.checkpoint import laws
from reference.checkpoint.census import census, kv_bytes, layer_costs
from reference.checkpoint.manifest import by_shard, file_header, file_sizes, manifest, parameters, shard_name
from reference.checkpoint.writer import render_config, render_index
from reference.config import Config
from reference.presets import CONFIG_JSON, preset

RELEASES = {
    "v4-pro": (145_116, 64, 864_704_792_696, 864_721_029_744, 1_598_837_347_742, 25_840_145_979),
    "v4-pro-0813": (149_782, 66, 892_727_580_904, 892_744_322_880, 1_650_495_609_866, 77_498_408_103),
    "v4-flash": (69_187, 46, 159_609_485_896, 159_617_149_040, 290_942_289_362, 6_610_048_891),
    "v4-flash-0731": (72_317, 48, 166_878_536_440, 166_886_535_336, 304_178_091_454, 19_845_850_983),
}
PRO_GROUPS = {
    "routed experts": (140_544, 1_547_396_186_112, 822_054_223_872),
    "attention": (793, 18_293_589_632, 18_294_854_528),
    "MTP": (2_343, 25_840_145_979, 13_956_587_692),
    "shared experts": (366, 4_029_677_568, 4_029_923_520),
    "embed + head": (2, 1_853_358_080, 3_706_716_160),
    "compressor": (244, 670_128_640, 1_344_566_272),
    "indexer": (210, 501_384_960, 625_367_040),
    "gates": (119, 167_925_504, 335_895_552),
    "mHC": (369, 84_069_603, 336_278_412),
    "hash tables": (3, 0, 18_616_320),
    "norms": (123, 881_664, 1_763_328),
}
PRO_DTYPES = {
    "I8": (71_424, 786_381_668_352),
    "F8_E8M0": (71_952, 49_150_268_416),
    "F8_E4M3": (528, 23_169_335_296),
    "BF16": (619, 5_633_798_656),
    "F32": (590, 351_105_656),
    "I64": (3, 18_616_320),
}


@cache
def tensors(release):
    return manifest(preset(release))


@pytest.mark.parametrize("release", RELEASES)
def test_totals_are_the_published_ones(release):
    count, shards, payload, files, params, drafter = RELEASES[release]
    held = tensors(release)
    counted = census(preset(release), held)
    assert (counted.total.tensors, len(by_shard(held)), counted.total.bytes) == (count, shards, payload)
    assert sum(file_sizes(held).values()) == files
    assert counted.total.parameters == params
    assert next(row for row in counted.groups if row.name == "MTP").parameters == drafter


def test_groups_and_dtypes_of_pro():
    counted = census(preset("v4-pro"), tensors("v4-pro"))
    assert {row.name: (row.tensors, row.parameters, row.bytes) for row in counted.groups} == PRO_GROUPS
    assert {row.name: (row.tensors, row.bytes) for row in counted.dtypes} == PRO_DTYPES
    assert round(counted.activated / 1e9, 3) == 49.779


def test_flash_activates_what_is_published():
    counted = census(preset("v4-flash"), tensors("v4-flash"))
    assert round(counted.activated / 1e9, 2) == 13.80


@pytest.mark.parametrize(
    ("release", "digest", "index_bytes"),
    [
        ("v4-pro", "5fe4568d", 11_305_684),
        ("v4-pro-0813", "9dd2a892", 11_651_606),
        ("v4-flash", "b628e633", 5_371_381),
        ("v4-flash-0731", "6c8f3d2d", 5_602_871),
    ],
)
def test_config_and_index_are_written_as_released(release, digest, index_bytes):
    config = render_config(CONFIG_JSON[release]).encode()
    assert hashlib.sha256(config).hexdigest().startswith(digest)
    assert len(render_index(tensors(release))) == index_bytes


def test_a_pro_shard_has_the_released_counts():
    shards = by_shard(tensors("v4-pro"))
    assert list(shards[shard_name(0, 64)]) == ["embed.weight"]
    assert len(shards[shard_name(1, 64)]) == 2337  # layer 0, HCA
    assert len(shards[shard_name(3, 64)]) == 2344  # layer 2, CSA
    assert {"head.weight", "norm.weight", "hc_head_fn", "hc_head_base", "hc_head_scale"} == set(shards[shard_name(62, 64)])
    assert all(name.startswith("mtp.0.") for name in shards[shard_name(63, 64)])


def test_an_expert_is_two_contiguous_ranges():
    """33,030,144 bytes of weights and 2,064,384 of scales: two reads fetch an expert of Pro."""
    held = by_shard(tensors("v4-pro"))[shard_name(31, 64)]
    names = list(held)
    for kind, size in (("weight", 33_030_144), ("scale", 2_064_384)):
        own = [f"layers.30.ffn.experts.17.{w}.{kind}" for w in ("w1", "w2", "w3")]
        first = names.index(own[0])
        assert names[first : first + 3] == own
        assert sum(held[name].nbytes for name in own) == size


def test_header_is_aligned_and_counts_its_own_padding():
    header = file_header(by_shard(manifest(preset("mini")))["model-00001-of-00008.safetensors"])
    assert len(header) % 8 == 0
    assert int.from_bytes(header[:8], "little") == len(header) - 8


def test_scales_round_up_where_sizes_do_not_divide():
    config = Config.from_dict({**CONFIG_JSON["mini"], "hidden_size": 416, "moe_intermediate_size": 160})
    held = manifest(config)
    assert held["layers.0.ffn.shared_experts.w1.scale"].shape == (2, 4)
    assert held["layers.0.ffn.experts.0.w1.scale"].shape == (160, 13)
    assert held["layers.0.ffn.experts.0.w2.weight"].shape == (416, 80)


@pytest.mark.parametrize("release", ["v4-pro-0813", "v4-flash-0731"])
def test_dspark_blocks(release):
    config = preset(release)
    held, last = tensors(release), config.num_drafter_blocks - 1
    assert config.dspark is not None and last == 2 and not config.has_mtp
    rank = config.dspark.dspark_markov_rank
    assert held["mtp.0.main_proj.weight"].shape == (config.hidden_size, 3 * config.hidden_size)
    assert held["mtp.2.markov_head.markov_w2.weight"].shape == (config.vocab_size, rank)
    assert held["mtp.2.confidence_head.proj.weight"].shape == (1, config.hidden_size + rank)
    assert "mtp.2.norm.weight" in held and "mtp.0.norm.weight" not in held
    assert not any("e_proj" in name or "tid2eid" in name for name in held if name.startswith("mtp."))


@pytest.mark.parametrize("name", CONFIG_JSON)
def test_every_parameter_has_a_law(name):
    config = preset(name)
    drawn = {re.sub(r"\d+", "0", p.name): p for shard in parameters(config).values() for p in shard if p.dtype != "I64"}
    for parameter in drawn.values():
        law = laws.law(config, parameter)
        assert law.std > 0 or law.high > law.low


def test_kv_bytes_per_token_of_pro():
    kv = kv_bytes(preset("v4-pro"))
    assert (kv.main["bf16"], kv.main["fp8"], kv.index["fp4"], kv.index["fp8"]) == (7928, 4955, 510, 990)
    assert kv.window["fp8"] == 7808 * 640
    assert kv.compressor_state == 18_710_528


@pytest.mark.parametrize(
    ("context", "compressed", "keys"),
    [(3, 0, 0), (4, 1, 1), (4099, 1024, 1024), (4100, 1024, 1025), (1_048_576, 1024, 262_144)],
)
def test_rows_a_csa_layer_reads(context, compressed, keys):
    costs = {cost.kind: cost for cost in layer_costs(preset("v4-pro"), tensors("v4-pro"), context)}
    csa, hca = costs["csa"], costs["hca"]
    assert (csa.layers, hca.layers, "window" in costs) == (30, 31, False)
    assert (csa.window_rows, csa.compressed_rows, csa.index_keys) == (min(context, 128), compressed, keys)
    assert (hca.compressed_rows, hca.index_keys) == (context // 128, 0)
    assert csa.kv_bytes["pool-fp8"] == (min(context, 128) + compressed) * 640 + keys * 68
    assert csa.kv_bytes["pool-bf16"] == (min(context, 128) + compressed) * 1024 + keys * 132
    assert csa.attention_flops == 4 * (min(context, 128) + compressed) * 128 * 512
    assert csa.index_flops == 2 * keys * 64 * 128
