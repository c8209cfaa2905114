"""Public faults that nothing in this code base can show, with the reason."""

from __future__ import annotations

from ..fault import OutOfReach

OUT_OF_REACH = (
    OutOfReach("NVIDIA-NeMo/Automodel#2658", "two additive masks overflow bfloat16 to -inf, and a gradient is NaN",
               "attention walks lists of rows: there is no additive mask, and nothing is trained"),
    OutOfReach("flashinfer-ai/flashinfer#4401", "a finite mask value swallows scores below -5e4",
               "queries and rows are normed: a score is at most sqrt(512) times a weight; the guard it replaces is modelled by "
               "compressor.guard-of-empty-lanes"),
    OutOfReach("vllm-project/vllm#53709", "FP4 weights are turned into FP8 blocks, whose range is too small",
               "experts are multiplied in the form they are stored in; a scale byte of 255 is refused when weights are loaded"),
    OutOfReach("NVIDIA/Megatron-LM#6699", "a table names an expert twice, and scatter drops one",
               "a table with an expert twice is refused when weights are loaded"),
    OutOfReach("sgl-project/sglang#26987", "garbled output under load, without a known cause",
               "there is no mistake to plant; ownership of state is what paging.* is about"),
    OutOfReach("vllm-project/vllm-ascend#9220", "as sgl-project/sglang#26987", "no known cause"),
    OutOfReach("vllm-project/vllm-ascend#15939", "as sgl-project/sglang#26987", "no known cause"),
    OutOfReach("huggingface/transformers#48721", "a reference disagrees with itself between prefill and decode",
               "a property of a reference, not of a candidate: tests/test_model.py asks it of this one"),
)  # fmt: skip
