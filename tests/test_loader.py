"""Resident or streamed, the weights are the same; memory holds what it says."""

from __future__ import annotations

import pytest
import torch
from strategies import TINY, MemoryStore, tiny_store

from reference.checkpoint.loader import Loader, dense_bytes
from reference.checkpoint.streaming import HEAD, held_bytes, part_of
from reference.errors import BadInput
from reference.model import Model
from reference.state import SequenceState

IDS = torch.arange(3, 43)
EXPERT = sum(info.nbytes for name, info in tiny_store().tensors.items() if name.startswith("layers.0.ffn.experts.0."))


def run(model: Model) -> torch.Tensor:
    return model.logits(model.forward([IDS], [SequenceState()]))


def test_a_streamed_model_gives_the_resident_ones_logits():
    resident, streamed = (Model(tiny_store(), torch.float64, memory=m) for m in (1 << 40, 0))
    assert resident.loader.resident and not streamed.loader.resident
    a, b = run(resident), run(streamed)
    eps = torch.finfo(torch.float64).eps
    assert (a - b).abs().max() <= 2**16 * eps * a.abs().max()  # the same products, tile by tile
    assert not torch.equal(a, torch.zeros_like(a))


def test_dense_bytes_counts_two_codes_a_byte():
    info = tiny_store().tensors
    weights = [i for name, i in info.items() if i.dtype == "I8"]
    assert weights
    without = MemoryStore(TINY, {n: v for n, v in tiny_store().values.items() if info[n].dtype != "I8"})
    packed = sum(i.nbytes for i in weights)
    assert dense_bytes(tiny_store(), torch.float64) - dense_bytes(without, torch.float64) == 2 * packed * 8


def test_experts_leave_when_memory_is_full():
    """Eight are there in any case, those of one call; here there is room for nine, beside the head."""
    head = sum(held_bytes(n, i, torch.float32) for n, i in tiny_store().tensors.items() if part_of(n) == HEAD)
    loader = Loader(tiny_store(), torch.float32, memory=head + 9 * EXPERT)
    experts = [loader.expert("layers.0.ffn", e) for e in range(9)]
    assert loader.experts_read == 9
    assert loader.expert("layers.0.ffn", 0) is experts[0]  # used again: now expert 1 is the oldest
    loader.expert("layers.1.ffn", 3)
    assert loader.expert("layers.0.ffn", 0) is experts[0] and loader.experts_read == 10
    assert loader.expert("layers.0.ffn", 1) is not experts[1] and loader.experts_read == 11
    assert loader.experts_used == {*(f"layers.0.ffn.experts.{e}" for e in range(9)), "layers.1.ffn.experts.3"}
    assert loader.touched == 13 * EXPERT


def test_only_the_experts_that_tokens_chose_are_read():
    store = MemoryStore(TINY, tiny_store().values)
    model = Model(store, memory=0)
    model.forward([IDS[:1]], [SequenceState()])
    layers = TINY.num_hidden_layers
    assert len(model.loader.experts_used) == layers * TINY.num_experts_per_tok
    assert store.bytes_read < sum(i.nbytes for i in store.tensors.values())


def test_a_quantised_weight_without_its_scale_is_refused():
    name = "layers.1.attn.wq_a.scale"
    store = MemoryStore(TINY, {n: v for n, v in tiny_store().values.items() if n != name})
    with pytest.raises(BadInput, match=name):
        Model(store).forward([IDS], [SequenceState()])


def test_states_hold_no_views_of_the_whole_prompt():
    state = SequenceState()
    Model(tiny_store()).forward([torch.arange(600) % TINY.vocab_size], [state])
    for layer in state.layers:
        held = [layer.window]
        held += [t for c in (layer.compressor, layer.indexer) if c for t in (c.values, c.gates, c.rows)]
        assert all(t.untyped_storage().nbytes() == t.nbytes for t in held)
