"""What `v4parity inspect` finds out about a model, as JSON values and as lines of text. Source: docs/checkpoint.md §7."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

from reference.checkpoint.census import Census, KvBytes, Row, census, kv_bytes, layer_costs
from reference.checkpoint.directory import DirectoryStore
from reference.checkpoint.manifest import by_shard, file_sizes
from reference.checkpoint.store import WeightStore
from reference.checkpoint.values import verify

GIB = 2**30
READ_UP_TO = 8 * GIB  # a larger checkpoint takes minutes to read; `checkpoint verify` does it


def inspect(store: WeightStore, model: str, context: int | None) -> dict[str, Any]:
    """Everything the command prints, as JSON values. Raises BadInput for damage in a directory."""
    counted, kv = census(store.config, store.tensors), kv_bytes(store.config)
    costs = [] if context is None else layer_costs(store.config, store.tensors, context)
    return {
        "model": model,
        "identity": store.identity,
        "tensors": counted.total.tensors,
        "parameters": counted.total.parameters,
        "bytes": counted.total.bytes,
        "file_bytes": _file_bytes(store, model),
        "shards": len(by_shard(store.tensors)),
        "activated": counted.activated,
        "values": _values(store, model, counted.total.bytes),
        **_census_facts(counted),
        "kv_bytes": _kv_facts(kv),
        "context": context,
        "layer_kinds": [vars(cost) for cost in costs],
    }


def _file_bytes(store: WeightStore, model: str) -> int:
    if isinstance(store, DirectoryStore):
        return sum((Path(model) / shard).stat().st_size for shard in by_shard(store.tensors))
    return sum(file_sizes(store.tensors).values())


def _values(store: WeightStore, model: str, size: int) -> str:
    """Read and check the values of a directory, unless it is large. Raises BadInput."""
    if not isinstance(store, DirectoryStore):
        return "drawn on request"
    if size > READ_UP_TO:
        return f"not read; `v4parity checkpoint verify` reads all {size / GIB:.0f} GiB"
    for file, held in by_shard(store.tensors).items():
        verify(store, held, str(Path(model) / file))
    return "all read, no damage"


def _census_facts(counted: Census) -> dict[str, list[dict[str, Any]]]:
    def facts(rows: tuple[Row, ...]) -> list[dict[str, Any]]:
        return [vars(row) for row in rows]

    return {"groups": facts(counted.groups), "dtypes": facts(counted.dtypes)}


def _kv_facts(kv: KvBytes) -> dict[str, Any]:
    return {
        "per_token": {
            "main": {build: _number(n) for build, n in kv.main.items()},
            "index": {build: _number(n) for build, n in kv.index.items()},
        },
        "per_sequence": {"window": kv.window, "compressor_state": kv.compressor_state},
    }


def _number(x: Fraction) -> int | float:
    return int(x) if x.denominator == 1 else float(x)


def lines(facts: dict[str, Any]) -> Iterator[str]:
    yield f"{facts['model']}  ({facts['identity']})"
    yield f"  {facts['tensors']:,} tensors in {facts['shards']:,} shards"
    yield f"  {facts['parameters']:,} parameters, {facts['activated'] / 1e9:.3f} B activated per token"
    yield f"  {facts['bytes']:,} bytes of tensors, {facts['file_bytes']:,} bytes of files"
    yield f"  values: {facts['values']}"
    for title, key in (("group", "groups"), ("dtype", "dtypes")):
        yield ""
        yield f"{title:<16}{'tensors':>10}{'parameters':>22}{'bytes':>20}{'GiB':>10}"
        for row in facts[key]:
            yield (
                f"{row['name']:<16}{row['tensors']:>10,}{row['parameters']:>22,}{row['bytes']:>20,}"
                f"{row['bytes'] / GIB:>10.3f}"
            )
    yield from _kv_lines(facts["kv_bytes"])
    if facts["context"] is not None:
        yield from _cost_lines(facts["layer_kinds"], facts["context"])


def _kv_lines(kv: dict[str, Any]) -> Iterator[str]:
    main, index = kv["per_token"]["main"], kv["per_token"]["index"]
    window, state = kv["per_sequence"]["window"], kv["per_sequence"]["compressor_state"]
    yield ""
    yield (
        f"KV bytes per token: main BF16 {main['bf16']:,}, FP8 {main['fp8']:,}; "
        f"index FP4 {index['fp4']:,}, FP8 {index['fp8']:,}"
    )
    yield f"KV bytes per sequence: window BF16 {window['bf16']:,}, FP8 {window['fp8']:,}; compressor state {state:,}"


def _cost_lines(kinds: list[dict[str, Any]], context: int) -> Iterator[str]:
    yield ""
    yield f"decode step at context {context:,}, per layer of a kind"
    counts = ("window_rows", "compressed_rows", "index_keys", "weight_bytes")
    flops = ("attention_flops", "index_flops", "weight_flops")
    yield f"{'':<24}" + "".join(f"{kind['kind'] + ' x' + str(kind['layers']):>18}" for kind in kinds)
    for column in counts + flops:
        yield f"{column.replace('_', ' '):<24}" + "".join(f"{kind[column]:>18,}" for kind in kinds)
    for build in ("pool-fp8", "pool-bf16"):
        yield f"{'kv bytes, ' + build:<24}" + "".join(f"{kind['kv_bytes'][build]:>18,}" for kind in kinds)
