"""`v4parity logits`: what the reference computes for given tokens, as a safetensors file."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import options

if TYPE_CHECKING:
    from torch import Tensor

    from reference.model import Model


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "logits",
        help="logits, hidden states and MTP logits of given token ids, to a file",
        description="Writes <name>.logits [n, V]; with --hidden <name>.hidden [layers, n, hc, D], the streams after each "
        "layer; with --mtp <name>.mtp_logits [n-1, V], whose row t pairs the state of position t with token t+1.",
    )
    options.add_model(parser)
    parser.add_argument("--ids-file", type=Path, required=True, metavar="F", help="JSON object: name -> list of token ids")
    parser.add_argument("--out", type=Path, required=True, metavar="F", help="safetensors file to write")
    parser.add_argument("--prefill", type=options.positive, metavar="P", help="run P tokens at once and the rest one by one")
    parser.add_argument("--hidden", action="store_true", help="also the streams after each layer")
    parser.add_argument("--mtp", action="store_true", help="also the logits of MTP block 0")
    parser.add_argument("--engine", choices=["reference"], default="reference", help="who computes (default reference)")
    options.add_arithmetic(parser)
    parser.set_defaults(main=main)


def main(args: argparse.Namespace) -> int:
    from reference.checkpoint.open import open_store
    from reference.model import Model
    from reference.rounding import profile

    from ..progress import Progress

    prompts = read_ids(args.ids_file)
    store = open_store(args.model)
    model = Model(store, options.DTYPES[args.dtype], profile(args.profile), args.memory)
    out: dict[str, Tensor] = {}
    with Progress(len(prompts), "prompt") as progress:
        for done, (name, ids) in enumerate(prompts.items()):
            progress.at(done, name)
            out |= {f"{name}.{what}": t for what, t in run(model, ids, args.prefill, args.hidden, args.mtp).items()}
            progress.note(f"{name}: {len(ids)} tokens")
    save(out, args.out)
    print(f"{args.out}: {len(out)} tensors from {store.identity} ({args.dtype}, profile {args.profile})")
    return 0


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


def run(model: Model, ids: Tensor, prefill: int | None, hidden: bool, mtp: bool) -> dict[str, Tensor]:
    """One prompt: `prefill` tokens in one step (all of them if None), the rest one by one."""
    import torch

    from reference.state import SequenceState

    state = SequenceState()
    first = len(ids) if prefill is None else min(prefill, len(ids))
    layers: list[list[Tensor]] = [[] for _ in range(model.config.num_hidden_layers)]
    on_layer = (lambda i, x: layers[i].append(x)) if hidden else None
    steps = [ids[:first], *(ids[i : i + 1] for i in range(first, len(ids)))]
    streams = torch.cat([model.forward([step], [state], on_layer) for step in steps])
    out = {"logits": model.logits(streams)}
    if hidden:
        out["hidden"] = torch.stack([torch.cat(parts) for parts in layers])
    if mtp:
        empty = out["logits"][:0]
        out["mtp_logits"] = model.mtp_logits(streams[:-1], [ids[1:]], [SequenceState()]) if len(ids) > 1 else empty
    return out


def save(tensors: dict[str, Tensor], path: Path) -> None:
    """Write a safetensors file; a failure leaves an older file as it was."""
    from safetensors.torch import save_file

    temporary = path.with_name(path.name + ".partial")
    try:
        save_file(tensors, temporary)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
