"""One op without a model: every op of the table from drawn inputs, users' kernels right and wrong, files, bad input."""

from __future__ import annotations

import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch

import parity
from optimized.rope import rope_table
from parity import ops
from parity.budget.bounded import ACCUMULATE
from parity.cases import layer_kinds
from parity.single.contract import ITEMS, LEFT_OUT, known
from parity.single.drawing import default_batch, draw, ragged
from parity.single.given import GivenTaps, given_step
from parity.single.verdict import judge_outputs
from reference import formats
from reference.checkpoint.loader import Loader
from reference.checkpoint.open import open_store
from reference.errors import BadInput

STORE = open_store("procedural:mini")
CONFIG = STORE.config
ALONE = [op for op in ops.OPS if op.name not in LEFT_OUT]
FP32 = ACCUMULATE["fp32"]


def case(op: str, layer: int | None = None, phase: str = "decode", profile: str = "pool-fp8", seed: int = 0):
    layer = next(i for i in range(6) if layer_kinds(CONFIG, i) & set(ops.BY_NAME[op].kinds)) if layer is None else layer
    return draw(op, STORE, layer, phase, profile, default_batch(CONFIG, phase, seed, op), seed)


def kernel_outputs(inputs):
    """What this project's own kernel puts out; one that makes two ops' outputs gets zeros and weights for the other."""
    step = given_step(inputs, FP32)
    rest = {n: torch.zeros(inputs.sizes.shape(ITEMS[n])) for n in ("attn.wq_b", "attn.wkv") if n not in inputs}
    step.capture = GivenTaps({n: step.capture[n] for n in ITEMS if n in step.capture._parts} | rest, inputs.sizes)
    if inputs.op == "attn.q":
        step.block = Loader(STORE, torch.float64, 0).block(inputs.layer)
    stored = ops.BY_NAME[inputs.op].candidate(step, inputs.op)
    return {name: x for name, x in stored.items() if name in inputs.contract.outputs}


@pytest.mark.parametrize("op", ALONE, ids=lambda op: op.name)
def test_every_op_is_judged_from_its_contract_alone(op):
    """The kernel passes; a wrong first element of its first output does not."""
    inputs = case(op.name)
    outputs = kernel_outputs(inputs)
    good = judge_outputs(inputs, outputs)
    assert good.passed and good.elements and good.exit_code == 0
    assert {v.output for v in good.outputs} == set(outputs)
    name = next(iter(outputs))
    bad = judge_outputs(inputs, outputs | {name: spoiled(outputs[name])})
    assert not bad.passed and bad.exit_code == 1


def spoiled(stored):
    """The first element another number, or another code."""
    if isinstance(stored, tuple):
        codes = stored[0].clone()
        codes.view(-1)[0] ^= 1 << (2 if codes.max() < 16 else 6)
        return codes, stored[1]
    x = stored.clone()
    x.view(-1)[0] = 3 * x.view(-1)[0] + 1
    return x


BUILD = ("attn.kv", "attn.compressor.row", "attn.indexer.compressor.row", "attn.indexer.q", "attn.core")


@pytest.mark.parametrize("op", BUILD)
def test_the_bf16_build_has_other_rows_and_keys(op):
    inputs = case(op, 2, "verify", "pool-bf16")
    outputs = kernel_outputs(inputs)
    assert judge_outputs(inputs, outputs).passed
    other = case(op, 2, "verify")
    if op in ("attn.kv", "attn.compressor.row"):
        with pytest.raises(BadInput, match="no output row"):
            judge_outputs(other, outputs)


# Kernels as a user writes them, in torch, on the names of the contract.


def decoded(x, name):
    """Codes and scale bytes per 128, or per 128 x 128, as float32."""
    codes = x[name].view(torch.float8_e4m3fn).float()
    scales = torch.exp2(x[f"{name.removesuffix('.weight')}.scale"].float() - 127)
    down = 128 if name.endswith(".weight") else 1
    grown = scales.repeat_interleave(128, 1).repeat_interleave(down, 0)
    return codes * grown[: codes.shape[0], : codes.shape[1]]


def gemm(x):
    return (decoded(x, "attn.wq_b.input") @ decoded(x, "attn.wq_b.weight").T).bfloat16()


