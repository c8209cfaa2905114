"""How small a fault may be before each gate misses it: one knob after the other, turned down until nothing is said.

Source: docs/faults.md §4.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..laws import LAWS
from .change import Change, edit, turned_on
from .fault import Cell, at
from .gates import run_cell, run_law

GEMM, ATTENTION, MIX, NUMERIC, EXPERTS = (
    "kernels.gemm_fp8", "kernels.decode_attention", "kernels.hyper_connection", "kernels.numeric", "kernels.experts",
)  # fmt: skip
PRODUCT = "* (sx[:, None] * sw[None, :])"
SCORE = "tl.zeros((HEADS, ROWS), tl.float32)) * scale"
NIBBLES = "code = tl.join(byte & 0xF, byte >> 4).reshape(COLS, STEP)"
STORED = "tl.store(y + t[:, None] * N + n[None, :], acc, mask=row"
PERCENTS = tuple(2.0**-n for n in range(3, 24))


@dataclass(frozen=True)
class Knob:
    """`amounts` from large to small; `change(amount)` is the fault of that size in `op`, tried in `cell`."""

    what: str
    unit: str
    op: str
    amounts: Sequence[float]
    change: Callable[[float], Change]
    cell: Cell


def _rows_lost(n: float) -> Change:
    return edit(GEMM, (STORED, STORED.replace("mask=row", f"mask=(row & (t >= {int(n)})[:, None])")))


HERE = at("window", "prefill", (36,))
KNOBS = (
    Knob("rows of a product that are not written", "of 36 rows", "attn.wq_a", (8, 4, 2, 1), _rows_lost, HERE),
    Knob("last channels of a product left out", "of 256", "attn.wq_a", (64, 32, 16, 8, 4, 2, 1),
         lambda n: edit(GEMM, ("deep = (d < K)[None, :]", f"deep = (d < K - {int(n)})[None, :]")), HERE),
    Knob("a product too large", "share", "attn.wq_a", PERCENTS,
         lambda p: edit(GEMM, (PRODUCT, f"{PRODUCT} * (1 + {p})")), HERE),
    Knob("exponent too low by one in so many tokens' first block", "of 36 tokens", "attn.wq_a", (36, 8, 2, 1),
         lambda n: edit(GEMM, (PRODUCT, f"{PRODUCT} * tl.where((t < {int(n)}) & (block == 0), 0.5, 1.0)[:, None]")), HERE),
    Knob("weights of FP4 with the lowest bit of their nibble flipped", "of a block of 32", "ffn.experts.h", (32, 8, 2, 1),
         lambda n: edit(EXPERTS, (NIBBLES, f"{NIBBLES}\n    code = tl.where((n == 5)[:, None] & "
                                  f"(first + tl.arange(0, STEP) < {int(n)})[None, :], code ^ 1, code)")),
         at("hca_scored", "decode", (3, 17))),
    Knob("scores of attention too large", "share", "attn.core", PERCENTS,
         lambda p: edit(ATTENTION, (SCORE, f"{SCORE} * (1 + {p})")), HERE),
    Knob("a sink too high", "nats", "attn.core", PERCENTS,
         lambda p: edit(ATTENTION, ("other=0.0) - peak)\n    acc", f"other=0.0) - peak + {p})\n    acc")), HERE),
    Knob("first rows of a list left out of the sum", "of 17 rows", "attn.core", (8, 4, 2, 1),
         lambda n: edit(ATTENTION, ("tl.sum(p, 1)", f"tl.sum(tl.where(j >= start + {int(n)}, p, 0.0), 1)")),
         at("window", "decode", (17,))),
    Knob("iterations that Sinkhorn leaves out", "of 20", "hc_attn.pre", (19, 8, 4, 2, 1),
         lambda n: edit(MIX, ("range(1, iterations)", f"range({1 + int(n)}, iterations)")), HERE),
    Knob("epsilon of a mix too large", "times", "hc_attn.pre", (4096, 1024, 256, 64, 16, 4, 2),
         lambda n: edit(MIX, ("collapse(x, pre + hc_eps", f"collapse(x, pre + {int(n)} * hc_eps")), HERE),
    Knob("epsilon of the streams' norm too large", "times", "hc_attn.pre", (4096, 1024, 256, 64, 16, 4, 2),
         lambda n: edit(MIX, ("/ width + rms_eps)", f"/ width + {int(n)} * rms_eps)")), HERE),
    Knob("halves of FP4 rounded away from zero, not to even", "", "attn.indexer.q", (1,),
         lambda n: edit(NUMERIC, ("(a > 0.25)", "(a >= 0.25)"), ("(a > 1.25)", "(a >= 1.25)"), ("(a > 2.5)", "(a >= 2.5)"),
                        ("(a > 5.0)", "(a >= 5.0)")), at("csa", "prefill", (36,))),
)  # fmt: skip


@dataclass(frozen=True)
class Smallest:
    """By gate, the smallest amount that it caught; None where it caught none."""

    knob: Knob
    run: float | None
    laws: float | None


def measure() -> list[Smallest]:
    return [Smallest(k, _last(k, _seen_by_run), _last(k, _seen_by_laws)) for k in KNOBS]


def _last(knob: Knob, seen: Callable[[Knob, float], bool]) -> float | None:
    """The smallest amount caught, coming from the largest; the first that is missed ends it."""
    caught = None
    for amount in knob.amounts:
        if not seen(knob, amount):
            break
        caught = amount
    return caught


def _seen_by_run(knob: Knob, amount: float) -> bool:
    return run_cell(knob.cell, knob.change(amount)).caught


def _seen_by_laws(knob: Knob, amount: float) -> bool:
    with turned_on(knob.change(amount)):
        return any(run_law(law).caught for law in LAWS if law.side == "kernel" and law.op == knob.op)


def as_markdown(found: Sequence[Smallest]) -> str:
    lines = ["| fault | op | verdict of a run | laws of the op |", "|---|---|---|---|"]
    for s in found:
        lines.append(f"| {s.knob.what} | {s.knob.op} | {_amount(s.knob, s.run)} | {_amount(s.knob, s.laws)} |")
    return "\n".join(lines) + "\n"


def _amount(knob: Knob, amount: float | None) -> str:
    """An amount with its unit; a share as a power of two, and that nothing was seen."""
    if amount is None:
        return "not seen"
    if amount >= 1:
        return f"{int(amount)} {knob.unit}".strip() if knob.unit else "seen"
    return f"2^{round(math.log2(amount))} {knob.unit}"
