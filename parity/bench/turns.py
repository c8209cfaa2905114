"""A step from a directory beside its disk and its memory, in turns: what one costs at a noisy time, so does the other.

Source: docs/checkpoint.md §9.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch

from optimized.cpu.fused import Products
from reference.checkpoint.store import WeightStore
from reference.generate import step
from reference.model import Model
from reference.state import SequenceState

from . import disk
from .limits import Limits

STAYED = 0.01  # of the touched bytes that a warm step may have read from the disk


@dataclass(frozen=True)
class Turn:
    """Bytes a second of the disk; then one decode step whose weights only the disk has, and the same step once more.

    cold and warm in seconds, the rest in bytes: touched by each of the two, and read from the disk by them.
    """

    disk: float
    cold: float
    warm: float
    touched: int
    cold_read: int
    warm_read: int


def turns(store: WeightStore, files: Sequence[Path], memory: int, count: int) -> Iterator[Turn]:
    """`count` turns, each with a token of its own, after a first step that compiles the products and examines weights. The
    disk reads as many bytes of the `files` of `store` as the first step does.

    `memory` bounds the weights that stay from a cold step to the warm one.
    """
    products = Products()
    ids = torch.arange(count + 1) * 7919 % store.config.vocab_size  # far apart: hash layers choose by id
    past = SequenceState()
    model = Model(store, memory=memory, products=products)
    step(model, ids[:1], past)
    touched = model.loader.touched
    for token in ids[1:]:
        store.release(store.tensors)
        rate = disk.cold(files, 0.0, touched)
        model = Model(store, memory=memory, products=products)
        cold, cold_read = _timed(model, token, past)
        warm, warm_read = _timed(model, token, past)
        yield Turn(rate, cold, warm, model.loader.touched // 2, cold_read, warm_read)


def _timed(model: Model, token: torch.Tensor, past: SequenceState) -> tuple[float, int]:
    """Seconds of a step behind `past`, which stays as it is, and bytes that it made the disk read."""
    read, began = disk.bytes_from_disk(), time.perf_counter()
    step(model, token[None], past.copy())
    return time.perf_counter() - began, disk.bytes_from_disk() - read


def lines(measured: list[Turn], limits: Limits) -> list[str]:
    """Medians, and how many times the least time they are: bytes touched over what the disk, or memory, gives a second."""
    rate, cold, warm = (median(getattr(turn, what) for turn in measured) for what in ("disk", "cold", "warm"))
    touched, of = median(turn.touched for turn in measured), f"medians of {len(measured)}"
    step = f"cold step {cold:.2f} s, {touched / 1e9:.2f} GB touched"
    found = [f"{step}: {cold * rate / touched:.2f}x what the disk allows ({of})"]
    if any(turn.warm_read > STAYED * turn.touched for turn in measured):
        return [*found, "warm step: what it touches does not stay in memory; a larger --memory may hold it"]
    return [*found, f"warm step {warm:.2f} s: {warm * limits.read / touched:.2f}x what memory allows ({of})"]
