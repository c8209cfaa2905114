"""A model read from files while it is used: what is asked of the disk, in which order, and what memory it takes."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from strategies import TINY, MemoryStore, tiny_store
from test_store import bits, tiny  # noqa: F401  (a fixture)

from reference.checkpoint import directory
from reference.checkpoint.directory import DirectoryStore
from reference.checkpoint.mapping import MappedFile, joined
from reference.checkpoint.procedural import ProceduralStore
from reference.checkpoint.streaming import Streaming, held_bytes, part_of
from reference.checkpoint.writer import write_checkpoint
from reference.config import Config
from reference.model import Model
from reference.presets import CONFIG_JSON
from reference.state import SequenceState

EXPERT = [f"layers.1.ffn.experts.10.{w}.{part}" for w in ("w1", "w2", "w3") for part in ("weight", "scale")]
MEMORY, WORKING = 24 << 20, 16 << 20  # bytes; the second for states, activations and pages at the edges of ranges


class Recording(MemoryStore):
    """Remembers what it was told, in parts."""

    def __init__(self) -> None:
        super().__init__(TINY, tiny_store().values)
        self.told: list[tuple[str, str]] = []

    def prefetch(self, names):
        self.told.append(("prefetch", one_part(names)))

    def release(self, names):
        self.told.append(("release", one_part(names)))

    def get(self, name, start=0, stop=None):
        self.told.append(("get", part_of(name)))
        return super().get(name, start, stop)


def one_part(names) -> str:
    parts = {part_of(name) for name in names}
    assert len(parts) == 1
    return parts.pop()


def step(memory: int, ids: list[int]) -> list[tuple[str, str]]:
    store = Recording()
    Model(store, memory=memory).forward([torch.tensor(ids)], [SequenceState()])
    return store.told


@pytest.fixture
def asked(monkeypatch):
    """(begin, end) of every range read ahead or dropped, instead of doing so."""
    seen: dict[str, list] = {"fetch": [], "drop": []}
    monkeypatch.setattr(MappedFile, "fetch", lambda self, b, e: seen["fetch"].append((b, e)))
    monkeypatch.setattr(MappedFile, "drop", lambda self, b, e, from_cache: seen["drop"].append((b, e, from_cache)))
    return seen


def test_ranges_that_touch_become_one():
    assert joined([(7, 9), (0, 3), (3, 5), (4, 6)]) == [(0, 6), (7, 9)]
    assert joined([(0, 9), (2, 3)]) == [(0, 9)] and joined([]) == []


def test_an_expert_is_two_ranges_of_its_file(tiny, asked):  # noqa: F811
    store = DirectoryStore(tiny)
    store.release(EXPERT)
    assert len(asked["drop"]) == 2
    assert sum(e - b for b, e, _ in asked["drop"]) == sum(store.tensors[name].nbytes for name in EXPERT)


def test_prefetching_asks_for_what_was_named(tiny, asked):  # noqa: F811
    store = DirectoryStore(tiny)
    store.prefetch(EXPERT)
    store.prefetch(["norm.weight"])
    while len(asked["fetch"]) < 3:
        pass
    assert sum(e - b for b, e in asked["fetch"]) == sum(store.tensors[n].nbytes for n in [*EXPERT, "norm.weight"])


@pytest.mark.parametrize("available", [0, 1 << 40])
def test_the_systems_cache_keeps_what_memory_could_hold(available, tiny, asked, monkeypatch):  # noqa: F811
    monkeypatch.setattr(directory, "available_memory", lambda: available)
    DirectoryStore(tiny).release(EXPERT)
    assert [from_cache for _, _, from_cache in asked["drop"]] == [available == 0] * 2


def test_views_stay_valid_when_their_pages_have_left(tiny, monkeypatch):  # noqa: F811
    monkeypatch.setattr(directory, "available_memory", lambda: 0)
    store = DirectoryStore(tiny)
    values = {name: store.get(name) for name in store.tensors}
    before = {name: bits(value).clone() for name, value in values.items()}
    store.prefetch(store.tensors)
    store.release(store.tensors)
    assert all(torch.equal(bits(value), before[name]) for name, value in values.items())


def test_a_file_is_mapped_once(tiny):  # noqa: F811
    store = DirectoryStore(tiny)
    first = [store.get(name).data_ptr() for name in store.tensors]
    assert [store.get(name).data_ptr() for name in store.tensors] == first


def test_parts_of_a_model():
    names = {"embed.weight": "embed", "head.weight": "head", "hc_head_fn": "head", "layers.12.attn.wq_a.scale": "layers.12",
             "layers.3.ffn.experts.17.w2.scale": "layers.3.ffn.experts.17", "mtp.0.enorm.weight": "mtp.0",
             "layers.3.ffn.shared_experts.w1.weight": "layers.3", "mtp.1.ffn.experts.0.w1": "mtp.1.ffn.experts.0"}  # fmt: skip
    assert {name: part_of(name) for name in names} == names


def test_a_copy_in_another_dtype_counts():
    tensors = tiny_store().tensors
    for name, times in (("norm.weight", 3), ("head.weight", 1), ("hc_head_fn", 1), ("layers.0.attn.wq_a.weight", 1)):
        assert held_bytes(name, tensors[name], torch.float32) == times * tensors[name].nbytes
    assert held_bytes("hc_head_fn", tensors["hc_head_fn"], torch.float64) == 3 * tensors["hc_head_fn"].nbytes


def test_everything_is_asked_for_before_it_is_read():
    """Layer 0 is a hash layer: its experts come with its dense part, those of others behind their router."""
    told = step(1 << 19, [3, 5, 8])
    for layer in range(TINY.num_hidden_layers):
        chosen = {part for what, part in told if part.startswith(f"layers.{layer}.ffn.experts.")}
        assert len(chosen) >= 2
        for part in {f"layers.{layer}", *chosen}:
            reads = [i for i, event in enumerate(told) if event == ("get", part)]
            if part != "layers.0":  # read for its hash table, before anything was asked for
                assert told.index(("prefetch", part)) < reads[0]
    order = [part for what, part in told if what == "prefetch"]
    assert order[0] == "layers.0" and order.index("layers.1") == len([p for p in order if p.startswith("layers.0")])
    behind = [part for layer in (1, 2) for part in order if part.startswith(f"layers.{layer}.ffn")]
    assert order.index("layers.2") < order.index(behind[0]) < order.index("layers.3") < order.index(behind[-1])
    assert len(order) == len(set(order))


def test_without_room_a_layer_leaves_when_the_next_one_comes():
    told = step(0, [3])
    for layer in range(TINY.num_hidden_layers - 1):
        left = told.index(("release", f"layers.{layer}"))
        assert left > max(i for i, event in enumerate(told) if event == ("get", f"layers.{layer}"))
        assert ("get", f"layers.{layer + 1}") not in told[:left]


def test_what_stays_is_neither_read_nor_asked_for_again():
    store = Recording()
    model, state = Model(store, memory=sum(i.nbytes for i in store.tensors.values())), SequenceState()
    assert not model.loader.resident
    model.forward([torch.tensor([3])], [state])
    touched = model.loader.touched
    store.told.clear()
    model.forward([torch.tensor([3])], [state])
    again = {part for what, part in store.told if what == "get" and "experts" not in part}
    assert again == {"embed", "layers.0"}  # a row of the embedding, and of the hash table
    assert not {part for what, part in store.told if what != "get" and "experts" not in part}
    assert model.loader.touched - touched == touched  # used all the same


def test_a_resident_model_hears_no_hints():
    assert {what for what, _ in step(1 << 40, [3, 4])} == {"get"}


def test_touched_bytes_are_those_of_the_parts_used():
    traffic, expert = Streaming(tiny_store(), torch.float32, 0), "layers.0.ffn.experts.3"
    for part in ("layers.0", expert, "layers.0"):
        traffic.use(part)
    size = {part: sum(i.nbytes for n, i in tiny_store().tensors.items() if part_of(n) == part) for part in ("layers.0", expert)}
    assert traffic.touched == 2 * size["layers.0"] + size[expert] and 0 < size[expert] < size["layers.0"]


CHILD = """
import sys
from pathlib import Path
import torch
from parity.options import peak_rss
from reference.checkpoint.directory import DirectoryStore
from reference.checkpoint.procedural import ProceduralStore
from reference.generate import Sampling, generate
from reference.model import Model

ids, store = torch.arange(40), DirectoryStore(Path(sys.argv[1]))
peaks = []
for source, memory in ((ProceduralStore("mini"), 0), (store, int(sys.argv[2])), (store, 1 << 29)):
    list(generate(Model(source, memory=memory), ids, 4, Sampling(2.0)))
    peaks.append(peak_rss())  # the first is what torch and the kernels take
print(peaks[1] - peaks[0], peaks[2] - peaks[0])
"""


def test_mapped_pages_stay_within_memory(tmp_path):
    """A directory of 170 MB, tokens that touch all its layers and many experts, and memory for a seventh of it."""
    fields = {**CONFIG_JSON["mini"], "moe_intermediate_size": 1024, "n_routed_experts": 64}
    write_checkpoint(ProceduralStore(Config.from_dict(fields)), fields, tmp_path / "big", lambda number, file: None)
    command = [sys.executable, "-c", CHILD, str(tmp_path / "big"), str(MEMORY)]
    small, large = map(int, subprocess.run(command, check=True, capture_output=True, text=True).stdout.split())
    assert small < MEMORY + WORKING
    assert large > 2 * (MEMORY + WORKING)  # the measurement sees pages that stay
