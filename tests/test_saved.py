"""A generation that is killed and goes on: the same tokens, or one line that says why not."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from strategies import TINY, tiny_model

from parity.cli import main
from reference.errors import BadInput
from reference.generate import Sampling, Text, extend, generate
from reference.saved import load_text, save_text
from reference.state import SequenceState, from_tensors, named_tensors

HOW = {"model": "tiny", "seed": 3, "temperature": 0.7}
WARM = Sampling(2.0, 3)
MODEL = tiny_model(torch.float32)
# Blocks of 4 and their overlap; the window of 7 and its 6 rows; blocks of 128.
LENGTHS = [1, 2, 3, 4, 6, 7, 126, 127, 128, 129]


def prompt(n: int) -> torch.Tensor:
    return (7 * torch.arange(n) + 3) % TINY.vocab_size


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("saved") / "text"
    text = Text.begin(prompt(9), WARM)
    list(extend(MODEL, text, 3, WARM))
    save_text(path, text, HOW)
    return path


@pytest.mark.parametrize("sampling", [Sampling(), WARM], ids=["greedy", "sampled"])
@pytest.mark.parametrize("n", LENGTHS)
def test_a_resumed_text_has_the_tokens_of_one_run(n, sampling, tmp_path):
    """The same bits in every state as well: nothing is rounded on the way through the file."""
    whole = Text.begin(prompt(n), sampling)
    once = list(extend(MODEL, whole, 4, sampling))
    for cut in (1, 2):
        text = Text.begin(prompt(n), sampling)
        first = list(extend(MODEL, text, cut, sampling))
        save_text(tmp_path / "text", text, HOW)
        again = load_text(tmp_path / "text", HOW)
        assert again.made == first == once[:cut]
        assert first + list(extend(MODEL, again, 4, sampling)) == once
        assert again.state.length == whole.state.length
        both = named_tensors(again.state), named_tensors(whole.state)
        assert both[0].keys() == both[1].keys() and all(torch.equal(x, both[1][name]) for name, x in both[0].items())


def test_a_text_that_has_seen_nothing(tmp_path):
    save_text(tmp_path / "text", Text.begin(prompt(4), WARM), HOW)
    assert list(extend(MODEL, load_text(tmp_path / "text", HOW), 3, WARM)) == list(generate(MODEL, prompt(4), 3, WARM))


def test_another_state_of_the_noise_draws_other_tokens(saved):
    text, other = load_text(saved, HOW), load_text(saved, HOW)
    other.generator.manual_seed(3)
    assert list(extend(MODEL, text, 12, WARM)) != list(extend(MODEL, other, 12, WARM))


def test_what_is_there_already_is_not_made_again(saved):
    assert list(extend(MODEL, load_text(saved, HOW), 3, WARM)) == []
    ended = load_text(saved, HOW)
    ended.ids.append(TINY.eos_token_id)
    assert list(extend(MODEL, ended, 9, WARM)) == []


def test_names_of_a_state_cover_all_of_it():
    state = SequenceState()
    MODEL.forward([prompt(130)], [state])
    named = named_tensors(state)
    assert {name.split(".", 2)[2] for name in named} == {
        "window", *(f"{part}.{what}" for part in ("compressor", "indexer") for what in ("values", "gates", "rows"))
    }  # fmt: skip
    back = from_tensors(130, named)
    assert back.length == 130 and len(back.layers) == TINY.num_hidden_layers
    with pytest.raises(KeyError, match=r"layers\.2\.window"):
        from_tensors(130, {n: x for n, x in named.items() if n != "layers.2.window"})
    with pytest.raises(KeyError, match=r"layers\.0\.indexer\.gates"):
        from_tensors(130, {n: x for n, x in named.items() if n != "layers.0.indexer.gates"})


@pytest.mark.parametrize("name", HOW)
def test_a_text_begun_in_another_way_is_refused(name, saved):
    with pytest.raises(BadInput, match=f"begun with {name} "):
        load_text(saved, {**HOW, name: "other"})
    with pytest.raises(BadInput, match=f"begun with {name} "):
        load_text(saved, {n: v for n, v in HOW.items() if n != name})


@pytest.mark.parametrize("place", [0, 7, 8, 9, 60, 200, -1, -5000, -40000, "half", "cut", "empty", "longer"])
def test_a_damaged_file_ends_in_one_line(place, saved, tmp_path):
    content = bytearray(saved.read_bytes())
    if isinstance(place, int):
        content[place] ^= 4
    else:
        content = {"half": content[: len(content) // 2], "cut": content[:-1], "empty": b"", "longer": content + b"\0"}[place]
    (tmp_path / "text").write_bytes(content)
    with pytest.raises(BadInput, match="text: ") as refused:
        load_text(tmp_path / "text", HOW)
    assert "\n" not in str(refused.value)


def test_a_file_of_another_kind_is_refused(saved, tmp_path):
    save_file(load_file(saved), tmp_path / "bare")
    save_file({"x": torch.zeros(1)}, tmp_path / "other", {"about": json.dumps([1]), "sha256": "0"})
    for name in ("bare", "other", "absent"):
        with pytest.raises(BadInput, match=f"{name}: "):
            load_text(tmp_path / name, HOW)


def test_a_full_disk_leaves_the_file_as_it_was(saved, tmp_path, monkeypatch):
    (tmp_path / "text").write_bytes(saved.read_bytes())

    def full(fd):
        raise OSError("disk full")

    monkeypatch.setattr("reference.saved.os.fsync", full)
    with pytest.raises(OSError, match="disk full"):
        save_text(tmp_path / "text", Text.begin(prompt(2), WARM), HOW)
    assert [p.name for p in tmp_path.iterdir()] == ["text"] and load_text(tmp_path / "text", HOW).made


GENERATE = ["generate", "--model", "procedural:mini", "--temperature", "1.5", "--seed", "4"]


def test_a_killed_command_goes_on(tmp_path, capsys):
    """Killed without notice while it generates; the file is whole whenever that happens."""
    path = tmp_path / "text"
    command = [*GENERATE, "--ids", "0,5,17", "--save-state", str(path), "--max-new-tokens", "400"]
    code = f"from parity.cli import main; main({command})"
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while not path.exists() and child.poll() is None:
        time.sleep(0.01)
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    with safe_open(path, "pt") as file:
        about = json.loads(file.metadata()["about"])
    made = len(about["ids"]) - about["prompt"]
    assert 0 < made < 400
    assert main([*GENERATE, "--resume", str(path), "--max-new-tokens", str(made + 6)]) == 0
    resumed = capsys.readouterr().out
    assert main([*GENERATE, "--ids", "0,5,17", "--max-new-tokens", str(made + 6)]) == 0
    assert capsys.readouterr().out == resumed and len(resumed.split()) == made + 6
    assert main([*GENERATE, "--resume", str(path), "--max-new-tokens", "1"]) == 0  # it has more: nothing is made
    assert len(capsys.readouterr().out.split()) == made + 6
    assert main([*GENERATE, "--resume", str(path), "--seed", "5"]) == 4
    assert "begun with seed 4, not 5" in capsys.readouterr().err


def test_the_engine_saves_nothing(tmp_path, capsys):
    engine = ["--engine", "optimized", "--profile", "pool-fp8"]
    assert main([*GENERATE, "--ids", "1", *engine, "--save-state", str(tmp_path / "text")]) == 2
    assert "need --engine reference" in capsys.readouterr().err
