"""MTP and speculation: what the drafter is fed, and what is kept of a step that was partly wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from ..change import edit, wrap
from ..fault import OWN, Fault, at, whole

GENERATION = ("tests/test_engine_generate.py::test_speculation_gives_the_tokens_of_plain_decoding",)
DRAFTS = ("tests/test_engine.py::test_drafts_are_the_reference_s",)


def _first_row_zero(embed: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def zeroed(table: Tensor, ids: Tensor, streams: int, *rest: Any) -> Tensor:
        y = embed(table, ids, streams, *rest)
        y[:1] *= streams > 1
        return y

    return zeroed


def _row_0_for_all(product: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda x, w, *rest, **kwargs: product(x[:1].expand(len(x), -1).contiguous(), w, *rest, **kwargs)


FAULTS = (
    Fault("mtp.first-embedding-zero", "missing step", "vllm-project/vllm#33299", "S3",
          "the embedding at position 0 is zeroed, though the inputs are shifted", "embed",
          wrap("kernels.embed:embed", _first_row_zero), at("mtp", "prefill", (3,)), also=("vllm-project/vllm#49938",)),
    Fault("mtp.row-0-reused", "stale state", "antirez/ds4#750", "S1",
          "every token of a step gets the logits of the first", "head.logits",
          wrap("kernels.gemm_bf16:gemm_bf16", _row_0_for_all), at("mtp", "decode", (3, 17))),
    Fault("mtp.carries-normed", "order", "vllm-project/vllm#46075", "S3",
          "the drafter is handed streams that were normed already", "layer",
          edit("mtp", ("rms_norm_quantize(x.flatten(0, 1), w.hnorm, eps)",
                       "rms_norm_quantize(rms_norm_quantize(x.flatten(0, 1), w.hnorm, eps)[0], w.hnorm, eps)")),
          whole("mtp", "decode", (3,)), tests=DRAFTS),
    Fault("mtp.projections-swapped", "swapped halves", OWN, "S1", "embedding and streams change their projections", "layer",
          edit("mtp", ("w.e_proj.codes, w.e_proj.scales", "w.h_proj.codes, w.h_proj.scales")),
          whole("mtp", "decode", (3,)), tests=DRAFTS),
    Fault("mtp.first-stream-for-all", "axis", OWN, "S1", "every stream of the drafter starts from the model's first", "streams",
          edit("kernels.mtp_streams", ("tl.load(h + at, mask=inside", "tl.load(h + t * STREAMS * D + d, mask=inside")),
          at("mtp", "decode", (3,))),
    Fault("mtp.embedding-left-out", "missing step", OWN, "S2", "the next token does not reach the drafter", "streams",
          edit("kernels.mtp_streams", ("bf16_rn(token + ", "bf16_rn(0 * token + ")), at("mtp", "decode", (3,))),
    Fault("mtp.wrong-draft-kept", "off by one", OWN, "S1", "the first wrong draft is not taken back", "generate",
          edit("generate", ("len(guesses) - right)", "max(0, len(guesses) - right - 1))")), tests=GENERATION),
    Fault("mtp.drafter-not-rewound", "stale state", OWN, "S3",
          "the drafter goes on behind what it drafted, though some of that was wrong", "generate",
          edit("generate", ("sequence.drafted = sequence.length", "pass")), tests=GENERATION),
    Fault("mtp.logits-of-last-draft", "off by one", OWN, "S1", "the token after a wrong draft is read a row late", "generate",
          edit("generate", ("made, x = made[: right + 1], x[: right + 1]", "made, x = made[-right - 1 :], x[: right + 1]")),
          tests=GENERATION),
)  # fmt: skip
