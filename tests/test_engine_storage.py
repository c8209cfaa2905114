"""Weights of the engine: storages of base models, what it refuses, and experts that do not fit into memory together."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from engine_cases import layer_config, with_numerator
from torch import Tensor

from optimized import weights as weights_module
from optimized.engine import Engine
from optimized.kernels.quantize import quantize_activation
from optimized.moe import moe
from optimized.tiles import tiles_for_model
from optimized.weights import Weights
from reference.checkpoint.dequantize import dequantize
from reference.checkpoint.manifest import FP8_BLOCK
from reference.checkpoint.procedural import ProceduralStore
from reference.checkpoint.store import TensorInfo
from reference.errors import BadInput
from reference.model import Model
from reference.rounding import Profile, profile
from reference.state import SequenceState

CONFIG = layer_config("csa")
TOKENS = torch.tensor([5, 17, 300, 4, 99, 211, 8])


class BaseStore(ProceduralStore):
    """A procedural model as base models are stored; `change` has a last word on a tensor."""

    def __init__(self, change: Mapping[str, Tensor] | None = None) -> None:
        super().__init__(CONFIG)
        self.change = change or {}

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        extra = {name.replace("weight", "scale"): i for name, i in super().tensors.items() if ".compressor.wkv." in name}
        return {**super().tensors, **extra}

    def get(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        return self.change[name] if name in self.change else self._stored(name)[start:stop]

    def _stored(self, name: str) -> Tensor:
        weight, part = name.rsplit(".", 1)
        if ".experts." not in name and not weight.endswith("compressor.wkv"):
            return super().get(name)
        stored = super().get(f"{weight}.weight")
        scale = super().get(f"{weight}.scale") if ".experts." in name else None
        codes, scales = by_blocks(dequantize(stored, scale))
        return codes if part == "weight" else scales


def by_blocks(values: Tensor) -> tuple[Tensor, Tensor]:
    """float32 [n, k] with n and k multiples of 128 -> E4M3 codes and float32 powers of two, one for 128 x 128."""
    tiles = values.unflatten(1, (-1, FP8_BLOCK)).unflatten(0, (-1, FP8_BLOCK))  # [n/128, 128, k/128, 128]
    scales = 2.0 ** torch.ceil(torch.log2(tiles.abs().amax((1, 3)) / 448))
    codes = (tiles / scales[:, None, :, None]).to(torch.float8_e4m3fn)
    return codes.flatten(2).flatten(0, 1), scales


def run(store: BaseStore) -> Tensor:
    engine = Engine(store, blocks=1, slots=1)
    return engine.step([TOKENS], [engine.allocator.open()]).double()


def read(store: BaseStore) -> None:
    weights = Weights(store)
    weights.layer(0)
    weights.experts("layers.0", torch.zeros(1, 1, dtype=torch.int32))


def test_a_base_model_is_computed_as_the_twin_does() -> None:
    """Nearer than without any one of the roundings around its experts and compressor, or with the experts as FP4."""
    store, own = BaseStore(), with_numerator(profile("pool-fp8"))
    got = run(store)

    def twin(store: ProceduralStore, rounding: Profile = own) -> Tensor:
        return Model(store, torch.float64, rounding).forward([TOKENS], [SequenceState()])

    want = twin(store)
    sites = ("ffn.experts.w1", "ffn.experts.w1.input", "ffn.experts.w2.input", "attn.compressor.row")
    wrong = [twin(store, own.without(site)) for site in sites] + [twin(ProceduralStore(CONFIG))]
    assert (got - want).norm() < min((other - want).norm() for other in wrong) / 2


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("layers.0.ffn.experts.1.w1.scale", lambda x: x * 1.5, "no power of two"),
        ("layers.0.ffn.experts.1.w1.scale", lambda x: x.double(), "stored as torch.float64"),
        ("layers.0.attn.compressor.wkv.scale", lambda x: x * 0.1, "does not fit into bfloat16"),
        ("layers.0.attn.wq_a.weight", lambda x: x.float(), "stored as torch.float32"),
        ("layers.0.attn.compressor.wgate.weight", lambda x: x.float(), "stored as torch.float32"),
    ],
)
def test_what_no_kernel_takes_is_refused_by_name(name, change, message) -> None:
    store = BaseStore({name: change(BaseStore().get(name))})
    with pytest.raises(BadInput, match=f"{name.rsplit('.', 1)[0]}.*{message}"):
        read(store)


def test_experts_of_two_forms_in_a_layer_are_refused() -> None:
    fp4 = ProceduralStore(CONFIG)
    whole = {f"layers.0.ffn.experts.1.{w}.{p}": fp4.get(f"layers.0.ffn.experts.1.{w}.{p}")
             for w in ("w1", "w2", "w3") for p in ("weight", "scale")}  # fmt: skip
    with pytest.raises(BadInput, match="some FP8"):
        read(BaseStore(whole))
    part = {name: tensor for name, tensor in whole.items() if ".w2." in name}
    with pytest.raises(BadInput, match="FP4 in one part"):
        read(BaseStore(part))


@pytest.mark.parametrize("room", [0, 3])
def test_a_step_in_pieces_of_its_experts_has_the_bits_of_the_whole(room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Room for no expert, so one at a time, and for three: never more are read for a piece, nor kept after it."""
    store = ProceduralStore(CONFIG)
    want = stepped(Weights(store))
    one = Weights(store, memory=0).experts("layers.0", torch.zeros(1, 1, dtype=torch.int32))[0].nbytes
    held = 2 * store.tensors["embed.weight"].nbytes
    weights, pieces = Weights(store, memory=held + 2 * room * one), []
    assert not weights.resident
    join = weights_module.side_by_side
    monkeypatch.setattr(weights_module, "side_by_side", lambda experts: pieces.append(len(experts)) or join(experts))
    assert torch.equal(stepped(weights), want)
    assert len(pieces) > 1 and max(pieces) == max(room, 1) == len(weights._experts)


def stepped(weights: Weights) -> Tensor:
    """One layer's experts on tokens that choose different ones."""
    x = torch.randn(6, CONFIG.hidden_size, generator=torch.Generator().manual_seed(3)).bfloat16()
    return moe(x, *quantize_activation(x), torch.arange(6), weights.layer(0), weights, tiles_for_model(CONFIG))
