"""A run that is killed at any instant goes on after its last finished layer, and ends with the same records."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from parity import cli, journal, records
from parity.flow import Streams

TINY = ["run", "--model", "procedural:mini", "--lengths", "3", "--start-pos", "", "--phases", "decode", "--ops", "attn_norm"]
LAYERS = [*(f"layer_{n:02d}" for n in range(5)), "mtp_0"]

# One process loads everything and forks a run per layer; each is killed by the first verdict of its layer.
KILL = """
import os, signal, sys
from parity import cli, flow, run

honest = flow.Flow.run_layer

def killed_in(victim):
    def run_layer(self, layer):
        for judged in honest(self, layer):
            if layer == victim:
                os.kill(os.getpid(), signal.SIGKILL)
            yield judged
    return run_layer

for victim in range(6):
    pid = os.fork()
    if not pid:
        flow.Flow.run_layer = killed_in(victim)
        os._exit(cli.main(sys.argv[1:]))
    print("ended", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""


def run(out: Path, *words: str) -> int:
    return cli.main([*TINY, *words, "--out", str(out)])


def said(out: Path) -> list[records.Record]:
    return [records.deterministic(r) for r in records.read_lines(out)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """The same run, never interrupted."""
    out = tmp_path_factory.mktemp("whole")
    assert run(out) == 0
    return out


def layers_kept(out: Path) -> list[str]:
    return sorted(p.stem for p in (out / journal.STATE).glob("*.json") if p.stem != "run")


def test_killed_in_the_middle_of_each_layer(tmp_path, whole):
    out = tmp_path / "run"
    command = [sys.executable, "-c", KILL, *TINY, "--resume", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[1])
    assert done.stdout.count("ended -9") == len(LAYERS), done.stderr
    assert layers_kept(out) == LAYERS[:-1] and not (out / records.FILE).exists()
    assert [p.name for p in (out / journal.STATE).glob("*.safetensors")] == ["layer_04.safetensors"]
    assert run(out, "--resume") == 0
    assert said(out) == said(whole)
    assert sorted(p.name for p in out.iterdir()) == sorted(p.name for p in whole.iterdir())


class Killed(BaseException):
    """As sudden as a signal, for what runs in this process."""


def kill_at(monkeypatch, number: int, before: bool) -> None:
    """The end comes just before, or just after, the renaming of file `number`."""
    honest, count = Path.replace, iter(range(1000))

    def replace(self, target):
        here = next(count) == number
        if here and before:
            raise Killed
        honest(self, target)
        if here:
            raise Killed

    monkeypatch.setattr(Path, "replace", replace)


FEW = ["--layers", "1-2"]  # two layers on synthetic streams
FILES = 5  # run.json, two layers, records, page


@pytest.fixture(scope="module")
def few(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("few")
    assert run(out, *FEW) == 0
    return out


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("number", range(FILES))
def test_killed_around_each_file(tmp_path, monkeypatch, few, number, before):
    with monkeypatch.context() as patch, pytest.raises(Killed):
        kill_at(patch, number, before)
        run(tmp_path, *FEW)
    assert run(tmp_path, *FEW, "--resume") == 0
    assert said(tmp_path) == said(few)
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(p.name for p in few.iterdir())


@pytest.fixture
def broken(tmp_path, monkeypatch) -> Path:
    """A free-running run whose first layer is finished."""
    with monkeypatch.context() as patch, pytest.raises(Killed):
        kill_at(patch, 2, before=False)  # after run.json and the streams: the records of layer 0
        run(tmp_path)
    assert layers_kept(tmp_path) == LAYERS[:1]
    return tmp_path


def test_streams_come_back_to_the_bit_whatever_their_fields(broken):
    """What is kept follows the fields of `Streams`, in any number and type."""
    back = journal.Journal(broken).streams("layer_00")
    for name in ("truth", "twin", "reference"):
        assert set(getattr(back, name)) == {"prefill", "decode"}
    assert back.twin["decode"].shape == (1, 4, 256) and (back.twin["decode"] != back.truth["decode"]).any()
    assert back.reference["decode"].dtype == torch.float32 != back.truth["decode"].dtype
    other = Streams({"decode": back.twin["decode"].bfloat16()}, {"decode": back.twin["decode"][:, :1].transpose(1, 2)})
    journal.Journal(broken).keep("layer_01", [], other)
    again = journal.Journal(broken).streams("layer_01")
    assert all(getattr(again, n)["decode"].equal(getattr(other, n)["decode"]) for n in ("truth", "twin"))
    assert again.truth["decode"].dtype == other.truth["decode"].dtype


@pytest.mark.parametrize(
    ("words", "field"),
    [
        (["--seed", "1"], "seed"),
        (["--model", "procedural:mini@7"], "model"),
        (["--model", "procedural:v4-pro-slim"], "config_sha256"),
        (["--lengths", "4"], "lengths"),
        (["--start-pos", "5"], "start_pos"),
        (["--phases", "prefill"], "phases"),
        (["--ops", "attn_norm,ffn_norm"], "ops"),
        (["--layers", "0-1"], "layers"),
        (["--profile", "pool-bf16"], "profile"),
        (["--gate", "--ops", "*"], "ops"),
        (["--candidate-layers", "0"], "candidate"),
    ],
)
def test_another_run_is_not_resumed(broken, words, field, capsys):
    kept = {p: p.read_bytes() for p in (broken / journal.STATE).iterdir()}
    assert run(broken, "--resume", *words) == 4
    said = capsys.readouterr().err
    assert "run.json: the run began with" in said and said.count("\n") == 1
    assert f"began with {field} " in said
    assert {p: p.read_bytes() for p in (broken / journal.STATE).iterdir()} == kept


def test_without_the_word_nothing_is_resumed_or_overwritten(broken, few, capsys):
    assert run(broken) == 4 and "--resume" in capsys.readouterr().err
    assert run(few, *FEW) == 4 and "already holds a run" in capsys.readouterr().err


def test_a_run_that_ended_is_rendered_again_and_not_run_again(few, monkeypatch):
    monkeypatch.setattr("parity.run._layer", None)
    before = (few / records.FILE).read_bytes()
    (few / "index.html").unlink()
    assert run(few, *FEW, "--resume") == 0
    assert (few / records.FILE).read_bytes() == before and (few / "index.html").exists()
    assert run(few, *FEW, "--resume", "--seed", "3") == 4


@pytest.mark.parametrize("name", ["run.json", "layer_00.json", "layer_00.safetensors"])
@pytest.mark.parametrize("damage", ["cut", "flip", "gone"])
def test_damage_is_named(broken, name, damage, capsys):
    """Half of it, a flipped bit, nothing at all; a lost record of a layer only means that it runs again."""
    path = broken / journal.STATE / name
    content = bytearray(path.read_bytes())
    if damage == "cut":
        path.write_bytes(content[: len(content) // 2])
    elif damage == "flip":
        content[0] ^= 1
        content[-1] ^= 1
        path.write_bytes(content)
    else:
        path.unlink()
    harmless = damage == "gone" and name != "layer_00.safetensors"
    assert run(broken, "--resume") == (0 if harmless else 4)
    assert harmless or str(path) in capsys.readouterr().err


@pytest.mark.parametrize("text", ["[]", "{}", '{"records": 3}', json.dumps({"records": [{"op": "x"}]})])
def test_a_layer_without_records_is_named(broken, text, capsys):
    path = broken / journal.STATE / "layer_00.json"
    path.write_text(text)
    assert run(broken, "--resume") == 4 and str(path) in capsys.readouterr().err
