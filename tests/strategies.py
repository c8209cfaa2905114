"""What the tests draw from: small models with every kind of layer, adversarial tensors, ragged batches; and how a law
is tried on the right implementation and on a wrong one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from reference.checkpoint.procedural import ProceduralStore
from reference.checkpoint.store import DTYPE_OF_TAG, TensorInfo, row_range
from reference.config import Config
from reference.errors import BadInput
from reference.model import Model
from reference.rounding import EXACT, Profile, Tap
from reference.state import SequenceState

TAG_OF_DTYPE = {dtype: tag for tag, dtype in DTYPE_OF_TAG.items()}

# Every kind of layer, hash and scored routing, widths with a short last block everywhere (160 = 128 + 32 inputs,
# 96 = 64 + 32 unrotated channels), all counts and epsilons different, clamps and top-k that bite.
TINY = Config(
    hidden_size=160,
    num_hidden_layers=4,
    num_attention_heads=6,
    head_dim=128,
    qk_rope_head_dim=32,
    q_lora_rank=96,
    o_groups=3,
    o_lora_rank=48,
    sliding_window=7,
    index_n_heads=5,
    index_head_dim=64,
    index_topk=3,
    moe_intermediate_size=64,
    n_routed_experts=9,
    num_experts_per_tok=2,
    routed_scaling_factor=1.75,
    num_hash_layers=1,
    swiglu_limit=0.6,
    vocab_size=97,
    compress_ratios=(4, 0, 128, 4, 0),
    hc_eps=3e-6,
    rms_norm_eps=2e-6,
)


class MemoryStore:
    """A WeightStore over tensors at hand."""

    def __init__(self, config: Config, values: Mapping[str, Tensor]) -> None:
        self.config = config
        self.identity = "memory"
        self.bytes_read = 0
        self.values = dict(values)
        self.tensors = {n: TensorInfo(TAG_OF_DTYPE[v.dtype], tuple(v.shape), "memory") for n, v in self.values.items()}

    def get(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        if name not in self.values:
            raise BadInput(f"memory: no tensor {name}")
        start, stop = row_range(name, tuple(self.values[name].shape), start, stop)
        value = self.values[name][start:stop]
        self.bytes_read += value.nbytes
        return value

    def prefetch(self, names: Iterable[str]) -> None: ...

    def release(self, names: Iterable[str]) -> None: ...


@cache
def tiny_store(seed: int = 0, config: Config = TINY) -> MemoryStore:
    """Procedural weights in released storage, made louder: sub-layers move the streams as much as the embedding does."""
    source = ProceduralStore(config, seed)
    return MemoryStore(config, {name: _louder(name, source.get(name)) for name in source.tensors})


def _louder(name: str, value: Tensor) -> Tensor:
    if name.endswith("scale") and any(part in name for part in ("wo_b", ".w2")):
        return (value.view(torch.uint8) + 2).view(torch.float8_e8m0fnu)
    return value


def tiny_model(dtype: torch.dtype = torch.float64, profile: Profile = EXACT, tap: Tap | None = None, **changed: Any) -> Model:
    """A model over `tiny_store`; `changed` replaces fields of TINY that change no weight."""
    store = tiny_store()
    config = dataclasses.replace(TINY, **changed)
    return Model(MemoryStore(config, store.values), dtype, profile, memory=1 << 40, tap=tap)


def tokens(n: int, seed: int, vocab: int = TINY.vocab_size) -> Tensor:
    return torch.randint(0, vocab, (n,), generator=torch.Generator().manual_seed(seed))


def run(model: Model, ids: Tensor, cuts: Sequence[int] = ()) -> Tensor:
    """Logits [t, vocab] of all positions, the prompt cut before each position of `cuts`."""
    state, parts = SequenceState(), torch.tensor_split(ids, sorted(cuts))
    return torch.cat([model.logits(model.forward([part], [state])) for part in parts if len(part)])


def normal(seed: int, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def adversarial(seed: int, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Normal values with an outlier in one of 29 places, and a scale of its own for every run of 16 channels."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, generator=g, dtype=torch.float64)
    runs = torch.randint(-6, 7, (*shape[:-1], -(-shape[-1] // 16)), generator=g).double()
    x *= torch.exp2(runs).repeat_interleave(16, -1)[..., : shape[-1]]
    return (x * torch.where(torch.rand(*shape, generator=g) < 1 / 29, 64.0, 1.0)).to(dtype)


seeds = st.integers(0, 2**31 - 1)
widths = st.sampled_from([1, 2, 31, 32, 33, 63, 64, 65, 127, 128, 129, 200])


@st.composite
def chunked(draw: st.DrawFn, edges: Sequence[int] = (1, 3, 4, 5, 7, 8, 15, 127, 128, 129), longest: int = 140) -> Any:
    """(number of tokens, seed of the tokens, where to cut): lengths and cuts near `edges`, and anywhere."""
    n = draw(st.one_of(st.sampled_from([e for e in edges if e <= longest]), st.integers(1, longest)))
    at = st.one_of(st.sampled_from(edges), st.integers(1, longest))
    cuts = draw(st.lists(at, max_size=6, unique=True))
    return n, draw(seeds), sorted(c for c in cuts if c < n)


Law = Callable[..., None]


def holds(law: Law, cases: st.SearchStrategy[Any], *right: Any, examples: int | None = None) -> None:
    """The law is true of the right implementation, whatever the case."""

    @settings(max_examples=examples or settings.default.max_examples)
    @given(cases)
    def trial(case: Any) -> None:
        law(*right, case)

    trial()


def refuted(law: Law, cases: st.SearchStrategy[Any], *wrong: Any, examples: int | None = None) -> None:
    """The same law catches a wrong implementation: some case makes it fail."""

    @settings(
        max_examples=examples or settings.default.max_examples,
        phases=[Phase.generate],
        database=None,
        derandomize=True,
        report_multiple_bugs=False,
    )
    @given(cases)
    def trial(case: Any) -> None:
        law(*wrong, case)

    with pytest.raises(AssertionError):
        trial()


def smallest_margin(store: Any, ids: Tensor) -> float:
    """How near the model comes to choosing otherwise on this prompt: over all indexers and scored routers, the least gap
    between the last score taken and the first left, relative to the largest score of that token (float64). Rows that all
    heads reject score exactly 0 in any precision: those ties are left to the tie rule."""
    gaps = []

    def watch(name: str, x: Tensor) -> None:
        layer = int(name.split(".")[1]) if name.startswith("layers.") else 0
        if name.endswith("indexer.scores"):
            visible = (torch.arange(len(x)) + 1) // store.config.ratio(layer)
            x = x.masked_fill(torch.arange(x.shape[1]) >= visible[:, None], -torch.inf)
            k = store.config.index_topk
        elif name.endswith("gate.scores") and not store.config.is_hash_layer(layer):
            x = x + store.get(f"layers.{layer}.ffn.gate.bias").double()
            k = store.config.num_experts_per_tok
        else:
            return
        best = x.topk(min(k + 1, x.shape[1]), dim=-1).values
        if best.shape[1] > k:
            gap = (best[:, k - 1] - best[:, k]) / best.abs().nan_to_num(posinf=0).amax(-1)
            gaps.append(gap[(best[:, k] > -torch.inf) & (best[:, k - 1 : k + 1] != 0).any(-1)])

    Model(store, torch.float64, memory=1 << 40, tap=watch).forward([ids], [SequenceState()])
    return float(torch.cat(gaps).amin())
