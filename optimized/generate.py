"""Text from the engine: one token at a time, or with drafts of the MTP block, which give the same tokens.

Source: docs/pool.md §11.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from reference.errors import BadInput

from .engine import Engine

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


def speculate(engine: Engine, prompt: Tensor, max_new_tokens: int) -> Iterator[list[int]]:
    """The tokens of greedy `generate`, step by step: one, or two where the draft was right.

    MTP drafts the token after the next one; a step verifies both, and a wrong draft is taken back. Raises BadInput for an
    engine without lookahead.
    """
    if not engine.geometry.lookahead:
        raise BadInput("drafts have to be taken back: the engine needs a lookahead of 1")
    sequence = engine.allocator.open()
    try:
        x = engine.step([prompt], [sequence])
        made = [greedy(engine.logits(x[-1:])[0])]
        after = torch.cat([prompt[1:], torch.tensor(made)])  # the token after each one that MTP has not seen
        count = 0
        while True:
            made = made[: max_new_tokens - count]
            if engine.config.eos_token_id in made:
                made = made[: made.index(engine.config.eos_token_id) + 1]
            count += len(made)
            yield made
            if made[-1] == engine.config.eos_token_id or count == max_new_tokens:
                return
            draft = greedy(engine.draft_logits(x, [after], [sequence])[-1])
            x = engine.step([torch.tensor([made[-1], draft])], [sequence])
            made = [greedy(row) for row in engine.logits(x)]
            if made[0] != draft:
                engine.allocator.roll_back(sequence, 1)
                made, x = made[:1], x[:1]
            after = torch.tensor(made)
    finally:
        engine.allocator.free(sequence)
