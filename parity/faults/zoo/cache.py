"""Rows of the pool: how they are quantised, where their bytes lie, and which are written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..change import edit, wrap
from ..fault import OWN, Fault, at

KV, ROW, CORE = "attn.kv", "attn.compressor.row", "attn.core"
TILES, ATTENTION = "kernels.row_tiles", "kernels.decode_attention"
ROTATED = "bf16_rn(y), mask=live[:, None] & (d >= NOPE)"
SECOND = "tl.store(row + NOPE + 2 * tile + 1, scale, mask"


def _untranslated(write: Callable[..., Any]) -> Callable[..., Any]:
    def to_ring_row(*args: Any, **kwargs: Any) -> Any:
        if len(args) > 8:
            args = (*args[:8], args[8] % 19)  # the place in the ring alone: 16 of the window and 3 of drafts
        return write(*args, **kwargs)

    return to_ring_row


def _rows_of_token_before(write: Callable[..., None]) -> Callable[..., None]:
    return lambda main, *rest, **kwargs: write(main.roll(1, 0), *rest, **kwargs)


FAULTS = (
    Fault("cache.window-untranslated", "wrong page", "sgl-project/sglang#19107", "S1",
          "the fused write takes a place in the ring for a row of the pool", KV,
          wrap("kernels.qk_norm_rope:qk_norm_rope", _untranslated), at("window", "decode", (17,))),
    Fault("cache.stride-of-codes", "wrong format", "vllm-project/vllm#47716", "S1",
          "rows are as far apart as their codes are long", CORE,
          edit(ATTENTION, ("main_rows + row[:, None] * main_stride", "main_rows + row[:, None] * (HEAD_DIM - 64)")),
          at("window", "decode", (17,))),
    Fault("cache.rotated-in-fp8", "lost bits", "NVIDIA/TensorRT-LLM#14327", "S3",
          "the rotated channels are rounded to E4M3 too", KV,
          edit(TILES, (ROTATED, ROTATED.replace("bf16_rn(y)", "bf16_rn(e4m3_up(e4m3_rn(y)))")),
               ("e2m1_scale, e4m3_rn,", "e2m1_scale, e4m3_rn, e4m3_up,")), at("window", "decode", (3,))),
    Fault("cache.sentinel-0", "wrong page", OWN, "S1", "a row that must not be written goes to row 0", KV,
          edit("kernels.window_write", ("t, row, row >= 0, main_stride, main_row_stride",
                                        "t, tl.maximum(row, 0), row >= -1, main_stride, main_row_stride")),
          at("window", "prefill", (36,))),
    Fault("cache.ring-of-token-before", "stale state", OWN, "S1", "ring rows get the payload of the token before", KV,
          wrap("kernels.window_write:write_window", _rows_of_token_before), at("window", "prefill", (36,))),
    Fault("cache.scale-once", "wrong format", OWN, "S2", "a scale byte is written once, not twice", KV,
          edit(TILES, (SECOND, SECOND.replace("scale, mask", "scale * 0, mask"))), at("window", "decode", (3,))),
    Fault("cache.padding-not-zero", "wrong format", OWN, "S3", "bytes behind the scales stay as they were", KV,
          edit(TILES, ("mask=live[:, None] & (pad >= 2 * TILES)", "mask=live[:, None] & (pad > 64)")),
          at("window", "decode", (3,))),
    Fault("cache.scale-of-tile-beside", "wrong scale", OWN, "S1", "readers take the scale of the tile beside", CORE,
          edit(ATTENTION, ("main + NOPE + 2 * tile,", "main + NOPE + 2 * (tile ^ 1),")), at("window", "decode", (17,))),
    Fault("cache.scale-floored", "wrong scale", OWN, "S2", "the exponent of a row's scale is rounded down", KV,
          edit(TILES, ("scale = e4m3_scale(tl.max(magnitude_bits(blocks), 2))",
                       "scale = e4m3_scale(tl.max(magnitude_bits(blocks), 2) - 0x800000)")), at("window", "decode", (3,))),
    Fault("cache.norm-weight-left-out", "missing step", OWN, "S1", "window rows miss the weight of their norm", KV,
          edit("kernels.qk_norm_rope", ("tl.load(kv_weight + d, mask=d < HEAD_DIM, other=0.0)", "(d < HEAD_DIM) * 1.0")),
          at("window", "decode", (3,))),
    Fault("cache.row-on-page-beside", "wrong page", OWN, "S1", "a compressed row goes to the sequence before", ROW,
          edit("kernels.compress", ("block_table + batch * table", "block_table + (batch - (batch > 0)) * table")),
          at("hca", "decode", starts=(127, 255))),
    Fault("cache.row-beside-its-own", "off by one", OWN, "S1", "a compressed row goes to the place beside its own", ROW,
          edit("kernels.compress", ("entry % BLOCK_ROWS + tl.zeros", "(entry % BLOCK_ROWS ^ 1) + tl.zeros")),
          at("csa", "decode", starts=(127,))),
)  # fmt: skip
