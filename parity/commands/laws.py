"""`v4parity laws`: what theory says of ops exactly, tried on the kernels and on the reference."""

from __future__ import annotations

import argparse
import sys
from typing import Any

FAILED, USAGE = 1, 2


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "laws",
        help="try exact laws on kernels and reference",
        description="Kernels to the bit, the reference in float64 within rounding. Exit code 1 if a law is broken.",
    )
    parser.add_argument("names", nargs="*", metavar="LAW", help="families (padding) or laws (padding.core); default all")
    parser.add_argument("--seed", type=int, default=0, help="default 0")
    parser.set_defaults(main=main)


def main(args: argparse.Namespace) -> int:
    from ..laws import LAWS, named

    try:
        laws = [law for name in args.names for law in named(name)] or LAWS
    except KeyError as error:
        print(f"v4parity laws: {error.args[0]}", file=sys.stderr)
        return USAGE
    broken = 0
    for law in laws:
        violation = law.run(args.seed)
        broken += violation is not None
        verdict = f"BROKEN: {violation.words}" if violation else "holds"
        print(f"{law.side:<10} {law.name:<24} {law.op:<22} {law.statement}: {verdict}")
    print(f"{len(laws)} laws, {broken} violated")
    return FAILED if broken else 0
