"""FlashMLA's pages: every byte of a row in its published place, both ways, and rows that do not fit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_cases import mutant

from optimized.pool import flashmla, rows
from reference.errors import BadInput


def random_rows(pages: int, tokens: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Any codes, scale bytes and rotated channels, NaN among them; a token's seven scales all differ."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (pages, tokens, 448), generator=generator, dtype=torch.uint8)
    scales = torch.rand(pages, tokens, 256, generator=generator).argsort(-1)[..., :7].to(torch.uint8)
    rotated = torch.randint(0, 256, (pages, tokens, 128), generator=generator, dtype=torch.uint8)
    return rows.pack_2buff(codes, scales, 512), rotated.view(torch.bfloat16)


def page_by_hand(main: torch.Tensor, rotated: torch.Tensor) -> bytes:
    """One page [P, ...] token by token and byte by byte."""
    tokens = len(main)
    stride = -(-584 * tokens // 576) * 576
    page = bytearray(stride)
    for i in range(tokens):
        page[576 * i : 576 * i + 448] = bytes(main[i, :448].tolist())
        page[576 * i + 448 : 576 * i + 576] = bytes(rotated[i].view(torch.uint8).tolist())
        for g in range(7):
            page[576 * tokens + 8 * i + g] = int(main[i, 448 + 2 * g])
    return bytes(page)


def faults(pages: int, tokens: int, module=flashmla) -> list[str]:
    main, rotated = random_rows(pages, tokens, seed=tokens)
    there = module.to_pages(main, rotated)
    found = [f"page {n}" for n in range(pages) if bytes(there[n].tolist()) != page_by_hand(main[n], rotated[n])]
    dirty = there.clone()
    dirty[:, 576 * tokens + 7 : 584 * tokens : 8] = 0xA5  # pads
    dirty[:, 584 * tokens :] = 0x5A
    for name, page in (("clean", there), ("dirty", dirty)):
        back, turned = module.from_pages(page, tokens)
        if not torch.equal(back, main) or not torch.equal(turned.view(torch.uint8), rotated.view(torch.uint8)):
            found.append(f"back from {name} pages")
    return found


@pytest.mark.parametrize(("tokens", "stride"), [(64, 37440), (128, 74880), (256, 149760), (2, 1728), (1, 1152)])
def test_a_page_is_a_whole_number_of_tokens_data(tokens, stride):
    assert flashmla.page_bytes(tokens) == stride


@pytest.mark.parametrize("tokens", [1, 2, 63, 64, 72])
def test_rows_and_pages_hold_the_same_bytes(tokens):
    assert faults(3, tokens) == []


def test_shapes_without_and_with_more_dimensions():
    main, rotated = random_rows(6, 64)
    there = flashmla.to_pages(main, rotated)
    assert torch.equal(flashmla.to_pages(main[2], rotated[2]), there[2])
    nested = flashmla.to_pages(main.view(2, 3, 64, 512), rotated.view(2, 3, 64, 64))
    assert torch.equal(nested, there.view(2, 3, -1))
    back, turned = flashmla.from_pages(nested, 64)
    assert torch.equal(back, main.view(2, 3, 64, 512)) and turned.shape == (2, 3, 64, 64)


def test_rows_that_a_kernel_wrote_into_a_wide_pool():
    """Strided views, as `Pool.layer_rows` gives them."""
    main, rotated = random_rows(1, 64)
    wide, wide_rotated = torch.full((64, 700), 7, dtype=torch.uint8), torch.zeros(64, 96).bfloat16()
    wide[:, 100:612], wide_rotated[:, 32:] = main[0], rotated[0]
    assert torch.equal(flashmla.to_pages(wide[:, 100:612], wide_rotated[:, 32:]), flashmla.to_pages(main, rotated)[0])


@given(st.integers(0, 1), st.integers(0, 63), st.integers(448, 511), st.integers(1, 255))
def test_a_row_that_a_page_has_no_place_for_is_refused(page, token, byte, change):
    """One byte off in the scale copies or in the padding: nothing is lost in silence."""
    main, rotated = random_rows(2, 64)
    main[page, token, byte] ^= change
    place = byte if byte >= 462 or byte % 2 else byte + 1  # of a pair, the copy is the one that is wrong
    with pytest.raises(BadInput, match=rf"2buff row \[{page}, {token}\]: byte {place} is "):
        flashmla.to_pages(main, rotated)


@pytest.mark.parametrize("size", [37439, 37376, 0])
def test_pages_of_another_size_are_refused(size):
    with pytest.raises(BadInput, match="64 tokens take 37440"):
        flashmla.from_pages(torch.zeros(3, size, dtype=torch.uint8), 64)


MISTAKES = {
    "scales first": ("split([tokens * DATA, tokens * SCALES], -1)", "roll(1, -1).split([tokens * DATA, tokens * SCALES], -1)"),
    "rotated channels in front": ("data[..., NOPE:] = rotated", "data[..., : 2 * ROPE] = rotated"),
    "a scale lost": ("behind[..., :TILES] = scales", "behind[..., : TILES - 1] = scales[..., :-1]"),
    "scales without a pad": ("SCALES = TILES + 1 ", "SCALES = TILES "),
    "no room for the tail": ("round_up(tokens * (DATA + SCALES), DATA)", "tokens * (DATA + SCALES)"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_planted_mistakes_are_seen(tmp_path: Path, mistake: str):
    assert faults(2, 3, mutant(flashmla, tmp_path, MISTAKES[mistake]))
