"""`v4parity faults`: what the gates are known to catch. Planted faults, most of them public, before every gate."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

DEFAULT = Path("reports/runs/faults")


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "faults",
        help="planted faults before the gates: the kill matrix",
        description="Each fault is a small change of correct code. It is turned on, its gates run, and it is turned off. "
        "A directory that holds results goes on where it ended. Exit 1 if a fault is not caught or is blamed on another op.",
    )
    parser.add_argument("--only", metavar="PATTERN,..", default="", help="names, kinds or sources, as shell patterns")
    parser.add_argument("--out", type=Path, default=DEFAULT, metavar="DIR", help=f"where results are kept (default {DEFAULT})")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--list", action="store_true", help="name the faults and run none")
    what.add_argument("--clean", type=int, metavar="N", help="no fault: trigger cells over N seeds, none of which may fail")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="the first of --clean's seeds (default 0)")
    what.add_argument("--public-gates", action="store_true",
                      help="the usual public gates beside ours, on one fault of each of ten kinds")
    what.add_argument("--smallest", action="store_true", help="how small a fault can be before each gate misses it")
    parser.set_defaults(main=main)  # fmt: skip


def main(args: argparse.Namespace) -> int:
    from ..faults import matrix

    faults = matrix.select([p for p in args.only.split(",") if p])
    if args.list:
        for f in faults:
            print(f"{f.name:36} {f.severity} {f.source:42} {f.what}")
        return 0
    args.out.mkdir(parents=True, exist_ok=True)
    if args.clean is not None:
        return _clean(faults, range(args.seed, args.seed + args.clean))
    if args.public_gates:
        from ..faults import public

        return _write(args.out / "gates.md", public.as_markdown(public.measure()))
    if args.smallest:
        from ..faults import smallest

        return _write(args.out / "smallest.md", smallest.as_markdown(smallest.measure()))
    return _matrix(faults, args.out)


def _matrix(faults: Any, out: Path) -> int:
    from ..faults import matrix, render
    from ..progress import Progress
    from ..records import write_bytes

    with Progress(len(faults), "fault") as progress:
        done = iter(range(1, len(faults) + 1))

        def listen(fault: Any, result: Any) -> None:
            progress.at(next(done), fault.name)
            if why := matrix.wrong(result, fault):
                progress.note(f"{fault.name}: {why}")

        results = matrix.run_all(faults, out, listen)
    table = render.rows(faults, results)
    for name, text in (("json", render.as_json(table)), ("md", render.as_markdown(table)), ("html", render.as_html(table))):
        write_bytes(out / f"matrix.{name}", text.encode())
    print(f"{render.sentence(render.totals(table))}\n{out / 'matrix.html'}")
    return int(any(row["wrong"] for row in table))


def _clean(faults: Any, seeds: range) -> int:
    """Exit 1 for a false alarm."""
    from ..faults.gates import covering, run_cell
    from ..progress import Progress

    triggers = list(dict.fromkeys(f.cell for f in faults if f.cell))
    cells, alarms, seconds = covering(triggers), 0, 0.0
    with Progress(len(cells) * len(seeds), "cell") as progress:
        for turn, seed in enumerate(seeds):
            for n, cell in enumerate(cells, 1):
                progress.at(turn * len(cells) + n, f"seed {seed}, {cell.text}")
                outcome = run_cell(cell, None, seed)
                seconds += outcome.seconds
                if outcome.caught:
                    alarms += 1
                    progress.note(f"false alarm: {cell.text}, seed {seed}: {outcome.words}")
    print(f"{len(triggers)} trigger cells in {len(cells)}, {len(seeds)} seeds each, from {seeds.start}: "
          f"{alarms} false alarms; {seconds:.0f} s of processor")  # fmt: skip
    return int(bool(alarms))


def _write(path: Path, text: str) -> int:
    from ..records import write_bytes

    write_bytes(path, text.encode())
    print(text)
    return 0
