"""The kernel sheet, docs/kernels.md: what compilers made of each kernel, and what its bytes and products allow."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from importlib.metadata import version
from pathlib import Path

from optimized.kernels.aot import SHARED_LIMIT, TARGETS, Report, compile_all, faults
from optimized.kernels.costs import Cost, Step, layer_costs
from reference.config import Config

from ..records import write_bytes
from .roofline import DECODE, DEVICES, PREFILL, describe

FP8_KERNELS = ("gemm_fp8", "index_logits_fp8", "index_logits_preshuffled")
COMMAND = "v4parity bench kernels --sheet docs/kernels.md"
INTRODUCTION = """# Kernel sheet
Written by `{command}`; not by hand.

**Worked out on paper, and compiled. No kernel of this sheet ran on a GPU.** `v4parity bench kernels --device cuda` measures
the calls of §2 and §3 where there is one, beside the same floors.

## 1. How to read it
A *call* is what one wrapper launches: one kernel, or two that run one after the other. Names of products are those of their
weights. Numbers are per token of the step: the step's total, divided by its tokens.

* **Bytes**: every byte of an operand that is used counts once, weights included, however many programs read it; every byte of
  a result once; scratch between the two kernels of a call once written and once read. Attention: each row that any list
  names once. Experts: pairs spread evenly, so that the most experts are hit. The tests count the same in the interpreter,
  address by address.
* **Flops**: two a multiply-add of a matrix product. Elementwise work (norms, softmax, Sinkhorn, quantisers, top-k) is not
  counted: kernels without products are held to their bytes alone.
* **Roofline**: max(bytes / bandwidth, flops / peak) of each kernel, added up over a call; microseconds of the whole step.
  Launches and the cost of small pieces of memory are not in it, nor is what a cache keeps from one kernel to the next.
* **Intensity**: flops a byte.

| device | memory, TB/s | FP8, TFLOP/s | BF16 | FP32 |
|---|---:|---:|---:|---:|
{devices}

Dense peaks from the vendors' data sheets: NVIDIA's for the H200 SXM, whose figures with sparsity are
halved, and AMD's for the Instinct MI355X. Products of experts, wo_a and attention widen their codes to BF16 and pay its peak;
products in FP32 (hyper-connections, router) pay that of vector units.
"""
COMPILED = """## 4. Compiled
With {compiler}, at Pro's widths and GPU tiles (`optimized/kernels/aot.py`). Registers: of a thread (AMD: vector registers);
spills: bytes of stack or scratch a thread; shared: bytes a program; instructions: how often each stands in the code.

{fp8}
"""
TARGET = """### 4.{number} {target}
Shared memory: at most {limit:,} bytes a program. Faults: {faults}.

| kernel | registers | spills | shared | matrix instructions |
|---|---:|---:|---:|---|
"""


def sheet(config: Config, reports: Sequence[Report], compiler: str) -> str:
    """The whole page."""
    return "\n".join([introduction(), paper(config), compiled(reports, compiler)])


def write_sheet(path: Path, config: Config) -> list[str]:
    """Compile everything, write the page, and return what a kernel must not be and is. Raises OSError."""
    reports = compile_all()
    write_bytes(path, sheet(config, reports, compiler()).encode())
    return [f"{r.kernel} for {r.target} {fault}" for r in reports for fault in faults(r)]


def compiler() -> str:
    return f"Triton {version('triton')}"


def introduction() -> str:
    speeds = [(d, (d.bandwidth, d.peak["fp8"], d.peak["bf16"], d.peak["fp32"])) for d in DEVICES]
    rows = [f"| {d.name} ({d.target}) | {' | '.join(f'{x / 1e12:g}' for x in numbers)} |" for d, numbers in speeds]
    return INTRODUCTION.format(command=COMMAND, devices="\n".join(rows))


def paper(config: Config) -> str:
    """Sections 2 and 3: bytes, flops and floors at this model's widths."""
    return "\n".join([
        f"## 2. Decode: {describe(DECODE)}", *paper_table(config, DECODE), "",
        f"## 3. Prefill: {describe(PREFILL)}", *paper_table(config, PREFILL), "",
    ])  # fmt: skip


def paper_table(config: Config, step: Step) -> list[str]:
    names = [device.name for device in DEVICES]
    lines = [f"| call | kernels | bytes | flops | intensity | {' | '.join(f'{name}, µs' for name in names)} |"]
    lines.append("|---|---|" + "---:|" * (3 + len(names)))
    for call, kernels in layer_costs(config, step).items():
        moved, flops = sum(c.moved for c in kernels.values()), sum(c.flops for c in kernels.values())
        numbers = [f"{moved / step.tokens:,.0f}", f"{flops / step.tokens:,.0f}", _intensity(kernels.values())]
        floors = [f"{device.floor(kernels) * 1e6:,.2f}" for device in DEVICES]
        lines.append(f"| {call} | {', '.join(kernels)} | {' | '.join(numbers + floors)} |")
    return lines


def _intensity(costs: Iterable[Cost]) -> str:
    costs = list(costs)
    flops, moved = sum(c.flops for c in costs), sum(c.moved for c in costs)
    return f"{flops / moved:.1f}" if flops else "–"


def compiled(reports: Sequence[Report], compiler: str) -> str:
    """Section 4: one table a target."""
    parts = [COMPILED.format(compiler=compiler, fp8=fp8_on_gfx942(reports))]
    for number, target in enumerate(TARGETS, 1):
        of_target = [r for r in reports if r.target == target]
        wrong = [f"{r.kernel} {fault}" for r in of_target for fault in faults(r)]
        head = TARGET.format(number=number, target=target, limit=SHARED_LIMIT[target], faults=", ".join(wrong) or "none")
        parts.append(head + "\n".join(map(compiled_row, of_target)) + "\n")
    return "\n".join(parts)


def compiled_row(r: Report) -> str:
    return f"| {r.kernel} | {r.registers} | {r.spills} | {r.shared:,} | {r.error or _instructions(r)} |"


def fp8_on_gfx942(reports: Sequence[Report]) -> str:
    """What becomes of OCP E4M3 on the one target that has no product of it."""
    by = {(r.kernel, r.target): r for r in reports}
    told = ["**FP8 on gfx942**: there is no OCP E4M3 in hardware. The compiler widens the codes and multiplies in float16:", "",
            "| kernel | gfx942 | gfx950 | code, of gfx950's |", "|---|---|---|---:|"]  # fmt: skip
    for kernel in FP8_KERNELS:
        old, new = by[kernel, "gfx942"], by[kernel, "gfx950"]
        told.append(f"| {kernel} | {_instructions(old)} | {_instructions(new)} | {old.code / new.code:.0f} times |")
    return "\n".join([*told, "", "Exact, but not what one would ship there."])


def _instructions(r: Report) -> str:
    return ", ".join(f"{name} ×{n}" for name, n in sorted(r.matrix.items())) or "–"
