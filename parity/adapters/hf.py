"""The same weights in transformers' own model: the independent witness, and the peer of the benchmark.

Names follow docs/checkpoint.md §8. transformers has no MTP, so `mtp.` tensors are left out.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from reference.checkpoint.store import WeightStore
from reference.linear import Linear

_RENAMES = [
    (r"^embed\.weight$", "model.embed_tokens.weight"),
    (r"^head\.weight$", "lm_head.weight"),
    (r"^norm\.weight$", "model.norm.weight"),
    (r"^hc_head_(\w+)$", r"model.hc_head.hc_\1"),
    (r"^layers\.", "model.layers."),
    (r"\.attn_norm\.", ".input_layernorm."),
    (r"\.ffn_norm\.", ".post_attention_layernorm."),
    (r"\.hc_(attn|ffn)_(\w+)$", r".\1_hc.\2"),
    (r"\.attn\.attn_sink$", ".self_attn.sinks"),
    (r"\.attn\.indexer\.weights_proj\.", ".attn.compressor.indexer.scorer.weights_proj."),
    (r"\.attn\.indexer\.wq_b\.", ".attn.compressor.indexer.q_b_proj."),
    (r"\.attn\.indexer\.compressor\.", ".attn.compressor.indexer."),
    (r"\.attn\.(.*)\bwkv\.", r".attn.\1kv_proj."),
    (r"\.wgate\.", ".gate_proj."),
    (r"\.attn\.(compressor\.(?:indexer\.)?)norm\.", r".attn.\1kv_norm."),
    (r"\.ape$", ".position_bias"),
    (r"\.attn\.wq_a\.", ".attn.q_a_proj."),
    (r"\.attn\.q_norm\.", ".attn.q_a_norm."),
    (r"\.attn\.wq_b\.", ".attn.q_b_proj."),
    (r"\.attn\.wo_a\.", ".attn.o_a_proj."),
    (r"\.attn\.wo_b\.", ".attn.o_b_proj."),
    (r"\.attn\.", ".self_attn."),
    (r"\.ffn\.gate\.bias$", ".ffn.gate.e_score_correction_bias"),
    (r"\.shared_experts\.w1\.", ".shared_experts.gate_proj."),
    (r"\.shared_experts\.w2\.", ".shared_experts.down_proj."),
    (r"\.shared_experts\.w3\.", ".shared_experts.up_proj."),
    (r"\.ffn\.", ".mlp."),
]


def hf_name(name: str) -> str:
    """A checkpoint's tensor name in transformers' model (routed experts aside: they are stacked there)."""
    for pattern, replacement in _RENAMES:
        name = re.sub(pattern, replacement, name)
    return name


def dense(store: WeightStore, name: str, dtype: torch.dtype) -> Tensor:
    """A tensor dequantised; integer tables as they are."""
    scale = name.removesuffix("weight") + "scale"
    stored = store.get(name)
    if stored.dtype == torch.int64:
        return stored
    return Linear(stored, store.get(scale) if scale in store.tensors else None).dense(dtype)


def state_dict(store: WeightStore, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Every weight of the layers and the head under transformers' names, in `dtype`."""
    for name in store.tensors:
        if not name.startswith("mtp.") and ".experts." not in name and not name.endswith(".scale"):
            yield hf_name(name), dense(store, name, dtype)
    for layer in range(store.config.num_hidden_layers):
        experts = [f"layers.{layer}.ffn.experts.{e}" for e in range(store.config.n_routed_experts)]
        gate_up = [torch.cat([dense(store, f"{e}.{w}.weight", dtype) for w in ("w1", "w3")]) for e in experts]
        down = [dense(store, f"{e}.w2.weight", dtype) for e in experts]
        yield f"model.layers.{layer}.mlp.experts.gate_up_proj", torch.stack(gate_up)  # [e, 2I, D]
        yield f"model.layers.{layer}.mlp.experts.down_proj", torch.stack(down)  # [e, D, I]


def build(store: WeightStore, config_json: dict[str, Any], dtype: torch.dtype) -> Any:
    """transformers' eager model with the weights of `store`. Raises RuntimeError if a name or shape does not fit."""
    from transformers import DeepseekV4Config, DeepseekV4ForCausalLM
    from transformers.initialization import no_init_weights

    fields = {k: v for k, v in config_json.items() if k not in ("quantization_config", "expert_dtype", "torch_dtype")}
    fields |= {"attn_implementation": "eager", "experts_implementation": "eager", "dtype": dtype}
    config = DeepseekV4Config(**fields)
    with no_init_weights():  # weights that are replaced at once would count in the peak of memory
        model = DeepseekV4ForCausalLM(config)
    model.load_state_dict(dict(state_dict(store, dtype)), strict=True, assign=True)
    return model.eval()
