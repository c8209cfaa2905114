"""Traces of one CSA layer of `mini` from its own kernels: two requests, three steps each, mistakes planted on the way."""

from __future__ import annotations

from functools import cache

import torch

from parity import cases, ops, trace
from parity.adapters import opwise
from parity.adapters.opwise import Kernels
from parity.adapters.tape import Held, Segment, Tape
from parity.cli import main
from parity.flow import Flow, Setting
from parity.records import config_digest, read_lines
from parity.single.files import config_json
from reference.checkpoint.loader import Loader
from reference.checkpoint.open import open_store
from reference.rounding import profile

STORE = open_store("procedural:mini")
CONFIG, LAYER = STORE.config, 2
TOKENS = {"prefill": (4, 3), "decode": (1, 1), "chunk": (4, 4)}
PLAN = cases.Plan(tuple(cases.SequencePlan(0, {p: n[r] for p, n in TOKENS.items()}) for r in (0, 1)), tuple(TOKENS))
ROUNDS = ([0, 1], [2, 3], [4, 5])
LOADER = Loader(STORE, torch.float64, 1 << 28)
RUN = ["run", "--model", "procedural:mini", "--layers", str(LAYER)]


def segments() -> list[Segment]:
    ends, found = [0, 0], []
    for phase, counts in TOKENS.items():
        for request, n in enumerate(counts):
            found.append(Segment(request, phase, tuple(range(ends[request], ends[request] + n))))
            ends[request] += n
    return found


def flow() -> Flow:
    """The same tokens as a run of this project's kernels."""
    made = Flow.start(Setting(STORE, profile("pool-fp8"), PLAN, ops.OPS, ops.ARITHMETIC, 7))
    made.streams = made._synthetic(LAYER)
    return made


def begun() -> Tape:
    """Streams before the layer, and nothing else."""
    run = flow()
    tape = opwise.begin(segments(), dict(enumerate(run.ids)))
    for k, s in enumerate(tape.segments):
        x = run.streams.twin[s.phase].split(TOKENS[s.phase])[s.request]
        tape.held[LAYER - 1, "hc_ffn.streams", k] = Held(x.bfloat16(), "bf16")
    return tape


@cache
def right(build: str = "pool-fp8") -> Tape:
    tape = begun()
    kernels = Kernels.of(tape, LOADER, build, LAYER)
    for steps in ROUNDS:
        for op in kernels.ops:
            kernels.run(op, steps)
    return tape


def spoilt(op: str, spoil, steps=ROUNDS[-1]) -> Tape:
    """The same with a mistake in one op of the last steps, which everything after it has taken for granted."""
    tape = begun()
    tape.held |= right().held
    kernels = Kernels.of(tape, LOADER, "pool-fp8", LAYER)
    names = [o.name for o in kernels.ops]
    for o in kernels.ops[names.index(op) :]:
        kernels.run(o, steps, spoil if o.name == op else dict)
    return tape


def written(tape: Tape, path, build: str = "pool-fp8", change=lambda entries, values: (entries, values), **more):
    """A tape as a trace; `change` may edit its entries and tensors."""
    entries, values = change(*opwise.entries(tape, CONFIG))
    made = trace.Trace("kernels", "mini", config_json(CONFIG), config_digest(CONFIG), profile(build), tuple(entries), **more)
    trace.write_trace(path, made, values)
    return path


def judged(path, out, *words: str):
    """Exit code and records of a run that judges a trace."""
    code = main([*RUN, "--candidate", str(path), "--out", str(out), *words])
    return code, read_lines(out)


def verdicts(said):
    return {(r["op"], r["phase"]): r for r in said if r["record"] == "verdict"}


def missing(said):
    return {r["op"]: r["reason"] for r in said if r["record"] == "not_run"}
