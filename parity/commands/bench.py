"""`v4parity bench`: the reference beside a peer, and the kernels beside their rooflines."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import options

if TYPE_CHECKING:
    from reference.checkpoint.store import WeightStore

    from ..bench.limits import Limits


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("bench", help="speed: the reference against a peer, the kernels against a roofline")
    what = parser.add_subparsers(title="what to measure", dest="what", required=True, metavar="WHAT")
    _add_reference(what)
    _add_kernels(what)
    _add_full(what)


def _add_reference(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "reference",
        help="speed and memory against transformers, as ratios from one run",
        description="The reference against transformers (extra `oracle`): same weights in float32, one process a "
        "measurement, alternating; `reference` on dequantised weights, `packed` multiplying the stored ones. Bare times of a "
        "shared machine say little; read the ratios.",
    )
    options.add_model(parser, "procedural:mini")
    parser.add_argument("--prefill", type=options.positive, default=2048, metavar="T", help="tokens at once (default 2048)")
    parser.add_argument("--decode", type=options.positive, default=32, metavar="N", help="single tokens after (default 32)")
    parser.add_argument("--cut", action="store_true",
                        help="the widths of a procedural model, with a layer of each of its kinds, 8 experts and a vocabulary "
                        "of 4,096: what all engines can hold in float32")
    parser.add_argument("--repeats", type=options.positive, default=3, metavar="R", help="processes per engine (default 3)")
    parser.add_argument("--threads", type=options.positive, default=os.cpu_count(), metavar="N", help="default: all cores")
    parser.set_defaults(main=reference)


def _add_kernels(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "kernels",
        help="kernels against what their bytes and products allow",
        description="`--device cuda` times every call of a decode and a prefill step beside its roofline; `--sheet` compiles "
        "the kernels for four GPUs, none needed, and writes what came out and the rooflines as a page.",
    )
    options.add_model(parser, "procedural:v4-pro")
    how = parser.add_mutually_exclusive_group(required=True)
    how.add_argument("--sheet", type=Path, metavar="FILE", help="write the kernel sheet there (minutes of compilation)")
    how.add_argument("--device", choices=["cuda"], help="time the kernels on this GPU (CUDA or ROCm)")
    parser.add_argument("--repeats", type=options.positive, default=30, metavar="R", help="runs a call (default 30)")
    parser.set_defaults(main=kernels)


def _add_full(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "full",
        help="what limits a run of real size, and how near the products come to it",
        description="Measures what memory lets this machine read and how fast it multiplies, then products with packed "
        "weights at the model's shapes, as shares of those; for a directory also the disk, and whole steps from it, cold and "
        "warm, in turn with the disk alone. Run it on a quiet machine.",
    )
    options.add_model(parser, "procedural:v4-pro")
    parser.add_argument("--memory", type=options.byte_count, default=8 << 30, metavar="BYTES",
                        help="bytes that the process may take for steps from a directory (default 8GiB)")  # fmt: skip
    parser.add_argument("--turns", type=options.positive, default=5, metavar="N", help="of disk and step (default 5)")
    parser.set_defaults(main=full)


def reference(args: argparse.Namespace) -> int:
    from rich.console import Console
    from rich.table import Table

    from ..bench.reference import ENGINES, PEER, Job, Measured, measure, ratios
    from ..progress import Progress

    job = Job(args.model, args.prefill, args.decode, args.threads, args.cut)
    runs: dict[str, list[Measured]] = {engine: [] for engine in ENGINES}
    with Progress(args.repeats * len(ENGINES), "process") as progress:
        for i in range(args.repeats * len(ENGINES)):
            engine = ENGINES[i % len(ENGINES)]
            progress.at(i, engine)
            runs[engine].append(measure(engine, job))
            progress.note(f"{engine}: {runs[engine][-1].prefill_s:.2f} s prefill, {runs[engine][-1].decode_s:.2f} s decode")
    title = f"{args.model}{', cut down' * args.cut}, {args.threads} threads"
    table = Table("engine", "prefill tok/s", "decode tok/s", "peak RSS", title=title)
    for engine, measured in runs.items():
        best = [min(getattr(m, field) for m in measured) for field in ("prefill_s", "decode_s", "peak_rss")]
        table.add_row(engine, f"{job.prefill / best[0]:.1f}", f"{job.decode / best[1]:.2f}", options.show_bytes(best[2]))
    Console().print(table)
    for engine in (engine for engine in ENGINES if engine != PEER):
        for name, value in ratios(runs[engine], runs[PEER]).items():
            print(f"{name:14} {value:.2f}x  ({engine} against {PEER}, medians of {args.repeats})")
    return 0


def kernels(args: argparse.Namespace) -> int:
    return write_sheet(args) if args.sheet is not None else time_kernels(args)


def write_sheet(args: argparse.Namespace) -> int:
    from reference.checkpoint.open import open_store

    from ..bench import sheet

    wrong = sheet.write_sheet(args.sheet, open_store(args.model).config)
    print("\n".join([*wrong, f"{args.sheet}: compiled, and worked out on paper; nothing ran on a GPU"]))
    return 1 if wrong else 0


def time_kernels(args: argparse.Namespace) -> int:
    from reference.checkpoint.open import open_store

    from ..bench.kernels import CudaClock, find_gpu, lines, measure
    from ..bench.roofline import DECODE, PREFILL

    device = find_gpu()
    config, clock = open_store(args.model).config, CudaClock()
    for step in (DECODE, PREFILL):
        for line in lines(step, device, measure(config, step, device, clock, args.device, args.repeats)):
            print(line, flush=True)
    return 0


def full(args: argparse.Namespace) -> int:
    from optimized.cpu.fused import best
    from reference.checkpoint.open import open_store

    from ..bench.full import lines
    from ..bench.limits import last_level_cache, measure

    store, limits = open_store(args.model), measure()
    print(f"{store.identity}, kernels {best()}, last-level cache {options.show_bytes(last_level_cache())}")
    read = f"read {limits.read / 1e9:.1f} GB/s, one thread {limits.read_one / 1e9:.1f}"
    print(f"{read}; {limits.fma / 1e9:.0f} G multiply-adds/s")
    for line in lines(store, limits):
        print(line, flush=True)
    if not args.model.startswith("procedural:"):
        streamed(args, store, limits)
    return 0


def streamed(args: argparse.Namespace, store: WeightStore, limits: Limits) -> None:
    """The disk of a directory, and steps from it."""
    from ..bench import disk
    from ..bench.turns import lines, turns

    files = disk.shards(Path(args.model))
    print(f"disk {disk.cold(files) / 1e9:.2f} GB/s cold, {disk.warm(files) / 1e9:.2f} from the system's cache", flush=True)
    measured = []
    for turn in turns(store, files, options.room_for_weights(args.memory), args.turns):
        measured.append(turn)
        read = f"{turn.touched / 1e9:.2f} GB touched, {turn.cold_read / 1e9:.2f} read"
        print(f"disk {turn.disk / 1e9:.2f} GB/s; step {turn.cold:.2f} s cold ({read}), {turn.warm:.2f} s warm", flush=True)
    print("\n".join([*lines(measured, limits), f"peak RSS {options.show_bytes(options.peak_rss())}"]))
