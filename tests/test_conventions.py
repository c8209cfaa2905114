"""The ledger of conventions: the official rules are the reference's, the others have a witness, the page is what it counts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch

from parity import cli
from parity.conventions import inputs, rules
from parity.conventions.ledger import ENGINES, NONE, NOT_STATED, TOPICS
from parity.conventions.page import agreement, equal, page, run, section
from reference import formats
from reference.hadamard import hadamard
from reference.rounding import Rounding

BY_TITLE = {topic.title: topic for topic in TOPICS}
PAGE = Path(__file__).parents[1] / "docs" / "conventions.md"


def official(title: str) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Inputs of a topic by name, each with what the official rule makes of it."""
    topic = BY_TITLE[title]
    found = run(topic)
    return {name: (made(), found[name][topic.said["official"]]) for name, made in topic.inputs.items()}


def scales(quantise, largest: float, amax: np.ndarray) -> np.ndarray:
    """The reference's scales of blocks of two: amax and nothing."""
    x = torch.tensor(np.stack([amax, np.zeros_like(amax)], -1).astype(np.float32))
    return formats.e8m0_decode(quantise(x, 2)[1]).double().numpy()[:, 0]


@pytest.mark.parametrize(("title", "quantise", "largest"), [
    ("Exponent of an FP8 scale", formats.quantize_e4m3, 448.0),
    ("Floor of small tiles, FP8 rows", formats.quantize_e4m3, 448.0),
    ("Product or quotient, FP8", formats.quantize_e4m3, 448.0),
    ("Floor of small groups, FP4", formats.quantize_e2m1, 6.0),
])  # fmt: skip
def test_official_scales_are_the_references(title, quantise, largest):
    for amax, scale in official(title).values():
        assert equal(scales(quantise, largest, amax), scale).all()
        assert not equal(scales(quantise, largest, np.nextafter(amax, np.float32(np.inf))), scale).all()


def test_official_codes_are_the_references():
    for x, code in official("Ties of FP4").values():
        assert (formats.e2m1_encode(torch.tensor(x, dtype=torch.float32)).numpy() == code).all()
    (x, code), = official("Saturation of E4M3").values()
    assert (formats.e4m3_encode(torch.tensor(x)).numpy() == code).all()
    (byte, value), = official("Flavour of E4M3").values()
    assert equal(formats.e4m3_decode(torch.tensor(byte, dtype=torch.uint8)).numpy(), value).all()
    (byte, value), = official("Edges of UE8M0").values()
    assert equal(formats.e8m0_decode(torch.tensor(byte, dtype=torch.uint8)).numpy(), value).all()
    (bits, half), = official("float32 to bfloat16").values()
    x = torch.tensor(bits.astype(np.uint32).view(np.float32))
    ours = x.bfloat16().view(torch.int16).numpy().view(np.uint16)
    assert equal(ours, half)[~np.isnan(x.numpy())].all()


def test_official_rows_are_the_references():
    (x, row), = official("What a row's quantiser receives").values()
    assert (Rounding("e4m3", 64, 1e-4)(torch.tensor(x), "bf16").double().numpy() == row).all()
    assert not (Rounding("e4m3", 64, 1e-4)(torch.tensor(x), "f32").double().numpy() == row).all()


def test_rotation_is_the_references():
    x = inputs.normal(8, 128)
    largest = np.abs(rules.hadamard(x)).max()
    assert np.abs(rules.hadamard(x) - hadamard(torch.tensor(x).double()).numpy()).max() <= 128 * 2.0**-53 * largest * 128**0.5


def test_other_rules_have_witnesses():
    """ml_dtypes: FNUZ, a cast to E4M3 that does not saturate; torch: UE8M0 to nearest."""
    byte = np.arange(256, dtype=np.uint8)
    assert equal(rules.fnuz_value(byte), byte.view(ml_dtypes.float8_e4m3fnuz).astype(np.float64)).all()
    x = inputs.all_bf16()
    with np.errstate(invalid="ignore"):  # NaN among them
        cast = x.astype(ml_dtypes.float8_e4m3fn).astype(np.float64)
    assert equal(rules.e4m3_value(rules.e4m3(False)(x)), cast).all()
    assert not equal(rules.e4m3_value(rules.e4m3(True)(x)), cast).all()
    amax = inputs.amax_edges(1.5)
    amax = amax[amax < 1.5 * 2.0**127]  # from there on 2^128, which is no scale
    near = torch.tensor(amax).to(torch.float8_e8m0fnu).double().numpy()
    assert equal(rules.scale_nearest(amax), near).all() and not equal(rules.scale_up(amax), near).all()


