"""Weights on a device, with a device that copies as late as it may: a buffer that is reused too early shows in the bytes."""

from __future__ import annotations

import dataclasses
import time
import weakref
from collections import deque
from threading import Lock

import pytest
import torch
from strategies import TINY, MemoryStore, tiny_store
from test_store import bits

from parity.cli import main
from reference.checkpoint.device import BUFFERS, DeviceStore
from reference.checkpoint.loader import LOOKAHEAD
from reference.checkpoint.streaming import HEAD, held_bytes, part_of
from reference.model import Model
from reference.moe import TOGETHER
from reference.state import SequenceState

STAGING = 1000  # bytes: most tensors come in several pieces


class Late:
    """Copies are made when somebody waits for them, in their order. `patient` is whether the caller's waits are heeded."""

    def __init__(self, patient: bool = True) -> None:
        self.queue: deque[tuple[int, torch.Tensor, torch.Tensor]] = deque()
        self.lock, self.made, self.patient = Lock(), 0, patient
        self.live = self.most = 0
        self.pinned_bytes: list[int] = []

    def pinned(self, nbytes):
        self.pinned_bytes.append(nbytes)
        return torch.zeros(nbytes, dtype=torch.uint8)

    def empty(self, nbytes):
        tensor = torch.full((nbytes,), 0x5A, dtype=torch.uint8)
        self.live += nbytes
        self.most = max(self.most, self.live)
        weakref.finalize(tensor.untyped_storage(), self._gone, nbytes)
        return tensor

    def _gone(self, nbytes):
        self.live -= nbytes

    def copy(self, to, source):
        self.made += 1
        self.queue.append((self.made, to, source))
        return self.made

    def _reach(self, event):
        with self.lock:  # both threads wait
            while self.queue and self.queue[0][0] <= event:
                _, to, source = self.queue.popleft()
                to.copy_(source)

    def wait_here(self, event):
        if self.patient:
            self._reach(event)

    def wait_there(self, event):
        self._reach(event)


def settles(device: Late, nbytes: int) -> bool:
    """The thread lets go of a tensor a moment after it has handed it over."""
    until = time.monotonic() + 20
    while device.live != nbytes and time.monotonic() < until:
        time.sleep(0.001)
    return device.live == nbytes


def store() -> MemoryStore:
    return MemoryStore(TINY, tiny_store().values)


def wrong(device: Late) -> list[str]:
    """Tensors that do not arrive bit for bit, all asked for before the first is used."""
    host = store()
    wrapped = DeviceStore(host, device, STAGING)
    wrapped.prefetch(host.tensors)
    got = {name: wrapped.get(name) for name in host.tensors}
    assert all(x.dtype == host.values[name].dtype for name, x in got.items())
    return [name for name, x in got.items() if not torch.equal(bits(x), bits(host.values[name]))]


def test_every_tensor_arrives_bit_for_bit():
    assert wrong(Late()) == []


def test_a_buffer_reused_before_its_copy_is_seen():
    assert len(wrong(Late(patient=False))) > 10


def test_copies_are_queued_in_the_order_of_the_hints():
    device, host = Late(), store()
    wrapped = DeviceStore(host, device, 1 << 20)
    names = ["norm.weight", "head.weight", "layers.1.attn.wq_a.weight", "layers.0.attn.wq_a.scale"]
    wrapped.prefetch(names)
    wrapped.get(names[-1])
    assert device.pinned_bytes == [1 << 20] * BUFFERS and device.made == len(names)
    assert not device.queue  # the last one there means that all before it are
    wrapped.prefetch(names)
    wrapped.get(names[0])
    assert device.made == len(names)  # none comes twice


def test_rows_alone_are_copied_and_do_not_stay():
    device = Late()
    wrapped = DeviceStore(store(), device, STAGING)
    assert torch.equal(bits(wrapped.get("embed.weight", 3, 5)), bits(tiny_store().values["embed.weight"][3:5]))
    assert settles(device, 0) and device.most == 2 * TINY.hidden_size * 2
    wrapped.get("embed.weight")
    made = device.made
    assert torch.equal(bits(wrapped.get("embed.weight", 3, 5)), bits(tiny_store().values["embed.weight"][3:5]))
    assert device.made == made


def test_what_is_released_leaves_and_comes_again():
    device = Late()
    wrapped = DeviceStore(store(), device, STAGING)
    wrapped.get("head.weight")
    assert settles(device, tiny_store().tensors["head.weight"].nbytes)
    wrapped.release(["head.weight", "norm.weight"])
    assert settles(device, 0)
    assert torch.equal(bits(wrapped.get("head.weight")), bits(tiny_store().values["head.weight"]))


def run(model: Model) -> torch.Tensor:
    state = SequenceState()
    parts = [model.forward([ids], [state]) for ids in (torch.arange(9), torch.tensor([3]), torch.tensor([60]))]
    return model.logits(torch.cat(parts))


@pytest.mark.parametrize("memory", [0, 1 << 19, 1 << 21])
def test_a_model_computes_the_same_from_a_device(memory):
    wrapped = DeviceStore(store(), Late(), 40 * STAGING)
    assert torch.equal(run(Model(wrapped, memory=memory)), run(Model(store(), memory=memory)))


def test_the_device_holds_what_memory_says_and_what_is_on_its_way():
    """Eight layers, memory for a few: beside it, a quarter of it in experts and two dense parts are coming, and of a dense
    part one that leaves is still there while the next one is built."""
    config = dataclasses.replace(TINY, num_hidden_layers=8, compress_ratios=(4, 0, 128, 4) * 2 + (0,))
    values, sizes = tiny_store(config=config).values, dict[str, int]()
    for name, info in tiny_store(config=config).tensors.items():
        sizes[part_of(name)] = sizes.get(part_of(name), 0) + held_bytes(name, info, torch.float32)
    dense, expert = max(n for p, n in sizes.items() if p.count(".") == 1), sizes["layers.1.ffn.experts.0"]
    memory = sizes[HEAD] + dense + TOGETHER * expert
    small, large = Late(), Late()
    for device, room in ((small, memory), (large, sum(sizes.values()))):
        run(Model(DeviceStore(MemoryStore(config, values), device, 40 * STAGING), memory=room))
    assert small.most <= memory + memory // 4 + (LOOKAHEAD + 1) * dense < large.most


def test_without_a_gpu_the_command_says_so(capsys):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert main(["generate", "--model", "procedural:mini", "--ids", "1", "--device", "cuda"]) == 4
    assert "no GPU" in capsys.readouterr().err
