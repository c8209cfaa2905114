"""`v4parity conventions`: format rules of public engines on the same inputs, and who agrees with whom."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "conventions",
        help="format rules of public engines, run on the same inputs",
        description="For each rule of a number format (scale exponent, floors, saturation, ties, sign of zero, edge codes, "
        "rounding, rotation, padding): what each engine is known to do, and on how many inputs the rules agree. Markdown.",
    )
    parser.add_argument("--md", type=Path, metavar="F", help="write the page there instead of printing it")
    parser.set_defaults(main=main)


def main(args: argparse.Namespace) -> int:
    from ..conventions.page import page
    from ..records import write_bytes

    if args.md is None:
        print(page())
        return 0
    write_bytes(args.md, page().encode())
    print(args.md)
    return 0
