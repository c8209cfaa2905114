"""Weights on their way from the checkpoint to the kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..change import edit, wrap
from ..fault import LAYER, OWN, Fault, whole

ENGINE = ("tests/test_engine.py::test_every_layer_is_nearer_to_the_twin_than_leaving_out_any_one_rounding",)
_E4M3 = torch.float8_e4m3fn
DRAFTS = ("tests/test_engine.py::test_drafts_are_the_reference_s",)
HERE = whole("csa", "prefill", (17,))


def _head_at_init(hyper: Callable[..., Any]) -> Callable[..., Any]:
    def loaded(self: Any, name: str) -> Any:
        mix = hyper(self, name)
        return type(mix)(0 * mix.fn, 0 * mix.base, 0 * mix.scale + 1) if name.endswith("hc_head") else mix

    return loaded


def _named(part: str, change: Callable[[Tensor], Tensor]) -> Callable[[Callable[..., Tensor]], Callable[..., Tensor]]:
    """float32 tensors whose name holds `part` through a change."""
    return lambda f32: lambda self, name: change(f32(self, name)) if part in name else f32(self, name)


FAULTS = (
    Fault("loading.head-at-init", "missing step", "Blaizzy/mlx-vlm#2277", "S1",
          "names of the last mix are dropped by a normaliser, and it keeps its first values", LAYER,
          wrap("weights:Weights._hyper", _head_at_init), whole("mtp", "decode", (3,)), tests=DRAFTS,
          also=("ISEEKYAN/Megatron-LM#51", "sgl-project/sglang#39311")),
    Fault("loading.one-layer-more", "off by one", "ikawrakow/ik_llama.cpp#2110", "S1",
          "the MTP block runs as one more layer of the model", "engine",
          edit("engine", ("layers = self.config.num_hidden_layers\n        kinds",
                          "layers = self.config.num_hidden_layers + int(self.config.has_mtp)\n        kinds")), tests=ENGINE),
    Fault("loading.stacked-the-other-way", "swapped halves", OWN, "S1", "w3 stands over w1 in the shared expert", LAYER,
          edit("weights", ("SharedExpert(stack(w1, w3), w2", "SharedExpert(stack(w3, w1), w2")), HERE, tests=ENGINE),
    Fault("loading.gap-not-whole", "off by one", OWN, "S1", "rows of w3 begin where w1 ends, not at a whole block", LAYER,
          edit("attention", ("at_kv = whole_blocks(config.q_lora_rank)", "at_kv = config.q_lora_rank - 1")), HERE,
          tests=ENGINE),
    Fault("loading.sink-of-next-layer", "wrong table", OWN, "S2", "sinks are shifted by a head", LAYER,
          wrap("weights:Weights.f32", _named("attn_sink", lambda x: x.roll(1))), HERE, tests=ENGINE),
    Fault("loading.bias-under-another-name", "missing step", "Avarok-Cybersecurity/atlas#186", "S1",
          "the router's bias is not found, and zeros take its place", LAYER,
          wrap("weights:Weights.f32", _named("gate.bias", lambda x: 0 * x)), HERE, tests=ENGINE),
    Fault("loading.ape-reversed", "order", OWN, "S2", "position biases are stored in the other order", LAYER,
          wrap("weights:Weights.f32", _named(".ape", lambda x: x.flip(0).contiguous())), HERE, tests=ENGINE),
    Fault("loading.norm-in-fp8", "lost bits", OWN, "S3", "norm weights are stored with three bits of mantissa", LAYER,
          wrap("weights:Weights.f32", _named("_norm.weight", lambda x: x.to(_E4M3).float())), HERE, tests=ENGINE),
    Fault("loading.experts-rotated", "wrong page", OWN, "S1", "experts of a layer are numbered from the last one down", LAYER,
          edit("weights", ("for e in range(self.config.n_routed_experts)",
                           "for e in range(1 - self.config.n_routed_experts, 1)"),
               ('self._expert(f"{name}.{e}")', 'self._expert(f"{name}.{-e}")')), HERE, tests=ENGINE),
    Fault("loading.compressors-swapped", "swapped halves", OWN, "S1", "scores of the compressor come before its values", LAYER,
          edit("attention", ("kv, score = projected[:, : w.width], projected[:, w.width : 2 * w.width]\n    field",
                             "score, kv = projected[:, : w.width], projected[:, w.width : 2 * w.width]\n    field")), HERE,
          tests=ENGINE),
)  # fmt: skip
