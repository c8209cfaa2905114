"""Every kernel compiles for four GPUs without spills and with its matrix instructions. Compiled, not run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest

from optimized.kernels import aot
from optimized.kernels.launch import INTERPRETER

pytestmark = pytest.mark.aot

KERNELS = ["quantize", "gemm_fp8", "compress_hca", "compress_csa", "state_write", "attend", "combine"]
KERNELS += ["norm", "norm_quantize", "hc_project", "hc_post_project", "hc_post", "hc_mix", "hc_head"]
KERNELS += ["gemm_bf16", "grouped_gemm", "router_scores", "choose_experts", "look_up_experts", "embed"]
KERNELS += ["expert_gate_up", "expert_down", "expert_gate_up_fp8", "expert_down_fp8", "expert_sum", "swiglu_quantize"]
KERNELS += ["mtp_streams"]
KERNELS += ["qk_norm_rope", "qk_norm_rope_bf16", "window_write", "inverse_rope"]
KERNELS += ["compress_hca_bf16", "compress_csa_bf16", "compress_index_fp4", "compress_index_fp8"]
KERNELS += ["index_query_fp4", "index_query_fp8", "index_logits_fp4", "index_logits_flydsl", "index_logits_fp8"]
KERNELS += ["index_logits_preshuffled", "topk", "translate"]
KERNELS += ["attend_bf16", "attend_step", "attend_step_bf16"]

PLANTED = """
import json
from dataclasses import asdict
from optimized.kernels import aot
cases = aot.cases()
gemm, attend = cases["gemm_fp8"], cases["attend"]
low = aot.Case(gemm.kernel, gemm.types, {**gemm.constants, "ROWS": 16}, gemm.aligned)
wide = aot.Case(attend.kernel, attend.types, {**attend.constants, "HEADS": 64, "ROWS": 64}, attend.aligned)
short = aot.Case(gemm.kernel, gemm.types, {**gemm.constants, "COLS": 100}, gemm.aligned)
found = [aot.compile_case("gemm_fp8", low, "sm_90"), aot.compile_case("attend", wide, "sm_90")]
print(json.dumps([asdict(r) for r in [*found, aot.compile_case("gemm_fp8", short, "sm_90")]]))
"""


@pytest.mark.parametrize("target", aot.TARGETS)
def test_every_kernel_compiles_clean(target):
    """One process a target, so that parallel test runners do not compile anything twice."""
    reports = {r.kernel: r for r in aot.compile_all(targets=[target])}
    assert sorted(reports) == sorted(KERNELS)
    assert {name: aot.faults(r) for name, r in reports.items() if aot.faults(r)} == {}
    assert all(r.registers > 0 and r.code > 1000 for r in reports.values())
    if target == "gfx942":  # no OCP E4M3 in hardware: emulated in half precision, and held to nothing better
        assert ("gemm_fp8", target) not in aot.REQUIRED
        assert reports["gemm_fp8"].matrix and all(name.endswith("f16") for name in reports["gemm_fp8"].matrix)


def test_planted_faults_are_seen():
    """16-row tiles lose QGMMA, 64 x 64 attention tiles spill, a tile that is no power of two does not compile."""
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    done = subprocess.run([sys.executable, "-c", PLANTED], env=environment, capture_output=True, text=True, check=True)
    low, wide, short = (aot.Report(**fields) for fields in json.loads(done.stdout))
    assert "GMMA" in aot.faults(low)[0]
    assert any("spills" in fault for fault in aot.faults(wide))
    assert short.error
    assert aot.faults(replace(low, target="gfx942", shared=65537))[0].startswith("takes 65537")


def test_an_unknown_kernel_is_an_error():
    with pytest.raises(RuntimeError, match="KeyError"):
        aot.compile_all(["no_such_kernel"])


def test_tests_run_in_the_interpreter():
    """Without a GPU this process interprets: what compiled above is not what the other tests executed."""
    assert (os.environ.get("TRITON_INTERPRET") == "1") == INTERPRETER
