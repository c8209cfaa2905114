"""`v4parity cases`: inputs of one op at a model's shapes, as a trace, without evaluating the model."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from reference.config import Config
    from reference.state import Batch

USAGE = 2
TOKENS = {"prefill": 17, "decode": 1, "verify": 3, "chunk": 9}


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "cases",
        help="draw the inputs of one op",
        description="Weights come from the model, all else is drawn. No expected output is written: the judge computes it.",
    )
    parser.add_argument("op", metavar="OP", help="an op of the table, attn.wq_a, attn.core, attn.compressor.row")
    parser.add_argument("--model", metavar="M", default="procedural:v4-pro",
                        help="directory in the released format, or procedural:PRESET[@seed] (default procedural:v4-pro)")
    parser.add_argument("--layer", type=int, metavar="N", help="default: the first layer that has the op")
    parser.add_argument("--phase", default="decode", metavar="P", help="prefill, decode, verify or chunk (default decode)")
    parser.add_argument("--lengths", metavar="N,..", help="prompt lengths of a prefill")
    parser.add_argument("--start-pos", metavar="N,..", help="positions of the sequences before the step (default: edges)")
    parser.add_argument("--tokens", type=int, metavar="N", help="of each sequence in the step (default by phase: 17, 1, 3, 9)")
    parser.add_argument("--profile", default="pool-fp8", metavar="P", help="pool-fp8 (default) or pool-bf16")
    parser.add_argument("--seed", type=int, default=0, help="default 0")
    parser.add_argument("--out", type=Path, metavar="DIR", help="trace directory to write")
    parser.add_argument("--describe", action="store_true", help="print names, axes, shapes and storage instead")
    parser.set_defaults(main=main)  # fmt: skip


def main(args: argparse.Namespace) -> int:
    from reference.checkpoint.open import open_store

    from ..single.contract import known

    store = open_store(args.model)
    try:
        known(args.op)
        layer = first_layer(args.op, store.config) if args.layer is None else args.layer
        check(args, layer, store.config)
        batch = build_batch(args, store.config)
        if args.describe:
            return describe(args, store.config, layer, batch)
        if args.out is None:
            raise ValueError("nothing to do: name a directory with --out, or ask for --describe")
        from ..single.drawing import draw
        from ..single.files import write_inputs

        inputs = draw(args.op, store, layer, args.phase, args.profile, batch, args.seed)
    except ValueError as error:
        print(f"v4parity cases: {error}", file=sys.stderr)
        return USAGE
    write_inputs(args.out, inputs, args.model)
    size = sum(x.nbytes for x in inputs.values())
    print(f"{args.out}: {len(inputs)} tensors of {args.op}, layer {layer}, {args.phase}, {size:,} bytes")
    return 0


def first_layer(op: str, config: Config) -> int:
    """Raises ValueError where the model has no such layer."""
    from ..cases import layer_kinds
    from ..ops import BY_NAME

    for layer in range(config.num_hidden_layers + int(config.has_mtp)):
        if layer_kinds(config, layer) & set(BY_NAME[op].kinds):
            return layer
    raise ValueError(f"no layer of this model has {op}")


def check(args: argparse.Namespace, layer: int, config: Config) -> None:
    """Raises ValueError for a word or number that means nothing here."""
    from optimized.engine import FORMS

    from ..single.contract import contract

    if args.phase not in TOKENS:
        raise ValueError(f"no phase {args.phase!r}; phases are {', '.join(TOKENS)}")
    if args.profile not in FORMS:
        raise ValueError(f"no profile {args.profile!r} for single ops; there are {', '.join(FORMS)}")
    if not 0 <= layer < config.num_hidden_layers + int(config.has_mtp):
        raise ValueError(f"no layer {layer} in this model")
    if args.lengths and args.phase != "prefill":
        raise ValueError("--lengths are those of a prefill; other phases take --start-pos and --tokens")
    contract(args.op, config, layer, FORMS[args.profile].rows)


def build_batch(args: argparse.Namespace, config: Config) -> Batch:
    """Raises ValueError for words that are no numbers, or positions beyond the model."""
    import torch

    from ..single.drawing import VOCABULARY, default_batch, ragged
    from .run import numbers

    if not (args.lengths or args.start_pos or args.tokens):
        return default_batch(config, args.phase, args.seed, args.op)
    tokens = TOKENS[args.phase] if args.tokens is None else args.tokens
    starts = numbers(args.start_pos, "start position") if args.start_pos else [0]
    counts = [tokens] * len(starts)
    if args.lengths:
        counts = numbers(args.lengths, "length")
        starts = [0] * len(counts)
    if tokens < 1 or max(s + n for s, n in zip(starts, counts, strict=True)) > config.max_position_embeddings:
        raise ValueError(f"{tokens} tokens from position {max(starts)}: the model has {config.max_position_embeddings}")
    vocab = min(VOCABULARY, config.vocab_size) if args.op == "embed" else config.vocab_size
    return ragged(starts, counts, vocab, torch.Generator().manual_seed(args.seed))


def describe(args: argparse.Namespace, config: Config, layer: int, batch: Batch) -> int:
    """Print what goes in and what comes out of an op, and its bound."""
    from optimized.engine import FORMS

    from ..ops import BY_NAME
    from ..single.contract import ITEMS, Sizes, contract, weight_names

    c, sizes = contract(args.op, config, layer, FORMS[args.profile].rows), Sizes.of(config, layer, batch, args.op)

    def row(name: str, note: str = "") -> None:
        item = ITEMS[name]
        print(f"  {name:34} {item.dims:4} {sizes.shape(item)!s:22} {item.storage}{' with NAME.scale' * item.coded}{note}")

    print(f"{args.op} in layer {layer} ({config.kind(layer)}) of {args.model}, {args.phase}, {args.profile}\ninputs")
    for name in c.inputs:
        row(name)
    print("weights, by their checkpoint names inside the layer")
    for name in weight_names(c, config, layer, [0]):
        print(f"  {name}{' (for every expert chosen)' if '.experts.' in name else ''}")
    print("outputs")
    for name in c.outputs:
        row(name, "  may be absent" if name in c.optional else "")
    print(f"bound\n  {BY_NAME[args.op].bound}")
    return 0
