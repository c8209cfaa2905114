"""The verdict on what a kernel put out for given inputs: the twin is computed anew, and every output judged by its bound.

Source: docs/single.md §1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from reference.errors import BadInput

from ..budget import codes as code_rules
from ..budget.bounded import ACCUMULATE, Arithmetic
from ..judge import AXES, Bytes, Codes, Dense, Expected, MismatchedShape, Places, Stored, Verdict, judge
from ..ops import BY_NAME
from ..twins import Expectation, Expectations
from .drawing import Inputs
from .given import GivenStep, given_step, indexing_tables, split_tables

Outputs = Mapping[str, Stored]
OURS = ("page", "page_row")  # labels of this project's own pool
CHOICES = ("attn.indexer.picks", "ffn.gate.experts")


@dataclass(frozen=True)
class Worst:
    """The worst element of a plain output: what the candidate and the twin have, and the bound."""

    candidate: float
    twin: float
    bound: float


@dataclass(frozen=True)
class OpVerdict:
    """What one op came to on one set of inputs. `absent` names optional outputs that were not handed in."""

    op: str
    layer: int
    kind: str
    phase: str
    how: Arithmetic
    outputs: tuple[Verdict, ...]
    worst: Mapping[str, Worst]
    absent: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        """Whether something was judged and all of it is legal."""
        return self.elements > 0 and all(v.passed for v in self.outputs)

    @property
    def elements(self) -> int:
        return sum(v.elements for v in self.outputs)

    @property
    def budget_used(self) -> float:
        return max((v.budget_used for v in self.outputs), default=0.0)

    @property
    def exit_code(self) -> int:
        """0 passed, 1 failed, 3 nothing was judged."""
        return 1 if not all(v.passed for v in self.outputs) else 0 if self.elements else 3


def judge_outputs(inputs: Inputs, outputs: Outputs, how: Arithmetic = ACCUMULATE["fp32"]) -> OpVerdict:
    """Judge stored outputs, named as in the contract: tensors, and pairs (codes one a byte, scale bytes).

    Raises BadInput for a missing or unknown output, and for one of another shape or a coarser dtype than the twin's.
    """
    _, stored, expected = prepared(inputs, outputs, how)
    try:
        verdicts = tuple(judge(name, stored[name], e.expected, how, e.places) for name, e in expected.items())
    except MismatchedShape as error:
        raise BadInput(f"output {error}") from None
    worst = {v.output: _worst(v, stored[v.output], expected[v.output].expected) for v in verdicts}
    kind = inputs.config.kind(inputs.layer)
    absent = tuple(name for name in inputs.contract.outputs if name not in outputs)
    shown = {name: w for name, w in worst.items() if w is not None}
    return OpVerdict(inputs.op, inputs.layer, kind, inputs.phase, how, verdicts, shown, absent)


def prepared(inputs: Inputs, outputs: Outputs, how: Arithmetic) -> tuple[GivenStep, dict[str, Stored], Expectations]:
    """The step behind the inputs, what is stored and what is expected, both as a verdict compares them. Raises BadInput."""
    c, op = inputs.contract, BY_NAME[inputs.op]
    unknown = [name for name in outputs if name not in c.outputs]
    missing = [name for name in c.outputs if name not in outputs and name not in c.optional]
    if unknown or missing:
        said = f"no output {unknown[0]}" if unknown else f"output {missing[0]}: missing"
        raise BadInput(f"{said}; {inputs.op} puts out {', '.join(c.outputs)}")
    step = given_step(inputs, how)
    stored = as_candidates_store(step, dict(outputs))
    assert op.twin is not None
    return step, *fitted(stored, op.twin(step, inputs.op, stored))


def fitted(stored: dict[str, Stored], expected: Expectations) -> tuple[dict[str, Stored], Expectations]:
    """What a verdict compares: choices in one order, plain outputs in the format they are stored in, nothing that is not
    stored. Raises BadInput for a coarser format than the op's."""
    expected = {name: e for name, e in expected.items() if name in stored}
    for name, e in expected.items():
        if name.startswith(CHOICES) and isinstance(e.expected, Bytes):
            e, stored[name] = _in_any_order(e, stored[name])
        expected[name] = Expectation(_in_stored_form(e, stored[name], name), _ours_apart(e.places))
    return stored, expected


def as_candidates_store(step: GivenStep, outputs: dict[str, Stored]) -> dict[str, Stored]:
    """The same outputs under the names and in the tables that twins use."""
    for name in ("attn.indexer.picks", "ffn.gate.experts"):
        if name in outputs:
            outputs[name] = _plain(outputs[name], name).int()
    for name in indexing_tables(outputs):
        outputs |= split_tables(step, name, _plain(outputs.pop(name), name))
    return outputs


def _plain(x: Stored, name: str) -> Tensor:
    if isinstance(x, Tensor):
        return x
    raise BadInput(f"output {name}: codes and scales, expected one tensor")


def _in_any_order(e: Expectation, stored: Stored) -> tuple[Expectation, Stored]:
    """A choice may come in any order within a row."""
    assert isinstance(e.expected, Bytes) and isinstance(stored, Tensor)
    return replace(e, expected=replace(e.expected, expected=e.expected.expected.sort(-1).values)), stored.sort(-1).values


def _in_stored_form(e: Expectation, stored: Stored, name: str) -> Expected:
    """A plain output is judged in the format it is stored in. Raises BadInput for one that is coarser than the op's, or
    for codes where there should be none."""
    if isinstance(e.expected, Codes):
        if not isinstance(stored, tuple):
            raise BadInput(f"output {name}: one tensor, expected codes and scales")
        return e.expected
    if not isinstance(e.expected, Dense):
        return e.expected
    form = {torch.float32: "f32", torch.bfloat16: "bf16"}.get(_plain(stored, name).dtype)
    if form is None or (form, e.expected.form) == ("bf16", "f32"):
        raise BadInput(f"output {name}: {_plain(stored, name).dtype}, the profile stores {e.expected.form}")
    return replace(e.expected, form=form)


def _ours_apart(places: Places) -> Places:
    return Places({label: at for label, at in places.labels.items() if label not in OURS})


def _worst(v: Verdict, stored: Stored, expected: Expected) -> Worst | None:
    """Numbers at the place of a verdict on plain output or on codes; None where it names no element."""
    if not isinstance(expected, Dense | Codes) or any(AXES[letter] not in v.worst for letter in expected.dims):
        return None
    at = tuple(int(str(v.worst[AXES[letter]])) for letter in expected.dims)
    c = values_of(stored, expected)
    t = expected.expected
    return Worst(float(c[at]), float(t.value[at]), float(t.bound[at]))


def values_of(stored: Stored, expected: Dense | Codes) -> Tensor:
    """What is stored, as float64."""
    if isinstance(expected, Codes):
        assert isinstance(stored, tuple)
        return code_rules.dequantize(*stored, expected.block, expected.grid)
    assert isinstance(stored, Tensor)
    return stored.double()
