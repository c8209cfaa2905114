"""`v4parity attribute`: the drift of a profile, split over the rounding sites that cause it."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import options

if TYPE_CHECKING:
    from torch import Tensor

    from parity.attribution.split import Question
    from reference.checkpoint.store import WeightStore

USAGE = 2
RUNS = Path("reports/runs")
LEAST = 8  # orders: four pairs, three degrees of freedom


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "attribute",
        help="split the drift of a rounding profile over its sites",
        description="How much of the squared relative L2 between twin and truth each rounding site is worth: Shapley values, "
        "from all subsets where that costs no more than --permutations orders, else from random orders, with confidence "
        "intervals. Shares add up to the drift. In --out DIR: attribution.jsonl and attribution.html; where DIR holds a run, "
        "its page shows them too.",
    )
    options.add_model(parser, "procedural:mini")
    parser.add_argument("--profile", default="pool-fp8", metavar="P", help="rounding profile to split (default pool-fp8)")
    parser.add_argument("--layers", default="all", metavar="L", help="layers that round, 30, 0-5 or all (default all: "
                        "embedding and head round too)")  # fmt: skip
    parser.add_argument("--output", choices=["streams", "logits"], default="streams",
                        help="streams behind the last of the layers (default), or logits")  # fmt: skip
    parser.add_argument("--by", default="format,layer", metavar="W,..", help="ways of splitting: format, layer, op, site "
                        "(default format,layer)")  # fmt: skip
    parser.add_argument("--permutations", type=options.positive, default=32, metavar="N",
                        help=f"orders where they are drawn, even, at least {LEAST} (default 32)")  # fmt: skip
    parser.add_argument("--tokens", type=options.positive, default=48, metavar="N", help="length of the prompt (default 48)")
    parser.add_argument("--ids-file", type=Path, metavar="F", help="prompts to take instead: JSON, name -> token ids")
    parser.add_argument("--seed", type=int, default=0, help="of the prompt and the orders (default 0)")
    parser.add_argument("--memory", type=options.byte_count, default=8 << 30, metavar="BYTES",
                        help="bytes of weights kept between uses (default 8GiB)")  # fmt: skip
    parser.add_argument("--resume", action="store_true", help="go on with the attribution in --out")
    parser.add_argument("--out", type=Path, metavar="DIR", help=f"directory to write (default {RUNS}/<time>-attribution)")
    parser.set_defaults(main=main)


def main(args: argparse.Namespace) -> int:
    from reference.checkpoint.open import open_store

    from ..attribution import files
    from ..attribution.keep import Kept
    from ..attribution.split import split, steps
    from ..progress import Progress
    from ..records import write_bytes
    from ..report import attribution as report

    if args.resume and args.out is None:
        return usage("--resume needs the attribution's directory, --out DIR")
    try:
        question = ask(args, open_store(args.model))
    except ValueError as error:
        return usage(str(error))
    out = args.out or RUNS / f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-attribution"
    kept, began = Kept.open(out, question.asked(), args.resume), time.monotonic()
    with Progress(steps(question), "layer of a coalition") as progress:
        found = split(question, kept, progress.at)
    seconds = round(time.monotonic() - began, 1)
    found = [{**record, "volatile": {"seconds": seconds}} for record in found]
    files.write(out, found)
    write_bytes(out / "attribution.html", report.render(found).encode())
    kept.close()
    written = [out / files.FILE, out / "attribution.html", *show_in_run(out)]
    report.print_tables(found)
    print("\n".join(map(str, written)))
    return 0


def show_in_run(out: Path) -> list[Path]:
    """The page of a run that lies in the same directory, made anew."""
    from ..attribution.files import joined
    from ..records import FILE
    from ..report.html import write_html

    if not (out / FILE).exists():
        return []
    write_html(joined(out), out / "index.html")
    return [out / "index.html"]


def ask(args: argparse.Namespace, store: WeightStore) -> Question:
    """Raises ValueError for a word that means nothing, BadInput for prompts that cannot be used."""
    from reference.rounding import profile, profile_names

    from ..attribution.players import WAYS
    from ..attribution.split import Question
    from ..attribution.walk import Twin
    from ..cases import layer_numbers

    ways = args.by.split(",")
    if unknown := [way for way in ways if way not in WAYS]:
        raise ValueError(f"no way of splitting is called {unknown[0]!r}; ways are {', '.join(WAYS)}")
    if args.permutations % 2 or args.permutations < LEAST:
        raise ValueError(f"orders come with their reverse, and an interval needs four such pairs: --permutations must be "
                         f"even and at least {LEAST}")  # fmt: skip
    if args.profile not in profile_names() or args.profile == "exact":
        raise ValueError(f"no profile {args.profile!r} that rounds; there are {', '.join(profile_names()[1:])}")
    whole = args.layers == "all"
    last = store.config.num_hidden_layers
    layers = [i for i in layer_numbers(args.layers, store.config) if i < last]
    if not layers:
        raise ValueError(f"--layers {args.layers}: no layer of the model itself; drafters are not split")
    twin = Twin(store, profile(args.profile), prompts(args, store), args.memory)
    return Question(twin, layers, whole, args.output, ways, args.permutations, args.seed)


def prompts(args: argparse.Namespace, store: WeightStore) -> list[Tensor]:
    """Those of the file, or one drawn from the seed."""
    import torch

    from .run import read_prompts

    vocabulary = store.config.vocab_size
    if args.ids_file:
        return list(read_prompts(args.ids_file, vocabulary).values())
    return [torch.randint(vocabulary, (args.tokens,), generator=torch.Generator().manual_seed(args.seed))]


def usage(message: str) -> int:
    print(f"v4parity attribute: {message}", file=sys.stderr)
    return USAGE
