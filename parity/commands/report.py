"""`v4parity report`: a run directory rendered again, on the terminal or in files, whole or one module of it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

USAGE = 2


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "report",
        help="render the records of a run again",
        description="On the terminal, or in as many files as are named.",
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="run directory")
    parser.add_argument("--module", metavar="M", help="only ops with this in their name, compressor or attn.indexer, and "
                        "what each costs by kind of layer")  # fmt: skip
    parser.add_argument("--html", type=Path, metavar="F", help="one self-contained page")
    parser.add_argument("--md", type=Path, metavar="F", help="Markdown for the summary of a CI step")
    parser.add_argument("--junit", type=Path, metavar="F", help="JUnit XML, one test case a verdict")
    parser.add_argument("--csv", type=Path, metavar="F", help="one row an output of a verdict")
    parser.set_defaults(main=main)


def main(args: argparse.Namespace) -> int:
    from ..attribution.files import joined
    from ..records import write_bytes
    from ..report import html, junit, markdown, table, terminal

    records: list[Mapping[str, Any]] = list(joined(args.run))
    if args.module:
        try:
            records = table.of_module(records, args.module)
        except ValueError as error:
            print(f"v4parity report: {error}", file=sys.stderr)
            return USAGE
    renderings = {args.html: html.render, args.md: markdown.render, args.junit: junit.render, args.csv: table.csv}
    for path in (path for path in renderings if path is not None):
        write_bytes(path, renderings[path](records).encode())
        print(path)
    if not any(renderings):
        terminal.print_report(records)
        if args.module:
            terminal.print_drift(table.drift(records).to_dict("records"))
    return 0
