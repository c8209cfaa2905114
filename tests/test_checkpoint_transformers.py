"""A written directory in other software: `from_pretrained` finds every weight, with the value we give it."""

from __future__ import annotations

import re

import pytest
import torch

from reference.checkpoint.dequantize import dequantize
from reference.checkpoint.directory import DirectoryStore
from reference.checkpoint.procedural import ProceduralStore
from reference.checkpoint.writer import write_checkpoint

pytestmark = pytest.mark.oracle

# Pieces of our names -> theirs, applied in this order.
RENAMES = [
    (r"^embed\.weight", "model.embed_tokens.weight"),
    (r"^head\.weight", "lm_head.weight"),
    (r"^hc_head_(\w+)", r"model.hc_head.hc_\1"),
    (r"^norm\.", "model.norm."),
    (r"^layers\.", "model.layers."),
    (r"\.attn\.", ".self_attn."),
    (r"\.ffn\.", ".mlp."),
    (r"\.indexer\.compressor\.", ".compressor.indexer."),
    (r"\.self_attn\.indexer\.weights_proj", ".self_attn.compressor.indexer.scorer.weights_proj"),
    (r"\.self_attn\.indexer\.wq_b", ".self_attn.compressor.indexer.q_b_proj"),
    (r"(compressor|indexer)\.norm\.", r"\1.kv_norm."),
    (r"\.ape$", ".position_bias"),
    (r"\.wkv\.", ".kv_proj."),
    (r"\.wgate\.", ".gate_proj."),
    (r"\.attn_norm\.", ".input_layernorm."),
    (r"\.ffn_norm\.", ".post_attention_layernorm."),
    (r"\.hc_(attn|ffn)_(\w+)$", r".\1_hc.\2"),
    (r"\.attn_sink$", ".sinks"),
    (r"\.wq_a\.", ".q_a_proj."),
    (r"\.wq_b\.", ".q_b_proj."),
    (r"\.q_norm\.", ".q_a_norm."),
    (r"\.wo_([ab])\.", r".o_\1_proj."),
    (r"\.gate\.bias$", ".gate.e_score_correction_bias"),
    (r"\.shared_experts\.w1\.", ".shared_experts.gate_proj."),
    (r"\.shared_experts\.w2\.", ".shared_experts.down_proj."),
    (r"\.shared_experts\.w3\.", ".shared_experts.up_proj."),
]


def their_name(name):
    for pattern, new in RENAMES:
        name = re.sub(pattern, new, name)
    return name


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("oracle") / "mini"
    store = ProceduralStore("mini")
    write_checkpoint(store, store.config_json, path, lambda number, file: None)
    return path


@pytest.fixture(scope="module")
def theirs(directory):
    """All tensors of their model; dtype=float32 is what the dequantised weights come in (they default to bfloat16)."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    return {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in model.state_dict().items()}


def ours(store, name):
    """A weight as numbers; expert numbers as they are."""
    stored, scale = store.get(name), name.removesuffix("weight") + "scale"
    if stored.dtype == torch.int64:
        return stored
    return dequantize(stored, store.get(scale) if scale in store.tensors else None)


def test_every_weight_is_loaded_with_our_value(directory, theirs):
    store = DirectoryStore(directory)
    plain = [n for n in store.tensors if not n.endswith(".scale") and not n.startswith("mtp.") and ".experts." not in n]
    unseen = set(theirs)
    for name in plain:
        assert torch.equal(theirs[their_name(name)], ours(store, name)), name
        unseen.discard(their_name(name))
    for layer in range(store.config.num_hidden_layers):
        experts = f"layers.{layer}.ffn.experts"
        for e in range(store.config.n_routed_experts):
            w1, w2, w3 = (ours(store, f"{experts}.{e}.{w}.weight") for w in ("w1", "w2", "w3"))
            assert torch.equal(theirs[f"{their_name(experts + '.')}gate_up_proj"][e], torch.cat([w1, w3]))
            assert torch.equal(theirs[f"{their_name(experts + '.')}down_proj"][e], w2)
        unseen -= {f"{their_name(experts + '.')}gate_up_proj", f"{their_name(experts + '.')}down_proj"}
    assert not unseen, f"not in the checkpoint: {sorted(unseen)}"


def test_a_swapped_nibble_would_be_seen(directory, theirs):
    """The planted mistake of the comparison above."""
    store = DirectoryStore(directory)
    name = "layers.3.ffn.experts.2.w2"
    packed = store.get(f"{name}.weight").view(torch.uint8)
    swapped = ((packed << 4) | (packed >> 4)).view(torch.int8)
    values = dequantize(swapped, store.get(f"{name}.scale"))
    assert not torch.equal(theirs["model.layers.3.mlp.experts.down_proj"][2], values)
