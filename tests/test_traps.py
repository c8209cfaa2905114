"""The traps of docs/traps.md: every test it names is there, and traps that no other file is about have their test here."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path

import pytest
import torch
from bounds import FAR, PEER_FLOAT64, distance
from strategies import TINY, MemoryStore, adversarial, normal, run, tiny_model, tiny_store, tokens

from reference.attention import sink_attention
from reference.block import Block
from reference.checkpoint.census import kv_bytes
from reference.checkpoint.procedural import ProceduralStore
from reference.config import Config
from reference.errors import BadInput
from reference.model import Model
from reference.moe import choose_experts, router_scores, routing_weights
from reference.presets import preset
from reference.rounding import SITES, Profile, Rounding, Sites, profile, profile_names

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "traps.md").read_text()
TRAPS = {f"T{n}" for n in range(37)}
ROUNDED = [name for name in profile_names() if name != "exact"]
IDS = tokens(40, 5)


# ---- the page


def rows(page: str) -> dict[str, list[str]]:
    """First cell of each table row -> the tests that the row names."""
    lines = (line.strip("|").split("|") for line in page.splitlines() if line.startswith("| "))
    named = {cells[0].strip(): re.findall(r"`(tests/[^`]+)`", cells[-1]) for cells in lines}
    return {first: tests for first, tests in named.items() if first not in ("#", "text")}


@cache
def known(path: str) -> tuple[set[str], str]:
    """Names of a file's test functions, `TestClass::test` inside of a class, and its text."""
    text = (ROOT / path).read_text()
    top = ast.parse(text).body
    names = {n.name for n in top if isinstance(n, ast.FunctionDef)}
    for group in (n for n in top if isinstance(n, ast.ClassDef)):
        names |= {f"{group.name}::{n.name}" for n in group.body if isinstance(n, ast.FunctionDef)}
    return names, text


def absent(test: str) -> bool:
    """Whether no test has this id, `tests/test_x.py::test_y[a case]`; a case must stand in the file as it is named."""
    path, _, name = test.partition("::")
    name, _, case = name.partition("[")
    if not (ROOT / path).exists() or name not in known(path)[0]:
        return True
    return bool(case) and f'"{case.removesuffix("]")}"' not in known(path)[1]


def test_every_trap_names_tests_that_are_there() -> None:
    found = rows(PAGE)
    assert set(found) >= TRAPS and all(found.values())
    assert [test for named in found.values() for test in named if absent(test)] == []


def test_that_check_sees() -> None:
    assert absent("tests/test_nowhere.py::test_x") and absent("tests/test_moe.py::test_nothing")
    assert absent("tests/test_mutations.py::test_mutation_is_seen[no such mistake]")
    assert not absent("tests/test_mutations.py::test_mutation_is_seen[no ReLU]")
    assert rows("| # | trap | tests |\n|---|---|---|\n| T1 | x | none |\n") == {"T1": []}


@pytest.mark.slow
def test_pytest_finds_every_one() -> None:
    named = sorted({test for tests in rows(PAGE).values() for test in tests})
    done = subprocess.run([sys.executable, "-m", "pytest", "--collect-only", "-q", *named], cwd=ROOT, capture_output=True,
                          text=True, check=False)  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


# ---- traps without a test elsewhere


def with_weights(**changed: torch.Tensor) -> Model:
    """The small model with some weights replaced."""
    return Model(MemoryStore(TINY, {**tiny_store().values, **changed}), torch.float64, memory=1 << 40)


def moved(model: Model) -> float:
    return distance(run(model, IDS), run(tiny_model(), IDS))


def test_streams_begin_as_equal_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    right, seen = Block.__call__, []

    def first_only(self, x, *rest):
        if not seen:
            x = x * torch.tensor([1.0, 0, 0, 0], dtype=x.dtype)[:, None]
        seen.append(x)
        return right(self, x, *rest)

    def watched(self, x, *rest):
        seen.append(x)
        return right(self, x, *rest)

    monkeypatch.setattr(Block, "__call__", watched)
    model = tiny_model()
    want = run(model, IDS)
    embedded = model.loader.embed(IDS)
    assert all(torch.equal(seen[0][:, s], embedded) for s in range(TINY.hc_mult))
    seen.clear()
    monkeypatch.setattr(Block, "__call__", first_only)
    assert distance(run(tiny_model(), IDS), want) > FAR * PEER_FLOAT64


