"""Window write and inverse RoPE."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import illegal_bf16, mutant, on_device, poison_new_memory, uneven
from row_cases import turned

from optimized.kernels import inverse_rope as rope_file
from optimized.kernels import window_write as window_file
from optimized.pool.geometry import Geometry
from optimized.pool.pool import Pool
from optimized.rope import rope_table
from reference.presets import preset

CONTEXT, EXTEND, SEQUENCES = [300, 20, 7, 18], [40, 20, 3, 1], 4  # longer than the ring of 18, and shorter


class Step:
    """Payload and destinations of a mixed step on mini's pool, whose every byte is poison."""

    def __init__(self, build: str, kind: str = "csa", seed: int = 0):
        config = preset("mini")
        self.geometry = Geometry(config, build, lookahead=2, drafter_blocks=1)
        self.pool = Pool(self.geometry, blocks=2, slots=5)
        self.pool.poison()
        self.layer = self.geometry.kinds.index(kind)
        batch = torch.repeat_interleave(torch.arange(SEQUENCES), torch.tensor(EXTEND))
        start = torch.tensor(CONTEXT)[batch] - torch.tensor(EXTEND)[batch]
        first = torch.tensor([0, *EXTEND]).cumsum(0)[batch]
        self.positions = start + torch.arange(len(batch)) - first
        slots = torch.tensor([self.pool.slot_position(g) for g in (3, 0, 4, 1)])[batch]
        rows = torch.from_numpy(self.geometry.window_index(kind, slots.numpy(), self.positions.numpy()))
        self.destination = window_file.last_writes(rows, self.positions, torch.tensor(CONTEXT)[batch], self.geometry.ring)
        self.destination[-2] = -1  # a padded token
        generator = torch.Generator().manual_seed(seed)
        self.payload, self.views = [], list(self.pool.layer_rows(self.layer))
        for view in self.views:
            width = view.shape[1] * view.element_size()
            wide = torch.randint(0, 256, (len(batch), 2 * width), generator=generator, dtype=torch.uint8)
            self.payload.append(wide.view(view.dtype)[:, : view.shape[1]])
        if build == "bf16":
            self.payload.append(None)
            self.views.append(None)

    def faults(self, module=window_file, **how) -> str:
        on_device(module.write_window)(*self.payload, *self.views, self.destination, **how)
        kept = self.destination >= 0
        if len(self.destination[kept].unique()) != kept.sum():
            return "two tokens meet"
        for view, rows in zip(self.views, self.payload, strict=True):
            if view is not None:
                if not torch.equal(view[self.destination[kept]].view(torch.uint8), rows[kept].view(torch.uint8)):
                    return "rows"
                view.view(torch.uint8)[self.destination[kept]] = 0xFF
        return "" if (self.pool.memory == 0xFF).all() else "a byte outside its rows was written"


@pytest.mark.parametrize("build", ["2buff", "bf16"])
@pytest.mark.parametrize("kind", ["window", "hca", "csa"])
@pytest.mark.parametrize("tiles", [None, window_file.Tiles(ROWS=4)])
def test_rows_reach_their_ring_and_nothing_else_changes(build, kind, tiles):
    assert Step(build, kind).faults(tiles=tiles) == ""


def test_every_last_position_of_a_ring_is_written():
    step = Step("2buff")
    written = step.positions[: EXTEND[0]][step.destination[: EXTEND[0]] >= 0]
    assert written.tolist() == list(range(CONTEXT[0] - step.geometry.ring, CONTEXT[0]))


@pytest.mark.parametrize("build", ["2buff", "bf16"])
def test_rows_behind_two_gib(build):
    far, width = 5_000_000, 512
    planes = [torch.empty(far + 2, width, dtype=torch.uint8 if build == "2buff" else torch.bfloat16)]
    planes.append(torch.empty(far + 2, 64, dtype=torch.bfloat16) if build == "2buff" else None)
    payload = [None if p is None else torch.ones(2, p.shape[1], dtype=p.dtype) for p in planes]
    on_device(window_file.write_window)(*payload, *planes, torch.tensor([far, far + 1]))
    assert all((p[far:] == 1).all() for p in planes if p is not None)


