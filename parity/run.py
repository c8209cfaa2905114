"""The main job: a checkpoint, layer by layer, three evaluations, verdicts, records. Source: docs/judge.md §8 and §9."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from typing import Any, Protocol

import torch
from torch import Tensor

from optimized.engine import FORMS
from reference.checkpoint.store import WeightStore
from reference.config import Config
from reference.rounding import profile

from . import candidates, cases, ops, records
from .adapters.traced import Traced
from .budget.bounded import ACCUMULATE, Arithmetic
from .drift import Drift, LogitsDrift
from .flow import Flow, Judged, Setting, Streams
from .journal import Journal
from .locate import departures
from .options import peak_rss
from .records import Record
from .trace import Trace

PROFILES = tuple(FORMS)  # builds that a candidate exists for
ON_GPU = candidates.DEVICE != "cpu"
ENGINE = f"optimized ({'Triton on a GPU' if ON_GPU else 'Triton interpreter'})"


@dataclass(frozen=True)
class Request:
    """What to run. `required` ops must be judged, or the run is incomplete. `streams` are `free-running`, the twin's
    from layer to layer, or `synthetic` at every layer. `model` is the user's word for it, if there was one. `ids` are
    those of the first sequences, read from `ids_file`; the others' are drawn. With `drift` the candidate runs whole layers
    too. Kernels run in the layers of `candidate` (None: all); the others are evaluated only. With `trace` nothing runs but the
    twin: what is judged, and the plan, are the trace's, and `argument` is the user's word for it. `how` the candidate adds."""

    layers: tuple[int, ...]
    ops: tuple[ops.Op, ...]
    required: frozenset[str]
    plan: cases.Plan
    profile: str
    seed: int
    streams: str
    model: str = ""
    ids: tuple[Tensor, ...] = ()
    ids_file: str = ""
    drift: bool = True
    candidate: frozenset[int] | None = None
    trace: Trace | None = None
    argument: str = ""
    how: Arithmetic = ACCUMULATE["fp32"]

    def asks(self, layer: int) -> bool:
        """Whether a candidate's ops are judged in this layer."""
        return self.candidate is None or layer in self.candidate


class Layers(Protocol):
    """What runs layer by layer: kernels of this project, or steps of a trace. It keeps what it judged and measured, why a layer
    ran as no whole, and what the next one gets."""

    judged: list[Judged]
    drift: list[Drift | LogitsDrift]
    unfit: dict[int, str]

    @property
    def streams(self) -> Streams | None: ...

    def run_layer(self, layer: int) -> Iterator[Judged]: ...


Listener = Callable[[int, Record], None]


def run(
    store: WeightStore, request: Request, journal: Journal, listen: Listener = lambda done, record: None
) -> list[Record]:
    """All records of a run, the last one its summary. Layers that `journal` holds are not run again; each one that
    finishes is kept there. `listen` hears each verdict and the number of layers finished."""
    one_thread()
    began, config = time.monotonic(), store.config
    header = journal.begin(_header(store, request))
    if ended := journal.ended():
        return ended
    names = [cases.layer_id(config, i) for i in request.layers]
    parts = journal.finished(names)
    layers = _kernels(store, request, journal, names[: len(parts)]) if request.trace is None else Traced.start(
        store, request.trace, request.ops, request.how, request.plan, request.drift)  # fmt: skip
    for done, layer in enumerate(request.layers[len(parts) :], len(parts)):
        parts.append(_layer(layers, config, layer, request, partial(listen, done)))
        journal.keep(names[done], parts[-1], layers.streams)
    out = [header, *_in_order(parts), *_never_met(request, config), *_drafter(request, config)]
    return [*out, _summary(out, request, config, time.monotonic() - began)]