def test_the_norm_of_the_latent_has_a_weight_and_that_of_heads_has_none() -> None:
    stored = ProceduralStore("v4-pro").tensors
    assert stored["layers.2.attn.q_norm.weight"].shape == (preset("v4-pro").q_lora_rank,)
    assert {name.split(".")[3] for name in stored if name.startswith("layers.2.attn.") and "norm" in name} == {
        "q_norm", "kv_norm", "compressor", "indexer"
    }  # fmt: skip
    ones = torch.ones(TINY.q_lora_rank, dtype=torch.bfloat16)
    assert moved(with_weights(**{"layers.1.attn.q_norm.weight": ones})) > FAR * PEER_FLOAT64


@pytest.mark.parametrize("name", ["qat", "official", "pool-fp8"])
@pytest.mark.parametrize("site", ["attn.kv", "attn.compressor.row"])
def test_cache_rows_go_through_e4m3_and_not_through_bfloat16_alone(name: str, site: str) -> None:
    rounding, x = profile(name).sites[site], adversarial(0, 50, 128, dtype=torch.float32)
    assert (rounding.format, rounding.block, rounding.amax_floor) == ("e4m3", 64, 1e-4)
    through = rounding(x, "bf16")
    assert not torch.equal(through, x.bfloat16().float())
    assert torch.equal(through, rounding(through, "bf16"))


@pytest.mark.parametrize("name", ROUNDED)
@pytest.mark.parametrize("site", ["ffn.experts.w1.input", "ffn.experts.w2.input"])
def test_inputs_of_fp4_experts_have_one_scale_for_128_channels(name: str, site: str) -> None:
    """An outlier in the last 32 channels of 128 costs the first 32 their smallest values; with a scale per 32 it does not."""
    x = torch.full((1, 256), 2.0**-12)
    x[0, 120] = 440.0
    rounding = profile(name).sites[site]
    rounded, per_32 = rounding(x, "f32"), replace(rounding, block=32)(x, "f32")
    assert (rounded[0, :120] == 0).all() and (rounded[0, 128:] != 0).all()
    assert (per_32[0, :96] != 0).all()


def test_the_router_works_in_the_type_of_the_run() -> None:
    """No profile rounds it; in bfloat16 some tokens would choose other experts."""
    assert not [site for name in ROUNDED for site in profile(name).sites if site.startswith("ffn.gate.")]
    x, gate, bias = normal(1, 500, 64).float(), normal(2, 96, 64).float(), 0.1 * normal(3, 96).float()
    logits = (x @ gate.T).bfloat16().float()
    right = router_scores(x @ gate.T)
    rough = torch.nn.functional.softplus(logits).sqrt()
    a, b = (choose_experts(scores, bias, 6).sort().values for scores in (right, rough))
    assert not torch.equal(a, b)


def test_no_epsilon_keeps_the_routing_weights_from_nan() -> None:
    """Official code divides by the bare sum. Where all chosen scores vanish that is NaN; elsewhere 1e-20 changes nothing."""
    experts = torch.tensor([[0, 1]])
    assert routing_weights(torch.zeros(1, 4), experts, 2.5).isnan().all()
    scores = torch.rand(1, 4, generator=torch.Generator().manual_seed(0)) + 0.01
    chosen = scores[:, :2]
    assert torch.equal(routing_weights(scores, experts, 2.5), chosen / (chosen.sum(-1, keepdim=True) + 1e-20) * 2.5)


@pytest.mark.parametrize("site", ["post", "comb"])
def test_weights_of_the_streams_stay_unrounded(site: str) -> None:
    names = {f"hc_attn.{site}", f"hc_ffn.{site}"}
    assert names <= SITES and not [name for name in ROUNDED if names & set(profile(name).sites)]
    rounded = tiny_model(profile=Profile("wrong", "f32", {name: Rounding("bf16") for name in names}))
    assert moved(rounded) > FAR * PEER_FLOAT64


def test_kinds_of_layer_are_never_guessed() -> None:
    fields = {**asdict(preset("v4-pro")), "model_type": "deepseek_v4"}
    del fields["compress_ratios"]
    with pytest.raises(BadInput, match="compress_ratios"):
        Config.from_dict(fields)
    assert [preset("v4-pro").kind(i) for i in range(4)] == ["hca", "hca", "csa", "hca"]


