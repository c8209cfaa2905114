"""The benchmark measures what it says: own processes, one engine each, ratios the right way up."""

from __future__ import annotations

import pytest

from parity.bench.reference import ENGINES, Job, Measured, cut, measure, opened, ratios
from reference.checkpoint.procedural import ProceduralStore
from reference.checkpoint.writer import write_checkpoint
from reference.config import Config
from reference.errors import BadInput
from reference.presets import CONFIG_JSON


def test_ratios_are_above_one_where_the_reference_is_faster():
    ours = [Measured(1.0, 2.0, 100, 50), Measured(9.0, 2.0, 300, 50), Measured(1.0, 2.0, 100, 50)]
    theirs = [Measured(3.0, 1.0, 400, 50)] * 3
    assert ratios(ours, theirs) == {"prefill speed": 3.0, "decode speed": 0.5, "peak memory": 0.25}


@pytest.mark.oracle
@pytest.mark.parametrize("engine", ENGINES)
def test_each_engine_runs_in_a_process_of_its_own(engine):
    pytest.importorskip("transformers")
    got = measure(engine, Job("procedural:mini", prefill=20, decode=2, threads=1))
    assert got.prefill_s > 0 and got.decode_s > 0
    assert got.peak_rss >= got.loaded_rss > 100 << 20  # an engine without torch and weights would be smaller


def test_a_child_that_fails_is_an_error():
    with pytest.raises(RuntimeError, match="nosuch"):
        measure("reference", Job("procedural:nosuch", 4, 1, 1))


@pytest.mark.parametrize(("name", "kinds"), [("v4-pro", ["hca", "csa"]), ("v4-flash", ["window", "csa", "hca"])])
def test_a_cut_model_has_the_widths_and_a_layer_of_each_kind(name, kinds):
    whole, few = CONFIG_JSON[name], cut(CONFIG_JSON[name])
    config = Config.from_dict(few)
    assert [config.kind(i) for i in range(config.num_hidden_layers)] == kinds
    assert [config.is_hash_layer(i) for i in range(len(kinds))] == [True, *[False] * (len(kinds) - 1)]
    changed = {field for field in whole if whole[field] != few[field]}
    assert changed == {"num_hidden_layers", "compress_ratios", "num_hash_layers", "n_routed_experts", "vocab_size"}
    assert opened(Job(f"procedural:{name}", 1, 1, 1, cut=True))[0].config == config


def test_files_are_not_cut(tmp_path):
    drawn = ProceduralStore("mini")
    write_checkpoint(drawn, drawn.config_json, tmp_path / "mini", lambda number, file: None)
    assert opened(Job(str(tmp_path / "mini"), 1, 1, 1))[1] == drawn.config_json
    with pytest.raises(BadInput, match="only a procedural model"):
        opened(Job(str(tmp_path / "mini"), 1, 1, 1, cut=True))
