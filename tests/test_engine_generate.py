"""Generation with the engine: drafts change no token, rolled back ones leave no trace, and commands take the engine."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from bounds import assert_within, rounding_bound
from safetensors.torch import load_file

from optimized import generate as module
from optimized.engine import Engine
from optimized.generate import generate, speculate
from optimized.pool.allocator import Sequence
from parity.cli import main
from parity.freerun import compare
from reference.checkpoint.procedural import ProceduralStore
from reference.errors import BadInput
from reference.presets import preset

# MTP of a model that was never trained guesses wrong; to accept drafts too, the tests bend its guesses.
CONFIG = replace(preset("mini"), num_hidden_layers=1, compress_ratios=(4, 0), num_hash_layers=0, index_topk=3)
STORE = ProceduralStore(CONFIG)
PROMPT = torch.tensor([5, 17, 300, 4, 99, 211])
NEW = 6


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine(STORE, blocks=2, slots=2, lookahead=3)


@pytest.fixture(scope="module")
def plain(engine: Engine) -> list[int]:
    made = list(generate(engine, PROMPT, NEW))
    assert len(made) == NEW and engine.allocator.free_slots == 2
    return made


@pytest.mark.parametrize(
    ("drafts", "right", "lengths"),
    [
        (1, {1, 3, 5}, [1, 2, 2, 1]),
        (3, {1, 2, 5}, [1, 3, 1, 1]),  # two of three, none of the one that still fits, none needed for the last
    ],
)
def test_speculation_gives_the_tokens_of_plain_decoding(
    engine: Engine, plain: list[int], drafts: int, right: set[int], lengths: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drafts of the new tokens in `right` are bent to be right, all others to be wrong: these must leave no trace."""
    drafted: list[int] = []

    def draft(x: torch.Tensor, after: list[torch.Tensor], sequences: list[Sequence]) -> torch.Tensor:
        streams = original[0](x, after, sequences)
        drafted.append(sequences[0].drafted - len(PROMPT) + 1)  # number of the guess among the new tokens
        return streams

    def guess(x: torch.Tensor) -> torch.Tensor:
        bent, at = original[1](x), drafted[-1]
        bent[-1, plain[at] if at in right else (plain[at] + 1) % CONFIG.vocab_size] = torch.inf
        return bent

    original = engine.draft, engine.draft_logits
    monkeypatch.setattr(engine, "draft", draft)
    monkeypatch.setattr(engine, "draft_logits", guess)
    steps = list(speculate(engine, PROMPT, NEW, drafts))
    assert [token for step in steps for token in step] == plain
    assert [len(step) for step in steps] == lengths
    assert engine.allocator.free_slots == 2 and engine.allocator.free_blocks == 2


@pytest.mark.slow
@pytest.mark.parametrize("build", ["pool-fp8", "pool-bf16"])
def test_speculation_with_drafts_that_nobody_bent(build: str) -> None:
    """A dozen words, of which the drafter guesses some: plain tokens for one, two and three drafts."""
    config = replace(CONFIG, vocab_size=12, eos_token_id=99)
    engine = Engine(ProceduralStore(config, seed=9), build, blocks=1, slots=1, lookahead=3)
    prompt = torch.tensor([2, 0, 1, 1, 0, 2])
    plain = list(generate(engine, prompt, 14))
    for drafts in (1, 2, 3):
        steps = list(speculate(engine, prompt, 14, drafts))
        assert [token for step in steps for token in step] == plain
        accepted = sum(len(step) - 1 for step in steps)
        assert 0 < accepted < drafts * (len(steps) - 2)


def test_a_draft_that_is_not_taken_back_is_seen(
    engine: Engine, plain: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine.allocator, "roll_back", lambda sequence, n: None)
    made = [token for step in speculate(engine, PROMPT, NEW) for token in step]
    assert made != plain


