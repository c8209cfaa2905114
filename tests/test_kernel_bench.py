"""Timing of kernels, all but the time itself: a clock that is told what everything takes stands in for a GPU's."""

from __future__ import annotations

import pytest
import torch

from optimized.kernels.costs import Step, layer_costs
from parity import cli
from parity.bench import kernels
from parity.bench.draws import Draw
from parity.bench.kernels import Timed, device_named, lines, median_seconds
from parity.bench.roofline import DECODE, DEVICES
from reference.errors import BadInput
from reference.presets import preset

FLUSH = 1000.0
H200 = DEVICES[0]


class FakeClock:
    """A queue in which a flush takes FLUSH seconds, and a call what it says itself."""

    def __init__(self):
        self.now, self.flushed, self.read = 0.0, 0, 0

    def flush(self):
        self.now, self.flushed = self.now + FLUSH, self.flushed + 1

    def mark(self):
        assert not self.read, "a run was queued after the first was read: the host would wait in between"
        return self.now

    def seconds(self, start, end):
        self.read += 1
        return end - start


def script(clock, times):
    left = iter(times)

    def call():
        clock.now += next(left)

    return call


def test_the_median_of_warm_runs_on_cold_caches():
    clock = FakeClock()
    times = [50.0] * kernels.WARM_UP + [3.0, 900.0, 2.0, 4.0, 3.5]
    assert median_seconds(script(clock, times), clock, 5) == 3.5
    assert clock.flushed == clock.read == 5


def test_a_slower_kernel_has_a_smaller_share():
    assert Timed("x", 2e-6, 1e-6).share == 0.5
    head, _, fast, slow, end = lines(DECODE, H200, [Timed("fast", 2e-6, 1e-6), Timed("slow", 4e-6, 1e-6)])
    assert head == "128 sequences to 16,384 tokens, one token each; roofline of H200"
    assert fast.split() == ["fast", "2.00", "1.00", "50.0%"] and slow.split()[-1] == "25.0%" and end == ""


def test_every_call_is_timed_on_operands_of_its_own(monkeypatch):
    """The whole list, both builds, in the interpreter: one run of each, timed by the clock that counts runs."""
    monkeypatch.setattr(kernels, "WARM_UP", 0)
    step, runs = Step(2, 8, 1), []

    class Counting(FakeClock):
        def mark(self):
            self.now += 1.0
            runs.append(self.now)
            return self.now

    timed = list(kernels.measure(preset("mini"), step, H200, Counting(), "cpu", 1))
    assert {t.call for t in timed} == layer_costs(preset("mini"), step).keys()
    assert len(runs) == 2 * len(timed) and all(t.seconds == 1.0 for t in timed)
    assert {t.call for t in timed if not t.floor} == {"compress hca 2buff", "compress hca bf16"}  # no group is complete


def test_operands_follow_the_seed_and_have_no_zeros():
    one, same, other = (Draw("cpu", seed) for seed in (5, 5, 6))
    for draw in ("e4m3", "e2m1", "scales", "bf16"):
        a, b, c = (getattr(d, draw)(64, 96) for d in (one, same, other))
        assert torch.equal(a, b) and not torch.equal(a, c)
    codes = one.e4m3(1 << 14)
    assert set(codes.tolist()) == {c for c in range(256) if c & 0x7F not in (0, 0x7F)}
    assert set(one.e2m1(1 << 14).tolist()) == {c for c in range(256) if c & 7 and c >> 4 & 7}


def test_only_a_known_gpu_has_a_roofline():
    assert device_named("NVIDIA H200", interpreted=False) is H200
    assert device_named("AMD Instinct MI355X", interpreted=False).bandwidth == 8e12
    refused = [(None, True, "no GPU"), ("NVIDIA H200", True, "TRITON_INTERPRET"), ("T4", False, "no roofline for T4")]
    for name, interpreted, why in refused:
        with pytest.raises(BadInput, match=why):
            device_named(name, interpreted)


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
def test_without_a_gpu_the_command_says_so_in_one_line(capsys):
    assert cli.main(["bench", "kernels", "--device", "cuda"]) == 4
    assert capsys.readouterr().err == "v4parity: no GPU: kernels can only be timed on one\n"
