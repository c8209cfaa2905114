"""One oracle case: a directory with config.json, model.safetensors and expected.safetensors."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file
from strategies import MemoryStore
from torch import Tensor

from reference.checkpoint.loader import Loader
from reference.config import Config
from reference.model import Model
from reference.rounding import EXACT, Profile, Tap
from reference.state import SequenceState

LENGTHS = (1, 3, 4, 5, 127, 128, 129, 300, 520)


class OracleCase:
    """Weights and expected outputs; the README beside them says what each tensor is."""

    def __init__(self, directory: Path) -> None:
        self.name = directory.name
        self.store = MemoryStore(Config.from_json(directory / "config.json"), load_file(directory / "model.safetensors"))
        self.expected: Mapping[str, Tensor] = load_file(directory / "expected.safetensors")
        self._loaders: dict[torch.dtype, Loader] = {}

    def __repr__(self) -> str:
        return self.name

    def model(self, dtype: torch.dtype, profile: Profile = EXACT, tap: Tap | None = None) -> Model:
        """A model of this case; weights are dequantised once for all of them."""
        model = Model(self.store, dtype, profile, memory=1 << 40, tap=tap)
        model.loader = self._loaders.setdefault(dtype, model.loader)
        return model

    def rows(self, n: int) -> Tensor:
        return self.expected[f"pos_{n}"].long()

    def prefill(self, model: Model, n: int) -> tuple[Tensor, Tensor]:
        """The prompt of n tokens at once -> streams and logits of every position."""
        streams = model.forward([self.expected[f"ids_{n}"]], [SequenceState()])
        return streams, model.logits(streams)

    def decode_runs(self) -> list[tuple[str, int]]:
        """(suffix of the tensor names, tokens prefilled) of each decode run."""
        names = [k.removeprefix("dec_ids_") for k in self.expected if k.startswith("dec_ids_")]
        return [(name, int(name.split("_")[0])) for name in names]
