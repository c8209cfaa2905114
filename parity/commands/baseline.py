"""`v4parity baseline`: pinned drift of a model and profile, measured over seeds; what has moved since."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

USAGE, INCOMPLETE = 2, 3
BASELINES = Path("reports/baselines")


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "baseline",
        help="pin a model's drift, or say what has moved",
        description="A figure is an op's relative L2 or share of the budget in a kind of layer, or the drift of the streams "
        "behind a layer. `update` pins medians and spreads of runs that differ in their seed only; nothing else ever writes. "
        "Exit codes of `check`: 0 nothing got worse, 1 a figure rose beyond what seeds explain, 3 a pinned figure is missing, "
        "4 bad input.",
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    check = actions.add_parser("check", help="compare a run with the baseline of its model and profile")
    check.add_argument("run", type=Path, metavar="RUN", help="run directory")
    check.set_defaults(main=main)
    update = actions.add_parser("update", help="pin the figures of at least three runs, each of another seed")
    update.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="run directories")
    update.set_defaults(main=main)
    for action in (check, update):
        action.add_argument("--baselines", type=Path, default=BASELINES, metavar="DIR",
                            help=f"where baselines lie (default {BASELINES})")  # fmt: skip


def main(args: argparse.Namespace) -> int:
    return check(args.run, args.baselines) if args.action == "check" else update(args.runs, args.baselines)


def check(run: Path, directory: Path) -> int:
    """Print what moved; the exit code."""
    from .. import baseline
    from ..records import read_lines

    said = read_lines(run)
    pinned = baseline.read(baseline.file_of(directory, said))
    moves, missing = baseline.compare(pinned, said), baseline.lost(pinned, said)
    worse = [m for m in moves if m.worse]
    for move in [*worse, *(m for m in moves if not m.worse)]:
        print(f"{'WORSE' if move.worse else 'better'}  {move}")
    for figure in missing:
        print(f"MISSING  {figure.op} {figure.output} {figure.where}: {figure.metric}")
    counts = f"{len(worse)} worse, {len(moves) - len(worse)} better, {len(missing)} missing"
    print(f"{len(pinned.figures)} figures over {len(pinned.seeds)} seeds: {counts}")
    return 1 if worse else INCOMPLETE if missing else 0


def update(runs: list[Path], directory: Path) -> int:
    """Pin the figures of these runs, and say what that changes."""
    from .. import baseline
    from ..records import read_lines

    said = [read_lines(run) for run in runs]
    try:
        pinned = baseline.measure(said)
    except ValueError as error:
        print(f"v4parity baseline update: {error}", file=sys.stderr)
        return USAGE
    path = baseline.file_of(directory, said[0])
    for move in baseline.repinned(baseline.read(path), pinned) if path.exists() else []:
        print(move)
    directory.mkdir(parents=True, exist_ok=True)
    baseline.write(pinned, path)
    print(f"{path}: {len(pinned.figures)} figures over seeds {', '.join(map(str, pinned.seeds))}")
    return 0
