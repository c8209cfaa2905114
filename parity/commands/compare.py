"""`v4parity compare`: two traces of any engines, tap by tap."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

USAGE, INCOMPLETE = 2, 3


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "compare",
        help="two traces side by side, and where they first part",
        description="Distances of every tap that both have, in causal order. A tap is beyond its storage where the relative "
        "L2 is more than one rounding of every element to the coarser of both formats. This describes and is no verdict unless "
        "--gate asks for one. Exit codes: 0 compared, 1 with --gate a tap beyond its storage, 2 a trace without a profile, "
        "3 nothing in common, 4 bad input.",
    )
    parser.add_argument("a", type=Path, metavar="A", help="trace directory")
    parser.add_argument("b", type=Path, metavar="B", help="trace directory")
    parser.add_argument("--all", action="store_true", help="print taps that agree to the bit too")
    parser.add_argument("--gate", action="store_true", help="exit 1 where a tap is beyond its storage")
    parser.set_defaults(main=main)


def main(args: argparse.Namespace) -> int:
    from ..comparing import compare, first
    from ..trace import WithoutProfile, read_trace

    try:
        a, b = read_trace(args.a), read_trace(args.b)
    except WithoutProfile as error:
        print(f"v4parity compare: {error}", file=sys.stderr)
        return USAGE
    found, alone = compare(a, b)
    print(f"A {a.engine}, profile {a.profile.name}\nB {b.engine}, profile {b.profile.name}")
    shown = [d for d in found if d.differs or args.all]
    if shown:
        print(f"{'tap':44} {'tokens':>6} {'rel. L2':>9} {'max abs':>9} {'1-cosine':>9}  worst at")
    for d in shown:
        where = f"request {d.request}" + ("" if d.position is None else f", position {d.position}")
        where += "  beyond its storage" if d.beyond else ""
        print(f"{d.tap:44} {d.tokens:6} {d.relative_l2:9.2e} {d.max_abs:9.2e} {1 - d.cosine:9.1e}  {where}")
    print(f"{len(found)} taps in both, {sum(not d.differs for d in found)} equal to the bit; only in one: {len(alone)}")
    if not found:
        return INCOMPLETE
    if at := first(found):
        print(f"first divergence: {at.tap}, request {at.request}, position {at.position}, relative L2 {at.relative_l2:.3g}")
        return int(args.gate)
    print("no tap is beyond its storage")
    return 0
