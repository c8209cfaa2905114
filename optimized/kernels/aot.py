"""Compile every kernel for real GPUs without having one, and say what came out.

`python -m optimized.kernels.aot` prints a table and what is wrong; `compile_all` gives the same as records. Compiling
needs a process in which Triton is not in interpreter mode, so both start one. Nothing runs on a device.
Source: docs/pool.md §7.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

TARGETS: dict[str, tuple[str, int | str, int]] = {
    "sm_90": ("cuda", 90, 32),
    "sm_100": ("cuda", 100, 32),
    "gfx942": ("hip", "gfx942", 64),
    "gfx950": ("hip", "gfx950", 64),
}
SHARED_LIMIT = {"sm_90": 232448, "sm_100": 232448, "gfx942": 65536, "gfx950": 163840}  # bytes a program may take
TYPES = {"u": "*u8", "b": "*bf16", "f": "*fp32", "p": "*i32", "l": "*i64", "i": "i32", "x": "fp32"}
OPTIONS = ("num_warps", "num_stages")
MATRIX = re.compile(r"\b(UTC\w*MMA|[HQIO]G?MMA|v_mfma_\w+)")
REQUIRED = {  # kernel, target -> a matrix instruction that must stand in the code; gfx942 has no FP8 of this kind
    ("gemm_fp8", "sm_90"): r"[QH]GMMA",
    ("gemm_fp8", "sm_100"): r"UTC\w*MMA",
    ("gemm_fp8", "gfx950"): r"v_mfma_\w*f8f6f4",
    ("index_logits_fp8", "sm_90"): r"QGMMA",
    ("index_logits_fp8", "sm_100"): r"UTC\w*MMA",
    ("index_logits_fp8", "gfx950"): r"v_mfma_\w*f8f6f4",
}
BF16_PRODUCT = {
    "sm_90": r"HG?MMA",
    "sm_100": r"HMMA|UTC\w*MMA",
    "gfx942": r"v_mfma_\w*bf16",
    "gfx950": r"v_mfma_\w*bf16",
}
for _name in ("attend", "attend_bf16", "attend_step", "attend_step_bf16", "index_logits_fp4", "index_logits_flydsl"):
    REQUIRED |= {(_name, target): pattern for target, pattern in BF16_PRODUCT.items()}
for _name in ("gemm_bf16", "grouped_gemm", "expert_gate_up", "expert_down", "expert_gate_up_fp8", "expert_down_fp8"):
    REQUIRED |= {(_name, target): pattern for target, pattern in (BF16_PRODUCT | {"sm_90": "HGMMA"}).items()}


@dataclass(frozen=True)
class Report:
    """One kernel for one target. `spills`: bytes of stack (NVIDIA) or of scratch (AMD) a thread; `shared`: bytes a program;
    `matrix`: matrix instructions and how often each stands in the code; `error`: empty if it compiled."""

    kernel: str
    target: str
    seconds: float
    registers: int = 0
    spills: int = 0
    shared: int = 0
    code: int = 0
    matrix: dict[str, int] = field(default_factory=dict)
    error: str = ""


def faults(report: Report) -> list[str]:
    """What the compiled kernel must not be: missing, spilling, too large for the target, without its instructions."""
    if report.error:
        return [report.error]
    found = []
    if report.spills:
        found.append(f"spills {report.spills} bytes a thread")
    if report.shared > SHARED_LIMIT[report.target]:
        found.append(f"takes {report.shared} of {SHARED_LIMIT[report.target]} bytes of shared memory")
    required = REQUIRED.get((report.kernel, report.target))
    if required and not any(re.fullmatch(required, name) for name in report.matrix):
        found.append(f"has no {required}, only {sorted(report.matrix)}")
    return found


@dataclass(frozen=True)
class Case:
    """A kernel as its wrapper launches it: one letter of TYPES an argument, then constants and options. Pointers and the
    integers named in `aligned` are multiples of 16."""

    kernel: Any
    types: str
    constants: dict[str, Any]
    aligned: tuple[str, ...] = ()


def compile_all(kernels: Iterable[str] = (), targets: Iterable[str] = ()) -> list[Report]:
    """Compile the named kernels for the named targets (none named: all) in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "reports.json"
        command = [sys.executable, "-m", "optimized.kernels.aot", "--worker", str(out), *_words("--kernels", kernels)]
        environment = {**os.environ, "TRITON_INTERPRET": "0"}
        done = subprocess.run([*command, *_words("--targets", targets)], env=environment, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"the compiling process ended with {done.returncode}: {done.stderr[-2000:]}")
        return [Report(**fields) for fields in json.loads(out.read_text())]


def _words(flag: str, values: Iterable[str]) -> list[str]:
    values = list(values)
    return [flag, *values] if values else []


