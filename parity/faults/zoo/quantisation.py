"""FP8 and FP4: scales, codes, packing, and products of codes."""

from __future__ import annotations

from ..change import edit
from ..fault import OWN, Fault, at, whole

CODES, PRODUCT, H = "attn.wq_a.input", "attn.wq_a", "ffn.experts.h"
QUANTISE, GEMM, NUMERIC, EXPERTS = "kernels.quantize", "kernels.gemm_fp8", "kernels.numeric", "kernels.experts"
ENCODED = "return e4m3_rn(value * e8m0_inverse(scale)[:, :, None]).reshape(ROWS, GROUPS * 128), scale"
AMAX = "scale = e4m3_scale(tl.max(magnitude_bits(value), 2))"
CEIL = "byte = (x.to(tl.uint32, bitcast=True) + 0x7FFFFF) >> 23"
UP = "u = byte.to(tl.uint32) << 23\n    u = tl.where(u == 0, 0x00400000, u)"
NUMERICS = "tests/test_kernel_numeric.py"

FAULTS = (
    Fault("quantisation.two-scales", "wrong scale", "sgl-project/sglang#28418", "S2",
          "codes are made with the exact scale, and its power of two is stored", CODES,
          edit(QUANTISE, (ENCODED, "exact = tl.max(tl.abs(value), 2) / 448.0; exact = tl.where(exact == 0, 1.0, exact)\n    "
                          + ENCODED.replace("value * e8m0_inverse(scale)", "value / exact")), within="kernels.quantize"),
 at("window", "decode", (3,)), also=("sgl-project/sglang#26766",)),
    Fault("quantisation.exponent-by-logarithm", "lost bits", "sgl-project/sglang#31210", "S3",
          "the exponent of a scale comes from a float logarithm", CODES,
          edit(NUMERIC, (CEIL, "byte = (tl.ceil(tl.log2(x)) + 127).to(tl.uint32)")), at("window", "decode", (3,)),
          tests=(NUMERICS,), also=("sgl-project/sglang#29954", "sgl-project/sglang#29956")),
    Fault("quantisation.mantissa-dropped", "lost bits", "sgl-project/sglang#39193", "S2",
          "a scale between powers of two loses its mantissa instead of being refused", "load",
          edit("weights", ("if not torch.equal(scales.float(), stored):", "if False:")),
          tests=("tests/test_engine_storage.py", "tests/meta/test_storage.py")),
    Fault("quantisation.scales-transposed", "axis", "sgl-project/sglang#31727", "S2",
          "scales are written by token and read by block: right for one token", PRODUCT,
          edit(GEMM, ("x_scale + t * x_scale_stride + block", "x_scale + block * T + t")), at("window", "decode", (3, 17))),
    Fault("quantisation.byte-as-number", "wrong format", "vllm-project/vllm#43416", "S1",
          "a scale byte is taken for its value", H,
          edit(NUMERIC, (UP, f"return byte.to(tl.float32)\n    {UP}"), within="kernels.experts"),
          at("hca_scored", "decode", (3,)), also=("vllm-project/vllm#51946",)),
    Fault("quantisation.no-floor", "missing clamp", "huggingface/kernels-community#681", "S1",
          "the amax of an empty block has no floor", CODES,
          edit(NUMERIC, ("floored = tl.maximum(amax_bits, E4M3_AMAX_FLOOR_BITS)", "floored = amax_bits")),
          at("window", "decode", (3,)), tests=(NUMERICS,),
          also=("THUDM/slime#2256", "pytorch/ao#4714", "pytorch/ao#4762", "InternLM/lmdeploy#3652")),
    Fault("quantisation.ties-away", "order", "ROCm/aiter#3992", "S3", "halves between FP4 codes go away from zero",
          "attn.indexer.q",
          edit(NUMERIC, ("(a > 0.25)", "(a >= 0.25)"), ("(a > 1.25)", "(a >= 1.25)"), ("(a > 2.5)", "(a >= 2.5)"),
               ("(a > 5.0)", "(a >= 5.0)")), at("csa", "decode", starts=(127,)), tests=(NUMERICS,),
          also=("flashinfer-ai/flashinfer#4601",)),
    Fault("quantisation.scales-not-interleaved", "wrong scale", "flashinfer-ai/flashinfer#4093", "S2",
          "scales of an FP4 weight are read from other rows than they were written to", H,
          edit(EXPERTS, ("w_scale + n[:, None] * scales + scale_at[None, :]",
                         "w_scale + (n - (n > 0))[:, None] * scales + scale_at[None, :]")), at("hca_scored", "decode", (3,))),
    Fault("quantisation.rows-without-scales", "wrong scale", "sgl-project/sglang#35703", "S1",
          "rows of a weight are permuted when it is loaded, their scales are not", "layer",
          edit("weights", ("return Packed(codes.view(torch.uint8)", "return Packed(codes.view(torch.uint8).roll(1, 0)")),
          whole("hca_scored", "decode", (3,))),
    Fault("quantisation.shuffled-as-plain", "wrong format", "vllm-project/vllm#51821", "S1",
          "a weight that was shuffled for one kernel goes through another", PRODUCT,
          edit(GEMM, ("w + n[:, None] * w", "w + (n - 8 * (n >= 8))[:, None] * w")), at("window", "decode", (3,))),
    Fault("quantisation.amax-over-tokens", "axis", "sgl-project/sglang#26133", "S2",
          "the amax of a block is taken over all rows of a tile, padding too", CODES,
          edit(QUANTISE, (AMAX, "amax = tl.max(magnitude_bits(value), 2)\n    scale = e4m3_scale(tl.zeros_like(amax) + "
                          "tl.max(amax, 0)[None, :])"), within="kernels.quantize"),
          at("window", "decode", (3, 17)), also=("sgl-project/sglang#33106", "sgl-project/sglang#32843")),
    Fault("quantisation.exponent-floored", "wrong scale", OWN, "S2", "the exponent of a scale is rounded down", CODES,
          edit(QUANTISE, (AMAX, AMAX.replace("value), 2)", "value), 2) - 0x800000")), within="kernels.quantize"),
          at("window", "decode", (3,))),
    Fault("quantisation.last-block-dropped", "dropped tail", OWN, "S1", "a product leaves out its last 128 channels", PRODUCT,
          edit(GEMM, ("range(0, (K + 127) // 128)", "range(0, (K - 1) // 128)")), at("window", "decode", (3,))),
    Fault("quantisation.last-64-dropped", "dropped tail", OWN, "S1", "a product leaves out its last 64 channels", PRODUCT,
          edit(GEMM, ("deep = (d < K)[None, :]", "deep = (d < K - 64)[None, :]")), at("window", "decode", (3,))),
    Fault("quantisation.first-scale-for-all", "wrong scale", OWN, "S1", "all channels take the scale of the first 128", PRODUCT,
          edit(GEMM, ("x_scale_stride + block", "x_scale_stride")), at("window", "decode", (3,))),
    Fault("quantisation.one-exponent-low", "wrong scale", OWN, "S2", "a block of a weight has an exponent too low", PRODUCT,
          edit(GEMM, ("* (sx[:, None] * sw[None, :])", "* (sx[:, None] * sw[None, :]) * tl.where(block == 1, 0.5, 1.0)")),
          at("window", "decode", (3,))),
    Fault("quantisation.nibbles-swapped", "swapped halves", OWN, "S1", "the high half of a byte is its first channel", H,
          edit(EXPERTS, ("byte & 0xF, byte >> 4", "byte >> 4, byte & 0xF")), at("hca_scored", "decode", (3,))),
    Fault("quantisation.bf16-truncated", "lost bits", OWN, "S3", "a product is cut to bfloat16, not rounded", PRODUCT,
          edit(NUMERIC, ("r = (u + 0x7FFF + ((u >> 16) & 1)) >> 16", "r = u >> 16"), within="kernels.gemm_fp8"),
          at("window", "decode", (3,))),
    Fault("quantisation.rounded-twice", "lost bits", OWN, "S3", "SwiGLU goes through bfloat16 before it is quantised",
          "ffn.shared_experts.w2.input",
          edit("kernels.swiglu", ("quantize_tile(clamped_swiglu(a, b, limit)", "quantize_tile(bf16_up(bf16_rn(clamped_swiglu("
               "a, b, limit)))"), ("import bf16_up", "import bf16_rn, bf16_up")), at("window", "prefill", (36,))),
    Fault("quantisation.three-percent", "wrong scale", OWN, "S3", "a product is 3 % too large", PRODUCT,
          edit(GEMM, ("* (sx[:, None] * sw[None, :])", "* (sx[:, None] * sw[None, :]) * 1.03")), at("window", "decode", (3,))),
)  # fmt: skip
