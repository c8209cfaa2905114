"""A checkpoint without files: every tensor of a release, drawn on request from (generator version, seed, name, element).

Source: docs/checkpoint.md §5. A slice of rows equals the same rows of the whole tensor, bit for bit; nothing else is made.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .. import formats
from ..config import Config
from ..errors import BadInput
from ..presets import CONFIG_JSON, preset
from . import laws
from .manifest import Parameter, manifest, parameters
from .store import DTYPE_OF_TAG, TensorInfo, row_range

GENERATOR_VERSION = 1

# Scale exponents: even steps around the base, by random byte (half, three eighths, one eighth), plus a checkerboard of 0 and 1.
_SCALE_STEPS = np.repeat(np.array([0, -2, 2]), [128, 96, 32])
# Standard deviation of codes at the smallest base exponent; the base is chosen so that it lies in [this, twice this).
_CODE_STD = {"F8_E4M3": 28.0, "I8": 1.2}
_JITTER = {"F32": (1 << 18) - 1, "BF16": 31, "F8_E4M3": 0, "I8": 0}
_BITS = {"F32": np.uint32, "BF16": np.uint16, "F8_E4M3": np.uint8, "I8": np.uint8}
_ROW_KINDS = np.repeat(np.arange(4), laws.ROW_COUNTS)


class ProceduralStore:
    """The weights of a named model or a configuration, in the released storage. `WeightStore` without a disk."""

    def __init__(self, model: str | Config, seed: int = 0) -> None:
        if isinstance(model, str) and model not in CONFIG_JSON:
            raise BadInput(f"procedural:{model}: unknown preset; known: {', '.join(CONFIG_JSON)}")
        self._name = model if isinstance(model, str) else _config_digest(model)
        self._config = preset(model) if isinstance(model, str) else model
        self._seed = seed
        self._bytes_read = 0

    @property
    def config(self) -> Config:
        return self._config

    @property
    def identity(self) -> str:
        return f"procedural:{self._name}@{self._seed}/g{GENERATOR_VERSION}"

    @cached_property
    def tensors(self) -> Mapping[str, TensorInfo]:
        return manifest(self._config)

    @property
    def bytes_read(self) -> int:
        return self._bytes_read

    @cached_property
    def _parameters(self) -> dict[str, Parameter]:
        return {p.name: p for shard in parameters(self._config).values() for p in shard}

    def get(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        """Rows [start, stop) along the first dimension, in the stored dtype. Raises BadInput for an unknown name."""
        info = self.tensors.get(name)
        if info is None:
            raise BadInput(f"{self.identity}: no tensor {name}")
        start, stop = row_range(name, info.shape, start, stop)
        key = _key(self._seed, name)
        values = _draw(self._config, self._parameters, name, info, key, start, stop)
        self._bytes_read += values.nbytes
        return values


def _config_digest(config: Config) -> str:
    return "config-" + hashlib.sha256(repr(config).encode()).hexdigest()[:12]


def _key(seed: int, name: str) -> np.uint64:
    digest = hashlib.sha256(f"{GENERATOR_VERSION}/{seed}/{name}".encode()).digest()
    return np.frombuffer(digest[:8], dtype="<u8")[0]


def _draw(
    config: Config, params: Mapping[str, Parameter], name: str, info: TensorInfo, key: np.uint64, start: int, stop: int
) -> Tensor:
    from . import drawing

    rows, columns = stop - start, math.prod(info.shape[1:])
    shape = (rows, *info.shape[1:])
    if info.dtype == "I64":
        ids = torch.empty(rows, columns, dtype=torch.int64)
        drawing.fill_distinct(key, start, config.n_routed_experts, ids.numpy())
        return ids
    if info.dtype == "F8_E8M0":
        out = torch.empty(rows, columns, dtype=torch.uint8)
        weight = params[name.removesuffix("scale") + "weight"]
        drawing.fill_scales(key, start, 127 + _exponent(config, weight), _SCALE_STEPS, out.numpy())
        return out.view(torch.float8_e8m0fnu)
    bits = np.empty((rows, columns), dtype=_BITS[info.dtype])
    table = _table(config, params[name])
    drawing.fill(key, start, table, _ROW_KINDS, _JITTER[info.dtype], _outlier_columns(key, columns), bits)
    values = torch.from_numpy(bits).view(DTYPE_OF_TAG[info.dtype]).view(shape)
    if "hc_" in name and name.endswith("_base"):
        values += torch.tensor(laws.hc_base_mean(config, name, info.shape[0]))[start:stop]
    return values


def _outlier_columns(key: np.uint64, columns: int) -> Any:
    """One column of each 64, at a place of its own in each; tensors narrower than that have none."""
    if columns < laws.COLUMN_PERIOD:
        return np.empty(0, dtype=np.int64)
    place = np.random.Philox(key=int(key)).random_raw(columns // laws.COLUMN_PERIOD) % laws.COLUMN_PERIOD
    return np.arange(len(place)) * laws.COLUMN_PERIOD + place.astype(np.int64)


def _scale_rms() -> float:
    """Root mean square of a block scale relative to its base: steps and checkerboard are independent."""
    return math.sqrt(float(np.mean(4.0**_SCALE_STEPS)) * (1 + 4) / 2)


def _exponent(config: Config, weight: Parameter) -> int:
    """Base exponent of a tensor's scales: the largest that keeps the codes' standard deviation at its lower bound or above."""
    return math.floor(math.log2(laws.law(config, weight).std / (_scale_rms() * _CODE_STD[weight.dtype])))


def _table(config: Config, parameter: Parameter) -> Any:
    """Element bits [5, 256] by kind of row and random byte; for I8 the byte of two codes."""
    law = laws.law(config, parameter)
    values = torch.tensor(law.table(), dtype=torch.float64)
    if parameter.dtype in _CODE_STD:
        values = values / (_scale_rms() * 2.0 ** _exponent(config, parameter))
    values = values.float()
    if parameter.dtype == "F8_E4M3":
        return formats.e4m3_encode(values).numpy()
    if parameter.dtype == "I8":
        code = formats.e2m1_encode(values)
        # Both nibbles see all 256 quantiles: the high one in bit-reversed order, which leaves them uncorrelated.
        reversed_bits = [int(f"{i:08b}"[::-1], 2) for i in range(256)]
        return (code | (code[:, reversed_bits] << 4)).numpy()
    return values.to(DTYPE_OF_TAG[parameter.dtype]).view(torch.int16 if parameter.dtype == "BF16" else torch.int32).numpy().view(_BITS[parameter.dtype])
