"""Text from the reference: a prompt, then one token at a time. Source: docs/model.md §8 (sampling)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from .model import Model
from .state import SequenceState


@dataclass(frozen=True)
class Sampling:
    """temperature 0 is greedy; above, exact categorical sampling from softmax(logits / temperature), seeded."""

    temperature: float = 0.0
    seed: int = 0


def sample(logits: Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """One token id from logits [vocab]: argmax of p / Exp(1) noise draws from p. Greedy ties go to the lower id."""
    if sampling.temperature == 0:
        return int(torch.argmax(logits))
    p = torch.softmax(logits.float() / max(sampling.temperature, 1e-5), dim=-1)
    noise = torch.empty_like(p).exponential_(1, generator=generator)
    return int(torch.argmax(p / noise))


def generate(
    model: Model,
    prompt: Tensor,
    max_new_tokens: int,
    sampling: Sampling,
    on_layer: Callable[[int, Tensor], None] | None = None,
) -> Iterator[int]:
    """Token ids after `prompt` [n], as they come; the last one is eos if the model says so within `max_new_tokens`."""
    generator = torch.Generator().manual_seed(sampling.seed)
    state, tokens = SequenceState(), prompt
    for _ in range(max_new_tokens):
        x = model.forward([tokens], [state], on_layer)
        token = sample(model.logits(x[-1:])[0], sampling, generator)
        yield token
        if token == model.config.eos_token_id:
            return
        tokens = torch.tensor([token])
