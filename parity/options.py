"""Options that several commands share, in the same words."""

from __future__ import annotations

import argparse
import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from reference.errors import BadInput

if TYPE_CHECKING:
    from optimized.engine import Engine
    from reference.checkpoint.store import WeightStore

DTYPES = {"float32": torch.float32, "float64": torch.float64}
WORKING = 256 << 20  # bytes of a run beside its weights: compiled kernels, states, activations
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def byte_count(text: str) -> int:
    """`18GiB`, `512M`, `1.5 G` or plain bytes -> bytes (powers of 1024)."""
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([KMGT]?)(?:i?B)?\s*", text, re.IGNORECASE)
    if not match:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of bytes; write 512M or 18GiB")
    return int(float(match[1]) * _UNITS[match[2].upper()])


def token_ids(text: str) -> list[int]:
    """`1,2,3` or `1 2 3` -> token ids."""
    try:
        return [int(word) for word in text.replace(",", " ").split()]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of token ids; write 0,128803,19923") from None


def positive(text: str) -> int:
    if not text.isdigit() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no positive integer")
    return int(text)


def show_bytes(n: float) -> str:
    """1536 -> `1.5 KiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if n < 1024:
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:.1f} {unit}"
        n /= 1024
    return f"{n:.1f} TiB"


def add_model(parser: argparse.ArgumentParser, default: str | None = None) -> None:
    text = "directory in the released format, or procedural:PRESET[@seed]"
    parser.add_argument("--model", metavar="M", default=default, required=default is None,
                        help=text + (f" (default {default})" if default else ""))  # fmt: skip


def add_device(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", choices=["cpu", "cuda"], help="where kernels run: cpu, in Triton's interpreter, or cuda "
                        "(default: the GPU if there is one)")  # fmt: skip


def settle_device(device: str | None) -> None:
    """Fix where this process's kernels run, before any of them is imported. Raises BadInput for a device that is not
    there, or where the process has settled on the other one."""
    if device is None:
        return
    if device == "cuda" and not torch.cuda.is_available():
        raise BadInput("--device cuda: this machine has no GPU that torch can use")
    if "optimized.kernels" not in sys.modules:
        os.environ["TRITON_INTERPRET"] = "1" if device == "cpu" else "0"
    from optimized.kernels.launch import INTERPRETER

    if (device == "cpu") != INTERPRETER:
        raise BadInput(f"--device {device}: TRITON_INTERPRET or an earlier import has settled on the other one")


def add_arithmetic(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="float32", help="type of the run (default float32)")
    parser.add_argument("--profile", default="exact",
                        help="rounding profile: exact, qat, official, pool-bf16, pool-fp8 (default exact)")  # fmt: skip
    parser.add_argument("--memory", type=byte_count, default=8 << 30, metavar="BYTES",
                        help="bytes of weights kept between uses, in generate of the whole process; a larger model is "
                        "streamed (default 8GiB)")  # fmt: skip


def add_engine(parser: argparse.ArgumentParser, both: bool = False) -> None:
    parser.add_argument("--engine", choices=["reference", "optimized", *["both"] * both], default="reference",
                        help="who computes: the reference (default), or the kernels on a paged pool, which follow the "
                        "profiles pool-fp8 and pool-bf16 and no --dtype" + ("; or both" if both else ""))  # fmt: skip


def wrong_engine(args: argparse.Namespace) -> bool:
    """Whether the engine asked for cannot follow the profile; says so."""
    if args.engine != "reference" and args.profile not in ("pool-fp8", "pool-bf16"):
        print(f"error: --engine {args.engine} needs --profile pool-fp8 or pool-bf16, not {args.profile}", file=sys.stderr)
        return True
    return False


def open_engine(args: argparse.Namespace, store: WeightStore, lengths: list[int]) -> Engine:
    """An engine with room for sequences of these lengths."""
    from optimized.engine import Engine
    from optimized.pool.geometry import BLOCK_TOKENS

    blocks = sum(-(-n // BLOCK_TOKENS) for n in lengths)
    return Engine(store, args.profile, blocks=blocks, slots=len(lengths), memory=args.memory)


def arithmetic(args: argparse.Namespace) -> str:
    """What computed, for a summary."""
    return {"optimized": "engine", "both": "engine and float64"}.get(args.engine, str(args.dtype))


def peak_rss() -> int:
    """Largest resident set of this process so far in bytes (VmHWM: mapped file pages count)."""
    return _status("VmHWM")


def rss() -> int:
    """Resident set of this process now, in bytes."""
    return _status("VmRSS")


def room_for_weights(memory: int) -> int:
    """Bytes of weights that may stay where the whole process may take `memory`."""
    return max(0, memory - rss() - WORKING)


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {field}")
