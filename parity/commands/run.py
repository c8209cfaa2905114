"""`v4parity run`: the main job. A model layer by layer, every kernel there is against the twin, verdicts and a report."""

from __future__ import annotations

import argparse
import contextlib
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..options import add_device, settle_device

if TYPE_CHECKING:
    from torch import Tensor

    from reference.checkpoint.store import WeightStore
    from reference.config import Config

    from ..budget.bounded import Arithmetic
    from ..cases import Plan
    from ..ops import Op
    from ..run import Request

USAGE = 2
RUNS = Path("reports/runs")
PLANNED = ("lengths", "ids_file", "start_pos", "profile", "candidate_layers")  # words that a trace says itself


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "run",
        help="judge every kernel of a model against the twin, layer by layer",
        description="Without --model a small checkpoint is written in the released format and read back. With a trace as "
        "--candidate, every op whose inputs and outputs it holds is judged, and nothing but the twin runs. "
        "Exit codes: 0 all judged and passed, 1 a verdict failed or a whole layer departs, 2 usage, 3 something requested did "
        "not run or nothing was judged, 4 bad input or environment.",
    )
    parser.add_argument("--model", metavar="M", help="directory in the released format, or procedural:PRESET[@seed]")
    parser.add_argument("--layers", default="all", metavar="L",
                        help="30, 0-5, mtp_0, a list of those, or all: then streams run from layer to layer (default all)")
    parser.add_argument("--ops", metavar="OP,..", help="names or shell patterns, attn.core,attn.compressor.*: must be judged")
    parser.add_argument("--phases", metavar="P,..", help="of prefill, decode, verify, chunk (default all)")
    parser.add_argument("--lengths", metavar="N,..", help="prompt lengths (default: the model's near edges)")
    parser.add_argument("--ids-file", type=Path, metavar="F",
                        help="token ids of the prompts instead of --lengths, as JSON: name -> list; the last ones of each go "
                        "to the phases after the prompt")
    parser.add_argument("--start-pos", metavar="N,..", help="positions to start from without a prompt (default: far edges)")
    parser.add_argument("--profile", metavar="P",
                        help="rounding contract of the build: pool-fp8 (default) or pool-bf16")
    parser.add_argument("--seed", type=int, default=0, help="of token ids and synthetic state (default 0)")
    parser.add_argument("--candidate", type=candidate, default="optimized", metavar="C",
                        help="who is judged: optimized (default), this project's kernels, or the directory of a trace")
    add_device(parser)
    parser.add_argument("--accumulate", default="fp32", metavar="F",
                        help="how the candidate adds up products: fp32 (default), hopper-fp8 or tf32")
    parser.add_argument("--candidate-layers", metavar="L",
                        help="layers that kernels run in, spelt as in --layers; the others are evaluated without (default: "
                        "all of --layers)")
    parser.add_argument("--drift", action=argparse.BooleanOptionalAction,
                        help="run whole layers of the candidate too, for the curves of its drift (default: where --ops names "
                        "none)")
    parser.add_argument("--gate", action="store_true", help="an op without a kernel is a reason to fail too (exit 3)")
    parser.add_argument("--resume", action="store_true", help="go on with the run in --out after its last finished layer")
    parser.add_argument("--out", type=Path, metavar="DIR", help=f"run directory to write (default {RUNS}/<time>-<model>)")
    parser.set_defaults(main=main)  # fmt: skip


def candidate(word: str) -> str:
    """`optimized`, or where a trace is."""
    if word != "optimized" and not Path(word).is_dir():
        raise argparse.ArgumentTypeError(f"no candidate {word!r}; it is optimized, or the directory of a trace")
    return word


