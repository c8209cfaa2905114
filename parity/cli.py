"""`v4parity`: every module of `parity.commands` is one subcommand.

Exit codes: 0 done, judged and passed · 1 a gate failed · 2 usage · 3 incomplete · 4 bad input or environment.
"""

from __future__ import annotations

import argparse
import importlib
import pkgutil
import sys
from collections.abc import Sequence

from reference.errors import BadInput

from . import commands

BAD_INPUT = 4


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="v4parity",
        description="Reference-to-production correctness and numerics suite for DeepSeek-V4.",
        epilog="exit codes: 0 passed, 1 gate failed, 2 usage, 3 incomplete, 4 bad input or environment",
    )
    subparsers = parser.add_subparsers(title="commands", dest="command", required=True, metavar="COMMAND")
    for module in sorted(m.name for m in pkgutil.iter_modules(commands.__path__)):
        importlib.import_module(f"{commands.__name__}.{module}").add_parser(subparsers)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; input that cannot be used ends in one line on stderr."""
    args = build_parser().parse_args(argv)
    try:
        return int(args.main(args))
    except BadInput as error:
        print(f"v4parity: {error}", file=sys.stderr)
    except OSError as error:
        print(f"v4parity: {error.strerror or error}: {error.filename or ''}".rstrip(": "), file=sys.stderr)
    except MemoryError as error:
        print(f"v4parity: out of memory: {error}", file=sys.stderr)
    return BAD_INPUT


if __name__ == "__main__":
    sys.exit(main())
