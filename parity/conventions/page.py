"""The ledger as a page: for each topic who follows which rule, and on how many inputs any two rules agree."""

from __future__ import annotations

from collections.abc import Sequence

from .ledger import TOPICS, Topic
from .rules import Array

INTRODUCTION = """# Conventions of number formats

Written by `v4parity conventions --md docs/conventions.md`; a test compares. One table a topic: who follows which rule, and on
how many inputs that rule gives what the first one gives; then every pair of rules.

Rules are restated from public code and its documentation, as read in 2026: the official inference code at V4-Flash revision
60d8d707, transformers 5.23, SGLang 0.5.23, ATOM ffdf3bb5 with aiter, DeepGEMM 54e2261, FlashMLA 9241ae3, vLLM's kernels and
tests of that time. None of these engines was run: each rule is a few lines of numpy (`parity/conventions/rules.py`), run over
the inputs named in the table's head. *Not stated*: not found in what was read, which is not to say that there is none.
*Nothing of the kind*: the engine has no such step. An engine may follow several rules in several places; then each is a line.

Inputs: every bfloat16; every amax that a block of bfloat16 can have; *edges*, the largest code value times every power of
two, and the floors, each with its float32 neighbours; normal numbers from a fixed seed. `reference/formats.py` follows the
official rules; tests compare the two on all of these inputs.
"""


def page(topics: Sequence[Topic] = TOPICS) -> str:
    """Markdown of the whole ledger."""
    return "\n".join([INTRODUCTION, *(section(number, topic) for number, topic in enumerate(topics, 1))])


def section(number: int, topic: Topic) -> str:
    lines = [f"## {number}. {topic.title}", "", topic.what, ""]
    outcomes = run(topic)
    first = next(iter(topic.rules))
    heads = [f"as *{first}* on {name}" for name in outcomes]
    lines += _head("engine", "rule", *heads)
    for engine, rule in topic.engines().items():
        counts = [agreement(found[first], found[rule]) if rule in found else "" for found in outcomes.values()]
        lines.append(_row(engine, rule, *counts))
    if outcomes:
        lines += ["", *_pairs(topic, outcomes)]
    return "\n".join([*lines, ""])


def _pairs(topic: Topic, outcomes: dict[str, dict[str, Array]]) -> list[str]:
    names = list(topic.rules)
    lines = _head("rules", *(f"agree on {name}" for name in outcomes))
    for i, one in enumerate(names):
        for other in names[i + 1 :]:
            lines.append(_row(f"{one} · {other}", *(agreement(found[one], found[other]) for found in outcomes.values())))
    return lines


def run(topic: Topic) -> dict[str, dict[str, Array]]:
    """Inputs by name -> rule by name -> what it gives."""
    return {
        name: {rule: apply(made()) for rule, apply in topic.rules.items() if apply is not None}
        for name, made in topic.inputs.items()
    }


def agreement(a: Array, b: Array) -> str:
    """`65,280 of 65,536 (99.6 %)`; only all reads as 100 %."""
    same, total = int(equal(a, b).sum()), a.size
    if same == total:
        return f"all {total:,}"
    return f"{same:,} of {total:,} ({min(100 * same / total, 99.99):.2f} %)"


def equal(a: Array, b: Array) -> Array:
    """Elementwise, NaN equal to NaN, 0 to -0."""
    return (a == b) | ((a != a) & (b != b))


def _head(*cells: str) -> list[str]:
    return [_row(*cells), "|" + "---|" * len(cells)]


def _row(*cells: str) -> str:
    return "| " + " | ".join(cells) + " |"

