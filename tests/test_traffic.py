"""Meters and bounds of a streamed run, and what they are measured against."""

from __future__ import annotations

import os
import time

import pytest

from parity import traffic
from parity.bench import disk
from parity.bench.limits import Limits
from parity.traffic import Machine, Meter, Work, bound_lines

LIMITS = Limits(read=30e9, read_one=16e9, fma=100e9)
GB = 10**9


@pytest.fixture
def clock(monkeypatch):
    """Seconds that pass when told to."""
    at = [0.0]
    monkeypatch.setattr(traffic.time, "perf_counter", lambda: at[0])
    return at


def test_the_disk_binds_where_it_is_slowest():
    steps = [Work(60 * GB, 6 * GB, 4 * GB), Work(30 * GB, 0, 2 * GB), Work(30 * GB, 0, 0)]
    lines = bound_lines([6.0, 2.0, 1.0], steps, Machine(LIMITS, disk=1e9))
    assert "read 30.0 GB/s (one thread 16.0), disk 1.00 GB/s" in lines[0]
    by = "prompt bound    2.00 s by memory (60.0 GB), 0.10 s by arithmetic, 4.00 s by disk (4.0 GB)"
    assert lines[1] == f"{by}: disk binds, took 1.5x"
    by = "token bound     1.00 s by memory (30.0 GB), 0.00 s by arithmetic, 1.00 s by disk (1.0 GB)"
    assert lines[2] == f"{by}: memory binds, took 1.5x"


def test_progress_is_of_the_step_at_hand(clock):
    done = [Work(0, 0)]
    meter = Meter(lambda: done[0], Machine(LIMITS, disk=1e9))
    done[0], clock[0] = Work(3 * GB, 0, GB // 2), 1.0
    assert meter.now() == "3.00 GB, 0.50 from disk, 0.50 GB/s, 50% of disk"
    meter.token()
    done[0], clock[0] = Work(18 * GB, 0, GB // 2), 2.0
    assert meter.now() == "15.00 GB, 0.00 from disk, 15.00 GB/s, 50% of memory"
    meter.token()
    assert meter.seconds == [1.0, 1.0] and meter.steps == [Work(3 * GB, 0, GB // 2), Work(15 * GB, 0, 0)]


def test_a_resident_run_is_held_to_no_limit(clock):
    done = [Work(0, 0)]
    meter = Meter(lambda: done[0], None)
    done[0], clock[0] = Work(2 * GB, 0), 1.0
    assert meter.now() == "2.00 GB"


@pytest.fixture
def files(tmp_path, monkeypatch):
    monkeypatch.setattr(disk, "REGION", 1 << 20)
    monkeypatch.setattr(disk, "PIECE", 1 << 16)
    for name, size in (("b.safetensors", 3 * (1 << 20) + 12345), ("a.safetensors", 77), ("c.txt", 1 << 20)):
        (tmp_path / name).write_bytes(os.urandom(size))
    return disk.shards(tmp_path)


def test_regions_cover_every_byte_of_the_shards_once(files):
    assert [f.name for f in files] == ["a.safetensors", "b.safetensors"]
    cut = disk.regions(files, seed=1)
    assert sorted(cut) == sorted(disk.regions(files, seed=2)) and cut != disk.regions(files, seed=2)
    for file in files:
        ends = sorted((begin, end) for f, begin, end in cut if f == file)
        assert [begin for begin, _ in ends] == [0, *(end for _, end in ends[:-1])] and ends[-1][1] == file.stat().st_size


def test_every_byte_is_read(files, monkeypatch):
    """The rate is bytes over seconds: with a clock that says one second, it is the size of all."""
    ticks = iter([0.0, 0.5, 0.5, 0.5, 0.5, 0.5, 1.0])
    monkeypatch.setattr(disk.time, "perf_counter", lambda: next(ticks))
    assert disk._rate(disk.regions(files, 0), seconds=9.0, nbytes=0) == sum(file.stat().st_size for file in files)


def test_a_measurement_ends_when_its_time_is_over(files, monkeypatch):
    """And the bytes it must have are read."""
    (_, begin, end), (_, begin2, end2), *_ = parts = disk.regions(files, 0)
    for nbytes, size in ((0, end - begin), (end - begin + 1, end - begin + end2 - begin2)):
        monkeypatch.setattr(disk.time, "perf_counter", iter([0.0, *[5.0] * 3]).__next__)
        assert disk._rate(parts, seconds=5.0, nbytes=nbytes) == size / 5


def test_cold_reads_come_from_the_disk(files):
    """The kernel counts them; warm ones leave the count where it was."""
    for file in files:
        with file.open("r+b") as opened:
            os.fsync(opened.fileno())  # what is not written cannot be forgotten
    before = disk.bytes_from_disk()
    if disk.cold(files, seconds=9.0) and disk.bytes_from_disk() == before:
        pytest.skip("a file system that the kernel counts no reads of")
    read = disk.bytes_from_disk()
    assert read - before >= sum(file.stat().st_size for file in files)
    disk.warm(files, seconds=0.0)
    held = disk.bytes_from_disk()
    began = time.perf_counter()
    assert disk.warm(files, seconds=0.0) > 0 and time.perf_counter() > began
    assert disk.bytes_from_disk() == held
