"""What any engine hands in to be judged: a directory with `manifest.json` and safetensors files. Source: docs/judge.md §11.

Readable and writable in a few lines without this package. Reading is strict: a tap nobody knows, a size that does not
fit, a missing profile are refused, not guessed. Besides taps a trace may hold what single ops take and give.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from reference.config import Config
from reference.errors import BadInput
from reference.rounding import Profile, profile_names
from reference.rounding import profile as named

from .cases import PHASES
from .judge import AXES
from .ops import known_taps
from .records import config_digest
from .single.contract import names
from .single.layouts import LAYOUTS
from .trace_fields import TOP, mistyped, short, wrong_entry

VERSION = 1
MANIFEST = "manifest.json"
TENSORS = "tensors.safetensors"
# Storage format -> dtype of the file: codes and scales travel as bytes.
STORAGE = {
    "f32": torch.float32, "f64": torch.float64, "bf16": torch.bfloat16, "e4m3": torch.uint8, "e8m0": torch.uint8,
    "e2m1x2": torch.uint8, "2buff": torch.uint8, "bytes": torch.uint8, "i32": torch.int32, "i64": torch.int64,
}  # fmt: skip


class WithoutProfile(BadInput):
    """A trace that does not say how its engine rounds: a mistake in its use, not damage."""


@dataclass(frozen=True)
class Shard:
    """Which part of an axis this tensor is: the letter, the part and how many there are."""

    axis: str
    index: int
    count: int


@dataclass(frozen=True)
class TraceTensor:
    """One captured tensor. `tap` is its full name (`layers.30.attn.q`), `positions` those of its tokens, `dims` its axis
    letters; `partial_sum`: the sum over all shards is meant."""

    key: str
    tap: str
    layer: int
    phase: str
    request: int
    positions: tuple[int, ...]
    dims: str
    storage: str
    shape: tuple[int, ...]
    file: str = TENSORS
    layout: str = "plain"
    shard: Shard | None = None
    partial_sum: bool = False


@dataclass(frozen=True)
class Trace:
    """A trace directory: who computed what of which model, by which rounding contract. `versions` of what the engine is made
    of, and `claims`, what its author says of the boundaries, may be there; `files` are open ones."""

    engine: str
    model: str
    config: Mapping[str, Any]
    config_sha256: str
    profile: Profile
    tensors: tuple[TraceTensor, ...]
    root: Path = field(default=Path(), compare=False)
    versions: Mapping[str, str] = field(default_factory=dict)
    claims: tuple[str, ...] = ()
    files: dict[Path, Any] = field(default_factory=dict, compare=False, repr=False)

    @property
    def digest(self) -> str:
        """SHA-256 of the manifest as it lies there."""
        return hashlib.sha256((self.root / MANIFEST).read_bytes()).hexdigest()

    def get(self, tensor: TraceTensor) -> Tensor:
        """Raises BadInput where the file does not hold what the manifest says."""
        path = self.root / tensor.file
        try:
            if path not in self.files:
                self.files[path] = safe_open(path, framework="pt")
            value: Tensor = self.files[path].get_tensor(tensor.key)
        except (SafetensorError, OSError) as error:
            raise BadInput(f"{path}: {tensor.key}: {error}") from None
        if value.dtype != STORAGE[tensor.storage] or tuple(value.shape) != tensor.shape:
            said = f"{tensor.storage} {list(tensor.shape)}"
            raise BadInput(f"{path}: {tensor.key} is {value.dtype} {list(value.shape)}, the manifest says {said}")
        return value


def write_trace(path: Path, trace: Trace, values: Mapping[str, Tensor]) -> None:
    """All tensors into one file, the manifest beside it; nothing stands at `path` before all of it does.

    Raises BadInput where `path` exists or the manifest would not be read back.
    """
    if path.exists():
        raise BadInput(f"{path}: exists; a trace is never overwritten")
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{path.name}.", suffix=".partial", dir=path.parent))
    try:
        save_file({key: value.contiguous() for key, value in values.items()}, partial / TENSORS)
        (partial / MANIFEST).write_text(json.dumps(_to_json(trace), indent=1) + "\n")
        written = read_trace(partial)
        for tensor in written.tensors:
            written.get(tensor)
        partial.chmod(0o755)
        partial.rename(path)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _to_json(trace: Trace) -> dict[str, Any]:
    return {
        "schema": VERSION, "engine": trace.engine, "model": trace.model, "config": dict(trace.config),
        "config_sha256": trace.config_sha256, "profile": trace.profile.to_json(),
        "versions": dict(trace.versions), "claims": list(trace.claims), "tensors": [asdict(t) for t in trace.tensors],
    }  # fmt: skip


def read_trace(path: Path) -> Trace:
    """Parse and check a manifest; tensors are read when asked for. Raises BadInput with the first thing that is wrong, and
    WithoutProfile where that is the profile."""
    manifest = path / MANIFEST
    try:
        table = json.loads(manifest.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise BadInput(f"{manifest}: not readable as JSON: {error}") from None
    if not isinstance(table, dict) or table.get("schema") != VERSION:
        raise BadInput(f"{manifest}: expected a manifest of schema version {VERSION}")
    missing = [key for key in ("engine", "model", "config", "profile", "tensors") if not table.get(key)]
    if missing:
        refusal = WithoutProfile if missing[0] == "profile" else BadInput
        raise refusal(f"{manifest}: no {missing[0]}; it is not guessed")
    if wrong := mistyped(table, TOP):
        raise BadInput(f"{manifest}: {wrong}")
    try:
        config = Config.from_dict(table["config"])
        digest, longest = config_digest(config), config.max_position_embeddings
        tensors = tuple(_tensor(f"tensor {i}", entry, path, longest) for i, entry in enumerate(table["tensors"]))
        profile = _profile(table["profile"])
    except BadInput as error:
        raise BadInput(f"{manifest}: {error}") from None
    versions, claims = table.get("versions") or {}, table.get("claims") or []
    if not isinstance(versions, dict) or not all(isinstance(x, str) for x in (*versions, *versions.values())):
        raise BadInput(f"{manifest}: versions: expected names and versions, as text")
    if not isinstance(claims, list) or not all(isinstance(x, str) for x in claims):
        raise BadInput(f"{manifest}: claims: expected a list of sentences")
    who = table["engine"], table["model"], table["config"], table.get("config_sha256", digest)
    return Trace(*who, profile, tensors, path, versions, tuple(claims))


def _profile(said: Any) -> Profile:
    """By its table, or by the name of one that comes with the reference. Raises BadInput."""
    if not isinstance(said, str):
        return Profile.from_json(said)
    if said not in profile_names():
        raise BadInput(f"no profile {said!r}; there are {', '.join(profile_names())}")
    return named(said)


def _tensor(number: str, entry: Any, root: Path, longest: int) -> TraceTensor:
    """Raises BadInput, naming the tensor by number and key."""
    name = f"{number} ({short(entry['key'])})" if isinstance(entry, dict) and "key" in entry else number
    if wrong := wrong_entry(entry, longest):
        raise BadInput(f"{name}: {wrong}")
    shard = Shard(**entry["shard"]) if entry.get("shard") else None
    known = {**entry, "shard": shard, "positions": tuple(entry["positions"]), "shape": tuple(entry["shape"])}
    tensor = TraceTensor(**known)
    if wrong := _complaint(tensor, root):
        raise BadInput(f"{name}: {wrong}")
    return tensor


def _complaint(t: TraceTensor, root: Path) -> str | None:
    """What is wrong with an entry, or None."""
    if local_tap(t.tap) not in known_taps() | names() | {"slots"}:
        return f"unknown tap {t.tap!r}"
    if t.storage not in STORAGE or t.layout not in LAYOUTS:
        return f"unknown storage {t.storage!r} or layout {t.layout!r}"
    if t.phase not in PHASES:
        return f"unknown phase {t.phase!r}"
    if len(t.dims) != len(t.shape) or any(letter not in AXES for letter in t.dims):
        return f"dims {t.dims!r} do not name the {len(t.shape)} axes of {list(t.shape)}"
    if "t" in t.dims and t.shape[t.dims.index("t")] != len(t.positions):
        return f"{len(t.positions)} positions for {t.shape[t.dims.index('t')]} tokens"
    if t.shard and not (t.shard.axis in t.dims and 0 <= t.shard.index < t.shard.count):
        return f"shard {t.shard.index} of {t.shard.count} along {t.shard.axis!r}"
    if not _inside(root, t.file):
        return f"no file {t.file!r} inside the trace"
    return None


def _inside(root: Path, file: str) -> bool:
    """Whether a file is there, and not outside; no path that the system refuses is."""
    try:
        return (root / file).resolve().is_relative_to(root.resolve()) and (root / file).is_file()
    except (OSError, ValueError):
        return False


def block_tap(tap: str) -> str:
    """A tap's name inside its block: `layers.30.attn.q` -> `attn.q`."""
    return re.sub(r"^(layers\.\d+|mtp\.\d+\.block|mtp\.\d+)\.", "", tap)


def local_tap(tap: str) -> str:
    """The same for any expert: `layers.30.ffn.experts.5.w1` -> `ffn.experts.w1`."""
    return re.sub(r"\bexperts\.\d+\.", "experts.", block_tap(tap))
