"""`v4parity logits`: what the reference, or the engine, computes for given tokens, as a safetensors file; or both, and how
far apart they are."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import options

if TYPE_CHECKING:
    from torch import Tensor

    from optimized.engine import Engine
    from reference.model import Model

    OnLayer = Callable[[int, Tensor], None]
    Step = Callable[[Tensor], Tensor]
    Draft = Callable[[Tensor, Tensor], Tensor]


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "logits",
        help="logits, hidden states and MTP logits of given token ids, to a file",
        description="Writes <name>.logits [n, V]; with --hidden <name>.hidden [layers, n, hc, D], the streams after each "
        "layer; with --mtp <name>.mtp_logits [n-1, V], whose row t pairs the state of position t with token t+1. With --engine "
        "both the kernels compute them, and the reference in float64 with the same profile again, under <name>.twin_*; how "
        "far apart they end is printed.",
    )
    options.add_model(parser)
    parser.add_argument("--ids-file", type=Path, required=True, metavar="F", help="JSON object: name -> list of token ids")
    parser.add_argument("--out", type=Path, required=True, metavar="F", help="safetensors file to write")
    parser.add_argument("--prefill", type=options.positive, metavar="P", help="run P tokens at once and the rest one by one")
    parser.add_argument("--hidden", action="store_true", help="also the streams after each layer")
    parser.add_argument("--mtp", action="store_true", help="also the logits of MTP block 0")
    parser.add_argument("--json", type=Path, metavar="F", help="with --engine both: write the distances there too")
    options.add_engine(parser, both=True)
    options.add_arithmetic(parser)
    parser.set_defaults(main=main)


def main(args: argparse.Namespace) -> int:
    import torch

    from reference.checkpoint.open import open_store
    from reference.model import Model
    from reference.rounding import profile

    from ..progress import Progress

    if options.wrong_engine(args):
        return 2
    if args.json and args.engine != "both":
        print("error: --json holds distances, which only --engine both has", file=sys.stderr)
        return 2
    prompts = read_ids(args.ids_file)
    store = open_store(args.model)
    models: dict[str, Model | Engine] = {}
    if args.engine != "reference":
        models[""] = options.open_engine(args, store, [len(ids) for ids in prompts.values()])
    if args.engine != "optimized":
        twin = args.engine == "both"
        dtype = torch.float64 if twin else options.DTYPES[args.dtype]
        models["twin_" if twin else ""] = Model(store, dtype, profile(args.profile), args.memory)
    ran: dict[str, dict[str, dict[str, Tensor]]] = {}  # prompt -> side -> output
    with Progress(len(prompts), "prompt") as progress:
        for done, (name, ids) in enumerate(prompts.items()):
            progress.at(done, name)
            ran[name] = {side: run(model, ids, args.prefill, args.hidden, args.mtp) for side, model in models.items()}
            progress.note(f"{name}: {len(ids)} tokens")
    out = {f"{name}.{side}{what}": t for name, sides in ran.items() for side, made in sides.items() for what, t in made.items()}
    save(out, args.out)
    print(f"{args.out}: {len(out)} tensors from {store.identity} ({options.arithmetic(args)}, profile {args.profile})")
    if args.engine == "both":
        report(ran, store.identity, args)
    return 0


def report(ran: Mapping[str, Mapping[str, Mapping[str, Tensor]]], identity: str, args: argparse.Namespace) -> None:
    """Print how far the engine ends from its twin, for each prompt and for all of them; write it where asked."""
    from ..freerun import compare, pooled, table
    from ..records import write_bytes

    figures = {name: compare(sides[""], sides["twin_"]) for name, sides in ran.items()}
    whole = pooled(*([sides[side]["logits"] for sides in ran.values()] for side in ("", "twin_")))
    print(table({**figures, "all prompts": {"logits": whole}}))
    if args.json:
        record = {"model": identity, "profile": args.profile, "logits": whole, "prompts": figures}
        write_bytes(args.json, (json.dumps(record, indent=1) + "\n").encode())


def read_ids(path: Path) -> dict[str, Tensor]:
    """Raises BadInput unless the file is an object of names and non-empty lists of token ids."""
    import torch

    from reference.errors import BadInput

    try:
        table = json.loads(path.read_text())
    except ValueError as error:
        raise BadInput(f"{path}: not JSON: {error}") from None
    if not isinstance(table, dict) or not table:
        raise BadInput(f"{path}: expected an object of prompts, name -> list of token ids")
    for name, ids in table.items():
        if not isinstance(ids, list) or not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
            raise BadInput(f"{path}: {name} is no list of token ids")
        if not ids:
            raise BadInput(f"{path}: {name} is an empty prompt")
    return {name: torch.tensor(ids) for name, ids in table.items()}


def run(model: Model | Engine, ids: Tensor, prefill: int | None, hidden: bool, mtp: bool) -> dict[str, Tensor]:
    """One prompt: `prefill` tokens in one step (all of them if None), the rest one by one."""
    import torch

    first = len(ids) if prefill is None else min(prefill, len(ids))
    layers: list[list[Tensor]] = [[] for _ in range(model.config.num_hidden_layers)]
    on_layer = (lambda i, x: layers[i].append(x)) if hidden else None
    step, draft = steps_of(model, on_layer)
    streams = torch.cat([step(part) for part in (ids[:first], *ids[first:].split(1)) if len(part)])
    out = {"logits": model.logits(streams)}
    if hidden:
        out["hidden"] = torch.stack([torch.cat(parts) for parts in layers])
    if mtp:
        out["mtp_logits"] = draft(streams[:-1], ids[1:]) if len(ids) > 1 else out["logits"][:0]
    return {name: t.cpu() for name, t in out.items()}


def steps_of(model: Model | Engine, on_layer: OnLayer | None) -> tuple[Step, Draft]:
    """A new sequence: what puts tokens through the model, and what makes MTP logits of streams and next tokens."""
    from reference.model import Model
    from reference.state import SequenceState

    if isinstance(model, Model):
        state, drafter = SequenceState(), SequenceState()
        return lambda ids: model.forward([ids], [state], on_layer), lambda x, ids: model.mtp_logits(x, [ids], [drafter])
    sequence = model.allocator.open()

    def draft(x: Tensor, ids: Tensor) -> Tensor:
        return model.draft_logits(model.draft(x, [ids], [sequence]))

    return lambda ids: model.step([ids], [sequence], on_layer), draft


def save(tensors: dict[str, Tensor], path: Path) -> None:
    """Write a safetensors file; a failure leaves an older file as it was."""
    from safetensors.torch import save_file

    temporary = path.with_name(path.name + ".partial")
    try:
        save_file(tensors, temporary)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
