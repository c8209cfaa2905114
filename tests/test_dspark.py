"""DSpark releases: the drafter is counted and loaded, and its forward is said to be missing."""

from __future__ import annotations

import dataclasses

import jsonschema
import pytest
import torch

from parity import cli, records
from reference.checkpoint.loader import Loader
from reference.checkpoint.procedural import ProceduralStore
from reference.config import DSpark
from reference.errors import BadInput
from reference.presets import CONFIG_JSON, preset

SETTINGS = {"dspark_block_size": 5, "dspark_noise_token_id": 500, "dspark_target_layer_ids": [2, 3], "dspark_markov_rank": 8}
MINI = dataclasses.replace(
    preset("mini"),
    compress_ratios=(*preset("mini").compress_ratios, 0, 0),
    dspark=DSpark(5, 500, (2, 3), 8),
)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    from reference.checkpoint.writer import write_checkpoint

    path = tmp_path_factory.mktemp("dspark") / "model"
    fields = {**CONFIG_JSON["mini"], **SETTINGS, "compress_ratios": list(MINI.compress_ratios)}
    write_checkpoint(ProceduralStore(MINI), fields, path, lambda number, file: None)
    return path


def test_the_drafter_is_there_but_is_no_serial_mtp():
    store = ProceduralStore(MINI)
    assert {name.split(".")[1] for name in store.tensors if name.startswith("mtp.")} == {"0", "1", "2"}
    assert MINI.num_drafter_blocks == 3 and not MINI.has_mtp
    with pytest.raises(BadInput, match="DSpark"):
        Loader(store, dtype=torch.float32, memory=1 << 30).mtp(0)


def test_a_run_says_that_the_drafter_was_not_run(directory, tmp_path):
    out = tmp_path / "run"
    words = ["--layers", "0", "--phases", "decode", "--start-pos", "17", "--ops", "attn.wkv*", "--lengths", ""]
    assert cli.main(["run", "--model", str(directory), *words, "--out", str(out)]) == 0
    said = records.read_lines(out)
    drafter = [r for r in said if r["record"] == "not_run" and r["op"] == "dspark"]
    assert drafter and "not defined here" in drafter[0]["reason"] and drafter[0]["layers"] == 3
    for record in drafter:
        jsonschema.validate(record, records.schema())
    assert "dspark" in (out / "index.html").read_text()


def test_inspect_counts_the_drafter(directory, capsys):
    assert cli.main(["inspect", str(directory)]) == 0
    assert f"{len(ProceduralStore(MINI).tensors):,} tensors" in capsys.readouterr().out