def test_generation_stops_at_eos(engine: Engine, plain: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    ending = replace(engine.config, eos_token_id=plain[2])
    monkeypatch.setattr(engine, "config", ending)
    want = plain[: plain.index(plain[2]) + 1]
    assert list(generate(engine, PROMPT, NEW)) == want
    assert [t for step in speculate(engine, PROMPT, NEW) for t in step] == want


def test_speculation_needs_a_lookahead() -> None:
    steps: Iterator[list[int]] = speculate(Engine(STORE, blocks=1, slots=1), PROMPT, 2)
    with pytest.raises(BadInput, match="lookahead of 1"):
        next(steps)
    with pytest.raises(BadInput, match="lookahead of 3"):
        next(speculate(Engine(STORE, blocks=1, slots=1, lookahead=2), PROMPT, 2, drafts=3))
    assert module.greedy(torch.tensor([1.0, 3.0, 3.0])) == 1


@pytest.mark.parametrize("command", [["generate", "--ids", "5,17"], ["logits", "--model", "procedural:mini", "--out", "x"]])
def test_commands_refuse_a_profile_that_the_engine_does_not_follow(command: list[str], tmp_path: Path, capsys: Any) -> None:
    extra = ["--ids-file", str(tmp_path / "ids.json")] if command[0] == "logits" else []
    assert main([*command, *extra, "--engine", "optimized", "--profile", "qat"]) == 2
    assert "--profile pool-fp8 or pool-bf16" in capsys.readouterr().err


def test_commands_run_the_engine(tmp_path: Path, capsys: Any) -> None:
    """Logits of a prompt beside its twin's, then its first new token."""
    out, prompt = tmp_path / "logits.safetensors", PROMPT[:3].tolist()
    (tmp_path / "ids.json").write_text(json.dumps({"a": prompt}))
    chosen = ["--model", "procedural:mini", "--profile", "pool-bf16"]
    files = ["--ids-file", str(tmp_path / "ids.json"), "--out", str(out)]
    distances = ["--json", str(tmp_path / "distances.json")]
    assert main(["logits", *chosen, *files, *distances, "--engine", "both", "--mtp", "--hidden"]) == 0
    got = load_file(out)
    assert got["a.logits"].shape == (3, 512) and got["a.mtp_logits"].shape == (2, 512)
    assert got["a.twin_hidden"].dtype == torch.float64 and got["a.hidden"].shape == got["a.twin_hidden"].shape
    record = json.loads((tmp_path / "distances.json").read_text())
    assert record["logits"]["top1"] == 1.0 and record["profile"] == "pool-bf16"
    assert record["logits"] == compare({"logits": got["a.logits"]}, {"logits": got["a.twin_logits"]})["logits"]
    printed = capsys.readouterr().out
    assert f"{record['prompts']['a']['mtp_logits']['relative_l2']:.2e}" in printed and "all prompts" in printed
    ids = ",".join(map(str, prompt))
    assert main(["generate", *chosen, "--engine", "optimized", "--ids", ids, "--max-new-tokens", "1"]) == 0
    shown = capsys.readouterr()
    assert shown.out.split() == [str(int(got["a.logits"][-1].argmax()))] and "engine, pool-bf16" in shown.err


def test_distances_belong_to_both(tmp_path: Path, capsys: Any) -> None:
    files = ["--ids-file", str(tmp_path / "ids.json"), "--out", str(tmp_path / "x"), "--json", str(tmp_path / "y")]
    assert main(["logits", "--model", "procedural:mini", *files]) == 2
    assert "only --engine both" in capsys.readouterr().err


def test_distances_of_free_running_logits() -> None:
    """One row of two moved: its KL by hand, and a likeliest token that changed."""
    twin = torch.tensor([[0.0, 1.0], [0.0, 3.0]])
    got = torch.tensor([[0.0, 1.0], [1.0, 0.0]])
    p, q = torch.tensor([1.0, 3.0]).double().sigmoid()[1].item(), 1 / (1 + math.e)
    want = p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))
    figures = compare({"logits": got, "hidden": got[None]}, {"logits": twin, "hidden": twin[None]})
    logits = figures["logits"]
    assert logits["top1"] == 0.5 and logits["rows"] == 2
    exact = torch.tensor([want, want / 2], dtype=torch.float64)
    measured = torch.tensor([logits["kl_max"], logits["kl_mean"]], dtype=torch.float64)
    assert_within(rounding_bound(16, exact), measured, exact)
    assert math.isclose(logits["relative_l2"], math.sqrt(10 / 10)) and figures["hidden"] == [logits["relative_l2"]]
