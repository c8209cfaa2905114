"""`v4parity repro`: one verdict of a run as a script that needs numpy only."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "repro",
        help="one failing verdict of a run as a standalone script",
        description="The op is run again, and the worst row of its worst output goes into a script that needs numpy only and "
        "prints the same verdict.",
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="run directory")
    parser.add_argument("--record", type=int, metavar="N", help="line of its records, from 0 (default: the first that failed)")
    parser.add_argument("--out", type=Path, metavar="F", help="file to write (default: print)")
    parser.set_defaults(main=main)


def main(args: argparse.Namespace) -> int:
    from ..records import config_digest, read_lines, write_bytes
    from ..repro import from_run
    from .run import _model

    records = read_lines(args.run)
    run = records[0]
    with _model(run["model_argument"] or None) as store:
        if config_digest(store.config) != run["config_sha256"]:
            from reference.errors import BadInput

            raise BadInput(f"{args.run}: the run was of another model than {run['model_argument'] or 'mini'} is now")
        text = from_run(records, store, args.record)
    if args.out is None:
        print(text, end="")
    else:
        write_bytes(args.out, text.encode())
        print(args.out)
    return 0
