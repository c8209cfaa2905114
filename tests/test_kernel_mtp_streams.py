"""The addition in front of the MTP block: one rounding of an exact sum, each stream with its own token."""

from __future__ import annotations

import pytest
import torch
from kernel_cases import mutant, on_device

from optimized.kernels import mtp_streams as module
from optimized.kernels.mtp_streams import Tiles

add = on_device(module.mtp_streams)
SMALL = Tiles(ROWS=2, COLS=32)


def case(tokens: int, streams: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Magnitudes apart, so that sums round; some cancel, some are ties; e lies between other columns."""
    g = torch.Generator().manual_seed(tokens)
    h = (torch.randn(tokens, streams, width, generator=g) * 2.0 ** torch.randint(-6, 6, (width,), generator=g)).bfloat16()
    e = torch.full((tokens, width + 3), torch.nan, dtype=torch.bfloat16)[:, 1 : width + 1]
    e.copy_(torch.randn(tokens, width, generator=g))
    e[:, 0], h[:, 0, 0], h[:, 1:, 0] = 1.0, 2.0**-8, 3 * 2.0**-8  # ties to the even code below and above
    return e, h


def expected(e: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
    return (e.double()[:, None] + h.double()).to(torch.bfloat16)  # 24 bits hold any sum here: double adds nothing


@pytest.mark.parametrize(("tokens", "streams", "width"), [(1, 4, 256), (17, 2, 72), (5, 4, 40)])
@pytest.mark.parametrize("tiles", [None, SMALL])
def test_one_rounding_of_the_sum(tokens, streams, width, tiles):
    e, h = case(tokens, streams, width)
    assert torch.equal(add(e, h, tiles=tiles), expected(e, h))


@pytest.mark.parametrize(
    "edit",
    [
        ("(t * STREAMS + s) * D + d", "(s * T + t) * D + d"),
        ("e + t * e_stride + d", "e + d"),
        ("bf16_rn(token + bf16_up(tl.load(h + at, mask=inside, other=0.0)))", "tl.load(h + at, mask=inside, other=0.0)"),
    ],
)
def test_planted_mistakes_are_seen(tmp_path, edit):
    e, h = case(5, 4, 40)
    assert not torch.equal(on_device(mutant(module, tmp_path, edit).mtp_streams)(e, h, tiles=SMALL), expected(e, h))


def test_tokens_two_gib_away_nothing_and_refusals():
    e, h = case(2, 4, 40)
    far = torch.empty(3 << 29, dtype=torch.bfloat16).as_strided((2, 40), (5 << 28, 1))
    assert torch.equal(add(far.copy_(e), h), expected(e, h))
    assert add(e[:0], h[:0]).shape == (0, 4, 40)
    with pytest.raises(ValueError, match="e is"):
        add(e[:1], h)
    with pytest.raises(ValueError, match="h has strides"):
        add(e, h.transpose(0, 1).contiguous().transpose(0, 1))
