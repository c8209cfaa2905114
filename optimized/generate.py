"""Text from the engine: one token at a time, or with drafts of the MTP block, which give the same tokens.

Source: docs/pool.md §11.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from reference.errors import BadInput

from .engine import Engine
from .pool.allocator import Sequence

Choose = Callable[[Tensor], int]


def greedy(logits: Tensor) -> int:
    """The largest of logits [vocab]; the lower id wins a tie."""
    return int(torch.argmax(logits))


def generate(
    engine: Engine,
    prompt: Tensor,
    max_new_tokens: int,
    choose: Choose = greedy,
    on_layer: Callable[[int, Tensor], None] | None = None,
) -> Iterator[int]:
    """Token ids after `prompt` [n], as they come; the last one is eos if the model says so within `max_new_tokens`."""
    sequence, tokens = engine.allocator.open(), prompt
    try:
        for _ in range(max_new_tokens):
            token = choose(engine.logits(engine.step([tokens], [sequence], on_layer)[-1:])[0])
            yield token
            if token == engine.config.eos_token_id:
                return
            tokens = torch.tensor([token])
    finally:
        engine.allocator.free(sequence)


def speculate(engine: Engine, prompt: Tensor, max_new_tokens: int, drafts: int = 1) -> Iterator[list[int]]:
    """The tokens of greedy `generate`, step by step: one, and one more for each leading draft that was right.

    MTP drafts up to `drafts` tokens, the later ones on its own streams; a step verifies them all, and what follows the first
    wrong one is taken back. Raises BadInput for an engine with less lookahead.
    """
    if not 0 < drafts <= engine.geometry.lookahead:
        raise BadInput(f"drafts have to be taken back: {drafts} of them need a lookahead of {max(1, drafts)}")
    sequence, left = engine.allocator.open(), max_new_tokens
    try:
        x = engine.step([prompt], [sequence])
        made = [greedy(engine.logits(x[-1:])[0])]
        after = torch.cat([prompt[1:], torch.tensor(made)])  # the token after each one that MTP has not seen
        while True:
            made = _up_to(made[:left], engine.config.eos_token_id)
            left -= len(made)
            yield made
            if made[-1] == engine.config.eos_token_id or not left:
                return
            guesses = _draft(engine, x, after, sequence, min(drafts, left - 1))
            x = engine.step([torch.tensor([made[-1], *guesses])], [sequence])
            made = [greedy(row) for row in engine.logits(x)]
            right = next((i for i, guess in enumerate(guesses) if guess != made[i]), len(guesses))
            engine.allocator.roll_back(sequence, len(guesses) - right)
            made, x = made[: right + 1], x[: right + 1]
            after = torch.tensor(made)
    finally:
        engine.allocator.free(sequence)


def _draft(engine: Engine, x: Tensor, after: Tensor, sequence: Sequence, count: int) -> list[int]:
    """Guesses at the `count` tokens after the last of `after`; what MTP saw of its own streams it will see again as the
    model's."""
    guesses: list[int] = []
    for _ in range(count):
        x = engine.draft(x, [after], [sequence])[-1:]
        guesses.append(greedy(engine.draft_logits(x)[0]))
        after = torch.tensor(guesses[-1:])
    sequence.drafted = sequence.length
    return guesses


def _up_to(tokens: list[int], last: int) -> list[int]:
    return tokens[: tokens.index(last) + 1] if last in tokens else tokens
