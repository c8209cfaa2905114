"""Embedding kernel: bytes moved, nothing else."""

from __future__ import annotations

import pytest
import torch
from kernel_cases import mutant, on_device, poison_new_memory

from optimized.kernels import embed as embed_file

embed = on_device(embed_file.embed)
SMALL = embed_file.Tiles(ROWS=2, COLS=32)


def table(rows: int, width: int) -> torch.Tensor:
    """Random bytes, so subnormals, infinities and numbers that are none as well."""
    raw = torch.randint(-(2**15), 2**15, (rows, width), generator=torch.Generator().manual_seed(0))
    return raw.to(torch.int16).view(torch.bfloat16)


def expected(rows: torch.Tensor, ids: torch.Tensor, streams: int) -> torch.Tensor:
    bits = rows.view(torch.int16)[ids] * (ids >= 0)[:, None]
    return bits[:, None].expand(-1, streams, -1)


@pytest.mark.parametrize(("tokens", "width", "streams"), [(1, 1, 4), (5, 40, 4), (19, 130, 2), (35, 300, 4)])
@pytest.mark.parametrize("tiles", [None, SMALL])
def test_every_stream_gets_the_bytes_of_its_row(monkeypatch, tokens, width, streams, tiles):
    poison_new_memory(monkeypatch)
    rows = table(50, width)
    ids = torch.randint(0, 50, (tokens,), generator=torch.Generator().manual_seed(1))
    ids[2::4] = -1
    out = embed(rows, ids, streams, tiles=tiles)
    assert torch.equal(out.view(torch.int16), expected(rows, ids, streams))


def test_a_strided_table_and_no_tokens():
    wide = table(20, 9000)
    rows, ids = wide[:, 70:300], torch.tensor([19, 0, -1, 7])
    assert torch.equal(embed(rows, ids, 4).view(torch.int16), expected(rows, ids, 4))
    assert embed(rows, ids[:0], 4).shape == (0, 4, 230)


def test_ids_of_another_type_are_refused():
    with pytest.raises(ValueError, match="ids"):
        embed(table(3, 16), torch.zeros(2, dtype=torch.int32), 4)


@pytest.mark.parametrize(
    "edit",
    [
        ("token * table_stride", "token * D"),
        ("(token >= 0) & (d < D)", "(d < D)"),
        ("t[:, None] * STREAMS + s", "t[:, None] * STREAMS"),
        ("(t[:, None] * STREAMS + s) * D", "(s * T + t[:, None]) * D"),  # streams outermost
    ],
)
def test_planted_mistakes_are_seen(tmp_path, monkeypatch, edit):
    wrong = on_device(mutant(embed_file, tmp_path, edit).embed)
    poison_new_memory(monkeypatch)
    rows, ids = table(20, 400)[1:, :300], torch.tensor([3, 0, 11, -1, 7])
    assert not torch.equal(wrong(rows, ids, 4).view(torch.int16), expected(rows, ids, 4))
