"""Models with a name: the four releases at their real sizes, and two small ones with every kind of layer.

Source: docs/checkpoint.md §1 and §6. `CONFIG_JSON` holds the released `config.json` field for field, so that a
written checkpoint carries the same file.
"""

from __future__ import annotations

from typing import Any

from .config import Config

_COMMON: dict[str, Any] = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "expert_dtype": "fp4",
    "hc_eps": 1e-06,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "head_dim": 512,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "index_head_dim": 128,
    "index_n_heads": 64,
    "index_topk": 1024,
    "initializer_range": 0.02,
    "max_position_embeddings": 1048576,
    "model_type": "deepseek_v4",
    "moe_intermediate_size": 3072,
    "n_routed_experts": 384,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 61,
    "num_hash_layers": 3,
    "num_key_value_heads": 1,
    "num_nextn_predict_layers": 1,
    "o_groups": 16,
    "o_lora_rank": 1024,
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 64,
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "scale_fmt": "ue8m0",
        "weight_block_size": [128, 128],
    },
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 16,
        "original_max_position_embeddings": 65536,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sqrtsoftplus",
    "sliding_window": 128,
    "swiglu_limit": 10.0,
    "tie_word_embeddings": False,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "transformers_version": "4.57.1",
    "use_cache": True,
    "vocab_size": 129280,
    "compress_rope_theta": 160000,
}

_PRO_RATIOS = [128, 128] + [4, 128] * 29 + [4, 0]
_FLASH_RATIOS = [0, 0] + [4, 128] * 20 + [4, 0]
_PRO = {**_COMMON, "compress_ratios": _PRO_RATIOS}
_FLASH = {
    **_COMMON,
    "hidden_size": 4096,
    "index_topk": 512,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "num_attention_heads": 64,
    "num_hidden_layers": 43,
    "o_groups": 8,
    "q_lora_rank": 1024,
    "routed_scaling_factor": 1.5,
    "compress_ratios": _FLASH_RATIOS,
}


def _dspark(base: dict[str, Any], target_layers: list[int], rank: int) -> dict[str, Any]:
    return {
        **base,
        "compress_ratios": [*base["compress_ratios"], 0, 0],
        "dspark_block_size": 5,
        "dspark_noise_token_id": 128799,
        "dspark_target_layer_ids": target_layers,
        "dspark_markov_rank": rank,
    }


CONFIG_JSON: dict[str, dict[str, Any]] = {
    "v4-pro": _PRO,
    "v4-flash": _FLASH,
    "v4-pro-0813": _dspark(_PRO, [58, 59, 60], 512),
    "v4-flash-0731": _dspark(_FLASH, [40, 41, 42], 256),
    # All 62 blocks of Pro with its exact schedule of kinds and hash layers; only the widths are small.
    "v4-pro-slim": {
        **_PRO,
        "hidden_size": 512,
        "index_n_heads": 8,
        "index_topk": 16,
        "moe_intermediate_size": 128,
        "n_routed_experts": 16,
        "num_attention_heads": 16,
        "o_groups": 2,
        "o_lora_rank": 128,
        "q_lora_rank": 128,
        "vocab_size": 1024,
        "hc_eps": 3e-06,  # real models have every epsilon equal, which hides a swapped one
        "rms_norm_eps": 2e-06,
    },
    "mini": {
        **_PRO,
        "hidden_size": 256,
        "index_n_heads": 4,
        "index_topk": 8,
        "moe_intermediate_size": 128,
        "n_routed_experts": 8,
        "num_attention_heads": 8,
        "num_experts_per_tok": 3,
        "num_hash_layers": 2,
        "num_hidden_layers": 5,
        "o_groups": 2,
        "o_lora_rank": 128,
        "q_lora_rank": 128,
        "sliding_window": 16,
        "swiglu_limit": 1.0,
        "vocab_size": 512,
        "hc_eps": 3e-06,
        "rms_norm_eps": 2e-06,
        "compress_ratios": [0, 128, 4, 128, 4, 0],
    },
}


def preset(name: str) -> Config:
    """The configuration of a named model. Raises KeyError with the known names."""
    if name not in CONFIG_JSON:
        raise KeyError(f"unknown preset {name!r}; known: {', '.join(CONFIG_JSON)}")
    return Config.from_dict(CONFIG_JSON[name])
