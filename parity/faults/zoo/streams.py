"""Residual streams: the mixes before and after a sub-layer, Sinkhorn, and norms."""

from __future__ import annotations

from ..change import edit
from ..fault import OWN, Fault, at

PRE, POST, NORM = "hc_attn.pre", "hc_attn.streams", "attn_norm"
MIX, NORMS = "kernels.hyper_connection", "kernels.norm"
SHARE = "share = tl.load(comb + (t * STREAMS + j) * STREAMS + k"
ROWS, COLUMNS = "c = c / (tl.sum(c, 2)[:, :, None] + eps)", "c = c / (tl.sum(c, 1)[:, None, :] + eps)"
LOOP = f"for _ in range(1, iterations):\n        {ROWS}\n        {COLUMNS}"
SQUARES = "tl.store(partials + at, tl.where(n == MIXES, squares[:, None], acc)"
HERE = at("csa", "decode", (3, 17))

FAULTS = (
    Fault("streams.comb-transposed", "axis", "NVIDIA-NeMo/Automodel#2154", "S2",
          "streams are mixed by the rows of comb, not by its columns", POST,
          edit(MIX, (SHARE, "share = tl.load(comb + (t * STREAMS + k) * STREAMS + j")), HERE,
          also=("NVIDIA-NeMo/Automodel#2159", "NVIDIA/Megatron-LM#4957", "NVIDIA/Megatron-LM#4839", "NVIDIA/Megatron-LM#6699",
                "PaddlePaddle/PaddleFleet#1238", "huggingface/transformers#46172")),
    Fault("streams.other-eps-in-norm", "wrong scale", "osaurus-ai/vmlx-swift#381", "S3",
          "the norm of the streams takes the epsilon of Sinkhorn", PRE,
          edit(MIX, ("parts, LANES) / width + rms_eps)", "parts, LANES) / width + 1.5 * rms_eps)")),
          at("csa", "prefill", (17,))),
    Fault("streams.other-eps-in-sinkhorn", "wrong scale", OWN, "S3", "Sinkhorn takes the epsilon of the norms", PRE,
          edit(MIX, ("sinkhorn(logits, iterations, hc_eps)", "sinkhorn(logits, iterations, rms_eps)")), HERE),
    Fault("streams.one-iteration-less", "off by one", "NVIDIA/Megatron-LM#5106", "S3", "Sinkhorn stops an iteration early", PRE,
          edit(MIX, ("range(1, iterations)", "range(2, iterations)")), HERE),
    Fault("streams.one-iteration-more", "off by one", "NVIDIA/Megatron-LM#5106", "S3", "Sinkhorn runs one more iteration", PRE,
          edit(MIX, ("range(1, iterations)", "range(0, iterations)")), HERE),
    Fault("streams.eps-in-first-pass-only", "missing step", "NVIDIA/Megatron-LM#5106", "S3",
          "only the first pass of Sinkhorn has its epsilon", PRE,
          edit(MIX, (LOOP, LOOP.replace(" + eps", ""))), HERE, tests=("tests/test_kernel_hyper_connection.py",)),
    Fault("streams.one-iteration", "dropped tail", OWN, "S2", "Sinkhorn runs once", PRE,
          edit(MIX, ("range(1, iterations)", "range(1, 1)")), HERE),
    Fault("streams.ends-on-rows", "order", OWN, "S2", "Sinkhorn ends on a row step", PRE,
          edit(MIX, (f"{LOOP}\n    return c", f"{LOOP}\n    {ROWS}\n    return c")), HERE),
    Fault("streams.sinkhorn-axes-swapped", "axis", OWN, "S2", "Sinkhorn's softmax runs over the streams it comes from", PRE,
          edit(MIX, ("c = tl.exp(c - tl.max(c, 2)[:, :, None])\n    c = c / tl.sum(c, 2)[:, :, None] + eps",
                     "c = tl.exp(c - tl.max(c, 1)[:, None, :])\n    c = c / tl.sum(c, 1)[:, None, :] + eps")), HERE),
    Fault("streams.stale-squares", "stale state", "vllm-project/vllm#42810", "S2",
          "with many tokens in a step, sums of squares are those of another token", PRE,
          edit(MIX, (SQUARES, "first = tl.sum(tl.where(t == 0, squares, 0.0), 0)\n    "
                     + SQUARES.replace("squares[", "tl.where(t >= 16, first, squares)["))),
          at("csa", "prefill", (36,)), also=("vllm-project/vllm#43950", "vllm-project/vllm#43385")),
    Fault("streams.half-the-lanes", "dropped tail", "vllm-project/vllm#56506", "S1",
          "sums of squares run over half of the lanes", PRE,
          edit(MIX, ("squares + tl.sum(v * v, 1)", "squares + tl.sum(tl.where((tl.arange(0, v.shape[1]) < v.shape[1] // 2)"
                     "[None, :], v * v, 0.0), 1)")), HERE, also=("vllm-project/vllm#56342",)),
    Fault("streams.gate-not-doubled", "wrong scale", OWN, "S2", "post is a sigmoid, not twice one", PRE,
          edit(MIX, ("gate = 2.0 * sigmoid(", "gate = 1.0 * sigmoid(")), HERE),
    Fault("streams.scale-of-another", "wrong table", OWN, "S2", "post takes the scale of pre", PRE,
          edit(MIX, ("tl.load(scale + 1)", "tl.load(scale)")), HERE),
    Fault("streams.projection-ignored", "missing step", OWN, "S2", "a mix is its base, whatever the streams are", PRE,
          edit(MIX, ("parts, LANES) * rstd[:, None]\n    return", "parts, LANES) * rstd[:, None] * 0\n    return")), HERE),
    Fault("streams.last-stream-left-out", "dropped tail", OWN, "S1", "the last stream is not collapsed into the input", PRE,
          edit(MIX, ("share = tl.sum(tl.where(s == j, weight, 0.0), 1)",
                     "share = tl.sum(tl.where((s == j) & (s < STREAMS - 1), weight, 0.0), 1)")), HERE),
    Fault("streams.offset-norm-weight", "off by one", OWN, "S1", "a norm's weight is taken as an offset from 1", NORM,
          edit(NORMS, ("w[None, :] * (value", "(1 + w[None, :]) * (value")), HERE),
    Fault("streams.norm-by-deviation", "missing step", OWN, "S2", "a norm takes off the mean first", NORM,
          edit(NORMS, ("rstd = tl.rsqrt(", "value = tl.where(inside, value - (tl.sum(value, 1) / D)[:, None], 0.0)\n"
                       "    rstd = tl.rsqrt(")), HERE),
    Fault("streams.truncated", "lost bits", OWN, "S3", "a norm is cut to bfloat16, not rounded", NORM,
          edit("kernels.numeric", ("r = (u + 0x7FFF + ((u >> 16) & 1)) >> 16", "r = u >> 16"), within=NORMS), HERE),
)  # fmt: skip
