"""The kernels around attention as their wrappers launch them at Pro's widths, for the ahead-of-time check.

Source: docs/pool.md §7.
"""

from __future__ import annotations

from dataclasses import asdict

from .aot import Case

HEAD = {"HEAD_DIM": 512, "LANES": 512}
ROWS = ("main_stride", "rope_stride")


def attention_cases() -> dict[str, Case]:
    """Kernel name -> case. Only for a process that compiles."""
    from . import decode_attention, inverse_rope, qk_norm_rope, window_write

    tiles = asdict(decode_attention.tiles_for_heads(128))
    join = {**HEAD, "JOIN": tiles.pop("JOIN"), "SPLIT": tiles["SPLIT"]}
    core = "iippxfffi"
    attend = decode_attention.attend_kernel
    strides = (*ROWS, "step_main_stride", "step_rope_stride")
    step, pool = {"TWO_SOURCES": True, **HEAD, **tiles}, {"TWO_SOURCES": False, **HEAD, **tiles}

    fused = {**HEAD, **asdict(qk_norm_rope.GPU)}
    projections = ("q_stride", "kv_stride")
    return {
        "qk_norm_rope": Case(
            qk_norm_rope.qk_norm_rope_kernel, "bbfffxbubliiiiii",
            {"BF16": False, **fused}, (*projections, *ROWS),
        ),
        "qk_norm_rope_bf16": Case(
            qk_norm_rope.qk_norm_rope_kernel, "bbfffxbbbliiiiii", {"BF16": True, **fused}, (*projections, *ROWS),
        ),
        "window_write": Case(
            window_write.window_write_kernel, "ububliiiii", {"BF16": False, **HEAD, **asdict(window_write.GPU)},
            (*ROWS, "main_row_stride", "rope_row_stride"),
        ),
        "inverse_rope": Case(
            inverse_rope.inverse_rope_kernel, "bffbiiii", {**HEAD, **asdict(inverse_rope.GPU)}, ("x_stride", "out_stride"),
        ),
        "attend": Case(attend, "bubiiub" + core, {"BF16": False, **pool}, strides),
        "attend_bf16": Case(attend, "bbbiibb" + core, {"BF16": True, **pool}, strides),
        "attend_step": Case(attend, "bubiiub" + core, {"BF16": False, **step}, strides),
        "attend_step_bf16": Case(attend, "bbbiibb" + core, {"BF16": True, **step}, strides),
        "combine": Case(decode_attention.combine_kernel, "fffpfffbii", {"TURN": True, **join}),
    }  # fmt: skip
