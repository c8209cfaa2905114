"""`v4parity bench`: ratios of speed and memory, measured side by side in one run."""

from __future__ import annotations

import argparse
import os
from typing import Any

from .. import options


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "bench",
        help="speed and memory against a peer, as ratios from one run",
        description="`bench reference`: the reference against transformers (extra `oracle`), same weights in float32, one "
        "process a measurement, alternating. Bare times of a shared machine say little; read the ratios.",
    )
    parser.add_argument("what", choices=["reference"], help="what to measure")
    options.add_model(parser, "procedural:mini")
    parser.add_argument("--prefill", type=options.positive, default=2048, metavar="T", help="tokens at once (default 2048)")
    parser.add_argument("--decode", type=options.positive, default=32, metavar="N", help="single tokens after (default 32)")
    parser.add_argument("--repeats", type=options.positive, default=3, metavar="R", help="processes per engine (default 3)")
    parser.add_argument("--threads", type=options.positive, default=os.cpu_count(), metavar="N", help="default: all cores")
    parser.set_defaults(main=main)


def main(args: argparse.Namespace) -> int:
    from rich.console import Console
    from rich.table import Table

    from ..bench.reference import ENGINES, Job, Measured, measure, ratios
    from ..progress import Progress

    job = Job(args.model, args.prefill, args.decode, args.threads)
    runs: dict[str, list[Measured]] = {engine: [] for engine in ENGINES}
    with Progress(args.repeats * len(ENGINES), "process") as progress:
        for i in range(args.repeats * len(ENGINES)):
            engine = ENGINES[i % len(ENGINES)]
            progress.at(i, engine)
            runs[engine].append(measure(engine, job))
            progress.note(f"{engine}: {runs[engine][-1].prefill_s:.2f} s prefill, {runs[engine][-1].decode_s:.2f} s decode")
    table = Table("engine", "prefill tok/s", "decode tok/s", "peak RSS", title=f"{args.model}, {args.threads} threads")
    for engine, measured in runs.items():
        best = [min(getattr(m, field) for m in measured) for field in ("prefill_s", "decode_s", "peak_rss")]
        table.add_row(engine, f"{job.prefill / best[0]:.1f}", f"{job.decode / best[1]:.2f}", options.show_bytes(best[2]))
    Console().print(table)
    for name, value in ratios(runs["reference"], runs["transformers"]).items():
        print(f"{name:14} {value:.2f}x  (reference against transformers, medians of {args.repeats})")
    return 0
