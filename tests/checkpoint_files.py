"""A small checkpoint directory with every kind of layer and ragged sizes, and tools to damage it."""

from __future__ import annotations

import json
from pathlib import Path

from reference.checkpoint.directory import INDEX
from reference.checkpoint.procedural import ProceduralStore
from reference.checkpoint.shard import read_header
from reference.checkpoint.writer import write_checkpoint
from reference.config import Config
from reference.presets import CONFIG_JSON

TINY_JSON = {
    **CONFIG_JSON["mini"],
    "hidden_size": 160,
    "num_hidden_layers": 3,
    "compress_ratios": [0, 4, 128, 0],
    "num_hash_layers": 1,
    "num_attention_heads": 2,
    "head_dim": 128,
    "q_lora_rank": 96,
    "o_lora_rank": 40,
    "index_n_heads": 2,
    "moe_intermediate_size": 96,
    "n_routed_experts": 12,
    "vocab_size": 50,
}
# Where things are in it: shard file of a layer, and some tensors of each storage.
LAYER_0 = "model-00002-of-00006.safetensors"
LAYER_1 = "model-00003-of-00006.safetensors"
FP8 = "layers.1.attn.wq_b"
FP4 = "layers.1.ffn.experts.10.w1"
HASH = "layers.0.ffn.gate.tid2eid"


def write_tiny(path: Path) -> None:
    write_checkpoint(ProceduralStore(Config.from_dict(TINY_JSON)), TINY_JSON, path, lambda number, file: None)


def poke(path: Path, name: str, offset: int, new: bytes) -> None:
    """Overwrite bytes of a tensor, `offset` bytes into it."""
    begin = read_header(path).entries[name].begin
    with path.open("r+b") as file:
        file.seek(begin + offset)
        file.write(new)


def edit_header(path: Path, change) -> None:
    """Let `change` edit the header (a dict) in place; the payload stays."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    change(header)
    write_raw(path, json.dumps(header).encode(), data[8 + length :])


def write_raw(path: Path, header: bytes, payload: bytes) -> None:
    path.write_bytes(len(header).to_bytes(8, "little") + header + payload)


def tensors_of(path: Path) -> dict[str, tuple[str, list[int], bytes]]:
    """name -> (dtype, shape, bytes) of a file."""
    data = path.read_bytes()
    entries = read_header(path).entries
    return {
        name: (e.dtype, list(e.shape), data[e.begin : e.begin + e.row_bytes * e.shape[0]]) for name, e in entries.items()
    }


def write_tensors(path: Path, tensors: dict[str, tuple[str, list[int], bytes]]) -> None:
    header, offset = {}, 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + len(data)]}
        offset += len(data)
    write_raw(path, json.dumps(header).encode(), b"".join(data for _, _, data in tensors.values()))


def edit_tensors(directory: Path, file: str, change) -> None:
    """Let `change` edit the tensors of a shard in place, and bring the index up to date."""
    tensors = tensors_of(directory / file)
    change(tensors)
    write_tensors(directory / file, tensors)
    reindex(directory)


def reindex(directory: Path) -> None:
    """Write the index that fits the shards as they are."""
    weight_map, total = {}, 0
    for path in sorted(directory.glob("*.safetensors")):
        for name, entry in read_header(path).entries.items():
            weight_map[name] = path.name
            total += entry.row_bytes * entry.shape[0]
    (directory / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}))


def edit_json(path: Path, change) -> None:
    fields = json.loads(path.read_text())
    change(fields)
    path.write_text(json.dumps(fields))
