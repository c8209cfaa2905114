"""`v4parity judge`: a verdict on one op of anybody's kernel, from its inputs and outputs alone."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from reference.config import Config

USAGE = 2


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "judge",
        help="judge one op of any kernel",
        description="Inputs and outputs are trace directories or safetensors files with the names that `v4parity cases OP "
        "--describe` prints. The twin is computed anew from the inputs. Exit codes: 0 passed, 1 failed, 2 usage, 3 nothing "
        "was judged, 4 bad input.",
    )
    parser.add_argument("op", metavar="OP", help="an op of the table, attn.wq_a, attn.core, attn.compressor.row")
    parser.add_argument("--inputs", type=Path, required=True, metavar="A", help="what the kernel was given")
    parser.add_argument("--outputs", type=Path, required=True, metavar="B", help="what it put out")
    parser.add_argument("--profile", metavar="P", help="pool-fp8 or pool-bf16 (default: the trace's, or pool-fp8)")
    parser.add_argument("--accumulate", default="fp32", metavar="F", help="fp32 (default), hopper-fp8 or tf32")
    parser.add_argument("--model", metavar="M", help="whose inputs a bare file holds")
    parser.add_argument("--layer", type=int, metavar="N", help="likewise")
    parser.set_defaults(main=main)


def main(args: argparse.Namespace) -> int:
    from dataclasses import replace

    from ..budget.bounded import ACCUMULATE
    from ..single import files
    from ..single.contract import known
    from ..single.report import text
    from ..single.verdict import judge_outputs
    from ..trace import WithoutProfile

    try:
        known(args.op)
        model = _model(args)
        if args.accumulate not in ACCUMULATE:
            raise ValueError(f"no accumulate format {args.accumulate!r}; there are {', '.join(ACCUMULATE)}")
        inputs = files.read_inputs(args.inputs, args.op, model)
        if args.profile:
            inputs = replace(inputs, profile=args.profile)
        inputs.contract  # noqa: B018  # raises for a layer without the op
    except (ValueError, WithoutProfile) as error:
        print(f"v4parity judge: {error}", file=sys.stderr)
        return USAGE
    verdict = judge_outputs(inputs, files.read_outputs(args.outputs, inputs), ACCUMULATE[args.accumulate])
    print(text(verdict))
    return verdict.exit_code


def _model(args: argparse.Namespace) -> tuple[Config, int, str, str] | None:
    """Whose inputs a bare file holds. Raises ValueError for a profile or layer that is none."""
    from optimized.engine import FORMS
    from reference.checkpoint.open import open_store

    if args.profile and args.profile not in FORMS:
        raise ValueError(f"no profile {args.profile!r} for single ops; there are {', '.join(FORMS)}")
    if args.model is None or args.layer is None:
        return None
    config = open_store(args.model).config
    if not 0 <= args.layer < config.num_hidden_layers + int(config.has_mtp):
        raise ValueError(f"no layer {args.layer} in {args.model}")
    return config, args.layer, "decode", args.profile or "pool-fp8"
