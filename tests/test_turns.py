"""Steps from a directory in turn with its disk."""

from __future__ import annotations

import pytest
from checkpoint_files import write_tiny

from parity.bench import disk, full, turns
from parity.bench import limits as limits_of
from parity.bench.limits import Limits
from parity.bench.turns import Turn, lines
from parity.cli import main
from reference.checkpoint.directory import DirectoryStore

LIMITS = Limits(read=20e9, read_one=16e9, fma=100e9)
GB = 10**9


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    path = tmp_path_factory.mktemp("turns") / "tiny"
    write_tiny(path)
    return path


def turn(disk: float, cold: float, warm: float, warm_read: int = 0) -> Turn:
    return Turn(disk, cold, warm, 4 * GB, 4 * GB, warm_read)


def test_ratios_are_of_medians():
    measured = [turn(1e9, 5.0, 0.3), turn(2e9, 40.0, 0.1), turn(0.5e9, 4.0, 9.0)]
    cold, warm = lines(measured, LIMITS)
    assert cold == "cold step 5.00 s, 4.00 GB touched: 1.25x what the disk allows (medians of 3)"
    assert warm == "warm step 0.30 s: 1.50x what memory allows (medians of 3)"


def test_a_step_that_reads_again_is_not_called_warm():
    measured = [turn(1e9, 5.0, 0.3), turn(1e9, 5.0, 0.3, warm_read=GB // 20)]
    assert "does not stay in memory" in lines(measured, LIMITS)[1]
    assert "what memory allows" in lines([turn(1e9, 5.0, 0.3, warm_read=GB // 50)], LIMITS)[1]


def test_a_cold_step_reads_what_it_touches(tiny):
    """And the same step again reads nothing, in memory that holds everything."""
    found = list(turns.turns(DirectoryStore(tiny), disk.shards(tiny), 1 << 20, 3))
    if not any(t.cold_read for t in found):
        pytest.skip("a file system that the kernel counts no reads of")
    assert len(found) == 3 and all(t.cold_read >= t.touched > 0 and t.warm_read == 0 for t in found)
    assert all(t.cold > 0 and t.warm > 0 and t.disk > 0 for t in found)
    assert len({t.touched for t in found}) == 1


def test_bench_full_takes_turns_with_a_directory(tiny, capsys, monkeypatch):
    monkeypatch.setattr(limits_of, "measure", lambda: LIMITS)
    monkeypatch.setattr(full, "ratios", lambda *_, **__: iter(()))
    assert main(["bench", "full", "--model", str(tiny), "--turns", "2"]) == 0
    out = capsys.readouterr().out.splitlines()
    disk = next(i for i, line in enumerate(out) if line.startswith("disk "))
    assert out[disk].endswith("from the system's cache")
    assert [line.count(" touched, ") for line in out[disk + 1 : disk + 3]] == [1, 1]
    assert "medians of 2" in out[disk + 3] and out[-1].startswith("peak RSS")