def _kernels(store: WeightStore, request: Request, journal: Journal, finished: Sequence[str]) -> Flow:
    """Kernels of `optimized`, at the layer behind the finished ones."""
    setting = Setting(store, profile(request.profile), request.plan, request.ops, request.how, request.seed,
                      whole=request.drift, candidate=request.candidate)  # fmt: skip
    flow = Flow.start(setting)
    flow.ids[: len(request.ids)] = request.ids
    if request.streams == "free-running" and len(finished) < len(request.layers):
        flow.begin_with_tokens()
        if finished:
            flow.streams = journal.streams(finished[-1])
    return flow


def _layer(flow: Layers, config: Config, layer: int, request: Request, listen: Callable[[Record], None]) -> list[Record]:
    """Records of one layer: verdicts, drift, what was not run, and how long it took."""
    began = at = time.monotonic()
    judged, drift = len(flow.judged), len(flow.drift)
    out = []
    for result in flow.run_layer(layer):
        now = time.monotonic()
        if not result.missing:
            out.append(records.verdict_record(config, result, now - at))
            listen(out[-1])
        at = now
    out += [records.drift_record(config, d) for d in flow.drift[drift:]]
    missing = [r for r in flow.judged[judged:] if r.missing]
    if layer in flow.unfit:
        out += [records.missing_record("drift", phase, flow.unfit[layer], 1, False) for phase in request.plan.judged]
    out += [records.missing_record(r.op.name, r.phase, r.missing or "", 1, r.op.name in request.required) for r in missing]
    return [*out, records.layer_record(config, layer, request.asks(layer), time.monotonic() - began, peak_rss())]


def _in_order(parts: Sequence[Sequence[Record]]) -> list[Record]:
    """Records of all layers: verdicts in causal order, what else was measured, and once each what was not run."""
    out = [r for part in parts for r in part]
    verdicts = [r for r in out if r["record"] == "verdict"]
    missing = [r for r in out if r["record"] == "not_run"]
    return [*verdicts, *(r for r in out if r["record"] not in ("verdict", "not_run")), *records.merged(missing)]


def one_thread() -> None:
    """Kernels run in an interpreter, and threads that wait for each other cost more than they bring."""
    import numba

    numba.set_num_threads(1)
    torch.set_num_threads(1)


def _header(store: WeightStore, request: Request) -> Record:
    sequences = request.plan.sequences
    return records.header(
        store.identity,
        store.config,
        engine=ENGINE if request.trace is None else _engine(request.trace),
        profile=profile(request.profile).to_json(),
        accumulate=request.how.name,
        seed=request.seed,
        model_argument=request.model,
        streams=request.streams,
        drift=request.drift,
        layers=[cases.layer_id(store.config, i) for i in request.layers],
        candidate=None if request.candidate is None else [cases.layer_id(store.config, i) for i in sorted(request.candidate)],
        ops=[op.name for op in request.ops],
        required=sorted(request.required),
        phases=list(request.plan.judged),
        lengths=[s.tokens["prefill"] for s in sequences if s.tokens.get("prefill")],
        start_pos=[s.start for s in sequences if s.start],
        ids=_ids(request),
        trace=_trace(request),
        volatile=environment(),
    )


def _engine(trace: Trace) -> str:
    """An engine as its trace names it, with the versions of what it is made of."""
    versions = ", ".join(f"{name} {version}" for name, version in sorted(trace.versions.items()))
    return trace.engine + (f" ({versions})" if versions else "")


def _trace(request: Request) -> Record | None:
    """Which trace is the candidate, and what it says of itself."""
    if request.trace is None:
        return None
    said = {"model": request.trace.model, "claims": list(request.trace.claims)}
    return {"argument": request.argument, "manifest_sha256": request.trace.digest, **said}


def _ids(request: Request) -> Record | None:
    """Which token ids were given: the file's name, and a digest of what it says."""
    if not request.ids:
        return None
    said = json.dumps([ids.tolist() for ids in request.ids])
    return {"file": request.ids_file, "sha256": hashlib.sha256(said.encode()).hexdigest()}


