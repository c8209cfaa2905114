"""From a verdict to a script: what is inlined, and how a record of a run is judged once more. Source: docs/single.md §4."""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from reference.checkpoint.store import WeightStore
from reference.errors import BadInput
from reference.rounding import profile

from .. import candidates, cases, ops, residual
from ..adapters import traced
from ..budget import codes as code_rules
from ..budget.bounded import ACCUMULATE, LAMBDA, Arithmetic
from ..flow import Flow, Setting
from ..judge import AXES, Bytes, Codes, Dense, Errors, Selection, Stored, Verdict, judge
from ..records import Record
from ..report.terminal import place
from ..run import one_thread
from ..single.drawing import Inputs
from ..single.verdict import Outputs, prepared
from ..step import Step
from ..trace import read_trace
from ..twins import Expectations

MOST = 1 << 16  # channels of a row that a script carries; of a longer one, those around the worst


@dataclass(frozen=True)
class Evidence:
    """One op of one step: what was stored, what was expected."""

    step: Step
    op: ops.Op
    stored: Mapping[str, Stored]
    expected: Expectations


def from_case(inputs: Inputs, outputs: Outputs, how: Arithmetic = ACCUMULATE["fp32"]) -> str:
    """The script of the worst output of a case that `judge_outputs` takes: for a failing property, `print` it or write it
    beside the test. Raises BadInput for outputs that cannot be judged at all."""
    step, stored, expected = prepared(inputs, outputs, how)
    return script(Evidence(step, ops.BY_NAME[inputs.op], stored, expected))


def from_run(records: list[Record], store: WeightStore, number: int | None = None) -> str:
    """The script of one verdict of a run, the first that failed unless `number` counts another line. The op is run again, with
    all that came before it. Raises BadInput where there is none."""
    failing = [i for i, r in enumerate(records) if r["record"] == "verdict" and r["verdict"] == "fail"]
    if number is None and not failing:
        raise BadInput("no verdict of this run failed; name one with --record")
    number = failing[0] if number is None else number
    if not 0 <= number < len(records) or records[number]["record"] != "verdict":
        raise BadInput(f"record {number} of {len(records)} is no verdict")
    return script(again(records[0], records[number], store))


def again(run: Record, verdict: Record, store: WeightStore) -> Evidence:
    """One op of a run once more, on the same numbers. Raises BadInput for another model, or a kernel that raises."""
    one_thread()
    if run["ids"]:
        raise BadInput("the prompts of this run came from a file; repeat it with the command of the report")
    if run.get("trace"):
        return _of_trace(run, verdict, store)
    config, kept, arrived = store.config, list[Evidence](), list[int]()
    op = ops.BY_NAME[verdict["op"]]

    def spy(step: Step, name: str, stored: dict[str, Stored]) -> Expectations:
        assert op.twin is not None
        expected = op.twin(step, name, stored)
        kept.append(Evidence(step, op, dict(stored), expected))
        return expected

    names = run["ops"][: run["ops"].index(op.name) + 1]  # what came before feeds it
    chosen = [replace(ops.BY_NAME[n], twin=spy if n == op.name else _nothing) for n in names]
    plan = cases.plan(run["lengths"], run["start_pos"], run["phases"], cases.default_chunks(config))
    layer = int(verdict["layer"])
    setting = Setting(store, profile(run["profile"]["name"]), plan, chosen, ACCUMULATE[run["accumulate"]], run["seed"],
                      lambda _, phase: bool(arrived) and phase == verdict["phase"])  # fmt: skip
    flow = Flow.start(setting)
    if run["streams"] == "free-running":
        flow.begin_with_tokens()
        for before in range(layer):
            list(flow.run_layer(before))
    arrived.append(layer)
    list(flow.run_layer(layer))
    if not kept:
        raise BadInput(f"{op.name}: the kernel raised before it put out anything: {verdict['outputs'][0]['worst']}")
    return kept[0]


def _of_trace(run: Record, verdict: Record, store: WeightStore) -> Evidence:
    """The same where a trace was the candidate."""
    trace, op = read_trace(Path(run["trace"]["argument"])), ops.BY_NAME[verdict["op"]]
    if trace.digest != run["trace"]["manifest_sha256"]:
        raise BadInput(f"{trace.root}: another manifest than the run's")
    r = traced.again(store, trace, op, verdict["layer"], verdict["phase"], ACCUMULATE[run["accumulate"]])
    return Evidence(r.step, op, r.stored, r.expected)


def _nothing(step: Step, name: str, stored: dict[str, Stored]) -> Expectations:
    """An op that only runs because the next one is fed from it."""
    return {}


def script(e: Evidence) -> str:
    """The standalone script on the worst output."""
    verdicts = {n: judge(n, e.stored[n], x.expected, e.step.how, x.places) for n, x in e.expected.items()}
    if not any(v.elements for v in verdicts.values()):
        raise BadInput(f"{e.op.name}: nothing was judged")
    worst = max(verdicts.values(), key=lambda v: v.budget_used)
    text = pack(row_data(e, worst))
    program = resources.files("parity.repro").joinpath("standalone.py").read_text()
    head, tail = program.split(_LAST)
    lines = "\n".join(f'    "{text[i : i + 100]}"' for i in range(0, len(text), 100))
    return f"{head}DATA = (\n{lines}\n)\n\n{_LAST}{tail}"


