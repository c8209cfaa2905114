"""Who follows which rule: topics, their rules, and the engines that state one. Source: docs/conventions.md.

An engine appears under every topic: with a rule, as one that has nothing of the kind, or as one whose rule has not been
read anywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from . import inputs, rules
from .rules import Array, Rule

ENGINES = ("official", "transformers", "vLLM", "SGLang", "ATOM", "DeepGEMM", "FlashMLA")
NOT_STATED = "not stated"
NONE = "nothing of the kind"


@dataclass(frozen=True)
class Topic:
    """`rules` by name, the official one first (None where nothing is computed); `said` maps an engine, or one part of it
    (`SGLang, default`), to a rule's name, or to NONE; engines that are not in it have not been read on this."""

    title: str
    what: str
    rules: Mapping[str, Rule | None]
    said: Mapping[str, str]
    inputs: Mapping[str, Callable[[], Array]] = field(default_factory=dict)

    def engines(self) -> dict[str, str]:
        """Every engine or part of one, in order, with what it does."""
        found: dict[str, str] = {}
        for engine in ENGINES:
            parts = {who: rule for who, rule in self.said.items() if who.split(",")[0] == engine}
            found |= parts or {engine: NOT_STATED}
        return found


def _scales(rule: Rule) -> Rule:
    return lambda amax: rule(rules.ratio(np.maximum(amax, np.float32(1e-4)), rules.E4M3_MAX))


def _amax_floor(floor: float, largest: float) -> Rule:
    return lambda amax: rules.scale_up(rules.ratio(np.maximum(amax, np.float32(floor)), largest))


def _scale_floor(largest: float) -> Rule:
    return lambda amax: rules.scale_up(np.maximum(rules.ratio(amax, largest), np.float32(1e-4)))


def _reciprocal(divide: Callable[[Array, float], Array], largest: float) -> Rule:
    return lambda amax: rules.scale_up(divide(np.maximum(amax, np.float32(1e-4)), largest))


def _row(through: Rule) -> Rule:
    return lambda x: rules.quantised(through(x), 64, rules.E4M3_MAX, 1e-4, rules.e4m3(True), rules.E4M3)


def _picks(query: Rule, key: Rule) -> Rule:
    """Which 64 of the keys each of 64 queries likes best, both through FP4: the sums are exact."""

    def fp4(x: Array) -> Array:
        return rules.quantised(x, 32, rules.E2M1_MAX, rules.E2M1_MAX * 2.0**-126, rules.e2m1("even"), rules.E2M1)

    def picks(x: Array) -> Array:
        scores = fp4(rules.as_bf16(query(x[:64]))) @ fp4(rules.as_bf16(key(x[64:]))).T
        return np.argsort(np.argsort(-scores, kind="stable"), kind="stable") < 64

    return picks


def _same(x: Array) -> Array:
    return x


EDGES_FP8 = {"bfloat16 amax": inputs.amax_bf16, "edges": lambda: inputs.amax_edges(448, 1e-4, 448e-4, 1e-8, 1e-12)}
EDGES_FP4 = {"bfloat16 amax": inputs.amax_bf16, "edges": lambda: inputs.amax_edges(6, 1e-4, 6e-4)}
FP4 = {"all bfloat16": inputs.bf16_numbers, "normal blocks": inputs.over_scales}

