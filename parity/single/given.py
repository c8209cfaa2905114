"""A step made of an op's inputs alone: the twins of the whole model read it as they read any step.

What the op was not given is there as a tensor without storage, so that a twin which reads past the op's contract fails
instead of using a number nobody handed in. Source: docs/single.md §1.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor

from optimized.engine import FORMS
from optimized.pool.index_rows import GROUP
from reference import formats
from reference.attention import Attention
from reference.checkpoint.loader import Loader
from reference.checkpoint.manifest import manifest
from reference.checkpoint.store import DTYPE_OF_TAG, TensorInfo, row_range
from reference.compressor import Compressor
from reference.config import Config
from reference.errors import BadInput
from reference.rounding import Sites, profile
from reference.state import CompressorState, LayerState

from .. import indexing, row_forms
from ..budget.bounded import Arithmetic
from ..evaluation import Weights
from ..judge import Stored
from ..step import Step
from ..taps import Capture
from .checks import check
from .contract import ITEMS, Sizes, held_tokens, weight_prefix
from .drawing import Inputs


class GivenWeights:
    """The weights that came with an op, as a `WeightStore`; all others have shape and dtype, and no numbers."""

    identity = "inputs"
    bytes_read = 0

    def __init__(self, config: Config, layer: int, held: Mapping[str, Tensor]) -> None:
        self.config, self._prefix, self._held = config, weight_prefix(config, layer), held

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        return manifest(self.config)

    def get(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        """Rows [start, stop). Raises BadInput where what came has another dtype or shape than the checkpoint's."""
        info = self.tensors[name]
        held = self._held.get(name.removeprefix(self._prefix))
        dtype = DTYPE_OF_TAG[info.dtype]
        if held is None:
            first, last = row_range(name, info.shape, start, stop)
            return torch.empty(last - first, *info.shape[1:], dtype=dtype, device="meta")
        bytes_ = held.dtype == torch.uint8 and dtype.itemsize == 1
        rows_fit = held.shape == info.shape or (name == "embed.weight" and held.shape[1:] == info.shape[1:])
        if not (held.dtype == dtype or bytes_) or not rows_fit:
            raise BadInput(f"{name}: {held.dtype} {list(held.shape)}, the checkpoint has {dtype} {list(info.shape)}")
        first, last = row_range(name, tuple(held.shape), start, stop)
        return held[first:last].view(dtype) if bytes_ else held[first:last]

    def prefetch(self, names: Iterable[str]) -> None:
        """Nothing: all is there."""

    def release(self, names: Iterable[str]) -> None:
        """Nothing."""


class GivenTaps(Capture):
    """Payloads that came with an op; those that did not have a shape only."""

    def __init__(self, given: Mapping[str, Tensor], sizes: Sizes) -> None:
        super().__init__([""], given)
        self._given, self._sizes = given, sizes
        for name, x in given.items():
            self(name, x)

    def filled(self, names: Iterable[str]) -> GivenTaps:
        """The same with zeros for what was not given: a kernel that puts out what two ops do reads both ops' inputs."""
        zeros = {name: torch.zeros(self._sizes.shape(ITEMS[name])) for name in names}
        return GivenTaps({**zeros, **self._given}, self._sizes)

    def __getitem__(self, name: str) -> Tensor:
        if name in self._parts or name not in ITEMS:
            return super().__getitem__(name)
        return torch.empty(self._sizes.shape(ITEMS[name]), dtype=torch.float64, device="meta")


class GivenStep(Step):
    """A step of which every token is judged, however many there are."""

    capture: GivenTaps

    @property
    def direct(self) -> bool:
        return True

    @property
    def every_token(self) -> bool:
        return True


def given_step(inputs: Inputs, how: Arithmetic) -> GivenStep:
    """The step behind an op's inputs, its weights among them. Raises BadInput for what is missing or has another dtype or
    shape than it should."""
    check(inputs)
    loader = Loader(GivenWeights(inputs.config, inputs.layer, inputs.tensors), torch.float64, 0)
    return step_of(inputs, Weights.load(loader, inputs.config, inputs.layer), how, GivenStep)


S = TypeVar("S", bound=GivenStep)


def step_of(inputs: Inputs, weights: Weights, how: Arithmetic, kind: type[S]) -> S:
    """The step of a kind behind inputs that are as they should be, with these weights."""
    taps = _taps(inputs)
    before, after = _states(inputs, weights.block.attn)
    step = kind(
        inputs.config, inputs.layer, inputs.phase, weights.block, weights.mtp, inputs.batch,
        taps.get("streams", torch.empty(0)), weights.loader.embed, weights.head, GivenTaps(taps, inputs.sizes), before, after,
        Sites(profile(inputs.profile)), how, 0, stored=_stored(inputs),
    )  # fmt: skip
    for name in indexing_tables(step.stored):
        step.stored |= split_tables(step, name, step.stored.pop(name))
    return step


def indexing_tables(stored: Mapping[str, Stored]) -> list[str]:
    """Names of what has a row a token and is judged in tables, by how many keys a token sees."""
    return [name for name in ("attn.indexer.scores", "attn.indexer.picks") if name in stored]


