"""Small calls of every kernel that multiplies a row, page or slot number by a stride, and their tensors spread over memory.

A spread tensor has the same shape and contents; its last row lies more than 2^31 elements behind its first, at a stride that
fits 32 bits. Memory is reserved, hardly touched. Run as a program, it makes every call over a kernel file whose addresses
are 32 bits wide, each in a process of its own, and prints which of them still give the right bytes.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

WIDENING = ".to(tl.int64)"
PROJECTIONS = ("kv", "score", "kv_state", "score_state")


@dataclass(frozen=True)
class Call:
    """A wrapper of a kernel file with its arguments; `spread`: those that may lie anywhere; `widened`: those of them whose
    row numbers are 32 bits until this file widens them."""

    file: str
    function: str
    args: dict[str, Any]
    spread: tuple[str, ...]
    widened: tuple[str, ...]


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def floats(*shape: int) -> Tensor:
    return torch.randn(shape, generator=generator())


def bf16(*shape: int) -> Tensor:
    return floats(*shape).bfloat16()


def codes(*shape: int) -> Tensor:
    """Bytes that are numbers of moderate size as E4M3, as scale bytes and as FP4."""
    return torch.randint(0x70, 0x7A, shape, generator=generator(), dtype=torch.uint8)


def ints(*values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def _streams() -> dict[str, Any]:
    return {"fn": floats(24, 128), "base": floats(24), "scale": floats(3), "iterations": 2, "hc_eps": 1e-3, "rms_eps": 1e-3}


def _after() -> dict[str, Any]:
    return {"z": bf16(3, 32), "x": bf16(3, 4, 32), "post": floats(3, 4), "comb": floats(3, 4, 4)}


def _turn() -> dict[str, Any]:
    return {"cos": floats(3, 32), "sin": floats(3, 32)}


def _lists() -> dict[str, Any]:
    return {"indices": ints(0, 1, 2, 2, 1, 2), "indptr": ints(0, 3, 4, 6), "sink": floats(2), "scale": 0.1}


def _pooling(d: int) -> dict[str, Any]:
    """Three sequences complete their second group with their last three tokens in this step: ragged ids 2, 5 and 8."""
    plan = ints([2, 0, 7, 5], [5, 1, 7, 5], [8, 2, 7, 5])
    return {
        "kv": floats(9, 2 * d), "score": floats(9, 2 * d), "kv_state": floats(3, 8, 2 * d), "score_state": floats(3, 8, 2 * d),
        "plan": plan, "slots": ints(2, 0, 1), "ape": floats(4, 2 * d), "norm_weight": floats(d), "eps": 1e-3, **_turn(),
    }  # fmt: skip


def _states() -> dict[str, Any]:
    return {name: value for name, value in _pooling(64).items() if name in (*PROJECTIONS, "plan", "slots", "ape")}


TABLE = ints([0], [2], [1])
CALLS: dict[str, Callable[[], Call]] = {
    "quantize_activation": lambda: Call("quantize", "quantize_activation", {"x": bf16(3, 256)}, ("x",), ("x",)),
    "gemm_fp8": lambda: Call(
        "gemm_fp8", "gemm_fp8",
        {"codes": codes(3, 256), "scales": codes(3, 2), "weight_codes": codes(300, 256), "weight_scales": codes(3, 2)},
        *2 * [("codes", "scales", "weight_codes", "weight_scales")],
    ),
    "gemm_bf16": lambda: Call("gemm_bf16", "gemm_bf16", {"x": bf16(3, 64), "w": bf16(3, 64)}, *2 * [("x", "w")]),
    "grouped_gemm": lambda: Call(
        "gemm_bf16", "grouped_gemm", {"x": bf16(3, 3, 128), "codes": codes(300, 128), "scales": codes(3, 1)},
        *2 * [("x", "codes", "scales")],
    ),
    "rms_norm": lambda: Call("norm", "rms_norm", {"x": bf16(3, 64), "weight": floats(64), "eps": 1e-3}, *2 * [("x",)]),
    "rms_norm_quantize": lambda: Call(
        "norm", "rms_norm_quantize", {"x": bf16(3, 64), "weight": floats(64), "eps": 1e-3}, *2 * [("x",)]
    ),
    "hc_pre": lambda: Call("hyper_connection", "hc_pre", {"x": bf16(3, 4, 32), **_streams()}, *2 * [("x",)]),
    "hc_post": lambda: Call("hyper_connection", "hc_post", _after(), *2 * [("z", "x")]),
    "hc_post_pre": lambda: Call("hyper_connection", "hc_post_pre", {**_after(), **_streams()}, *2 * [("z", "x")]),
    "hc_head": lambda: Call(
        "hyper_connection", "hc_head",
        {"x": bf16(3, 4, 32), "fn": floats(4, 128), "base": floats(4), "scale": floats(1), "hc_eps": 1e-3, "rms_eps": 1e-3},
        *2 * [("x",)],
    ),
    "router_scores": lambda: Call("router", "router_scores", {"x": bf16(3, 64), "gate": bf16(3, 64)}, *2 * [("x", "gate")]),
    "embed": lambda: Call(
        "embed", "embed", {"table": bf16(3, 64), "ids": torch.tensor([2, -1, 0, 1]), "streams": 2}, ("table",), ()
    ),
    "mtp_streams": lambda: Call("mtp_streams", "mtp_streams", {"e": bf16(3, 64), "h": bf16(3, 2, 64)}, *2 * [("e",)]),
    "qk_norm_rope": lambda: Call(
        "qk_norm_rope", "qk_norm_rope",
        {"q": bf16(3, 2, 128), "kv": bf16(3, 128), "kv_weight": floats(128), "eps": 1e-3, **_turn(), "main": codes(3, 128),
         "rope": bf16(3, 64), "destination": torch.tensor([2, 0, -1])},
        ("q", "kv", "main", "rope"), ("q", "kv"),
    ),
    "write_window": lambda: Call(
        "window_write", "write_window",
        {"main": codes(3, 128), "rope": bf16(3, 64), "main_rows": codes(3, 128) + 1, "rope_rows": bf16(3, 64) + 1,
         "destination": torch.tensor([2, -1, 0])},
        ("main", "rope", "main_rows", "rope_rows"), (),
    ),
    "write_window, last token": lambda: Call(
        "window_write", "write_window",
        {"main": codes(3, 128), "rope": bf16(3, 64), "main_rows": codes(3, 128) + 1, "rope_rows": bf16(3, 64) + 1,
         "destination": torch.tensor([-1, 1, 0])},
        *2 * [("main", "rope")],
    ),
    "inverse_rope": lambda: Call(
        "inverse_rope", "inverse_rope", {"x": bf16(3, 2, 128), **_turn(), "out": bf16(3, 2, 128)}, *2 * [("x", "out")]
    ),
    "index_query": lambda: Call(
        "indexer", "index_query", {"q": bf16(3, 2, 64), "projected": floats(3, 2), **_turn(), "form": "fp4"},
        *2 * [("q", "projected")],
    ),
    "index_logits, fp4": lambda: Call(
        "index_logits", "index_logits",
        {"codes": codes(3, 2, 32), "scales": codes(3, 2, 2), "weights": floats(3, 2), "keys": codes(3, 64 * 32),
         "key_scales": codes(3, 64 * 2), "block_table": TABLE, "batch_ids": ints(0, 1, 2), "visible": ints(64, 64, 64),
         "columns": 64},
        *2 * [("keys", "key_scales", "block_table")],
    ),
    "index_logits, fp8": lambda: Call(
        "index_logits", "index_logits",
        {"codes": codes(3, 2, 64), "scales": codes(3, 2, 1), "weights": floats(3, 2), "keys": codes(3, 64 * 64),
         "key_scales": floats(3, 64), "block_table": TABLE, "batch_ids": ints(0, 1, 2), "visible": ints(64, 64, 64),
         "columns": 64},
        *2 * [("keys", "key_scales")],
    ),
    "topk": lambda: Call("topk", "topk", {"logits": floats(3, 9), "visible": ints(9, 8, 9), "k": 4}, *2 * [("logits",)]),
    "translate": lambda: Call(
        "translate", "translate",
        {"picks": ints([0, 1], [2, 3], [0, 3]), "positions": ints(7, 7, 7), "batch_ids": ints(0, 1, 2), "block_table": TABLE,
         "indptr": ints(0, 4, 8, 12), "indices": ints(*range(12)), "window": 2, "envelope": 100, "block_rows": 64},
        *2 * [("picks", "block_table")],
    ),
    "decode_attention, 2buff": lambda: Call(
        "decode_attention", "decode_attention",
        {"q": bf16(3, 2, 128), "main_rows": codes(3, 128), "rope_rows": bf16(3, 64), **_lists(), **_turn()},
        *2 * [("main_rows", "rope_rows")],
    ),
    "decode_attention, bf16": lambda: Call(
        "decode_attention", "decode_attention",
        {"q": bf16(3, 2, 128), "main_rows": bf16(3, 128), "rope_rows": None, **_lists()}, *2 * [("main_rows",)],
    ),
    "prefill_attention": lambda: Call(
        "prefill_attention", "prefill_attention",
        {"q": bf16(3, 2, 128), "main_rows": codes(3, 128), "rope_rows": bf16(3, 64), "step_main": codes(3, 128),
         "step_rope": bf16(3, 64), **_lists(), "indices": ints(2, 0, -1, -3, 1, -2)},
        ("main_rows", "rope_rows", "step_main", "step_rope"), (),
    ),
    "compress, 2buff": lambda: Call(
        "compress", "compress",
        {**_pooling(128), "main_rows": codes(102, 128), "rope_rows": bf16(102, 64), "block_table": TABLE, "ratio": 4,
         "envelope": 50, "block_rows": 64},
        *2 * [(*PROJECTIONS, "main_rows", "rope_rows", "block_table")],
    ),
    "compress, bf16": lambda: Call(
        "compress", "compress",
        {**_pooling(64), "main_rows": bf16(102, 64), "rope_rows": None, "block_table": TABLE, "ratio": 4, "envelope": 50,
         "block_rows": 64},
        *2 * [("main_rows",)],
    ),
    "compress_index": lambda: Call(
        "compress_index", "compress_index",
        {**_pooling(64), "keys": codes(3, 64 * 32), "scales": codes(3, 64 * 2), "block_table": TABLE},
        (*PROJECTIONS, "keys", "scales", "block_table"), (),
    ),
    "write_state": lambda: Call("state_write", "write_state", _states(), *2 * [PROJECTIONS]),
}  # fmt: skip


def spread_out(x: Tensor) -> Tensor:
    """The same numbers, rows so far apart that the last one begins past element 2^31."""
    rows, width = x.shape[0], x[0].numel()
    stride = (2**31 // (rows - 1) // 64 + 1) * 64
    assert (rows - 1) * stride > 2**31 - 1 >= stride >= width
    wide = torch.empty((rows - 1) * stride + width, dtype=x.dtype)
    there = wide.as_strided(x.shape, (stride, *x[0].contiguous().stride()))
    return there.copy_(x)


def results(module: ModuleType, call: Call, spread: str = "") -> list[bytes]:
    """What the call returns, and what it leaves in every tensor it was given; with one of them spread out."""
    args = {name: x.clone() if isinstance(x, Tensor) else x for name, x in call.args.items()}
    if spread:
        args[spread] = spread_out(args[spread])
    returned = getattr(module, call.function)(**args)
    outs = returned if isinstance(returned, tuple) else (returned,)
    tensors = [x for x in (*outs, *args.values()) if isinstance(x, Tensor)]
    return [x.contiguous().view(torch.uint8).numpy().tobytes() for x in tensors]


def kernel_file(name: str) -> ModuleType:
    return importlib.import_module(f"optimized.kernels.{name}")


def rewritten(name: str, folder: Path, widening: str) -> ModuleType:
    """The kernel file with something else in place of its widening to 64 bits."""
    path = folder / f"{name}.py"
    path.write_text(Path(str(kernel_file(name).__file__)).read_text().replace(WIDENING, widening))
    spec = importlib.util.spec_from_file_location(f"optimized.kernels.{name}_rewritten{len(widening)}", path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def survivors(folder: Path, widening: str) -> list[str]:
    """Calls over rewritten files that give the right bytes, each tried in a child that a wrapped address may kill."""
    found, files = [], {}
    for name, make in CALLS.items():
        call = make()
        if call.widened and call.file not in files:
            files[call.file] = rewritten(call.file, folder, widening)
        want = results(kernel_file(call.file), call)
        for tensor in call.widened:
            child = os.fork()
            if not child:
                os._exit(results(files[call.file], call, tensor) != want)
            if os.waitpid(child, 0)[1] == 0:
                found.append(f"{name}: {tensor}")
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    where = Path(sys.argv[1])
    print(json.dumps([survivors(where, widening) for widening in (WIDENING, "")]))