def main(args: argparse.Namespace) -> int:
    if args.resume and args.out is None:
        return usage("--resume needs the run's directory, --out DIR")
    if args.ids_file is not None and args.lengths is not None:
        return usage("--ids-file and --lengths both say how long prompts are")
    if args.candidate != "optimized" and (word := next((w for w in PLANNED if getattr(args, w) is not None), None)):
        return usage(f"--{word.replace('_', '-')} is for kernels that run: a trace has tokens and a profile of its own")
    settle_device(args.device)
    from ..report.html import write_html
    from ..report.terminal import print_report
    from ..run import run
    from ..trace import WithoutProfile

    with contextlib.ExitStack() as stack:
        store = stack.enter_context(_model(args.model))
        try:
            request = (build_request if args.candidate == "optimized" else of_trace)(args, store.config)
        except (ValueError, WithoutProfile) as error:
            return usage(str(error))
        from .. import records
        from ..journal import Journal
        from ..progress import Progress

        directory = _run_directory(args)
        journal = Journal.open(directory, args.resume)
        with Progress(len(request.layers), "layer") as progress:

            def listen(done: int, record: records.Record) -> None:
                progress.at(done, f"{record['layer_id']} {record['phase']} {record['op']}")
                if record["verdict"] == "fail":
                    progress.note(f"FAIL {record['layer_id']} {record['phase']} {record['op']}")

            said = run(store, request, journal, listen)
        records.write_lines(directory / records.FILE, said)
        write_html(said, directory / "index.html")
        journal.close()
    print_report(said)
    print(f"\n{directory / records.FILE}\n{directory / 'index.html'}")
    return int(said[-1]["exit_code"])


def usage(message: str) -> int:
    import sys

    print(f"v4parity run: {message}", file=sys.stderr)
    return USAGE


def build_request(args: argparse.Namespace, config: Config) -> Request:
    """Raises ValueError for a word that means nothing."""
    from .. import cases
    from ..run import PROFILES, Request

    named = args.profile or PROFILES[0]
    if named not in PROFILES:
        raise ValueError(f"no kernels for profile {named!r}; there are kernels for {', '.join(PROFILES)}")
    phases = named_phases(args, cases.PHASES)
    starts = cases.default_starts(config) if args.start_pos is None else numbers(args.start_pos, "start position")
    lengths = cases.default_lengths(config) if args.lengths is None else numbers(args.lengths, "length")
    ids = read_prompts(args.ids_file, config.vocab_size) if args.ids_file else {}
    if ids:
        lengths = prompt_lengths(args.ids_file, ids, cases.plan([1] * len(ids), [], phases, cases.default_chunks(config)))
    plan = cases.plan(lengths, starts, phases, cases.default_chunks(config))
    if not plan.sequences:
        raise ValueError("no lengths and no start positions: nothing to run")
    last = max(s.start + sum(s.tokens.values()) for s in plan.sequences)
    if last > config.max_position_embeddings:
        raise ValueError(f"position {last} is beyond the model's {config.max_position_embeddings}")
    chosen, required = named_ops(args)
    layers = tuple(cases.layer_numbers(args.layers, config))
    candidate = None if args.candidate_layers is None else frozenset(cases.layer_numbers(args.candidate_layers, config))
    if candidate is not None and candidate - set(layers):
        raise ValueError(f"--candidate-layers names {min(candidate - set(layers))}, which --layers does not")
    streams = "free-running" if args.layers == "all" else "synthetic"
    return Request(layers, chosen, required, plan, named, args.seed, streams, args.model or "",
                   tuple(ids.values()), str(args.ids_file) if ids else "",
                   args.ops is None if args.drift is None else args.drift, candidate, how=accumulation(args))  # fmt: skip


def of_trace(args: argparse.Namespace, config: Config) -> Request:
    """What to judge of a trace. Raises ValueError for a word that means nothing, WithoutProfile, and BadInput for damage or
    the trace of another model."""
    from .. import cases
    from ..adapters.tape import Tape
    from ..adapters.traced import check, plan_of
    from ..run import Request
    from ..trace import read_trace

    trace = read_trace(Path(args.candidate))
    check(trace, config)
    plan = plan_of(Tape.of(trace, config))
    plan = replace(plan, judged=tuple(p for p in plan.judged if p in named_phases(args, plan.judged)))
    chosen, required = named_ops(args)
    drift = args.ops is None if args.drift is None else args.drift
    layers = tuple(cases.layer_numbers(args.layers, config))
    return Request(layers, chosen, required, plan, trace.profile.name, 0, "trace", args.model or "", drift=drift, trace=trace,
                   argument=args.candidate, how=accumulation(args))  # fmt: skip


