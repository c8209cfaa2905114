"""`v4parity checkpoint write|verify`: a procedural model as files, and a directory read to the last value."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from .. import options


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("checkpoint", help="write a procedural model as a directory; verify a directory")
    actions = parser.add_subparsers(title="actions", dest="action", required=True, metavar="ACTION")
    write = actions.add_parser("write", help="write the shards, index and config of a procedural model")
    options.add_model(write, default="procedural:mini")
    write.add_argument("--out", type=Path, required=True, metavar="DIR", help="directory to create (absent or empty)")
    write.set_defaults(main=main_write)
    verify = actions.add_parser("verify", help="read every value of a directory and name the first damage")
    verify.add_argument("model", metavar="DIR", help="directory in the released format")
    verify.set_defaults(main=main_verify)


def main_write(args: argparse.Namespace) -> int:
    from reference.checkpoint.manifest import by_shard
    from reference.checkpoint.open import open_store
    from reference.checkpoint.procedural import ProceduralStore
    from reference.checkpoint.writer import write_checkpoint
    from reference.errors import BadInput

    from ..progress import Progress

    store = open_store(args.model)
    if not isinstance(store, ProceduralStore):
        raise BadInput(f"{args.model}: only procedural models can be written")
    with Progress(len(by_shard(store.tensors)), "shard") as progress:

        def started(number: int, file: str) -> None:
            progress.at(number)
            progress.note(file)

        write_checkpoint(store, store.config_json, args.out, started)
    print(f"{args.out}: {len(store.tensors):,} tensors, {store.bytes_read:,} bytes of {store.identity}")
    return 0


def main_verify(args: argparse.Namespace) -> int:
    from reference.checkpoint.directory import DirectoryStore
    from reference.checkpoint.manifest import by_shard
    from reference.checkpoint.values import verify

    from ..progress import Progress

    store = DirectoryStore(Path(args.model))
    shards = by_shard(store.tensors)
    with Progress(len(shards), "shard") as progress:
        for number, (file, held) in enumerate(shards.items()):
            progress.at(number)
            progress.note(file)
            verify(store, held, f"{args.model}/{file}")
    print(f"{args.model}: {len(store.tensors):,} tensors, {store.bytes_read:,} bytes read, no damage ({store.identity})")
    return 0
