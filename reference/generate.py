"""Text from the reference: a prompt, then one token at a time. Source: docs/model.md §8 (sampling)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from .model import Model
from .state import SequenceState

FEW = 32  # tokens of a step up to which one thread is quicker than two that wake each other


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


@dataclass
class Text:
    """Token ids of a prompt and of what was made after it, the state that has seen all but the last of them, and the
    source of the sampler's noise. A new text has a state that has seen nothing."""

    ids: list[int]
    prompt: int
    state: SequenceState
    generator: torch.Generator

    @classmethod
    def begin(cls, prompt: Tensor, sampling: Sampling) -> Text:
        return cls(prompt.tolist(), len(prompt), SequenceState(), torch.Generator().manual_seed(sampling.seed))

    @property
    def made(self) -> list[int]:
        return self.ids[self.prompt :]


def generate(
    model: Model,
    prompt: Tensor,
    max_new_tokens: int,
    sampling: Sampling,
    on_layer: Callable[[int, Tensor], None] | None = None,
) -> Iterator[int]:
    """Token ids after `prompt` [n], as they come; the last one is eos if the model says so within `max_new_tokens`."""
    return extend(model, Text.begin(prompt, sampling), max_new_tokens, sampling, on_layer)


def extend(
    model: Model,
    text: Text,
    max_new_tokens: int,
    sampling: Sampling,
    on_layer: Callable[[int, Tensor], None] | None = None,
) -> Iterator[int]:
    """The tokens that `text` still lacks of `max_new_tokens`, as they come; it holds each when it is given."""
    while len(text.made) < max_new_tokens and text.made[-1:] != [model.config.eos_token_id]:
        logits = step(model, torch.tensor(text.ids[text.state.length :], dtype=torch.long), text.state, on_layer)
        text.ids.append(sample(logits.cpu(), sampling, text.generator))
        yield text.ids[-1]


def step(model: Model, ids: Tensor, state: SequenceState, on_layer: Callable[[int, Tensor], None] | None = None) -> Tensor:
    """The next tokens ids [t] of one sequence -> the logits [vocab] behind the last; the state moves on."""
    with _threads_of_torch(1 if model.loader.products and len(ids) <= FEW else torch.get_num_threads()):
        return model.logits(model.forward([ids], [state], on_layer)[-1:])[0]


@contextmanager
def _threads_of_torch(count: int) -> Iterator[None]:
    """Products have threads of their own; what torch is left with is small, and waking a thread takes longer."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
