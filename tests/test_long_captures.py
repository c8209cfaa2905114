"""Kernels op by op on prompts longer than a window ring: a ring keeps the last rows, a trace all of them."""

from __future__ import annotations

import pytest
import torch
from traced_cases import CONFIG, LAYER, LOADER

from parity import ops
from parity.adapters import opwise
from parity.adapters.opwise import HOW, Kernels
from parity.adapters.tape import Held, Segment
from parity.adapters.traced import judged

LAST = ops.OPS.index(ops.BY_NAME["attn.core"])


@pytest.mark.parametrize("tokens", [21, 41])  # a ring of 19: once round, and twice
def test_rows_and_attention_of_a_long_prefill(tokens):
    generator = torch.Generator().manual_seed(tokens)
    tape = opwise.begin([Segment(0, "prefill", tuple(range(tokens)))], {0: torch.zeros(tokens, dtype=torch.int64)})
    streams = torch.randn(tokens, CONFIG.hc_mult, CONFIG.hidden_size, generator=generator)
    tape.held[LAYER - 1, "hc_ffn.streams", 0] = Held(streams.bfloat16(), "bf16")
    kernels = Kernels.of(tape, LOADER, "pool-fp8", LAYER)
    for op in (op for op in kernels.ops if ops.OPS.index(op) <= LAST):
        kernels.run(op, [0])
    for name in ("attn.kv", "attn.core"):
        (found,) = judged(ops.BY_NAME[name], kernels.feed, kernels.weights, [0], HOW)
        assert found.verdicts and all(v.passed for v in found.verdicts), found
    assert len(tape.held[LAYER, "attn.o_rotated", 0].value) == tokens
