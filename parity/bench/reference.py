"""Speed and memory of the reference beside transformers: same weights, same tokens, alternating processes.

The reference runs twice: as it is, on weights that it holds dequantised, and with products of packed weights, as it generates.

Run as a module it is one measurement in a process of its own, so that peak memory belongs to one engine alone.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from reference.checkpoint.store import WeightStore

ENGINES = ("reference", "packed", "transformers")
PEER = "transformers"
WARM_UP = 8  # tokens run before the clock starts: thread pools, compiled loops, weights
EXPERTS, VOCABULARY = 8, 4096  # of a model that is cut down


@dataclass(frozen=True)
class Job:
    """What all engines do: one prefill, then single tokens, in float32. `cut`: on a cut-down model."""

    model: str
    prefill: int
    decode: int
    threads: int
    cut: bool = False


@dataclass(frozen=True)
class Measured:
    """One process: seconds of the prefill and of all decode steps, and VmHWM in bytes."""

    prefill_s: float
    decode_s: float
    peak_rss: int
    loaded_rss: int


def measure(engine: str, job: Job) -> Measured:
    """Run one engine in a new process. Raises RuntimeError with the process's last words if it fails."""
    words = [engine, job.model, *map(str, (job.prefill, job.decode, job.threads)), *["--cut"] * job.cut]
    child = subprocess.run([sys.executable, "-m", "parity.bench.reference", *words], capture_output=True, text=True)
    if child.returncode:
        raise RuntimeError(f"{engine}: {(child.stderr.strip().splitlines() or ['died without a word'])[-1]}")
    return Measured(**json.loads(child.stdout.splitlines()[-1]))


def ratios(ours: list[Measured], theirs: list[Measured]) -> dict[str, float]:
    """Medians against medians: above 1 the reference is faster, below 1 it needs less memory."""

    def mid(runs: list[Measured], field: str) -> float:
        return median(getattr(run, field) for run in runs)

    return {
        "prefill speed": mid(theirs, "prefill_s") / mid(ours, "prefill_s"),
        "decode speed": mid(theirs, "decode_s") / mid(ours, "decode_s"),
        "peak memory": mid(ours, "peak_rss") / mid(theirs, "peak_rss"),
    }


def cut(fields: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration with the widths of this one and little of them: a layer of each kind that it has, the first with
    hashed experts, few experts, a small vocabulary."""
    ratios = list(dict.fromkeys(fields["compress_ratios"][: fields["num_hidden_layers"]]))
    few = {"num_hidden_layers": len(ratios), "compress_ratios": [*ratios, 0], "num_hash_layers": 1}
    return {**fields, **few, "n_routed_experts": EXPERTS, "vocab_size": VOCABULARY}


def opened(job: Job) -> tuple[WeightStore, dict[str, Any]]:
    """The weights and the fields of `config.json`. Raises BadInput for a directory that is to be cut down."""
    from reference.checkpoint.open import open_store
    from reference.checkpoint.procedural import ProceduralStore
    from reference.config import Config
    from reference.errors import BadInput

    store = open_store(job.model)
    if not isinstance(store, ProceduralStore):
        if job.cut:
            raise BadInput(f"{job.model}: only a procedural model can be cut down")
        return store, json.loads((Path(job.model) / "config.json").read_text())
    if not job.cut:
        return store, store.config_json
    fields = cut(store.config_json)
    return ProceduralStore(Config.from_dict(fields)), fields


def reference_engine(job: Job, packed: bool) -> Callable[[Tensor], Callable[[Tensor], None]]:
    from optimized.cpu.fused import Products
    from reference.model import Model
    from reference.state import SequenceState

    engine = Model(opened(job)[0], memory=sys.maxsize, products=Products() if packed else None)

    def start(prompt: Tensor) -> Callable[[Tensor], None]:
        state = SequenceState()

        def step(tokens: Tensor) -> None:
            engine.logits(engine.forward([tokens], [state]))

        step(prompt)
        return step

    return start


def transformers_engine(job: Job) -> Callable[[Tensor], Callable[[Tensor], None]]:
    import torch

    from ..adapters import hf

    engine = hf.build(*opened(job), torch.float32)

    def start(prompt: Tensor) -> Callable[[Tensor], None]:
        cache = engine(prompt[None], use_cache=True).past_key_values

        def step(tokens: Tensor) -> None:
            engine(tokens[None], past_key_values=cache, use_cache=True)

        return step

    return start


def one_process(engine: str, job: Job) -> Measured:
    """Load, warm up, measure; in this very process."""
    import torch

    from ..options import peak_rss

    torch.set_num_threads(job.threads)
    start = transformers_engine(job) if engine == PEER else reference_engine(job, packed=engine == "packed")
    vocab = 128  # ids every model has
    ids = torch.randint(vocab, (job.prefill + job.decode,), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        start(ids[:WARM_UP])(ids[WARM_UP : WARM_UP + 1])
        loaded, began = peak_rss(), time.perf_counter()
        step = start(ids[: job.prefill])
        middle = time.perf_counter()
        for token in ids[job.prefill :].split(1):
            step(token)
        return Measured(middle - began, time.perf_counter() - middle, peak_rss(), loaded)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m parity.bench.reference")
    parser.add_argument("engine", choices=ENGINES)
    parser.add_argument("model")
    for name in ("prefill", "decode", "threads"):
        parser.add_argument(name, type=int)
    parser.add_argument("--cut", action="store_true")
    fields: dict[str, Any] = vars(parser.parse_args())
    print(json.dumps(vars(one_process(fields.pop("engine"), Job(**fields)))))


if __name__ == "__main__":
    main()