def gemm_without_the_last_block(x):
    return (decoded(x, "attn.wq_b.input")[:, :-128] @ decoded(x, "attn.wq_b.weight").T[:-128]).bfloat16()


def turned(x, cos, sin, inverse=False):
    even, odd = x[..., 0::2], x[..., 1::2]
    sin = -sin if inverse else sin
    return torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1).flatten(-2)


def attention(x, shift=1, sink=True):
    """Window layers: every token on the rows of its own sequence."""
    c, q, out, behind = x.config, x["attn.q"].float(), [], 0
    bounds = x["bounds"].tolist()
    for first, last in pairwise(bounds):
        held = min(int(x["positions"][first]), c.sliding_window - 1)
        rows = torch.cat([x["window"][behind : behind + held], x["attn.kv"][first:last]]).float()
        behind += held
        for t in range(first, last):
            seen = rows[: held + t - first + shift][-c.sliding_window :]
            score = q[t] @ seen.T * c.head_dim**-0.5
            wide = torch.cat([score, x["attn.attn_sink"][:, None]], 1) if sink else score
            out.append(torch.softmax(wide, 1)[:, : len(seen)] @ seen)
    o, r = torch.stack(out), c.qk_rope_head_dim
    back = turned(o[..., -r:], x["cos"][:, None], x["sin"][:, None], inverse=True)
    return torch.cat([o[..., :-r], back], -1).bfloat16()


