"""Every layer of a model, every op that has a kernel, every phase: judged against the twin.

Ids read `layer_30-csa-attn.core-decode`. One run of a layer serves all its tests: under xdist use `--dist loadgroup`.
"""

from __future__ import annotations

from functools import lru_cache, partial

import pytest

from parity import cases, ops, records
from parity.flow import Flow, Judged, Setting
from parity.pytest_plugin import PROFILE, SEED, model_of
from parity.report.terminal import place
from parity.run import one_thread
from reference.checkpoint.open import open_store
from reference.rounding import profile

ALL_PHASES = {0, 1, 2, 3, 30, 59, 60, 61}  # layers that run every phase; 61 is the drafter block of Pro
SMALL = cases.plan([], [127], ["decode", "chunk"], chunks=[9])
FULL = cases.plan([3, 9], [127, 67, 4095], cases.PHASES, chunks=[9])
REAL = cases.plan([], [4099], ["decode"])  # 1,025 visible rows: the first position past Pro's top-k


@lru_cache(maxsize=1)
def config_of(model: str):
    return open_store(model).config


def plan_of(layer: int, scale: str) -> cases.Plan:
    if scale == "real":
        return REAL
    return FULL if layer in ALL_PHASES else SMALL


def judges(layer: int, op: ops.Op, phase: str) -> bool:
    """Layers in between judge in the chunk what a chunk is about: attention, with its norm, state and rows."""
    return layer in ALL_PHASES or phase != "chunk" or op.name.startswith("attn")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    model, scale = model_of(metafunc.config), metafunc.config.getoption("--v4-scale")
    config = config_of(model)
    params = []
    for layer in cases.layer_numbers("all", config):
        name, kind = cases.layer_id(config, layer), config.kind(layer)
        kinds = cases.layer_kinds(config, layer)
        for op in (op for op in ops.OPS if kinds & set(op.kinds)):
            for phase in plan_of(layer, scale).judged:
                if op.missing(phase) is None and judges(layer, op, phase):
                    group = pytest.mark.xdist_group(name)
                    params.append(pytest.param(layer, op.name, phase, marks=group, id=f"{name}-{kind}-{op.name}-{phase}"))
    metafunc.parametrize(("layer", "op", "phase"), params)


@lru_cache(maxsize=1)
def judged(model: str, scale: str, layer: int) -> dict[tuple[str, str], Judged]:
    """All verdicts of one layer."""
    one_thread()
    plan = plan_of(layer, scale)
    setting = Setting(open_store(model), profile(PROFILE), plan, ops.OPS, ops.ARITHMETIC, SEED, partial(judges, layer))
    return {(j.op.name, j.phase): j for j in Flow.start(setting).run_layer(layer)}


def test_op(request: pytest.FixtureRequest, record_property, layer: int, op: str, phase: str) -> None:
    model, scale = model_of(request.config), request.config.getoption("--v4-scale")
    result = judged(model, scale, layer)[op, phase]
    if result.missing:
        pytest.skip(result.missing)
    assert result.verdicts and sum(v.elements for v in result.verdicts) > 0, "nothing was judged"
    record = records.verdict_record(config_of(model), result, 0.0)
    record_property("budget_used", record["budget_used"])
    record_property("relative_l2", record["relative_l2"])
    for v in result.verdicts:
        assert v.passed, f"{v.output}: budget used {v.budget_used:.3g} in {v.failing_rows} rows, worst at {place(v.worst)}"