@pytest.mark.parametrize("name", ROUNDED)
def test_the_grouped_output_projection_takes_inputs_that_no_quantiser_saw(name: str) -> None:
    seen = set()
    run(tiny_model(profile=profile(name), tap=lambda tap, x: seen.add(tap.split(".", 2)[-1])), IDS)
    assert "attn.wo_b.input" in seen and "attn.wo_a.input" not in seen
    assert profile(name).sites.get("attn.o_rotated", Rounding("bf16")).format == "bf16"


def test_the_sink_stays_out_of_the_maximum() -> None:
    """So the rounded numerators do not depend on it: they are powers of e below the largest row's."""
    q, rows_ = normal(1, 2, 3, 16), normal(2, 9, 16)
    none = torch.zeros(2, 0, 16, dtype=torch.float64)
    seen: list[torch.Tensor] = []
    sites = Sites(Profile("p", "f32", {"p": Rounding("bf16")}), lambda name, p: seen.append(p.clone()))
    for sink in (-3.0, 40.0):
        sinks = torch.full((3,), sink, dtype=torch.float64)
        sink_attention(q, rows_, torch.zeros(2, 9, dtype=torch.bool), none, torch.zeros(2, 0, dtype=torch.bool), sinks, sites)
    assert torch.equal(*seen) and (seen[0].amax(-1) == 1).all()


def test_rows_hidden_from_everybody_leave_no_trace() -> None:
    """A stretch of rows that nobody may see comes first: no -inf less -inf, and the same result as without it."""
    q, shown, sink = normal(1, 3, 2, 16), normal(2, 70, 16), normal(3, 2)
    none, nobody = torch.zeros(3, 0, 16, dtype=torch.float64), torch.zeros(3, 0, dtype=torch.bool)
    hidden = torch.zeros(3, 134, dtype=torch.bool)
    hidden[:, :64] = True
    behind = torch.cat([torch.full((64, 16), 9.0, dtype=torch.float64), shown])
    out = sink_attention(q, behind, hidden, none, nobody, sink, Sites())
    alone = sink_attention(q, shown, hidden[:, 64:], none, nobody, sink, Sites())
    assert out.isfinite().all() and distance(out, alone) <= PEER_FLOAT64


NARROW = {"mma_fp8", "mma_bf16"}  # whose operands have 8 and 16 bits on a GPU, and nothing to lose


def loose_products(source: str) -> set[str]:
    """Functions with a `tl.dot` that leaves the hardware free to take TF32."""
    found = set()
    for function in (n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.FunctionDef)):
        for call in (n for n in ast.walk(function) if isinstance(n, ast.Call) and ast.unparse(n.func) == "tl.dot"):
            if {k.arg: ast.unparse(k.value) for k in call.keywords}.get("input_precision") != "'ieee'":
                found.add(function.name)
    return found


def test_float32_products_are_never_tf32() -> None:
    assert torch.get_float32_matmul_precision() == "highest" and not torch.backends.cuda.matmul.allow_tf32
    files = (ROOT / "optimized" / "kernels").glob("*.py")
    assert set().union(*(loose_products(path.read_text()) for path in files)) == NARROW
    ieee, tf32 = ("def {}():\n    tl.dot(a, b, input_precision='{}')\n".format(*two) for two in (("f", "ieee"), ("g", "tf32")))
    assert loose_products(ieee + tf32 + "def h():\n    tl.dot(a, b)\n") == {"g", "h"}


def test_a_million_tokens_is_5_09_gib_and_2_to_20_tokens_are_5_337() -> None:
    kv = kv_bytes(preset("v4-pro"))
    a_token = kv.main["fp8"] + kv.index["fp4"]
    assert round(float(a_token * 10**6 / 2**30), 2) == 5.09 and round(float(a_token * 2**20 / 2**30), 3) == 5.337


def test_compressor_states_are_3_7_windows_together_and_3_25_in_hca_layers() -> None:
    config, kv = preset("v4-pro"), kv_bytes(preset("v4-pro"))
    hca = config.compress_ratios.count(128) * 2 * 128 * config.head_dim * 4
    assert round(kv.compressor_state / kv.window["fp8"], 1) == 3.7 and round(hca / kv.window["fp8"], 2) == 3.25
