"""Attention core: sink, masks, lists, tiles, and the grouped product behind it."""

from __future__ import annotations

from ..change import edit
from ..fault import OWN, Fault, at

CORE, OUT = "attn.core", "attn.wo_a"
ATTENTION, PLANS, PRODUCTS = "kernels.decode_attention", "pool.plans", "kernels.gemm_bf16"
SINK = "total = tl.exp(tl.load(sink + h, mask=head, other=0.0) - peak)"
MASK = 's = tl.where(live[None, :], s, float("-inf"))'
SUM = "total = total * carry + tl.sum(p, 1)"
WINDOWS = "np.where(live, np.minimum(positions + 1, geometry.config.sliding_window), 0)"
FAR = 65_535

FAULTS = (
    Fault("attention.padded-lanes-counted", "missing clamp", "flashinfer-ai/flashinfer#5095", "S1",
          "lanes past the end of a list count as rows with score 0", CORE, edit(ATTENTION, (MASK, "s = s")),
          at("window", "decode", (3,)), also=("sgl-project/sglang#39288",)),
    Fault("attention.padded-lanes-loaded", "leak", "flashinfer-ai/flashinfer#5095", "S1",
          "lanes past the end of a list load what lies in row 0 and multiply it by 0", CORE,
          edit(ATTENTION, ("rows = load_rows(main, rope, live,", "rows = load_rows(main, rope, j >= 0,")),
          at("window", "decode", (3,))),
    Fault("attention.empty-row-is-nan", "missing clamp", "ikawrakow/ik_llama.cpp#2344", "S1",
          "a token that sees nothing puts out 0 / 0", CORE,
          edit(ATTENTION, ("result = tl.where(used > 0, tl.div_rn(acc, tl.broadcast_to(total[:, None], (JOIN, LANES))), 0.0)",
                           "result = tl.div_rn(acc, tl.broadcast_to(total[:, None], (JOIN, LANES)) * (used > 0))")),
          laws=("padding",), tests=("tests/test_kernel_attention.py",)),
    Fault("attention.sink-without-maximum", "missing step", "Dao-AILab/flash-attention#2752", "S3",
          "the sink is not taken relative to the running maximum", CORE,
          edit(ATTENTION, (SINK, "total = tl.exp(tl.load(sink + h, mask=head, other=0.0))")), at("window", "decode", (3,)),
          also=("fla-org/flash-linear-attention#831",)),
    Fault("attention.no-sink", "missing step", "kekzl/imp#1345", "S1",
          "the sink does not reach the kernel of quantised rows", CORE, edit(ATTENTION, (SINK, f"{SINK} * 0")),
          at("window", "decode", (3,)), also=("vllm-project/vllm-metal#550", "tenstorrent/tt-metal#55327")),
    Fault("attention.sink-scaled", "wrong scale", OWN, "S2", "the sink is scaled like a score", CORE,
          edit(ATTENTION, (SINK, SINK.replace(" - peak", " * 0.0442 - peak"))), at("window", "decode", (17,))),
    Fault("attention.sink-of-next-head", "axis", OWN, "S2", "every head has the sink of the one before", CORE,
          edit(ATTENTION, (SINK, SINK.replace("sink + h,", "sink + h - (h > 0),"))), at("window", "decode", (17,))),
    Fault("attention.first-row-not-in-sum", "off by one", OWN, "S2", "the first row of a part misses in the denominator", CORE,
          edit(ATTENTION, (SUM, SUM.replace("p, 1)", "tl.where(j > start, p, 0.0), 1)"))), at("window", "decode", (17,))),
    Fault("attention.no-carry", "missing step", OWN, "S2", "the numerator is not rescaled when the maximum grows", CORE,
          edit(ATTENTION, ("acc * carry[:, None])", "acc)")), at("hca", "decode", starts=(FAR,))),
    Fault("attention.parts-not-rescaled", "missing step", OWN, "S2", "parts of a list meet without their own maximum", CORE,
          edit(ATTENTION, ("mask=head, other=0.0) * share", "mask=head, other=0.0)")), at("hca", "decode", starts=(FAR,))),
    Fault("attention.last-part-dropped", "dropped tail", OWN, "S2", "rows from the 512th on are left out", CORE,
          edit(ATTENTION, ("total += tl.load(part_sum + at, mask=head, other=0.0) * share",
                           "share = tl.where(part < 2, share, 0.0)\n"
                           "        total += tl.load(part_sum + at, mask=head, other=0.0) * share")),
          at("hca", "decode", starts=(FAR,))),
    Fault("attention.window-short", "off by one", OWN, "S2", "the window loses its oldest row", CORE,
          edit(PLANS, (WINDOWS, WINDOWS.replace("sliding_window)", "sliding_window - 1)"))), at("window", "decode", (17,))),
    Fault("attention.draft-sees-draft", "leak", OWN, "S2",
          "a token of a verify step sees the groups that the step's last token completes", CORE,
          edit(PLANS, ("visible(positions, ratio), 0) if ratio", "visible(positions | 3, ratio), 0) if ratio")),
          at("hca", "prefill", (129,))),
    Fault("attention.block-of-another", "wrong page", OWN, "S1", "compressed rows are those of the sequence beside", CORE,
          edit(PLANS, ("_every_row(geometry, kind, block_table, int(seen.max(initial=0))), batch_ids, seen",
                       "_every_row(geometry, kind, block_table, int(seen.max(initial=0))), batch_ids ^ 1, seen")),
          at("hca", "decode", starts=(255, 257))),
    Fault("attention.own-row-late", "off by one", OWN, "S1", "of this step's rows each token takes the one before", CORE,
          edit(ATTENTION, ("(-1 - row)[:, None]", "tl.where(row < -1, -2 - row, 0)[:, None]")), at("window", "prefill", (17,))),
    Fault("attention.probabilities-in-fp8", "lost bits", OWN, "S2", "the numerator takes its weights with four bits", CORE,
          edit(ATTENTION, ("bf16_rn(p), rows", "bf16_rn(e4m3_up(e4m3_rn(p))), rows"),
               ("import bf16_rn, e4m3_up,", "import bf16_rn, e4m3_rn, e4m3_up,")), at("window", "decode", (17,))),
    Fault("attention.scale-of-nope", "wrong scale", OWN, "S2", "scores over the root of 448, not of 512", CORE,
          edit(ATTENTION, ("tl.zeros((HEADS, ROWS), tl.float32)) * scale",
                           "tl.zeros((HEADS, ROWS), tl.float32)) * scale * 1.06904")), at("window", "decode", (17,))),
    Fault("attention.groups-share-heads", "axis", OWN, "S1", "every group of the product reads the first one's heads", OUT,
          edit(PRODUCTS, ("group * x_group_stride", "0 * x_group_stride")), at("window", "decode", (3,))),
)  # fmt: skip
