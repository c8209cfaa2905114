"""`v4parity inspect M`: what a model weighs, what a token costs, and whether its checkpoint is sound."""

from __future__ import annotations

import argparse
import json
from typing import Any

from .. import options


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "inspect",
        help="census of a model: tensors, parameters, bytes, cost of a token; finds damage in a directory",
    )
    parser.add_argument("model", metavar="M", help="directory in the released format, or procedural:PRESET[@seed]")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--context", type=options.positive, metavar="N",
                        help="also the cost of a decode step when the context is N tokens long")  # fmt: skip
    parser.set_defaults(main=main)


def main(args: argparse.Namespace) -> int:
    from reference.checkpoint.open import open_store

    from ..inspection import inspect, lines

    facts = inspect(open_store(args.model), args.model, args.context)
    print(json.dumps(facts, indent=2) if args.json else "\n".join(lines(facts)))
    return 0
