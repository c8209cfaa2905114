"""`v4parity report`: a run directory rendered again, on the terminal or as its HTML file."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("report", help="render the records of a run again")
    parser.add_argument("run", type=Path, metavar="RUN", help="run directory")
    parser.add_argument("--html", action="store_true", help="write RUN/index.html instead of printing")
    parser.set_defaults(main=main)


def main(args: argparse.Namespace) -> int:
    from ..records import read_lines
    from ..report.html import write_html
    from ..report.terminal import print_report

    records = read_lines(args.run)
    if args.html:
        write_html(records, args.run / "index.html")
        print(args.run / "index.html")
    else:
        print_report(records)
    return 0
