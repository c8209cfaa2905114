"""The reference against outputs of independent software. Skipped where the cases are not at hand."""

from __future__ import annotations

from collections import defaultdict

import pytest
import torch
from bounds import ORACLE_FLOAT32, ORACLE_FLOAT32_SHORT, ORACLE_FLOAT64, assert_within, rounding_bound
from oracle_case import LENGTHS, OracleCase
from torch import Tensor

from reference.rounding import Profile, Sites, profile
from reference.state import SequenceState

DTYPES = [torch.float32, torch.float64]
PICKED = (5, 129, 300)  # prompts with stored hidden states, MTP outputs and picks
LONG = (127, 128, 129, 300, 520)


def logit_bound(dtype: torch.dtype, n: int) -> float:
    if dtype == torch.float64:
        return ORACLE_FLOAT64
    return ORACLE_FLOAT32_SHORT if n <= 5 else ORACLE_FLOAT32


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_exact_prefill(oracle: OracleCase, dtype: torch.dtype) -> None:
    model = oracle.model(dtype)
    for n in LENGTHS:
        _, logits = oracle.prefill(model, n)
        assert_within(logit_bound(dtype, n), logits[oracle.rows(n)], oracle.expected[f"logits_{n}"])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_exact_decode(oracle: OracleCase, dtype: torch.dtype) -> None:
    model = oracle.model(dtype)
    for name, prefilled in oracle.decode_runs():
        ids, state = oracle.expected[f"dec_ids_{name}"], SequenceState()
        logits = [model.logits(model.forward([ids[:prefilled]], [state])[-1:])]
        logits += [model.logits(model.forward([ids[i : i + 1]], [state])) for i in range(prefilled, len(ids))]
        assert_within(logit_bound(dtype, len(ids)), torch.cat(logits), oracle.expected[f"dec_logits_{name}"])


@pytest.mark.parametrize("n", PICKED)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_exact_hidden_states(oracle: OracleCase, dtype: torch.dtype, n: int) -> None:
    model, at, layers = oracle.model(dtype), oracle.expected[f"hpos_{n}"].long(), []
    model.forward([oracle.expected[f"ids_{n}"]], [SequenceState()], lambda _, x: layers.append(x[at]))
    for got, want in zip(torch.stack(layers).flatten(0, 1), oracle.expected[f"hidden_{n}"].flatten(0, 1), strict=True):
        size = max(1.0, float(want.abs().amax()))  # a row of its own layer and token: streams grow with depth
        assert_within(logit_bound(dtype, LONG[0]) * size, got, want)


@pytest.mark.parametrize("n", PICKED)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_exact_mtp(oracle: OracleCase, dtype: torch.dtype, n: int) -> None:
    model = oracle.model(dtype)
    streams, _ = oracle.prefill(model, n)
    logits = model.mtp_logits(streams, [oracle.expected[f"mtp_ids_{n}"]], [SequenceState()])
    assert_within(logit_bound(dtype, n), logits[oracle.rows(n)], oracle.expected[f"mtp_logits_{n}"])


@pytest.mark.parametrize("n", PICKED)
def test_picks(oracle: OracleCase, n: int) -> None:
    """Compressed rows and experts chosen, as sets, and the experts' weights; what a list lacks is filled with -1."""
    seen: dict[str, list[Tensor]] = defaultdict(list)
    model = oracle.model(torch.float32, tap=lambda name, x: seen[name].append(x))
    oracle.prefill(model, n)
    at = oracle.expected[f"hpos_{n}"].long()
    compared = 0
    for name, want in oracle.expected.items():
        what, _, layer = name.removeprefix(f"pick_{n}_").rpartition("_")
        if not name.startswith(f"pick_{n}_"):
            continue
        if what == "index":
            picks = torch.cat(seen[f"layers.{layer}.attn.indexer.picks"])[at]
            assert torch.equal(picks.sort(-1, descending=True).values, want)
        else:
            experts, order = torch.cat(seen[f"layers.{layer}.ffn.gate.experts"])[at].sort(-1)
            weights = torch.cat(seen[f"layers.{layer}.ffn.gate.weights"])[at].gather(1, order)
            if what == "experts":
                assert torch.equal(experts, want)
            else:
                assert_within(ORACLE_FLOAT32_SHORT, weights, want)
        compared += 1
    kinds = model.config.num_hidden_layers * 2 + sum(r == 4 for r in model.config.compress_ratios)
    assert compared == kinds


def test_qat(oracle: OracleCase) -> None:
    model = oracle.model(torch.float64, profile("qat"))
    for n in LENGTHS:
        streams, logits = oracle.prefill(model, n)
        assert_within(ORACLE_FLOAT64, logits[oracle.rows(n)], oracle.expected[f"sim64_logits_{n}"])
        if n in PICKED:
            mtp = model.mtp_logits(streams, [oracle.expected[f"mtp_ids_{n}"]], [SequenceState()])
            assert_within(ORACLE_FLOAT64, mtp[oracle.rows(n)], oracle.expected[f"sim64_mtp_logits_{n}"])


# Quantiser sites (A1 to A5) without which no prompt of 300 tokens would come out the same.
@pytest.mark.parametrize("site", sorted(s for s in profile("qat").sites if s not in ("e_proj.input", "h_proj.input")))
def test_every_quantiser_of_qat_is_needed(bf16_oracle: OracleCase, site: str) -> None:
    _, logits = bf16_oracle.prefill(bf16_oracle.model(torch.float64, profile("qat").without(site)), 300)
    moved = (logits[bf16_oracle.rows(300)] - bf16_oracle.expected["sim64_logits_300"]).abs().amax(-1)
    assert (moved > ORACLE_FLOAT64).float().mean() > 1 / 2


def matching_rows(case: OracleCase, rounding: Profile) -> Tensor:
    """Of the long prompts' stored rows, which are within the bound of the bfloat16 run."""
    model = case.model(torch.float32, rounding)
    off = [case.prefill(model, n)[1][case.rows(n)] - case.expected[f"simbf16_logits_{n}"] for n in LONG]
    return torch.cat([(d.abs().amax(-1) < ORACLE_FLOAT32) for d in off])


@pytest.fixture(scope="module")
def official_rows(bf16_oracle: OracleCase) -> Tensor:
    """A last-bit difference in a sum flips a rounding, then a selection, and spreads: so rows are counted."""
    return matching_rows(bf16_oracle, profile("official"))


def test_official(official_rows: Tensor) -> None:
    assert official_rows.float().mean() >= 1 / 4


# bfloat16 points the case cannot see, and why. Each is shown to act on its own value below.
UNSEEN = {
    "embed": "the table is stored in bfloat16",
    "rope.table": "float32 in a float32 run",
    "rope.angle": "float32 in a float32 run",
    "e_proj": "no bfloat16 output of MTP is stored",
    "h_proj": "no bfloat16 output of MTP is stored",
    "enorm": "no bfloat16 output of MTP is stored",
    "hnorm": "no bfloat16 output of MTP is stored",
    "streams": "no bfloat16 output of MTP is stored",
}