def compressed_row(x, ape=True):
    """HCA layers: a row for every group of 128 that the step completes."""
    c, rows, behind = x.config, [], 0
    bounds = x["bounds"].tolist()
    for first, last in pairwise(bounds):
        start = int(x["positions"][first])
        held = start % 128
        bias = x["attn.compressor.ape"][x["positions"][first:last] % 128] * ape
        values = torch.cat([x["state.values"][behind : behind + held], x["attn.compressor.values"][first:last]])
        gates = torch.cat([x["state.gates"][behind : behind + held], x["attn.compressor.scores"][first:last] + bias])
        behind += held
        for i in range(len(values) // 128):
            part = slice(128 * i, 128 * i + 128)
            row = (torch.softmax(gates[part], 0) * values[part]).sum(0)
            row = row * torch.rsqrt(row.square().mean() + c.rms_norm_eps) * x["attn.compressor.norm.weight"].float()
            cos, sin = rope_table(c, x.layer, torch.tensor([(start // 128 + i) * 128]))
            rows.append(torch.cat([row[:-64], turned(row[-64:], cos[0], sin[0])]))
    whole = torch.stack(rows) if rows else torch.zeros(0, c.head_dim)
    codes, scales = formats.quantize_e4m3(whole[:, :-64], 64)
    return {"nope": codes, "nope.scale": scales, "rope": whole[:, -64:].bfloat16()}


HCA = [case("attn.compressor.row", 1, phase) for phase in ("prefill", "decode")]
WINDOW = [case("attn.core", 0, phase) for phase in ("prefill", "verify")]


@pytest.mark.parametrize(
    ("op", "cases", "right", "wrong"),
    [
        ("attn.wq_b", None, gemm, gemm_without_the_last_block),
        ("attn.core", WINDOW, attention, lambda x: attention(x, sink=False)),
        ("attn.core", WINDOW, attention, lambda x: attention(x, shift=0)),
        ("attn.compressor.row", HCA, compressed_row, lambda x: compressed_row(x, ape=False)),
    ],
)
def test_a_users_kernel_has_its_verdict(op, cases, right, wrong):
    good, bad = parity.judge_op(op, right, cases), parity.judge_op(op, wrong, cases)
    assert good.passed and good.budget_used <= 1, good.report()
    assert not bad.passed and bad.report().startswith(f"FAIL {op}")
    assert "bound" in bad.report() and "worst" in bad.report() and "λ = " in bad.report()


def top(x, last=None):
    """Picks by torch, in the order of their scores."""
    k, table = x.config.index_topk, x["attn.indexer.scores"]
    picks = torch.full((len(table), k), -1, dtype=torch.int32)
    for t, p in enumerate(x["positions"].tolist()):
        chosen = table[t, : (p + 1) // 4].argsort(descending=True)[:k]
        picks[t, : len(chosen)] = chosen.int()
    if last is not None:
        picks[-1, -1] = last
    return picks


def test_picks_of_near_and_far_tokens_in_one_table_and_any_order():
    batch = ragged([3, 36, 4200], [1, 1, 2], CONFIG.vocab_size, torch.Generator().manual_seed(0))
    far = [draw("attn.indexer.picks", STORE, 2, "decode", "pool-fp8", batch)]
    assert far[0]["attn.indexer.scores"].shape == (4, 1050)  # more keys than are judged in the near table
    good = parity.judge_op("attn.indexer.picks", top, far)
    assert good.passed and {v.output for v in good.cases[0].outputs} == {"attn.indexer.picks", "attn.indexer.picks.far"}
    assert not parity.judge_op("attn.indexer.picks", lambda x: top(x, last=1050), far).passed
    assert not parity.judge_op("attn.indexer.picks", lambda x: top(x)[:-1], far).passed


def test_a_kernel_that_raises_or_puts_out_something_else_has_failed():
    one = [case("attn.wq_b")]
    for kernel in (lambda x: 1 / 0, lambda x: gemm(x)[:, :-1], lambda x: {"attn.q": gemm(x)}, lambda x: gemm(x).half()):
        verdicts = parity.judge_op("attn.wq_b", kernel, one)
        assert not verdicts.passed and "FAIL attn.wq_b" in verdicts.report()
    assert "ZeroDivisionError" in parity.judge_op("attn.wq_b", lambda x: 1 / 0, one).report()


def test_a_failing_case_leaves_a_script(tmp_path):
    """It ends as the verdict did; a case that passes, or puts out nothing, leaves none."""
    one = [case("attn.wq_b")]
    for kernel in (gemm, lambda x: 1 / 0):
        parity.judge_op("attn.wq_b", kernel, one, repro=tmp_path / "none")
    assert not (tmp_path / "none").exists()
    assert not parity.judge_op("attn.wq_b", lambda x: -gemm(x), one, repro=tmp_path / "r").passed
    (script,) = (tmp_path / "r").iterdir()
    assert script.name == "attn.wq_b-layer_00-decode.py"
    assert subprocess.run([sys.executable, str(script)], capture_output=True, check=False).returncode == 1


def test_stored_in_float32_a_kernel_is_judged_as_float32():
    one = [case("attn.wq_b", phase="chunk")]
    right = parity.judge_op("attn.wq_b", lambda x: gemm(x).float(), one)
    exact = parity.judge_op("attn.wq_b", lambda x: decoded(x, "attn.wq_b.input") @ decoded(x, "attn.wq_b.weight").T, one)
    assert not right.passed and exact.passed  # bfloat16 values in float32 are half a unit off


def test_truncating_sums_need_the_format_that_says_so():
    """Products added with 13 bits, as Hopper does between FP8 instructions, and chopped."""
    def chopped(x):
        a, b = decoded(x, "attn.wq_b.input"), decoded(x, "attn.wq_b.weight")
        total = torch.zeros(len(a), len(b))
        for k in range(a.shape[1]):
            total = (total + a[:, k, None] * b[None, :, k]).view(torch.int32).bitwise_and(-1 << 11).view(torch.float32)
        return total.bfloat16()

    one = [case("attn.wq_b", phase="chunk")]
    assert not parity.judge_op("attn.wq_b", chopped, one).passed
    assert parity.judge_op("attn.wq_b", chopped, one, accumulate="hopper-fp8").passed


def test_words_that_mean_nothing():
    with pytest.raises(ValueError, match="numbers rows its own way"):
        known("attn.indexer.rows")
    with pytest.raises(ValueError, match="no op 'attn'"):
        parity.judge_op("attn", gemm)
    with pytest.raises(ValueError, match="bf8"):
        parity.judge_op("attn.wq_b", gemm, accumulate="bf8")
    assert all(known(op.name) for op in ALONE)


def test_the_example_of_the_docs_runs_and_passes(capsys):
    page = (Path(__file__).parents[1] / "docs" / "single.md").read_text()
    code = page.split("```python\n")[1].split("```")[0]
    exec(code, {})  # our own page
    said = capsys.readouterr().out
    assert said.startswith("PASS attn.wo_b") and "FAIL" not in said
