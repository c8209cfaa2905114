"""Inputs of one op at a model's real shapes: weights from its store, everything else drawn, nothing evaluated.

Source: docs/single.md §1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from optimized.engine import FORMS
from optimized.rope import rope_table
from reference import formats
from reference.checkpoint.store import WeightStore
from reference.config import Config
from reference.state import Batch

from .. import cases, row_forms
from .contract import ITEMS, Contract, Item, Sizes, contract, weight_names

VOCABULARY = 256  # rows of the embedding that a case carries: its ids lie below
BLOCK = 128  # channels that share a scale


@dataclass(frozen=True)
class Inputs(Mapping[str, Tensor]):
    """What one op is given, by name, in the storage of its contract; codes and scale bytes are uint8."""

    op: str
    config: Config
    layer: int
    phase: str
    profile: str
    tensors: Mapping[str, Tensor] = field(repr=False)

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)

    @property
    def batch(self) -> Batch:
        return Batch(self["ids"], self["positions"], self["bounds"].tolist())

    @property
    def contract(self) -> Contract:
        return contract(self.op, self.config, self.layer, FORMS[self.profile].rows)

    @property
    def sizes(self) -> Sizes:
        return Sizes.of(self.config, self.layer, self.batch, self.op)


def ragged(starts: Sequence[int], tokens: Sequence[int], vocab: int, generator: torch.Generator) -> Batch:
    """A flat batch of sequences that stand at `starts` and take `tokens`."""
    positions = [torch.arange(start, start + n) for start, n in zip(starts, tokens, strict=True)]
    bounds = torch.tensor([0, *tokens]).cumsum(0).tolist()
    return Batch(torch.randint(0, vocab, (bounds[-1],), generator=generator), torch.cat(positions), bounds)


def default_starts(config: Config) -> list[int]:
    """Before a group, the window and a pool block are full, and where selection first loses rows."""
    return [3, 127, 255, 4 * config.index_topk + 4]


def default_batch(config: Config, phase: str, seed: int, op: str = "") -> Batch:
    """Ragged sequences of a phase at their edges."""
    tokens = {"decode": 1, "verify": 3, "chunk": 9}
    starts, counts = ([0, 0], [5, 129]) if phase == "prefill" else (s := default_starts(config), [tokens[phase]] * len(s))
    vocab = min(VOCABULARY, config.vocab_size) if op == "embed" else config.vocab_size
    return ragged(starts, counts, vocab, torch.Generator().manual_seed(seed))


def draw(op: str, store: WeightStore, layer: int, phase: str, profile: str, batch: Batch, seed: int = 0) -> Inputs:
    """Inputs of an op. Raises ValueError for an op that this layer has not, BadInput for a damaged store."""
    made = Inputs(op, store.config, layer, phase, profile, _batch_tensors(batch))
    laws = Laws(made, torch.Generator().manual_seed(seed * 1009 + layer))
    tensors = dict(made.tensors)
    for name in made.contract.inputs:
        if name not in tensors:
            tensors |= laws.tensor(ITEMS[name])
    experts = tensors["ffn.gate.experts"].unique().tolist() if "ffn.gate.experts" in tensors else []
    for local, name in weight_names(made.contract, store.config, layer, experts).items():
        rows = VOCABULARY if local == "embed.weight" else None
        tensors[local] = as_bytes(store.get(name, 0, rows and min(rows, store.config.vocab_size)))
    return Inputs(op, store.config, layer, phase, profile, tensors)


def _batch_tensors(batch: Batch) -> dict[str, Tensor]:
    return {"ids": batch.ids, "positions": batch.positions, "bounds": torch.tensor(batch.bounds)}


def as_bytes(x: Tensor) -> Tensor:
    """Codes and scale bytes as uint8, other dtypes as they are."""
    coded = (torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.int8)
    return x.view(torch.uint8) if x.dtype in coded else x


class Laws:
    """How each kind of input looks: numbers with outlier channels and tokens of different size, codes that fill their range,
    choices without repetition."""

    def __init__(self, inputs: Inputs, generator: torch.Generator) -> None:
        self.inputs, self.generator, self.form = inputs, generator, FORMS[inputs.profile]

    def tensor(self, item: Item) -> dict[str, Tensor]:
        """One input, and its scales where it has some."""
        if item.name in ("cos", "sin"):
            table = rope_table(self.inputs.config, self.inputs.layer, self.inputs.batch.positions)
            return {item.name: table[item.name == "sin"].contiguous()}
        shape = self.inputs.sizes.shape(item)
        law: Callable[[tuple[int, ...]], Tensor] = getattr(self, item.law)
        x = law(shape)
        if item.storage == "e4m3":
            codes, scales = formats.quantize_e4m3(x.float(), BLOCK)
            return {item.name: codes, f"{item.name}.scale": scales}
        if item.storage == "key":
            codes, scales = row_forms.quantise_queries(x.float(), self.form.keys.form)
            return {item.name: codes, f"{item.name}.scale": scales}
        dtype = {"bf16": torch.bfloat16, "f32": torch.float32, "i32": torch.int32}[item.storage]
        return {item.name: x.to(dtype)}

    def normal(self, shape: tuple[int, ...]) -> Tensor:
        return torch.randn(shape, generator=self.generator, dtype=torch.float64)

    def uneven(self, shape: tuple[int, ...]) -> Tensor:
        """As after a norm: channels of different size with a few outliers, rows of different size."""
        channel = torch.exp(0.5 * self.normal(shape[-1:]))
        channel[torch.randint(0, shape[-1], (max(1, shape[-1] // 64),), generator=self.generator)] *= 20
        row = torch.exp(0.5 * self.normal((*shape[:-1], 1)))
        return row * channel * self.normal(shape)

    def query(self, shape: tuple[int, ...]) -> Tensor:
        """Normed heads: numbers around 1, so that no row takes all the attention."""
        return self.normal(shape)

    def streams(self, shape: tuple[int, ...]) -> Tensor:
        return cases.streams(self.inputs.config, shape[0], self.generator)

    def row(self, shape: tuple[int, ...]) -> Tensor:
        """Values that the profile's pool rows hold exactly."""
        return row_forms.decode(row_forms.encode(self.normal(shape), self.form.rows))

    def key(self, shape: tuple[int, ...]) -> Tensor:
        return self.normal(shape) * torch.exp(self.normal((*shape[:-1], 1)))

    def gate(self, shape: tuple[int, ...]) -> Tensor:
        return 2 * self.normal(shape)

    def post(self, shape: tuple[int, ...]) -> Tensor:
        return 2 * torch.sigmoid(self.normal(shape))

    def comb(self, shape: tuple[int, ...]) -> Tensor:
        return torch.softmax(2 * self.normal(shape), -1)

    def score(self, shape: tuple[int, ...]) -> Tensor:
        return torch.nn.functional.softplus(2 * self.normal(shape)).sqrt()

    def share(self, shape: tuple[int, ...]) -> Tensor:
        return self.inputs.config.routed_scaling_factor * torch.softmax(self.normal(shape), -1)

    def experts(self, shape: tuple[int, ...]) -> Tensor:
        """Few enough experts for several tokens to meet in one; each token's differ."""
        few = min(self.inputs.config.n_routed_experts, 2 * shape[1])
        return torch.rand(shape[0], few, generator=self.generator).argsort(1)[:, : shape[1]]

    def picks(self, shape: tuple[int, ...]) -> Tensor:
        """For each token, rows it may see, ascending, then -1."""
        picks = torch.full(shape, -1)
        for t, p in enumerate(self.inputs.batch.positions.tolist()):
            chosen = torch.randperm((p + 1) // 4, generator=self.generator)[: shape[1]]
            picks[t, : len(chosen)] = chosen.sort().values
        return picks