def cases() -> dict[str, Case]:
    """Every kernel at Pro's widths, with its GPU tiles. Only for a process that compiles."""
    from . import gemm_fp8, quantize, state_write
    from .aot_attention import attention_cases
    from .aot_model import model_cases

    strides = ("kv_stride", "score_stride", "kv_slot_stride", "score_slot_stride")
    written = {"RATIO": 4, **asdict(state_write.GPU)}
    gemm = ("N", "K", "x_stride", "w_stride")
    return {
        "quantize": Case(quantize.quantize_kernel, "buuiii", asdict(quantize.GPU), ("D", "x_stride")),
        "gemm_fp8": Case(gemm_fp8.gemm_fp8_kernel, "uuuubiiiiiii", asdict(gemm_fp8.GPU), gemm),
        "state_write": Case(state_write.state_write_kernel, "ffiiffiiipipfi", written, (*strides, "width")),
        **attention_cases(),
        **model_cases(),
    }


def compile_case(name: str, case: Case, target: str) -> Report:
    """Compile one kernel for one target; a compiler that fails is recorded, not raised."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = case.kernel.arg_names
    options = {k: case.constants[k] for k in OPTIONS if k in case.constants}
    constants = {k: v for k, v in case.constants.items() if k not in OPTIONS}
    signature = {n: TYPES[t] for n, t in zip(names, case.types, strict=False)} | dict.fromkeys(constants, "constexpr")
    if list(signature) != list(names):
        raise ValueError(f"{name}: types and constants do not cover the arguments {names}")
    aligned = [i for i, n in enumerate(names) if signature[n].startswith("*") or n in case.aligned]
    hints = {(i,): [["tt.divisibility", 16]] for i in aligned}
    source = ASTSource(case.kernel, signature, {(names.index(k),): v for k, v in constants.items()}, hints)
    start = time.perf_counter()
    try:
        compiled = triton.compile(source, target=GPUTarget(*TARGETS[target]), options=options)
    except Exception as error:
        last = (str(error).strip().splitlines() or [""])[-1]
        return Report(name, target, time.perf_counter() - start, error=f"{type(error).__name__}: {last}")
    seconds = time.perf_counter() - start
    read = _read_nvidia if "cubin" in compiled.asm else _read_amd
    return Report(name, target, seconds, shared=compiled.metadata.shared, **read(compiled.asm))


def _read_nvidia(asm: dict[str, Any]) -> dict[str, Any]:
    import triton

    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(asm["cubin"])
        file.flush()
        usage = _output(tools / "cuobjdump", "--dump-resource-usage", file.name)
        # Reading machine code takes as long as a small kernel's compilation: only where PTX asks for a matrix product.
        listing = _output(tools / "nvdisasm", "-c", file.name) if "mma" in asm["ptx"] else ""
    return {
        "registers": int(re.findall(r"REG:(\d+)", usage)[-1]),
        "spills": int(re.findall(r"STACK:(\d+)", usage)[-1]),
        "code": len(asm["cubin"]),
        "matrix": dict(collections.Counter(MATRIX.findall(listing))),
    }


def _read_amd(asm: dict[str, Any]) -> dict[str, Any]:
    listing = asm["amdgcn"]
    return {
        "registers": int(re.findall(r"\.vgpr_count: *(\d+)", listing)[-1]),
        "spills": int(re.findall(r"ScratchSize: *(\d+)", listing)[-1]),
        "code": len(asm["hsaco"]),
        "matrix": dict(collections.Counter(MATRIX.findall(listing))),
    }


def _output(*command: str | Path) -> str:
    return subprocess.run([str(c) for c in command], capture_output=True, text=True, check=True).stdout


def table(reports: list[Report]) -> str:
    """The reports as fixed-width text."""
    head = f"{'kernel':13} {'target':7} {'regs':>5} {'spills':>6} {'shared':>7} {'code':>7} {'s':>5}  matrix instructions"
    lines = [head]
    for r in reports:
        what = r.error or ", ".join(f"{name} x{n}" for name, n in sorted(r.matrix.items())) or "-"
        numbers = f"{r.registers:5} {r.spills:6} {r.shared:7} {r.code:7} {r.seconds:5.1f}"
        lines.append(f"{r.kernel:13} {r.target:7} {numbers}  {what}")
    return "\n".join(lines)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Compile the kernels ahead of time and show their resources.")
    parser.add_argument("--kernels", nargs="*", default=[])
    parser.add_argument("--targets", nargs="*", default=[], choices=list(TARGETS))
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def _work(arguments: argparse.Namespace) -> None:
    known = cases()
    chosen = {name: known[name] for name in arguments.kernels or known}
    reports = [compile_case(n, case, t) for n, case in chosen.items() for t in arguments.targets or TARGETS]
    arguments.worker.write_text(json.dumps([asdict(r) for r in reports]))


def main() -> int:
    arguments = _arguments()
    if arguments.worker is not None:
        _work(arguments)
        return 0
    reports = compile_all(arguments.kernels, arguments.targets)
    print(table(reports))
    wrong = [f"{r.kernel} for {r.target} {fault}" for r in reports for fault in faults(r)]
    print("\n".join(wrong or ["No spills, shared memory within limits, matrix instructions where due. Nothing was run."]))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
