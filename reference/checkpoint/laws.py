"""What procedural weights look like: a distribution for every parameter, so that the model behaves as if trained.

A law gives the quantiles from which elements are drawn. Rows come in four widths (`ROW_FACTORS`), and one column in
128 is wider still, so that every weight has outlier channels. Quantiles are rounded to multiples of 2^-20, so that
another machine's `log` and `exp` draw the same elements.
Source: docs/checkpoint.md §5.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from functools import cache
from statistics import NormalDist
from typing import Any

import numpy as np

from ..config import Config
from .manifest import Parameter

Array = np.ndarray[Any, Any]

# Widths of a row relative to the law, and how many of 16 rows have each: plain, narrow, wide, outlier.
ROW_FACTORS = (1.0, 0.5, 1.5, 4.0)
ROW_COUNTS = (10, 3, 2, 1)
FLAT_FACTORS = (1.0, 0.8, 1.2, 1.0)  # vocabulary rows and the router: an outlier row would win every time
COLUMN_FACTOR = 4.0
COLUMN_PERIOD = 128

CODE_STD = {"F8_E4M3": 40.0, "I8": 1.2}  # standard deviation of quantised codes, whatever their scales: clear of the ends

EMBED_STD = 0.03  # small streams: the first norms feel their epsilon, as in trained models
UPDATE_STD = 0.3 * EMBED_STD  # what one attention or expert layer adds to the streams
BEFORE_NORM_STD = 0.1  # output of a projection that a norm follows
KV_NORM_GAIN = 2.0  # attention logits of standard deviation 2: a few rows matter, most do not
SINK_RANGE = (-2.0, 7.0)  # up to the log-sum-exp of a full window
GATE_STD = 1.5  # compressor gates: neither a mean nor a maximum over the slots
APE_STD = 1.0
ROUTER_STD = 1.5
ROUTER_BIAS_STD = 0.15
CLAMP_SHARE = 0.35  # expert activations relative to swiglu_limit: one value in 50 is clamped, most of them in outlier rows
LOGIT_STD = 2.0
HC_MIX_STD = 1.0
HC_SCALE_RANGE = (0.6, 1.4)
HC_BASE_STD = 0.5
HC_BASE_PRE, HC_BASE_POST, HC_BASE_DIAGONAL = -1.1, -0.3, 3.5
NORM_RANGE = (0.27, 1.08)  # root mean square 1 over the four widths


@dataclass(frozen=True)
class Law:
    """Distribution of a parameter: normal of standard deviation `std` or uniform on [low, high); widths of its rows."""

    std: float = 0.0
    low: float = 0.0
    high: float = 0.0
    factors: tuple[float, ...] = ROW_FACTORS

    @property
    def signed(self) -> bool:
        """Whether the sign is drawn apart from the magnitude."""
        return self.std > 0

    def quantiles(self, n: int) -> Array:
        """n equally likely values (float64) at width 1: magnitudes of the normal, or the uniform's values."""
        if self.signed:
            return _half_normal(n) * (self.std / _rms_of_factors(self.factors))
        return self.low + (self.high - self.low) * (np.arange(n) + 0.5) / n

    def widths(self) -> tuple[float, ...]:
        """Of the four kinds of row, then of outlier columns."""
        return (*self.factors, COLUMN_FACTOR)


@cache
def _half_normal(n: int) -> Array:
    normal = NormalDist()
    exact = np.array([normal.inv_cdf(0.5 + (i + 0.5) / (2 * n)) for i in range(n)])
    return np.round(exact * 2**20) / 2**20


def _rms_of_factors(factors: tuple[float, ...]) -> float:
    rows = sum(n * f * f for n, f in zip(ROW_COUNTS, factors, strict=True)) / sum(ROW_COUNTS)
    return math.sqrt(((COLUMN_PERIOD - 1) * rows + COLUMN_FACTOR**2) / COLUMN_PERIOD)


@cache
def swiglu_rms(std: float) -> float:
    """Root mean square of silu(a)·b for independent normal a and b of this standard deviation."""
    a = std * np.concatenate([_half_normal(512), -_half_normal(512)])
    silu = np.round(a / (1 + np.exp(-a)) * 2**20) / 2**20
    return math.sqrt(math.fsum(silu**2) / len(silu)) * std


def law(config: Config, parameter: Parameter) -> Law:
    """The law of a parameter (not of tid2eid, which holds expert numbers)."""
    name = re.sub(r"^(layers|mtp)\.\d+\.", "", parameter.name)
    if re.search(r"norm\.weight$", name):
        gain = KV_NORM_GAIN if name in ("attn.kv_norm.weight", "attn.compressor.norm.weight") else 1.0
        return Law(low=NORM_RANGE[0] * gain, high=NORM_RANGE[1] * gain)
    for pattern, result in _RULES:
        if re.search(pattern, name):
            return result
    fan_in = parameter.shape[-1]
    gain, factors = _projection(config, name)
    return Law(std=gain / math.sqrt(fan_in), factors=factors)


# Parameters whose law does not depend on the number of inputs.
_RULES = (
    (r"attn_sink$", Law(low=SINK_RANGE[0], high=SINK_RANGE[1], factors=FLAT_FACTORS)),
    (r"hc_\w+_scale$", Law(low=HC_SCALE_RANGE[0], high=HC_SCALE_RANGE[1], factors=FLAT_FACTORS)),
    (r"hc_\w+_base$", Law(std=HC_BASE_STD, factors=FLAT_FACTORS)),
    (r"\bape$", Law(std=APE_STD)),
    (r"gate\.bias$", Law(std=ROUTER_BIAS_STD, factors=FLAT_FACTORS)),
    (r"^embed\.weight$", Law(std=EMBED_STD, factors=FLAT_FACTORS)),
    (r"markov_w1\.weight$", Law(std=1.0, factors=FLAT_FACTORS)),
)


def _projection(config: Config, name: str) -> tuple[float, tuple[float, ...]]:
    """Standard deviation of a projection's output for inputs of size 1, and the widths of its rows."""
    flat = {
        r"hc_\w+_fn$": HC_MIX_STD,
        r"head\.weight$|markov_w2": LOGIT_STD,
        r"ffn\.gate\.weight$": ROUTER_STD,
        r"weights_proj|confidence_head": 1.0,
    }
    shaped = {
        r"wgate\.weight$": GATE_STD,
        r"compressor\.wkv|attn\.wkv|wq_a|attn\.wq_b|main_proj": BEFORE_NORM_STD,
        r"indexer\.wq_b|wo_a": 1.0,
        r"wo_b": UPDATE_STD,
        r"e_proj|h_proj": EMBED_STD,
        r"w1\.weight$|w3\.weight$": CLAMP_SHARE * config.swiglu_limit,
        r"w2\.weight$": UPDATE_STD / swiglu_rms(CLAMP_SHARE * config.swiglu_limit),
    }
    for rules, factors in ((flat, FLAT_FACTORS), (shaped, ROW_FACTORS)):
        for pattern, gain in rules.items():
            if re.search(pattern, name):
                return gain, factors
    raise KeyError(f"no law for {name}")


def hc_base_mean(config: Config, length: int) -> list[float]:
    """What `hc_*_base` scatters around: streams read weakly, written about once, and mostly kept apart."""
    hc = config.hc_mult
    if length == hc:
        return [HC_BASE_PRE] * hc
    comb = [HC_BASE_DIAGONAL * (j == k) for j in range(hc) for k in range(hc)]
    return [HC_BASE_PRE] * hc + [HC_BASE_POST] * hc + comb
