"""The benchmark measures what it says: own processes, one engine each, ratios the right way up."""

from __future__ import annotations

import pytest

from parity.bench.reference import ENGINES, Job, Measured, measure, ratios


def test_ratios_are_above_one_where_the_reference_is_faster():
    ours = [Measured(1.0, 2.0, 100, 50), Measured(9.0, 2.0, 300, 50), Measured(1.0, 2.0, 100, 50)]
    theirs = [Measured(3.0, 1.0, 400, 50)] * 3
    assert ratios(ours, theirs) == {"prefill speed": 3.0, "decode speed": 0.5, "peak memory": 0.25}


@pytest.mark.oracle
@pytest.mark.parametrize("engine", ENGINES)
def test_each_engine_runs_in_a_process_of_its_own(engine):
    pytest.importorskip("transformers")
    got = measure(engine, Job("procedural:mini", prefill=20, decode=2, threads=1))
    assert got.prefill_s > 0 and got.decode_s > 0
    assert got.peak_rss >= got.loaded_rss > 100 << 20  # an engine without torch and weights would be smaller


def test_a_child_that_fails_is_an_error():
    with pytest.raises(RuntimeError, match="nosuch"):
        measure("reference", Job("procedural:nosuch", 4, 1, 1))
