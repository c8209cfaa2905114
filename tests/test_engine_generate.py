"""Generation with the engine: drafts change no token, rolled back ones leave no trace, and commands take the engine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from optimized import generate as module
from optimized.engine import Engine
from optimized.generate import generate, speculate
from optimized.pool.allocator import Sequence
from parity.cli import main
from reference.checkpoint.procedural import ProceduralStore
from reference.errors import BadInput
from reference.model import Model
from reference.presets import preset
from reference.rounding import profile
from reference.state import SequenceState

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
    """Logits of a prompt, then its first new token."""
    out, prompt = tmp_path / "logits.safetensors", PROMPT[:3].tolist()
    (tmp_path / "ids.json").write_text(json.dumps({"a": prompt}))
    chosen = ["--model", "procedural:mini", "--engine", "optimized", "--profile", "pool-bf16"]
    files = ["--ids-file", str(tmp_path / "ids.json"), "--out", str(out)]
    assert main(["logits", *chosen, *files, "--mtp", "--hidden"]) == 0
    got = load_file(out)
    assert got["a.logits"].shape == (3, 512) and got["a.mtp_logits"].shape == (2, 512)
    want = Model(ProceduralStore("mini"), torch.float64, profile("pool-bf16"))
    logits = want.logits(want.forward([PROMPT[:3]], [SequenceState()]))
    assert torch.equal(got["a.logits"].argmax(1), logits.argmax(1))
    ids = ",".join(map(str, prompt))
    capsys.readouterr()
    assert main(["generate", *chosen, "--ids", ids, "--max-new-tokens", "1"]) == 0
    shown = capsys.readouterr()
    assert shown.out.split() == [str(int(got["a.logits"][-1].argmax()))] and "engine, pool-bf16" in shown.err
