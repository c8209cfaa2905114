"""Does a set of tensors make up the model its config describes? Decided from headers, before anything is read.

Source: docs/checkpoint.md §6. How each weight is stored is taken from its own header entry, never from a flag.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ..config import Config
from ..errors import BadInput
from .manifest import Parameter, parameters, stored
from .store import TensorInfo

# Release storage of a parameter -> the storages in which it is understood.
_READABLE = {
    "F8_E4M3": ("F8_E4M3", "BF16", "F32"),
    "I8": ("I8", "F8_E4M3", "BF16", "F32"),
    "BF16": ("BF16", "F32"),
    "F32": ("F32", "BF16"),
    "I64": ("I64",),
}
_LISTED = 5


def audit(where: str, config: Config, found: Mapping[str, TensorInfo]) -> None:
    """Check names, dtypes and shapes of all tensors against the config. `where` names the directory. Raises BadInput."""
    engram = sorted(name for name in found if "engram" in name)
    if engram:
        raise BadInput(f"{where}: {engram[0]} belongs to DeepSeek-V4.1, a different model that is not defined here")
    if config.n_routed_experts > len(found):  # before a list of that length is made
        raise BadInput(f"{where}: {len(found)} tensors cannot hold {config.n_routed_experts} experts")
    expected: dict[str, TensorInfo] = {}
    for members in parameters(config).values():
        for parameter in members:
            expected |= _expected(where, parameter, found.get(parameter.name))
    for title, names in (("missing", expected.keys() - found.keys()), ("unexpected", found.keys() - expected.keys())):
        if names:
            raise BadInput(f"{where}: {len(names)} {title} tensors: {_some(names)}")
    for name, info in found.items():
        _check(where, name, info, expected[name])


def _expected(where: str, parameter: Parameter, found: TensorInfo | None) -> dict[str, TensorInfo]:
    """The tensors that should hold a parameter, given how its weight is stored."""
    readable = _READABLE[parameter.dtype]
    if parameter.name.endswith("compressor.wkv.weight"):
        readable = (*readable, "F8_E4M3")  # the base models store it so
    dtype = parameter.dtype if found is None else found.dtype
    if found is not None and dtype not in readable:
        known = ", ".join(readable)
        raise BadInput(f"{where}/{found.shard}: {parameter.name} is stored as {dtype}; readable are {known}")
    return stored(parameter, dtype, "")


def _check(where: str, name: str, info: TensorInfo, expected: TensorInfo) -> None:
    if info.shape != expected.shape:
        raise BadInput(f"{where}/{info.shard}: {name} has shape {list(info.shape)}, expected {list(expected.shape)}")
    f32_scale = name.endswith(".scale") and info.dtype == "F32"
    if info.dtype != expected.dtype and not f32_scale:
        raise BadInput(f"{where}/{info.shard}: {name} is stored as {info.dtype}, expected {expected.dtype}")


def _some(names: Iterable[str]) -> str:
    listed = sorted(names)
    more = f" and {len(listed) - _LISTED} more" if len(listed) > _LISTED else ""
    return ", ".join(listed[:_LISTED]) + more
