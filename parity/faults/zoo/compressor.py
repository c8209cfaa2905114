"""Compressors: which groups are pooled, from which tokens, and what the rings keep."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..change import Both, edit, wrap
from ..fault import OWN, Fault, at, whole

ROW, STATE, CORE = "attn.compressor.row", "attn.compressor.state", "attn.core"
POOL, PLANS = "kernels.compress", "pool.plans"
SEEN = "seen = np.where(live, visible(positions, ratio), 0) if ratio"
NEWEST = "at = positions[:, None] - np.arange(geometry.config.sliding_window)[::-1]"
WINDOWS = "windows = np.where(live, np.minimum(positions + 1, geometry.config.sliding_window), 0)"
MYSTERY = "vllm-project/vllm#55927"  # no cause is known there; three that would fit


def _junk_in_row_0(compress: Callable[..., None]) -> Callable[..., None]:
    def both(*args: Any, **kwargs: Any) -> None:
        compress(*args, **kwargs)
        args[11][0] = 0  # where a step that completes no group points without a sentinel of its own

    return both


def _no_rows_no_mask(compressed: Callable[..., Any]) -> Callable[..., Any]:
    def strict(geometry: Any, kind: Any, seen: Any, *rest: Any) -> Any:
        if not seen.max(initial=0):
            raise IndexError("no compressed rows to mask")
        return compressed(geometry, kind, seen, *rest)

    return strict


FAULTS = (
    Fault("compressor.no-length", "stale state", "GDzhu01/vllm-ascend-deepseekv4#76", "S1",
          "a length that is not given counts as 0: no group is complete", ROW,
          edit(PLANS, ("plan[(plan[:, 2] + 1) % ratio == 0]", "plan[:0]")), at("csa", "prefill", (4,))),
    Fault("compressor.tile-crosses-row", "dropped tail", "GDzhu01/vllm-ascend-deepseekv4#83", "S1",
          "the last channel of each state row lands at the front of the next row", STATE,
          edit("kernels.state_write", ("[:, None] * width + column\n    tl.store(kv", "[:, None] * width + column + "
               "(column == width - 1)\n    tl.store(kv")), at("hca", "decode", starts=(127,))),
    Fault("compressor.lane-a-padded", "stale state", "jundot/omlx#2271", "S2",
          "a group that arrives alone leaves out the one before it: eight pooled tokens become four", ROW,
          edit(POOL, ("stored = ((k < window_len) &", "stored = ((k < window_len) & (k >= POOLED - RATIO) &")),
          at("csa", "decode", starts=(127,))),
    Fault("compressor.sentinel-0", "wrong page", "sgl-project/sglang#24872", "S1",
          "a step without a complete group writes a junk row to row 0", ROW,
          wrap("kernels.compress:compress", _junk_in_row_0), at("csa", "decode", starts=(127,))),
    Fault("compressor.last-window-only", "stale state", "vllm-project/vllm-ascend#9111", "S2",
          "rings keep one group where the next needs two", STATE,
          edit(PLANS, ("end - pooled_tokens(ratio) - lookahead", "end - ratio")), at("csa", "chunk", starts=(127,)),
          also=("GDzhu01/vllm-ascend-deepseekv4#131", "GDzhu01/vllm-ascend-deepseekv4#132")),
    Fault("compressor.stale-count", "stale state", "Avarok-Cybersecurity/atlas#279", "S2",
          "a prompt shorter than a group sees the row that another request counted", CORE,
          edit(PLANS, (SEEN, "seen = np.where(live, np.maximum(visible(positions, ratio), 1), 0) if ratio")),
          at("hca", "prefill", (3,))),
    Fault("compressor.rows-not-rotated", "missing step", "ml-explore/mlx-lm#1189", "S1",
          "compressed rows go into the pool without RoPE", ROW, edit(POOL, ("y = rotate_tail(", "turned = rotate_tail(")),
          at("hca", "decode", starts=(255,))),
    Fault("compressor.pool-masked-off", "dropped tail", "ml-explore/mlx-lm#1189", "S1",
          "no query sees a compressed row", CORE, edit(PLANS, (SEEN, "seen = np.where(live, 0, 0) if ratio")),
          at("hca", "decode", starts=(255,))),
    Fault("compressor.newest-token-dropped", "off by one", MYSTERY, "S2",
          "one token short of a group, the window ends a token early", CORE,
          edit(PLANS, (NEWEST, f"{NEWEST} - (positions % 4 == 2)[:, None]")), at("csa", "verify", starts=(128,))),
    Fault("compressor.half-group-visible", "leak", MYSTERY, "S2",
          "one token short of a group, the group is visible already", CORE,
          edit(PLANS, (SEEN, "seen = np.where(live, visible(positions + 1, ratio), 0) if ratio")),
          at("hca", "prefill", (129,))),
    Fault("compressor.window-short-at-group", "off by one", MYSTERY, "S2",
          "one token short of a group, the window loses its oldest row", CORE,
          edit(PLANS, (WINDOWS, f"{WINDOWS} - (positions % 4 == 2)")), at("csa", "verify", starts=(128,))),
    Fault("compressor.empty-pool-breaks", "off by one", "AI-Hypercomputer/maxtext#4337", "S1",
          "a batch without compressed rows has no mask for them", CORE, wrap("pool.plans:_compressed", _no_rows_no_mask),
          at("hca", "decode", (3,))),
    Fault("compressor.guard-of-empty-lanes", "missing clamp", "vllm-project/vllm#41601", "S1",
          "a tile of tokens that are not there takes -inf from -inf", ROW,
          Both((edit(POOL, ("tl.where(new_peak == float(\"-inf\"), 0.0, new_peak)", "new_peak"),
                     ("INTERPRETER = Tiles(SLOTS=128)", "INTERPRETER = Tiles(SLOTS=4)")),)),
          at("csa", "prefill", (4,)), also=("flashinfer-ai/flashinfer#4401",)),
    Fault("compressor.turned-at-entry", "wrong table", "AMD-AGI/Primus#930", "S2",
          "compressed rows are rotated at their number, not at their group's first position", "layer",
          edit("step", ("complete[:, 2] // ratio * ratio", "complete[:, 2] // ratio")),
          whole("hca", "decode", starts=(255,)),
          tests=("tests/test_pool_plans.py::test_the_plan_of_a_step_equals_a_slow_planner",)),
    Fault("compressor.halves-swapped", "swapped halves", OWN, "S2",
          "the older group of an overlap uses the right half", ROW,
          edit(POOL, ("tl.where(k >= RATIO, HEAD_DIM, 0)", "tl.where(k >= RATIO, 0, HEAD_DIM)")),
          at("csa", "decode", starts=(127,))),
    Fault("compressor.one-bias-for-all", "wrong table", OWN, "S2",
          "every token of a group gets the position bias of the first", ROW,
          edit(POOL, ("ape + (k % RATIO)[:, None]", "ape + (0 * k)[:, None]")), at("csa", "chunk", starts=(128,))),
    Fault("compressor.state-without-bias", "missing step", OWN, "S2",
          "scores go into the ring without their position bias", STATE,
          edit("kernels.state_write", ("gate += tl.load(ape", "gate += 0 * tl.load(ape")), at("hca", "decode", starts=(127,))),
    Fault("compressor.one-softmax-for-all", "axis", OWN, "S2",
          "the tokens of a group have one weight for all channels", ROW,
          edit(POOL, ("gate = tl.where(fresh, new_gate, gate)",
                      "gate = tl.where(fresh, new_gate, gate); gate = gate * 0 + (tl.sum(gate, 1) / LANES)[:, None]")),
          at("hca", "decode", starts=(127,))),
    Fault("compressor.oldest-token-dropped", "off by one", OWN, "S2",
          "a group pools all its tokens but the oldest", ROW,
          edit(POOL, ("stored = ((k < window_len) &", "stored = ((k < window_len) & (k > 0) &")),
          at("hca", "decode", starts=(127,))),
    Fault("compressor.slot-of-another", "wrong page", OWN, "S1",
          "state is read from the ring of the sequence before", ROW,
          edit(POOL, ("slot = tl.load(slots + batch)", "slot = tl.load(slots + batch - (batch > 0))")),
          at("csa", "decode", starts=(127, 255))),
    Fault("compressor.norm-without-eps", "missing clamp", OWN, "S3",
          "the norm of a compressed row leaves out its epsilon", ROW,
          edit(POOL, ("x * inverse_rms(x, eps, HEAD_DIM)", "x * inverse_rms(x, 0.0, HEAD_DIM)")),
          at("csa", "decode", starts=(255,))),
)  # fmt: skip