def split_tables(step: Step, name: str, x: Stored) -> dict[str, Stored]:
    """Scores [t, seen], 0 where a token sees nothing, or picks [t, k], by table. Raises BadInput for another shape."""
    seen = indexing.visible(step)
    scores = name.endswith("scores")
    assert isinstance(x, Tensor) and step.block.attn.indexer is not None
    shape = [len(seen), int(seen.max()) if scores else step.block.attn.indexer.topk]
    if list(x.shape) != shape:
        raise BadInput(f"tensor {name}: {list(x.shape)}, expected {shape}")
    tables: dict[str, Stored] = {}
    for suffix, tokens in indexing.tables(step).items():
        columns = int(seen[tokens].max())
        hidden = torch.arange(x.shape[1]) >= seen[tokens][:, None]
        tables[name + suffix] = x[tokens].masked_fill(hidden, 0)[:, :columns].contiguous() if scores else x[tokens]
    return tables


# Inputs that twins look for among what the candidate stored, and not among the twin's payloads.
_STORED = {
    "attn.compressor.values", "attn.compressor.scores", "attn.indexer.compressor.values", "attn.indexer.compressor.scores",
    "attn.indexer.weights_proj", "attn.indexer.scores", "ffn.gate.scores", "ffn.experts.w2", "ffn.shared_experts.w2",
    "hc_head", "norm",
}  # fmt: skip


def _stored(inputs: Inputs) -> dict[str, Stored]:
    given: dict[str, Stored] = {name: inputs[name] for name in inputs.contract.inputs if name in _STORED}
    coded = [name for name in inputs.contract.inputs if ITEMS[name].storage == "e4m3"]
    return given | {name: (inputs[name], inputs[f"{name}.scale"]) for name in coded}


def _taps(inputs: Inputs) -> dict[str, Tensor]:
    """Payloads in float64, or as integers; MTP's embedding without an axis of streams, its `h_proj` with one."""
    out: dict[str, Tensor] = {}
    for name in inputs.contract.inputs:
        if name in ("cos", "sin"):  # a step says itself what its table is
            continue
        if ITEMS[name].storage == "key":
            out[name] = dequantised(inputs, name)
        elif ITEMS[name].storage != "e4m3":
            x = inputs[name]
            out[name] = x.double() if x.is_floating_point() else x.long()
    shaped = {"embed": lambda x: x.flatten(0, 1), "h_proj": lambda x: x.unflatten(0, (len(inputs["ids"]), -1))}
    return {name: shaped[name](x) if name in shaped else x for name, x in out.items()}


def dequantised(inputs: Inputs, name: str) -> Tensor:
    """Index keys or queries as float64, from their codes unless they are numbers already."""
    if inputs[name].is_floating_point():
        return inputs[name].double()
    form = FORMS[inputs.profile].keys.form
    codes, scales = row_forms.key_codes(inputs[name], inputs[f"{name}.scale"], form)
    block = GROUP[form]
    decoded = formats.e2m1_decode(codes) if form == "fp4" else formats.e4m3_decode(codes.contiguous())
    return formats.dequantize_blocks(decoded, scales.contiguous(), block).double()


def _states(inputs: Inputs, attn: Attention) -> tuple[list[LayerState], list[LayerState]]:
    """What each sequence had behind it, and has after this step; what the op was not given is empty."""
    batch, ratio = inputs.batch, inputs.config.ratio(inputs.layer)
    starts = [int(batch.positions[s.start]) for s in batch.sequences()]
    ends = [int(batch.positions[s.stop - 1]) + 1 for s in batch.sequences()]
    index = attn.indexer.compressor if attn.indexer else None
    window = _parts(inputs, "window", [min(n, attn.sliding_window - 1) for n in starts], attn.head_dim)
    rows = _parts(inputs, "compressed", [n // ratio for n in ends] if ratio else [], attn.head_dim)
    keys = _parts(inputs, "keys", [n // 4 for n in ends], inputs.config.index_head_dim)
    before, after = [], []
    for b in range(len(starts)):
        main, of_keys = _held(inputs, attn.compressor, starts, b), _held(inputs, index, starts, b)
        before.append(LayerState(window[b], main, of_keys))
        done = main and replace(main, rows=rows[b]), of_keys and replace(of_keys, rows=keys[b])
        after.append(LayerState(window[b][:0], *done))
    return before, after


def _parts(inputs: Inputs, name: str, counts: list[int], width: int) -> list[Tensor]:
    """Rows [n, width] of each sequence, float64; none where the op has no such input."""
    if name not in inputs.contract.inputs:
        return [torch.zeros(0, width, dtype=torch.float64)] * len(inputs.batch.sequences())
    x = dequantised(inputs, name) if ITEMS[name].coded else inputs[name].double()
    return list(x.split(counts))


def _held(inputs: Inputs, compressor: Compressor | None, starts: list[int], b: int) -> CompressorState | None:
    """Tokens that a compressor holds for sequence b, none where they are not this op's."""
    if compressor is None:
        return None
    rows = torch.zeros(0, inputs.config.index_head_dim if compressor.index_keys else inputs.config.head_dim)
    of_index = inputs.op.startswith("attn.indexer.")
    if "state.values" not in inputs.contract.inputs or of_index != compressor.index_keys:
        none = torch.zeros(0, compressor.ape.shape[1], dtype=torch.float64)
        return CompressorState(none, none, rows.double())
    counts = [held_tokens(n, compressor.ratio) for n in starts]
    values, gates = (inputs[f"state.{part}"].double().split(counts)[b] for part in ("values", "gates"))
    if compressor.overlapping and starts[b] < compressor.ratio:  # a fresh state begins with a block of nothing
        before = torch.zeros(compressor.ratio, values.shape[1], dtype=torch.float64)
        values, gates = torch.cat([before, values]), torch.cat([before - torch.inf, gates])
    return CompressorState(values, gates, rows.double())
