"""Judging a Python function: a few draws of inputs, a verdict on each. Source: docs/single.md §1."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from reference.checkpoint.open import open_store
from reference.errors import BadInput

from ..budget.bounded import ACCUMULATE, Arithmetic
from ..cases import PHASES, layer_id, layer_kinds
from ..flow import raised
from ..judge import Stored
from . import layouts
from .contract import known
from .drawing import Inputs, as_bytes, default_batch, draw
from .report import text
from .verdict import OpVerdict, judge_outputs

Kernel = Callable[[Inputs], Tensor | Mapping[str, Tensor]]


@dataclass(frozen=True)
class Verdicts:
    """One verdict a case, worst first."""

    cases: tuple[OpVerdict, ...]

    @property
    def passed(self) -> bool:
        """Whether every case was judged and passed."""
        return bool(self.cases) and all(v.passed for v in self.cases)

    @property
    def budget_used(self) -> float:
        return max((v.budget_used for v in self.cases), default=0.0)

    def report(self) -> str:
        """Outcome, place, budget and bound of each case, in words."""
        return "\n".join(text(v) for v in self.cases)


def judge_op(
    name: str,
    kernel: Kernel,
    cases: Sequence[Inputs] | None = None,
    profile: str = "pool-fp8",
    accumulate: str = "fp32",
    model: str = "procedural:mini",
    seed: int = 0,
    repro: Path | None = None,
) -> Verdicts:
    """Judge a function that maps an op's inputs, by name, to its output, or to its outputs by name (codes `NAME`, scale bytes
    `NAME.scale`, as files hold them). Without `cases`, inputs are drawn at the shapes of `model` for every kind of layer
    that has the op, in every phase.

    An exception of the function, or outputs that are not the op's, is a failure. A case that fails by its numbers leaves a
    script (docs/single.md §4) in the directory `repro`, the last one of an op, layer and phase. Raises ValueError for an
    unknown op or word, BadInput for damaged cases.
    """
    how = ACCUMULATE.get(accumulate)
    if how is None:
        raise ValueError(f"no accumulate format {accumulate!r}; there are {', '.join(ACCUMULATE)}")
    chosen = drawn(name, model, profile, seed) if cases is None else cases
    verdicts = [_judged(kernel, inputs, how, repro) for inputs in chosen]
    return Verdicts(tuple(sorted(verdicts, key=lambda v: -v.budget_used)))


def drawn(name: str, model: str, profile: str, seed: int) -> list[Inputs]:
    """A case for every kind of layer that has the op, and every phase."""
    op, store = known(name), open_store(model)
    c = store.config
    by_kind = {c.kind(layer): layer for layer in reversed(range(c.num_hidden_layers + int(c.has_mtp)))
               if layer_kinds(c, layer) & set(op.kinds)}  # fmt: skip
    return [
        draw(name, store, layer, phase, profile, default_batch(c, phase, seed, name), seed)
        for layer in by_kind.values() for phase in PHASES
    ]  # fmt: skip


def _judged(kernel: Kernel, inputs: Inputs, how: Arithmetic, repro: Path | None) -> OpVerdict:
    """BadInput about an input is the caller's; about an output it is the kernel's."""
    try:
        y = kernel(inputs)
        named = y if isinstance(y, Mapping) else {inputs.contract.outputs[0]: y}
        outputs: dict[str, Stored] = layouts.stored(inputs, {n: as_bytes(x) for n, x in named.items()}, {})
        verdict = judge_outputs(inputs, outputs, how)
        if repro is not None and not verdict.passed and verdict.elements:
            _keep(repro, inputs, outputs, how)
        return verdict
    except BadInput as error:
        if str(error).startswith("input "):
            raise
        failure = raised(inputs.op, error)
    except Exception as error:  # whatever a kernel raises is its failure
        failure = raised(inputs.op, error)
    return OpVerdict(inputs.op, inputs.layer, inputs.config.kind(inputs.layer), inputs.phase, how, (failure,), {})


def _keep(repro: Path, inputs: Inputs, outputs: Mapping[str, Stored], how: Arithmetic) -> None:
    """The failing case as a script."""
    from ..records import write_bytes
    from ..repro import from_case

    repro.mkdir(parents=True, exist_ok=True)
    name = f"{inputs.op}-{layer_id(inputs.config, inputs.layer)}-{inputs.phase}.py"
    write_bytes(repro / name, from_case(inputs, outputs, how).encode())
