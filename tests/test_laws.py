"""Every law holds, on operands that bite, and catches a mistake made for it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from kernel_cases import mutant

from optimized.kernels import topk
from parity.cli import main
from parity.laws import LAWS, Law, named, on_indexer
from parity.laws.law import BITES, Operands, distance, same_bits, within_float64

FAMILIES = {"scaling", "tokens", "pages", "experts", "heads", "streams", "chunking", "padding", "causality", "sink", "hadamard",
            "rope", "linearity", "idempotence", "topk"}  # fmt: skip
ALL = [pytest.param(law, id=f"{law.side}-{law.name}") for law in LAWS]


@pytest.mark.parametrize("law", ALL)
def test_a_law_holds(law: Law) -> None:
    assert law.run() is None


@pytest.mark.slow
@pytest.mark.parametrize("law", ALL)
def test_a_law_holds_on_other_seeds(law: Law) -> None:
    assert [law.run(seed) for seed in range(1, 12)] == [None] * 11


@pytest.mark.parametrize("law", list({(law.operands, law.call): law for law in LAWS}.values()), ids=lambda law: law.name)
def test_every_operand_moves_the_output(law: Law) -> None:
    still = {name: moved for name, moved in law.movements().items() if moved < BITES}
    assert not still
    assert set(law.fixed) < set(law.operands(0))


def spoilt(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Operands], Operands]:
    """The op, fed with one operand changed."""
    return lambda ops: ops | {name: change(ops[name].clone())} if name in ops else ops


def first(x: torch.Tensor, value: float) -> torch.Tensor:
    x[0] = value
    return x


def at_cuts(name: str) -> Callable[[Operands], Operands]:
    """What crosses a cut is lost: the token before it is forgotten."""

    def change(ops: Operands) -> Operands:
        x = ops[name].clone()
        x[[c - 1 for c in ops["cuts"]]] = 0
        return ops | {name: x}

    return change


def only_first(x: torch.Tensor) -> torch.Tensor:
    return x[:1].expand_as(x).contiguous()


def small_is_zero(x: torch.Tensor) -> torch.Tensor:
    return torch.where(x.abs() < 0.125, 0, x)


# What is done wrong, by name of the law; (side, name) where the two sides call it otherwise.
MISTAKES: dict[str, Callable[[Operands], Operands]] = {
    "scaling.e4m3": spoilt("x", small_is_zero),  # a floor of amax that is too large
    "scaling.e2m1": spoilt("x", small_is_zero),
    "scaling.activation": spoilt("x", small_is_zero),
    "scaling.index-fp4": spoilt("q", small_is_zero),
    "scaling.index-fp8": spoilt("q", small_is_zero),
    "heads.core": spoilt("sink", only_first),  # one sink for all heads
    "heads.scores": spoilt("weights", lambda w: w * (torch.arange(w.shape[1]) > 0)),
    "reference pages.core": spoilt("hidden", lambda x: x | (torch.arange(x.shape[1]) == 0).byte()),  # row 0 means nobody
    "kernel pages.core": spoilt("lists", lambda x: torch.where(x == 0, -1, x)),
    "pages.scores": spoilt("table", lambda x: torch.where(x == 1, 4, x)),
    "streams.mix": spoilt("base_pre", lambda x: first(x, 0.0)),
    "streams.post": spoilt("comb", lambda c: c.mT.contiguous()),
    "experts.moe": spoilt("bias", lambda x: first(x, -9.0)),  # expert 0 is nobody
    "experts.router": spoilt("bias", lambda x: x * (torch.arange(len(x)) > 20)),
    "experts.gate-up": spoilt("experts", lambda x: x.clamp_min(1)),
    "experts.sum": spoilt("experts", lambda x: torch.where(x == 0, -1, x)),
    "chunking.compressor": at_cuts("gates"),
    "chunking.core": at_cuts("rope"),
    "chunking.csa": at_cuts("score"),
    "chunking.hca": at_cuts("kv"),
    "reference causality.core": spoilt("hidden", lambda x: x & (torch.arange(x.shape[1]) != 9).byte()),
    "kernel causality.core": spoilt("lists", lambda x: torch.where(x == x[1, 3], 65, x)),
    "causality.payload": spoilt("main", lambda x: x.roll(-1, 0)),  # every token sees the next one's row
    "causality.picks": spoilt("visible", lambda x: (x + 1).clamp_max(40)),
    "causality.scores": spoilt("visible", lambda x: (x + 1).clamp_max(128)),
    "padding.core": spoilt("lists", lambda x: x.clamp_min(0)),  # a sentinel of 0
    "padding.sum": spoilt("experts", lambda x: x.clamp_min(0)),
    "sink.core": spoilt("sink", lambda x: 0.25 * x),  # the sink is scaled as scores are
    "hadamard.scores": spoilt("k", lambda k: k * (1 + torch.arange(k.shape[1]) % 2)),
    "reference rope.translation": spoilt("p", lambda p: 2 * p),
    "kernel rope.translation": spoilt("turn_k", lambda t: -t),  # rows turned the other way
    "rope.turned-back": spoilt("sin", lambda s: -s),
    "idempotence.formats": spoilt("x", lambda x: 1.0625 * x),
    "idempotence.activation": spoilt("x", lambda x: 1.0625 * x),
    "topk.picks": spoilt("scores", lambda s: s.nan_to_num(-9.0)),  # NaN is small
    "topk.experts": spoilt("bias", torch.zeros_like),
    "linearity.combine": spoilt("z", lambda z: z.clamp(-3, 0.5)),
    "linearity.experts": spoilt("shared", lambda x: x.clamp_min(0)),
    "tokens.core": spoilt("cos", only_first),  # one position for all
    "tokens.norm": spoilt("x", only_first),
    "tokens.product": spoilt("scales", only_first),
    "tokens.hc-pre": spoilt("x", only_first),
    "tokens.router": spoilt("x", only_first),
    "tokens.sum": spoilt("shared", only_first),
    "tokens.scores": spoilt("weights", only_first),
    "tokens.picks": spoilt("visible", lambda v: v.clamp_min(int(v[0]) + 9)),
}


@pytest.mark.parametrize("law", ALL)
def test_a_law_catches_its_mistake(law: Law) -> None:
    change = MISTAKES.get(law.name) or MISTAKES[f"{law.side} {law.name}"]
    violation = law.run(call=lambda **ops: law.call(**change(ops)))
    assert violation is not None and (violation.law, violation.op) == (law.name, law.op)


def test_every_family_is_there_on_the_side_that_can_have_it() -> None:
    assert {law.family for law in LAWS} == FAMILIES
    assert len({(law.side, law.name) for law in LAWS}) == len(LAWS)
    assert {law.name for law in named("topk.picks")} == {"topk.picks"} and len(named("topk.picks")) == 2
    with pytest.raises(KeyError, match="families: causality"):
        named("nothing")


def test_a_changed_kernel_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Laws call kernels by the names in their modules, where a change of the kernel can take their place."""
    nan_is_small = mutant(topk, tmp_path, ('tl.where(x != x, float("inf")', 'tl.where(x != x, float("-inf")'))
    monkeypatch.setattr(on_indexer, "topk", nan_is_small.topk)
    assert [(law.side, law.run() is not None) for law in named("topk.picks")] == [("reference", False), ("kernel", True)]


def test_comparisons_see() -> None:
    nan = torch.tensor([1.0, torch.nan])
    assert same_bits((nan,), (nan.clone(),)) is None
    assert "the first at [0]" in str(same_bits((torch.tensor([-0.0]),), (torch.tensor([0.0]),)))
    assert "shape" in str(same_bits((nan,), (nan[:1],)))
    one = torch.ones(3, dtype=torch.float64)
    assert within_float64((one,), (one * (1 + 2.0**-52),)) is None
    assert within_float64((one,), (one * (1 + 2.0**-40),)) and within_float64((one * torch.nan,), (one,))
    assert distance(one, one) == 0 and distance(torch.tensor([1, 2]), torch.tensor([1, 3])) == 0.5


def test_the_command_says_what_holds(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["laws", "idempotence"]) == 0
    said = capsys.readouterr().out
    assert "idempotence.formats" in said and "idempotence.activation" in said and "2 laws, 0 violated" in said
    assert main(["laws", "nothing"]) == 2