_LAST = 'if __name__ == "__main__"'


def pack(table: Mapping[str, Any]) -> str:
    """JSON without quotes, backslashes or line ends: base64 of what `standalone.unpack` reads."""

    def value(x: Any) -> Any:
        if not isinstance(x, np.ndarray):
            return x
        return {"dtype": x.dtype.str, "shape": list(x.shape), "zlib": base64.b64encode(zlib.compress(x.tobytes())).decode()}

    return base64.b64encode(json.dumps({name: value(x) for name, x in table.items()}).encode()).decode()


def row_data(e: Evidence, v: Verdict) -> dict[str, Any]:
    """What the script holds of the worst row of an output."""
    x, stored = e.expected[v.output].expected, e.stored[v.output]
    dims = getattr(x, "dims", "")
    at = [int(str(v.worst.get(AXES[letter], 0))) for letter in dims]
    row, channel = tuple(at[:-1]), at[-1]
    width = stored[0].shape[-1] if isinstance(stored, tuple) else stored.shape[-1]
    block = x.block if isinstance(x, Codes) else 1
    first = max(0, min(channel - MOST // 2, width - MOST)) // block * block
    cut = slice(first, min(width, first + MOST))
    data = {"op": e.op.name, "output": v.output, "place": place(v.worst), "bound": e.op.bound,
            "channel": channel - first, **_compared(x, stored, row, cut)}  # fmt: skip
    if v.worst and AXES[dims[-1]] in v.worst:
        data["element"] = channel - first
    if isinstance(x, Dense):
        data |= _signs(x, stored, e.step.how, v) | _operands(e, v.output, row, channel, cut)
    return data


def _compared(x: object, stored: Stored, row: tuple[int, ...], cut: slice) -> dict[str, Any]:
    """Candidate, twin and bound of the row, by the kind of what is expected."""
    if isinstance(x, Codes):
        assert isinstance(stored, tuple)
        scales = slice(cut.start // x.block, -(-cut.stop // x.block))
        return {"kind": "codes", "c": stored[0][row][cut].numpy(), "scales": stored[1][row][scales].numpy(),
                **_bounded(x.expected.value[row][cut], x.expected.bound[row][cut]), "block": x.block, "floor": x.floor,
                "grid": x.grid.name}  # fmt: skip
    assert isinstance(stored, Tensor)
    if isinstance(x, Dense):
        c = stored[row][cut].float().numpy()
        return {"kind": "dense", "c": c, **_bounded(x.expected.value[row][cut], x.expected.bound[row][cut]), "form": x.form}
    if isinstance(x, Selection):
        return {"kind": "picks", "c": stored[row].numpy(), **_bounded(x.expected.value[row], x.expected.bound[row]),
                "visible": int(x.visible[row])}  # fmt: skip
    other = x.expected[row][cut] if isinstance(x, Bytes) else torch.zeros_like(stored[row][cut])
    return {"kind": "exact", "c": stored[row][cut].numpy(), "t": other.numpy()}


def _bounded(value: Tensor, bound: Tensor) -> dict[str, Any]:
    return {"t": value.numpy(), "A": bound.numpy()}


def _signs(x: Dense, stored: Stored, how: Arithmetic, v: Verdict) -> dict[str, Any]:
    """Signed errors of all rows, one number a row, where the sign is what failed."""
    if v.tests.get("bias", 0.0) < v.budget_used:
        return {}
    assert isinstance(stored, Tensor)
    errors = Errors.of(stored.double(), x.expected, x.form)
    outward = torch.where(errors.negative, -errors.beyond, errors.beyond)
    return {"sums": errors.beyond.sum(-1).numpy(), "outward": outward.sum(-1).numpy(), "lambda": LAMBDA}


def _operands(e: Evidence, output: str, row: tuple[int, ...], channel: int, cut: slice) -> dict[str, Any]:
    """What the twin computed from: both rows of a product, or the row of a norm."""
    step, name = e.step, e.op.name
    if name in candidates.SOURCE and output == name:
        codes, scales = candidates.quantised_input(step, name)
        x = code_rules.dequantize(codes[row], scales[row], candidates.ACTIVATION_BLOCK)
        weight = step.linear(name).dense(torch.float64, channel, channel + 1)[0]
        growth = step.how.growth(len(x)) * step.how.accumulate + 2 * step.how.operand
        return {"x": x.numpy(), "weight": weight.numpy(), "growth": growth}
    if e.op.candidate is residual.normed and output == name and cut.start == 0:
        x, weight, eps = residual._norm(step, name)
        return {"x": x[row].numpy(), "norm": weight.numpy(), "eps": eps}
    return {}
