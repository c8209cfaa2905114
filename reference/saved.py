"""A text on its way as a file: a killed generation goes on where it was, to the same tokens.

A safetensors file of the states, whose metadata say in JSON what was generated and with what. Source: docs/model.md §8.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from .checkpoint.shard import unique_object
from .errors import BadInput
from .generate import Text
from .state import from_tensors, named_tensors

_NOISE = "sampler"  # the tensor that holds the sampler's generator


def save_text(path: Path, text: Text, how: Mapping[str, Any]) -> None:
    """Write `text`, and `how` it is made: model, dtype, profile, ... as JSON. All of the new file is there or all of the old.

    Raises OSError where the disk is full.
    """
    tensors = {name: x.cpu().contiguous() for name, x in named_tensors(text.state).items()}
    tensors[_NOISE] = text.generator.get_state()
    about = json.dumps({"how": how, "ids": text.ids, "prompt": text.prompt, "length": text.state.length})
    content = save(tensors, {"about": about, "sha256": _digest(about, tensors)})
    partial = path.with_name(path.name + ".partial")
    try:
        with partial.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def load_text(path: Path, how: Mapping[str, Any]) -> Text:
    """What `save_text` wrote. Raises BadInput for a file that is not as it was written, or made in another way."""
    about, tensors = _read(path)
    try:
        began, ids, prompt, length = dict(about["how"]), about["ids"], about["prompt"], about["length"]
        generator = torch.Generator()
        generator.set_state(tensors.pop(_NOISE))
        here = {name: x.to(torch.get_default_device()) for name, x in tensors.items()}
        text = Text(ids, prompt, from_tensors(length, here), generator)
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise BadInput(f"{path}: no text that was saved: {error}") from None
    for name in sorted({*began, *how}):
        if began.get(name) != how.get(name):
            raise BadInput(f"{path}: it was begun with {name} {began.get(name)}, not {how.get(name)}")
    return text


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    try:
        content = path.read_bytes()
        tensors = load(content)
        header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")], object_pairs_hook=unique_object)
        metadata = header["__metadata__"]
        if metadata["sha256"] != _digest(metadata["about"], tensors):
            raise BadInput(f"{path}: damaged: its digest is not that of its content")
        about = json.loads(metadata["about"])
    except FileNotFoundError:
        raise BadInput(f"{path}: no such file") from None
    except (OSError, SafetensorError, ValueError, KeyError) as error:
        raise BadInput(f"{path}: not readable as a saved text: {error}") from None
    return about, tensors


def _digest(about: str, tensors: Mapping[str, Tensor]) -> str:
    """Of every byte that matters, names, dtypes and shapes included."""
    digest = hashlib.sha256(about.encode())
    for name, x in sorted(tensors.items()):
        digest.update(f"{name} {x.dtype} {list(x.shape)}".encode())
        digest.update(x.contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