def test_ties_one_by_one():
    """The seven midpoints and their negatives, by the four rules."""
    middle = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    made = {name: formats.e2m1_decode(torch.tensor(rule(np.concatenate([middle, -middle]))).int()).tolist()
            for name, rule in BY_TITLE["Ties of FP4"].rules.items()}  # fmt: skip
    even, down, up = [0, 1, 1, 2, 2, 4, 4], [0, 0.5, 1, 1.5, 2, 3, 4], [0.5, 1, 1.5, 2, 3, 4, 6]
    assert made == {"to even": [*even, *(-v for v in even)], "toward zero": [*down, *(-v for v in down)],
                    "to the smaller value": [*down, *(-v for v in up)], "away from zero": [*up, *(-v for v in up)]}  # fmt: skip
    assert sum(a != b for a, b in zip(even, down, strict=True)) == 3


@pytest.mark.parametrize(("title", "bytes_of_zero"), [
    ("Floor of small tiles, FP8 rows", {"amax ≥ 1e-4": 105, "scale ≥ 1e-4": 114, "amax ≥ 1e-8": 92, "amax ≥ 1e-12": 79}),
    ("Floor of small groups, FP4", {"amax ≥ 6·2^-126": 1, "scale ≥ 1e-4": 114, "amax ≥ 1e-4": 112}),
])  # fmt: skip
def test_the_scale_byte_of_nothing(title, bytes_of_zero):
    zero = np.zeros(1, np.float32)
    found = {name: int(np.log2(rule(zero)[0])) + 127 for name, rule in BY_TITLE[title].rules.items()}
    assert found == bytes_of_zero


@pytest.mark.parametrize("topic", TOPICS, ids=lambda t: t.title)
def test_every_engine_stands_under_every_topic(topic):
    engines = topic.engines()
    assert [e for e in ENGINES if not any(who.split(",")[0] == e for who in engines)] == []
    assert {who.split(",")[0] for who in engines} == set(ENGINES)
    assert set(engines.values()) <= {*topic.rules, NONE, NOT_STATED}
    assert engines["official"] in (next(iter(topic.rules)), NONE)
    assert set(topic.rules) == {rule for rule in topic.rules if topic.inputs or topic.rules[rule] is None}


ONE_RULE = [{"amax · fl32(1/448)", "amax / 448"}, {"amax · fl32(1/6)", "amax / 6"}]


@pytest.mark.parametrize("topic", [t for t in TOPICS if t.inputs], ids=lambda t: t.title)
def test_inputs_tell_the_rules_apart(topic):
    """On the inputs of a topic no two of its rules are one, but for float32's product and quotient."""
    found = run(topic)
    names = list(topic.rules)
    for i, one in enumerate(names):
        for other in names[i + 1 :]:
            same = all(equal(by[one], by[other]).all() for by in found.values())
            assert same == ({one, other} in ONE_RULE)


def test_counts():
    a, b = np.array([1.0, np.nan, 0.0, 3.0]), np.array([1.0, np.nan, -0.0, 4.0])
    assert equal(a, b).tolist() == [True, True, True, False]
    assert agreement(a, b) == "3 of 4 (75.00 %)" and agreement(a, a) == "all 4"
    nearly = np.zeros(1_000_000)
    assert agreement(nearly, np.append(nearly[1:], 1.0)) == "999,999 of 1,000,000 (99.99 %)"


def test_the_page_is_what_the_command_writes(tmp_path, capsys):
    assert cli.main(["conventions", "--md", str(tmp_path / "page.md")]) == 0
    assert (tmp_path / "page.md").read_text() == PAGE.read_text()
    assert str(tmp_path) in capsys.readouterr().out


def test_another_rule_is_another_page():
    topic = BY_TITLE["Ties of FP4"]
    wrong = replace(topic, rules={**topic.rules, "toward zero": rules.e2m1("even")})
    assert section(9, wrong) != section(9, topic)
    moved = replace(topic, said={**topic.said, "DeepGEMM": "to even"})
    assert page([moved]) != page([topic])
