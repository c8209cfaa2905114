"""config.json: presets, round trip, and everything that is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from reference.config import Config
from reference.errors import BadInput
from reference.presets import CONFIG_JSON, preset


def changed(**fields: Any) -> dict[str, Any]:
    return {**CONFIG_JSON["mini"], **fields}


@pytest.mark.parametrize("name", list(CONFIG_JSON))
def test_presets_load_from_their_file(name: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG_JSON[name]))
    assert Config.from_json(path) == preset(name)


def test_layer_kinds() -> None:
    pro, flash = preset("v4-pro"), preset("v4-flash")
    assert [pro.kind(i) for i in (0, 1, 2, 3, 60, 61)] == ["hca", "hca", "csa", "hca", "csa", "window"]
    assert [flash.kind(i) for i in (0, 1, 2, 3, 42, 43)] == ["window", "window", "csa", "hca", "csa", "window"]
    counts = [[c.kind(i) for i in range(c.num_hidden_layers)].count(kind) for c in (pro, flash) for kind in ("csa", "hca")]
    assert counts == [30, 31, 21, 20]
    assert [pro.is_hash_layer(i) for i in (2, 3)] == [True, False]


def test_drafter_blocks_are_counted_from_the_ratios() -> None:
    """num_nextn_predict_layers says 1 for all of them."""
    blocks = {name: preset(name).num_drafter_blocks for name in ("v4-pro", "v4-flash", "v4-pro-0813", "v4-flash-0731")}
    assert blocks == {"v4-pro": 1, "v4-flash": 1, "v4-pro-0813": 3, "v4-flash-0731": 3}
    assert [preset(name).has_mtp for name in ("v4-pro", "v4-pro-0813")] == [True, False]


def test_slim_keeps_the_schedule_of_pro_and_small_models_keep_epsilons_apart() -> None:
    assert preset("v4-pro-slim").compress_ratios == preset("v4-pro").compress_ratios
    for name in ("v4-pro-slim", "mini"):
        assert preset(name).hc_eps != preset(name).rms_norm_eps


def test_unknown_preset() -> None:
    with pytest.raises(KeyError, match="unknown preset 'v4-max'; known: v4-pro"):
        preset("v4-max")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"compress_ratios": [0, 128, 8, 128, 4, 0]}, r"unknown compress ratios \[8\]"),
        ({"compress_ratios": [0, 128, 4]}, "3 compress_ratios for 5 layers"),
        ({"compress_ratios": [0, 128, 4, 128, 4, 4]}, "drafter blocks are window-only"),
        ({"compress_ratios": "4"}, "list of integers"),
        ({"hidden_size": 256.0}, "hidden_size must be an integer"),
        ({"hidden_size": True}, "hidden_size must be an integer"),
        ({"hidden_size": 0}, "hidden_size must be positive"),
        ({"swiglu_limit": "10"}, "swiglu_limit must be a number"),
        ({"num_attention_heads": 9}, "9 heads do not split into 2 groups"),
        ({"qk_rope_head_dim": 63}, "qk_rope_head_dim 63 must be even"),
        ({"qk_rope_head_dim": 256}, "at most index_head_dim 128"),
        ({"index_head_dim": 96}, "no power of two"),
        ({"num_experts_per_tok": 9}, "top-9 of 8 experts"),
        ({"rope_scaling": {"type": "linear"}}, "of type yarn"),
        ({"rope_scaling": {**CONFIG_JSON["mini"]["rope_scaling"], "mscale": 1.0}}, "has an mscale"),
        ({"dspark_block_size": 5}, "dspark_block_size is set but"),
        ({"scoring_func": "sigmoid"}, "scoring_func is 'sigmoid'; every DeepSeek-V4 has 'sqrtsoftplus'"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings is True"),
        ({"n_shared_experts": 2}, "n_shared_experts is 2"),
        ({"num_key_value_heads": 2}, "num_key_value_heads is 2"),
    ],
)
def test_inconsistent_configs_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        Config.from_dict(changed(**fields))


@pytest.mark.parametrize(
    ("fields", "what"),
    [
        ({"model_type": "deepseek_v41"}, r"DeepSeek-V4\.1"),
        ({"model_type": "deepseek_v3"}, "DeepSeek-V3 / R1"),
        ({"model_type": "deepseek_v32"}, r"DeepSeek-V3\.2"),
        ({"model_type": "llama"}, "'llama'"),
        ({"engram_layer_ids": [1]}, r"DeepSeek-V4\.1 \(field engram_layer_ids\)"),
        ({"compress_ratios": [0, 1, 2, 1, 2, 0]}, r"DeepSeek-V4\.1 \(compress ratios 1 or 2\)"),
    ],
)
def test_other_models_are_refused_by_name(fields: dict[str, Any], what: str) -> None:
    with pytest.raises(BadInput, match=what):
        Config.from_dict(changed(**fields))


def test_missing_fields_are_listed() -> None:
    fields = changed()
    del fields["head_dim"], fields["index_topk"]
    with pytest.raises(BadInput, match="missing fields: head_dim, index_topk"):
        Config.from_dict(fields)


@pytest.mark.parametrize(("text", "message"), [("{", "not readable as JSON"), ("[1]", "expected a JSON object")])
def test_damaged_files_are_named(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(BadInput, match=message) as raised:
        Config.from_json(path)
    assert str(path) in str(raised.value)


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="no such file"):
        Config.from_json(tmp_path / "config.json")
