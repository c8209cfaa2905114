"""A planted fault: one small change of correct code, where it comes from, and where it must show. Source: docs/faults.md §1."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..cases import PHASES, Plan, default_chunks, default_lengths, default_starts, plan
from ..run import PROFILES
from .change import Change

Severity = Literal["S1", "S2", "S3"]  # garbage or crash; silent loss of quality; latent or small
LAYERS = {"window": 0, "hca": 1, "csa": 2, "hca_scored": 3, "csa_last": 4, "mtp": 5}  # of the preset `mini`
OWN = "own"
LAYER = "layer"  # in place of an op: every op is right on its own inputs, the layer as a whole is not


@dataclass(frozen=True)
class Cell:
    """Part of a default run of `mini`: one layer, some phases, and of its sequences those with these prompt lengths or start
    positions. With `whole` the candidate runs the whole layer too."""

    layer: str
    phases: tuple[str, ...]
    lengths: tuple[int, ...] = ()
    starts: tuple[int, ...] = ()
    profile: str = PROFILES[0]
    whole: bool = False

    def plan(self) -> Plan:
        """The sequences of the default run that are in this cell."""
        from reference.presets import preset

        config = preset("mini")
        default = plan(default_lengths(config), default_starts(config), PHASES, default_chunks(config))
        kept = [s for s in default.sequences if s.tokens["prefill"] in self.lengths or (s.start and s.start in self.starts)]
        if len(kept) != len(self.lengths) + len(self.starts):
            raise ValueError(f"{self} asks for sequences that a default run does not have")
        return Plan(tuple(kept), tuple(p for p in PHASES if p in self.phases))

    @property
    def text(self) -> str:
        """`csa, decode, 8 + @127, pool-fp8`."""
        sequences = " + ".join([*map(str, self.lengths), *(f"@{s}" for s in self.starts)])
        return ", ".join([self.layer, "/".join(self.phases), sequences, self.profile, *["whole layer"] * self.whole])


@dataclass(frozen=True)
class Fault:
    """`name` is family.what; `source` names the public thread, owner/repo#number, or is `own`. `op` is what a report must
    name, or `layer`. `cell` is its trigger in `v4parity run`; `laws` and `tests` are other gates that it is shown to: names
    of laws, and pytest ids of tests that exist without it."""

    name: str
    kind: str
    source: str
    severity: Severity
    what: str
    op: str
    change: Change
    cell: Cell | None = None
    laws: tuple[str, ...] = ()
    tests: tuple[str, ...] = ()
    also: tuple[str, ...] = ()  # other threads with the same kind of mistake

    @property
    def family(self) -> str:
        return self.name.split(".")[0]


@dataclass(frozen=True)
class OutOfReach:
    """A public fault that nothing in this code base can show, and why."""

    source: str
    what: str
    reason: str


def at(
    layer: str, phases: str, lengths: tuple[int, ...] = (), starts: tuple[int, ...] = (), profile: str = PROFILES[0]
) -> Cell:
    """A cell where ops are judged one by one; phases separated by spaces."""
    return Cell(layer, tuple(phases.split()), lengths, starts, profile)


def whole(layer: str, phases: str, lengths: tuple[int, ...] = (), starts: tuple[int, ...] = ()) -> Cell:
    """A cell where the candidate's whole layer runs too."""
    return Cell(layer, tuple(phases.split()), lengths, starts, whole=True)