def test_empty_steps_and_mixed_builds():
    step = Step("2buff")
    on_device(window_file.write_window)(*(p[:0] for p in step.payload), *step.views, step.destination[:0])
    assert (step.pool.memory == 0xFF).all()
    with pytest.raises(ValueError, match="builds"):
        window_file.write_window(*step.payload, *Step("bf16").views, step.destination)


WINDOW_MISTAKES = {
    "padded tokens written": ("mask=t < T, other=-1)", "mask=t < T, other=-1); row = tl.where(t < T, tl.abs(row), -1)"),
    "rotated channels forgotten": ("if not BF16:", "if BF16:"),
    "half a row": ("d < WIDTH", "d < WIDTH // 2"),
    "payload of another token": ("source + t[:, None]", "source + row[:, None] * 0 + t[:, None] // 2"),
    "no last token": ("mask=t < T,", "mask=t < T - 1,"),
}


@pytest.mark.parametrize("mistake", WINDOW_MISTAKES)
def test_planted_mistakes_in_the_window_write_are_seen(tmp_path, mistake):
    assert Step("2buff").faults(mutant(window_file, tmp_path, WINDOW_MISTAKES[mistake]))


def test_early_tokens_of_a_long_step_must_not_write():
    """The rule of `last_writes` is needed: without it two tokens of one sequence meet in a ring row."""
    step = Step("2buff")
    slots = torch.zeros(len(step.positions), dtype=torch.int64).numpy()
    step.destination = torch.from_numpy(step.geometry.window_index("csa", slots, step.positions.numpy()))
    assert step.faults() == "two tokens meet"


def attention_output(tokens: int = 6, heads: int = 5, head_dim: int = 512):
    generator = torch.Generator().manual_seed(1)
    wide = uneven(generator, tokens, heads * head_dim + 8).bfloat16()
    x = wide[:, : heads * head_dim].unflatten(-1, (heads, head_dim))
    positions = torch.tensor([0, 1, 127, 4096, 65_536, 999_999] * tokens)[:tokens]
    return x, *rope_table(preset("mini"), 2, positions)


def rope_faults(args, module=rope_file, **how) -> str:
    x, cos, sin = args
    got = on_device(module.inverse_rope)(x, cos, sin, **how)
    want, bound = turned(x.double(), torch.zeros(x.shape).double(), cos[:, None].double(), -sin[:, None].double())
    if not torch.equal(got[..., :-64], x[..., :-64]):
        return "channels without rotation"
    return "rotated channels" if illegal_bf16(got, want, bound).any() else ""


@pytest.mark.parametrize("tiles", [None, rope_file.Tiles(ROWS=4)])
@pytest.mark.parametrize("head_dim", [512, 192, 64])
def test_inverse_rope_within_the_bound(tiles, head_dim, monkeypatch):
    args = attention_output(head_dim=head_dim)
    poison_new_memory(monkeypatch)
    assert rope_faults(args, tiles=tiles) == ""


@settings(max_examples=10)
@given(st.integers(0, 9), st.integers(1, 20))
def test_inverse_rope_of_any_shape(tokens, heads):
    assert rope_faults(attention_output(tokens, heads, 128)) == ""


def test_inverse_rope_in_place():
    x, cos, sin = attention_output()
    want = on_device(rope_file.inverse_rope)(x, cos, sin)
    on_device(rope_file.inverse_rope)(x, cos, sin, x)
    assert torch.equal(x, want)


ROPE_MISTAKES = [
    ("-1.0, HEAD_DIM", "1.0, HEAD_DIM"),
    ("t = row // H", "t = 0 * row"),
    ("live = row < T * H", "live = row < T * H - 1"),
]


@pytest.mark.parametrize("edit", ROPE_MISTAKES)
def test_planted_mistakes_in_the_inverse_are_seen(tmp_path, edit, monkeypatch):
    poison_new_memory(monkeypatch)
    assert rope_faults(attention_output(), mutant(rope_file, tmp_path, edit))
