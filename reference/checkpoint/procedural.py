"""A checkpoint without files: every tensor of a release, a pure function of (generator version, seed, name, element).

Source: docs/checkpoint.md §5. Only the rows asked for are drawn, and they equal those of the whole tensor bit for bit.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterable, Mapping
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

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

if TYPE_CHECKING:
    from .noise import ScalePool

DEFAULT_VERSION = {"mini": 1, "v4-pro-slim": 1}  # of the others 2: weights of real size cost memory bandwidth only
VERSIONS = (1, 2)

# Scale exponents: an even step by random byte (a half, three eighths, an eighth), plus a checkerboard of 0 and 1.
_SCALE_STEPS = np.repeat(np.array([0, -2, 2]), [128, 96, 32])
_SCALE_RMS = math.sqrt(float(np.mean(4.0**_SCALE_STEPS)) * (1 + 4) / 2)
_NO_KINDS = np.zeros(16, dtype=np.int64)
# Bits of an element, and which of them are random whatever the table holds: the sign, mantissa below its resolution.
_ELEMENT_BITS = {"F32": 32, "BF16": 16, "F8_E4M3": 8, "I8": 4}
_SIGN = {"F32": 1 << 31, "BF16": 1 << 15, "F8_E4M3": 1 << 7, "I8": 1 << 3}
_FINE = {"F32": (1 << 17) - 1, "BF16": 7, "F8_E4M3": 0, "I8": 0}
_ROW_KINDS = np.repeat(np.arange(4), laws.ROW_COUNTS)


class ProceduralStore:
    """The weights of a named model or of any configuration, in the released storage: a `WeightStore` without a disk."""

    def __init__(self, model: str | Config, seed: int = 0, version: int | None = None) -> None:
        """`version` of the generator: by default that of the preset, 1 for a configuration. Raises BadInput for a name
        that is no preset, or no version.
        """
        if isinstance(model, str) and model not in CONFIG_JSON:
            raise BadInput(f"procedural:{model}: unknown preset; known: {', '.join(CONFIG_JSON)}")
        self._name = model if isinstance(model, str) else _config_digest(model)
        self._config = preset(model) if isinstance(model, str) else model
        self._seed = seed
        by_default = DEFAULT_VERSION.get(model, 2) if isinstance(model, str) else 1
        self._version = by_default if version is None else version
        if self._version not in VERSIONS:
            raise BadInput(f"procedural:{self._name}: generator {version}; known: {', '.join(map(str, VERSIONS))}")
        self._bytes_read = 0
        self._kept: dict[str, Tensor] = {}
        self._std: dict[str, float] = {}

    @property
    def config(self) -> Config:
        return self._config

    @property
    def config_json(self) -> dict[str, Any]:
        """`config.json` of the preset, field for field. Raises BadInput for a bare configuration, which has none."""
        if self._name not in CONFIG_JSON:
            raise BadInput(f"{self.identity}: only presets have a config.json")
        return CONFIG_JSON[self._name]

    @property
    def identity(self) -> str:
        return f"procedural:{self._name}@{self._seed}/g{self._version}"

    @cached_property
    def tensors(self) -> Mapping[str, TensorInfo]:
        return manifest(self._config)

    @property
    def bytes_read(self) -> int:
        return self._bytes_read

    @property
    def gives_views(self) -> bool:
        """Whether what `get` gives takes no memory of its own, however long it is held."""
        return self._version == 2

    @cached_property
    def _parameters(self) -> dict[str, Parameter]:
        return {p.name: p for shard in parameters(self._config).values() for p in shard}

    def get(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        """Rows [start, stop) along the first dimension, in the stored dtype. Raises BadInput for an unknown name."""
        info = self.tensors.get(name)
        if info is None:
            raise BadInput(f"{self.identity}: no tensor {name}")
        start, stop = row_range(name, info.shape, start, stop)
        values = self._kept[name][start:stop] if name in self._kept else self._make(name, info, start, stop)
        self._bytes_read += values.nbytes
        return values

    def prefetch(self, names: Iterable[str]) -> None:
        """Nothing: tensors are made when asked for."""

    def release(self, names: Iterable[str]) -> None:
        """Nothing."""

    def draw(self) -> None:
        """All that generator 2 draws once and keeps, before anybody waits for it: the pools, and what is in none of them but
        the embedding, of which a step takes rows."""
        from . import noise

        if self._version != 2:
            return
        for tag in laws.CODE_STD:
            noise.pool(self._seed, tag).draw()
        for name, info in self.tensors.items():
            if self._is_fp4_scale(name):
                self._scale_pool(name, info).draw()
            elif info.dtype not in laws.CODE_STD and name != "embed.weight" and name not in self._kept:
                self._make(name, info, 0, info.shape[0])

    def _make(self, name: str, info: TensorInfo, start: int, stop: int) -> Tensor:
        """Generator 1 draws all; 2 takes codes from its pool, and keeps what it had to draw whole."""
        if self._version == 2 and (info.dtype in laws.CODE_STD or self._is_fp4_scale(name)):
            return self._pooled(name, info, start, stop)
        from .threads import threads_for

        with threads_for(info.nbytes // info.shape[0] * (stop - start)):
            values = self._draw(name, info, start, stop)
        if self._version == 2 and len(values) == info.shape[0]:
            self._kept[name] = values
        return values

    def _is_fp4_scale(self, name: str) -> bool:
        return name.endswith(".scale") and self.tensors[name.removesuffix("scale") + "weight"].dtype == "I8"

    def _pooled(self, name: str, info: TensorInfo, start: int, stop: int) -> Tensor:
        from . import noise

        place = int(_key(2, self._seed, name))
        if info.dtype == "F8_E8M0":
            return self._scale_pool(name, info).view(place, info.shape[0])[start:stop].view(torch.float8_e8m0fnu)
        row_bytes = info.nbytes // info.shape[0]
        whole = noise.pool(self._seed, info.dtype).view(place, info.nbytes)
        return whole[start * row_bytes : stop * row_bytes].view(DTYPE_OF_TAG[info.dtype]).view(stop - start, *info.shape[1:])

    def _scale_pool(self, name: str, info: TensorInfo) -> ScalePool:
        from . import noise

        return noise.scale_pool(self._seed, info.shape[1], *noise.fitted(self._weight_std(name), fp4=True))

    def _weight_std(self, name: str) -> float:
        """Of the weight of a scale; alike in all layers and experts."""
        of = re.sub(r"\.\d+\.", ".", name)
        if of not in self._std:
            self._std[of] = laws.law(self._config, self._parameters[name.removesuffix("scale") + "weight"]).std
        return self._std[of]

    def _draw(self, name: str, info: TensorInfo, start: int, stop: int) -> Tensor:
        from . import drawing, noise

        key = _key(self._version, self._seed, name)
        if info.dtype == "I64":
            ids = torch.empty(stop - start, *info.shape[1:], dtype=torch.int64)
            drawing.fill_distinct(key, start, self._config.n_routed_experts, ids.numpy())
            return ids
        if info.dtype == "F8_E8M0":
            scale = torch.empty(stop - start, *info.shape[1:], dtype=torch.uint8)
            std = self._weight_std(name)
            if self._version == 1:
                base = 127 + _exponent(std, self.tensors[name.removesuffix("scale") + "weight"].dtype)
                drawing.fill_scales(key, start, base, _SCALE_STEPS, _NO_KINDS, scale.numpy())
            else:
                noise.fill_scales(key, start, *noise.fitted(std, fp4=False), False, scale)
            return scale.view(torch.float8_e8m0fnu)
        values = _draw_values(laws.law(self._config, self._parameters[name]), info, key, start, stop)
        if name.endswith("_base"):
            values += torch.tensor(laws.hc_base_mean(self._config, info.shape[0]))[start:stop]
        return values


def _config_digest(config: Config) -> str:
    return "config-" + hashlib.sha256(repr(config).encode()).hexdigest()[:12]


def _key(version: int, seed: int, name: str) -> np.uint64:
    digest = hashlib.sha256(f"{version}/{seed}/{name}".encode()).digest()
    return np.uint64(int.from_bytes(digest[:8], "little"))


def _draw_values(law: laws.Law, info: TensorInfo, key: np.uint64, start: int, stop: int) -> Tensor:
    from . import drawing

    tag = info.dtype
    row_bytes = info.nbytes // info.shape[0]
    words = np.empty((stop - start, -(-row_bytes // 8)), dtype=np.uint64)
    free = _repeat(_FINE[tag] | (_SIGN[tag] if law.signed else 0), tag)
    columns = _outlier_columns(int(key), 8 * row_bytes // _ELEMENT_BITS[tag] if len(info.shape) > 1 else 0)
    drawing.fill(key, start, _table(law, tag), _ROW_KINDS, free, columns, _ELEMENT_BITS[tag], words)
    held = torch.from_numpy(words.view(np.uint8))[:, :row_bytes].contiguous()
    return held.view(DTYPE_OF_TAG[tag]).view(stop - start, *info.shape[1:])


def _repeat(element: int, tag: str) -> np.uint64:
    """The word whose every element has these bits."""
    bits = _ELEMENT_BITS[tag]
    return np.uint64(sum(element << at for at in range(0, 64, bits)))


def _outlier_columns(key: int, columns: int) -> Any:
    """One column in each run of `COLUMN_PERIOD`, at a place that differs from run to run."""
    period = laws.COLUMN_PERIOD
    digest = hashlib.shake_256(key.to_bytes(8, "little")).digest(2 * -(-columns // period))
    place = np.frombuffer(digest, dtype="<u2") % period + np.arange(0, columns, period)
    return place[place < columns].astype(np.int64)


def _exponent(std: float, tag: str) -> int:
    """Base exponent of a tensor's scales: the largest that leaves its codes at least the deviation `CODE_STD`,
    and less than twice that."""
    return math.frexp(std / (_SCALE_RMS * laws.CODE_STD[tag]))[1] - 1


@lru_cache(maxsize=64)
def _table(law: laws.Law, tag: str) -> Any:
    """[5, 2048] words (uint64) of element bits: the law's quantiles, shuffled, by kind of row, then outlier columns."""
    from . import drawing

    per_word = 64 // _ELEMENT_BITS[tag]
    quantiles = law.quantiles(drawing.TABLE_WORDS * per_word)[drawing.order(drawing.TABLE_WORDS * per_word)]
    values = torch.from_numpy(np.outer(law.widths(), quantiles))
    if tag in laws.CODE_STD:
        values /= _SCALE_RMS * 2.0 ** _exponent(law.std, tag)
    if tag == "I8":
        packed = formats.e2m1_pack(formats.e2m1_encode(values.float()))
    elif tag == "F8_E4M3":
        packed = formats.e4m3_encode(values.float())
    else:
        packed = values.float().to(DTYPE_OF_TAG[tag])
    return packed.contiguous().view(torch.uint8).numpy().view(np.uint64)
