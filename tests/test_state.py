"""Ragged batches and the states of sequences."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import TINY, tiny_model, tokens

from reference.state import Batch, SequenceState

lengths = st.lists(st.integers(1, 9), min_size=1, max_size=5)


def batch_of(sizes: list[int]) -> Batch:
    bounds = [0, *torch.tensor(sizes).cumsum(0).tolist()]
    return Batch(torch.arange(bounds[-1]), torch.cat([torch.arange(n) for n in sizes]), bounds)


@given(lengths, st.integers(1, 12))
def test_blocks_and_parts_cover_each_token_once(sizes: list[int], size: int) -> None:
    """Walking blocks, and the sequences' parts in each, meets every token once, in order, under its own sequence."""
    batch, met = batch_of(sizes), []
    owner = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    for block in batch.blocks(size):
        assert block.stop - block.start <= size
        for b, part in batch.parts(block):
            ids = batch.ids[block][part]
            assert (owner[ids] == b).all()
            met += ids.tolist()
    assert met == batch.ids.tolist()


@given(lengths)
def test_sequences_are_the_pieces(sizes: list[int]) -> None:
    assert [s.stop - s.start for s in batch_of(sizes).sequences()] == sizes


def test_positions_continue_each_state() -> None:
    batch = tiny_model().batch([tokens(2, 0), tokens(3, 1)], [SequenceState(length=5), SequenceState()])
    assert batch.positions.tolist() == [5, 6, 0, 1, 2]
    assert batch.bounds == [0, 2, 5]


def test_a_state_holds_a_window_less_one_and_the_finished_rows() -> None:
    """Nothing in it grows with the prompt but the compressed rows."""
    model, state = tiny_model(), SequenceState()
    model.forward([tokens(131, 0)], [state])
    for layer, ratio in zip(state.layers, TINY.compress_ratios, strict=False):
        assert len(layer.window) == TINY.sliding_window - 1
        assert (layer.compressor is None) == (ratio == 0)
        assert (layer.indexer is None) == (ratio != 4)
        for compressor in (layer.compressor, layer.indexer):
            if compressor is not None:
                assert len(compressor.rows) == 131 // ratio
                assert len(compressor.values) == 131 % ratio + (4 if ratio == 4 else 0)


def test_steps_change_no_tensor_in_place() -> None:
    model, state = tiny_model(), SequenceState()
    model.forward([tokens(9, 0)], [state])
    kept = state.copy()
    before = [layer.window.clone() for layer in kept.layers]
    model.forward([tokens(9, 1)], [state])
    assert all(torch.equal(layer.window, old) for layer, old in zip(kept.layers, before, strict=True))