TOPICS = (
    Topic(
        "Exponent of an FP8 scale",
        "amax · fl32(1/448), amax at least 1e-4, to a power of two.",
        {"up": _scales(rules.scale_up), "nearest": _scales(rules.scale_nearest), "down": _scales(rules.scale_down)},
        {"official": "up", "transformers": NONE, "vLLM": "up", "SGLang": "up", "SGLang, a bug on record": "down", "ATOM": "up",
         "ATOM, one helper": "nearest", "FlashMLA": "up"},
        EDGES_FP8,
    ),
    Topic(
        "Product or quotient, FP8",
        "How amax, at least 1e-4, becomes the number whose power of two is taken. Product and quotient, rounded to float32, "
        "agree on both sides of every edge and grow with amax: they are one rule. The unrounded product is another.",
        {"amax · fl32(1/448)": _reciprocal(rules.ratio, 448), "amax / 448": _reciprocal(rules.quotient, 448),
         "the product in float64": _reciprocal(rules.ratio_float64, 448)},
        {"official": "amax · fl32(1/448)", "transformers": NONE},
        {"bfloat16 amax": inputs.amax_bf16, "edges": lambda: inputs.amax_edges(448)},
    ),
    Topic(
        "Product or quotient, FP4",
        "The same for 6.",
        {"amax · fl32(1/6)": _reciprocal(rules.ratio, 6), "amax / 6": _reciprocal(rules.quotient, 6),
         "the product in float64": _reciprocal(rules.ratio_float64, 6)},
        {"official": "amax · fl32(1/6)", "transformers": NONE},
        {"bfloat16 amax": inputs.amax_bf16, "edges": lambda: inputs.amax_edges(6)},
    ),
    Topic(
        "Floor of small tiles, FP8 rows",
        "What keeps the scale of a faint tile from vanishing.",
        {"amax ≥ 1e-4": _amax_floor(1e-4, 448), "scale ≥ 1e-4": _scale_floor(448), "amax ≥ 1e-8": _amax_floor(1e-8, 448),
         "amax ≥ 1e-12": _amax_floor(1e-12, 448)},
        {"official": "amax ≥ 1e-4", "transformers": NONE, "vLLM": "amax ≥ 1e-4", "SGLang, CUDA store": "amax ≥ 1e-4",
         "SGLang, its tests": "amax ≥ 1e-8", "ATOM, packer": "scale ≥ 1e-4", "ATOM, aiter's window writer": "amax ≥ 1e-12",
         "FlashMLA, its tests": "scale ≥ 1e-4"},
        EDGES_FP8,
    ),
    Topic(
        "Floor of small groups, FP4",
        "The same for index keys and queries.",
        {"amax ≥ 6·2^-126": _amax_floor(6 * 2.0**-126, 6), "scale ≥ 1e-4": _scale_floor(6),
         "amax ≥ 1e-4": _amax_floor(1e-4, 6)},
        {"official": "amax ≥ 6·2^-126", "transformers": NONE, "vLLM": "amax ≥ 6·2^-126", "SGLang": "scale ≥ 1e-4",
         "ATOM": "amax ≥ 6·2^-126", "DeepGEMM": "amax ≥ 1e-4"},
        EDGES_FP4,
    ),
    Topic(
        "Scale of an FP8 index key",
        "A power of two, or amax/448 as it comes. Official index keys are FP4.",
        {"power of two, up": _scales(rules.scale_up), "float32": _scales(_same)},
        {"official": NONE, "transformers": NONE, "ATOM, with ue8m0": "power of two, up",
         "DeepGEMM, its tests": "float32"},
        EDGES_FP8,
    ),
    Topic(
        "Saturation of E4M3",
        "What becomes of a quotient beyond 448. With scales rounded up there is none.",
        {"clamped to ±448": rules.e4m3(True), "the cast's own: NaN if it does not saturate": rules.e4m3(False)},
        {"official": "clamped to ±448", "transformers": NONE, "vLLM": "clamped to ±448", "SGLang": "clamped to ±448",
         "ATOM": "the cast's own: NaN if it does not saturate"},
        {"all bfloat16": inputs.all_bf16},
    ),
    Topic(
        "Flavour of E4M3",
        "What a byte means: on gfx942 half, and 0x80 is NaN.",
        {"OCP": rules.e4m3_value, "FNUZ": rules.fnuz_value},
        {"official": "OCP", "transformers": NONE, "ATOM, gfx950": "OCP", "ATOM, gfx942": "FNUZ"},
        {"all codes": lambda: np.arange(256)},
    ),
    Topic(
        "Ties of FP4",
        "Where a quotient lies midway between two of 0, ½, 1, 1½, 2, 3, 4, 6.",
        {"to even": rules.e2m1("even"), "toward zero": rules.e2m1("toward zero"),
         "to the smaller value": rules.e2m1("smaller value"), "away from zero": rules.e2m1("away from zero")},
        {"official": "to even", "transformers": NONE, "vLLM": "to even", "SGLang, default": "toward zero",
         "SGLang, rne=True": "to even", "ATOM, torch fallback": "toward zero", "ATOM, aiter's numpy": "to the smaller value",
         "ATOM, aiter before #3992": "away from zero", "DeepGEMM": "toward zero"},
        FP4,
    ),
    Topic(
        "Sign of an FP4 zero",
        "Whether a small negative value becomes code 8 or code 0. Both are zero; bytes differ.",
        {"kept": rules.e2m1("even"), "dropped": rules.e2m1("even", signed_zero=False)},
        {"official": "kept", "transformers": NONE, "vLLM": "kept", "SGLang": "dropped", "DeepGEMM": "dropped"},
        FP4,
    ),
    Topic(
        "Edges of UE8M0",
        "What the bytes 0 and 255 of a scale mean.",
        {"2^(byte−127), 255 NaN": rules.e8m0_power, "exponent bits: 0 is 0, 255 infinite": rules.e8m0_bits,
         "the byte as a number": rules.e8m0_number},
        {"official": "2^(byte−127), 255 NaN", "ATOM": "exponent bits: 0 is 0, 255 infinite",
         "vLLM, FP8 experts before #51946": "the byte as a number"},
        {"all bytes": lambda: np.arange(256)},
    ),
    Topic(
        "float32 to bfloat16",
        "Every upper half, with lower halves on and beside the tie.",
        {"nearest even": rules.bf16_even, "half away from zero": rules.bf16_half_up, "cut": rules.bf16_cut},
        {"official": "nearest even"},
        {"ties and neighbours": inputs.near_ties},
    ),
    Topic(
        "What a row's quantiser receives",
        "Whether rotated rows are rounded to bfloat16 before amax and codes, or taken from float32 registers.",
        {"bfloat16": _row(rules.as_bf16), "float32": _row(_same)},
        {"official": "bfloat16", "transformers": NONE, "vLLM": "bfloat16", "SGLang": "float32", "ATOM": "float32"},
        {"normal rows": lambda: inputs.normal(1024, 448)},
    ),
    Topic(
        "Hadamard sides",
        "Whether index queries and keys are rotated before FP4: which 64 of 512 keys each of 64 queries picks. transformers "
        "rotates neither, and has no FP4 either.",
        {"both": _picks(rules.hadamard, rules.hadamard), "neither": _picks(_same, _same),
         "query only": _picks(rules.hadamard, _same)},
        {"official": "both", "transformers": "neither", "SGLang": "both", "ATOM": "neither", "ATOM, issue 1507": "query only"},
        {"normal keys": lambda: inputs.normal(576, 128)},
    ),
    Topic(
        "Pad bytes",
        "Bytes of a cache row that hold nothing: the eighth scale byte of a FlashMLA page, bytes 462 … 511 of a 2buff row.",
        {"written as 0": None, "undefined": None},
        {"official": NONE, "transformers": NONE, "vLLM": "written as 0", "ATOM": "written as 0", "FlashMLA": "undefined"},
    ),
)  # fmt: skip