def accumulation(args: argparse.Namespace) -> Arithmetic:
    """Raises ValueError for a format that is none."""
    from ..budget.bounded import ACCUMULATE

    if args.accumulate not in ACCUMULATE:
        raise ValueError(f"no accumulate format {args.accumulate!r}; there are {', '.join(ACCUMULATE)}")
    return ACCUMULATE[args.accumulate]


def named_phases(args: argparse.Namespace, known: Sequence[str]) -> list[str]:
    """Raises ValueError for a phase that is none of these."""
    phases = args.phases.split(",") if args.phases else list(known)
    unknown = [p for p in phases if p not in known]
    if unknown:
        raise ValueError(f"no phase {unknown[0]!r}; phases are {', '.join(known)}")
    return phases


def named_ops(args: argparse.Namespace) -> tuple[tuple[Op, ...], frozenset[str]]:
    """Ops to judge, and the names of those that have to be. Raises ValueError for one that is none."""
    from .. import ops

    chosen = ops.select(args.ops.split(",") if args.ops else ["*"])
    return tuple(chosen), frozenset(op.name for op in chosen if args.ops or args.gate)


def read_prompts(file: Path, vocabulary: int) -> dict[str, Tensor]:
    """Prompts by name. Raises BadInput for a damaged file, or an id outside the vocabulary."""
    from reference.errors import BadInput

    from .logits import read_ids

    prompts = read_ids(file)
    for name, ids in prompts.items():
        outside = ((ids < 0) | (ids >= vocabulary)).nonzero().flatten()
        if len(outside):
            at = int(outside[0])
            raise BadInput(f"{file}: {name}, token {at}: id {int(ids[at])} is outside the vocabulary of {vocabulary}")
    return prompts


def prompt_lengths(file: Path, prompts: dict[str, Tensor], shortest: Plan) -> list[int]:
    """What is left for each prompt after all phases behind it and the token that only MTP sees; `shortest` is the plan with
    prompts of one token. Raises BadInput for a prompt that leaves nothing."""
    from reference.errors import BadInput

    lengths = []
    for (name, ids), sequence in zip(prompts.items(), shortest.sequences, strict=True):
        behind = 1 + sum(n for phase, n in sequence.tokens.items() if phase != "prefill")
        if len(ids) <= behind:
            raise BadInput(f"{file}: {name} has {len(ids)} ids; the phases after its prompt take {behind}")
        lengths.append(len(ids) - behind)
    return lengths


def numbers(text: str, what: str) -> list[int]:
    """`3,4,5` -> positive numbers; an empty text is none."""
    words = [word.strip() for word in text.split(",") if word.strip()]
    bad = [word for word in words if not word.isdigit() or int(word) == 0]
    if bad:
        raise ValueError(f"{bad[0]!r} is no {what}")
    return [int(word) for word in words]


@contextlib.contextmanager
def _model(name: str | None) -> Iterator[WeightStore]:
    """The store of a model; without a name, the preset `mini` written to a temporary directory and read back."""
    from reference.checkpoint.open import open_store

    if name is not None:
        yield open_store(name)
        return
    from reference.checkpoint.procedural import ProceduralStore
    from reference.checkpoint.writer import write_checkpoint

    drawn = ProceduralStore("mini")
    with tempfile.TemporaryDirectory(prefix="v4parity-") as scratch:
        directory = Path(scratch) / "mini"
        write_checkpoint(drawn, drawn.config_json, directory, lambda number, file: None)
        yield open_store(str(directory))


def _run_directory(args: argparse.Namespace) -> Path:
    """Where this run is written."""
    name = Path(args.model or "mini").name.replace(":", "-")
    return args.out or RUNS / f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{name}"
