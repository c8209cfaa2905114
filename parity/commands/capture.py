"""`v4parity capture`: a trace of the twin, or of the engine."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from .. import options

USAGE = 2


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "capture",
        help="write what the twin, the engine or single kernels compute as a trace",
        description="The twin, in float64 with the profile's rounding, shows every payload that has a row a token; the engine "
        "its streams after each layer and its logits; kernels, op by op, everything that each of them stores.",
    )
    options.add_model(parser, "procedural:mini")
    parser.add_argument("--ids", type=options.token_ids, metavar="N,..", help="token ids (default: 9 drawn ones)")
    parser.add_argument("--prefill", type=options.positive, metavar="P", help="at once, the rest one by one (default all)")
    parser.add_argument("--engine", choices=["twin", "optimized", "kernels"], default="twin",
                        help="who computes: the twin (default), the engine of optimized, or its kernels op by op")
    parser.add_argument("--profile", default="pool-fp8", metavar="P", help="rounding contract (default pool-fp8)")
    parser.add_argument("--memory", type=options.byte_count, default=8 << 30, metavar="BYTES",
                        help="bytes of weights kept between uses (default 8GiB)")  # fmt: skip
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="trace directory to write")
    parser.set_defaults(main=main)


def main(args: argparse.Namespace) -> int:
    import torch

    from reference.checkpoint.open import open_store
    from reference.rounding import profile, profile_names

    from ..adapters.opwise import kernels_trace
    from ..listening import engine_trace, twin_trace
    from ..trace import write_trace

    known = profile_names() if args.engine == "twin" else ["pool-fp8", "pool-bf16"]
    store = open_store(args.model)
    generator = torch.Generator().manual_seed(0)
    ids = torch.tensor(args.ids) if args.ids else torch.randint(0, store.config.vocab_size, (9,), generator=generator)
    prefill = args.prefill or len(ids)
    if args.profile not in known:
        print(f"v4parity capture: no profile {args.profile!r}; there are {', '.join(known)}", file=sys.stderr)
        return USAGE
    if prefill > len(ids):
        print(f"v4parity capture: --prefill {prefill} of {len(ids)} tokens", file=sys.stderr)
        return USAGE
    if args.engine != "optimized":
        who = twin_trace if args.engine == "twin" else kernels_trace
        trace, values = who(store, ids, prefill, profile(args.profile), args.model, args.memory)
    else:
        engine = options.open_engine(args, store, [len(ids)])
        trace, values = engine_trace(engine, store, ids, prefill, profile(args.profile), args.model)
    write_trace(args.out, trace, values)
    print(f"{args.out}: {len(values)} tensors of {trace.engine}, {len(ids)} tokens, profile {args.profile}")
    return 0