def environment() -> dict[str, Any]:
    """Versions, machine and time of this process."""
    versions = {name: metadata.version(name) for name in ("v4parity", "torch", "triton", "numpy")}
    return {"python": platform.python_version(), "machine": platform.machine(), "cores": os.cpu_count(),
            "device": "cpu (no GPU)" if not torch.cuda.is_available() else torch.cuda.get_device_name(),
            "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), **versions}  # fmt: skip


def _never_met(request: Request, config: Config) -> list[Record]:
    """Chosen ops that no chosen layer has: ops at the model's ends, or of another kind of layer."""
    kinds = set().union(*(cases.layer_kinds(config, i) for i in request.layers))
    unmet = [op for op in request.ops if not kinds & set(op.kinds)]
    return [
        records.missing_record(op.name, phase, "no chosen layer has it" if op.candidate else op.reason, 0,
                               op.name in request.required)
        for op in unmet for phase in request.plan.judged
    ]  # fmt: skip


def _drafter(request: Request, config: Config) -> list[Record]:
    """A DSpark drafter is in the checkpoint, and nobody here evaluates it."""
    if config.dspark is None:
        return []
    reason = f"the forward of a DSpark drafter ({config.num_drafter_blocks} blocks) is not defined here"
    blocks = config.num_drafter_blocks
    return [records.missing_record("dspark", phase, reason, blocks, False) for phase in request.plan.judged]


def _summary(out: Sequence[Record], request: Request, config: Config, seconds: float) -> Record:
    verdicts = [r for r in out if r["record"] == "verdict"]
    failed = sum(r["verdict"] == "fail" for r in verdicts)
    missing = [r for r in out if r["record"] == "not_run"]
    departed, elements = len({r["layer"] for r in departures(out, "forced")}), sum(r["elements"] for r in verdicts)
    whole = [r for r in out if request.trace and r["record"] == "drift" and r["curve"] == "forced"]
    unmet = _unmet(verdicts, whole, request) or any(r["required"] and r["layers"] == 0 for r in missing)
    incomplete = not (elements or whole) or unmet
    return {
        "record": "summary", "exit_code": 1 if failed or departed else 3 if incomplete else 0, "judged": len(verdicts),
        "passed": len(verdicts) - failed, "failed": failed, "departed": departed, "elements": elements,
        "not_run": len({r["op"] for r in missing} - {r["op"] for r in verdicts}), "notes": notes(request, config),
        "volatile": {"seconds": round(seconds, 2)},
    }  # fmt: skip


def _unmet(verdicts: Sequence[Record], whole: Sequence[Record], request: Request) -> bool:
    """Whether a required op was judged in no phase, or a requested phase has no verdict at all, on an op or a layer of a
    trace."""
    judged = {r["op"] for r in verdicts}
    phases = {r["phase"] for r in (*verdicts, *whole)}
    return not request.required <= judged or not set(request.plan.judged) <= phases


def notes(request: Request, config: Config) -> list[str]:
    """Which paths this run did not exercise, in words."""
    said = []
    if request.trace is not None:
        said.append(f"nothing ran but the twin: outputs are those of a trace of {_engine(request.trace)}")
    elif not ON_GPU:
        said.append("no GPU: kernels ran in Triton's interpreter, which sums products in float32 and in its own order")
    ends = [s.start + sum(s.tokens.values()) for s in request.plan.sequences]
    sparse = 4 * config.index_topk + 3
    if max(ends) <= sparse:
        said.append(f"sparse selection never active: no position reaches {sparse}")
    if request.trace is not None:
        return [*said, *(f"the trace says: {claim}" for claim in request.trace.claims)]
    if any(s.start for s in request.plan.sequences):
        said.append("far positions start from synthetic state, not from a prompt")
    if request.streams == "synthetic":
        said.append("streams into each layer are synthetic, not those of the layer before")
    return said
