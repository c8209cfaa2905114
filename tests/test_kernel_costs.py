"""The priced bytes and products are those that kernels move and multiply: counted in the interpreter, address by address."""

from __future__ import annotations

import collections
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from triton.runtime import interpreter

from optimized.kernels import aot, costs, experts, hyper_connection, launch, prefill_attention
from optimized.kernels.costs import Step, layer_costs
from optimized.kernels.gemm_fp8 import gemm_fp8
from parity.bench import draws
from parity.bench.calls import layer_calls
from parity.bench.paged_calls import paged_calls
from reference.presets import preset

# Widths that no block of 128 or 32 divides, fewer experts than pairs, more index keys than picks.
CONFIG = replace(
    preset("mini"), hidden_size=320, q_lora_rank=144, o_lora_rank=72, moe_intermediate_size=160, vocab_size=300, index_topk=2,
    num_attention_heads=16, head_dim=192, index_n_heads=3, index_head_dim=64,
)  # fmt: skip
STEPS = {"decode": Step(3, 256, 1), "open group": Step(2, 257, 1), "prefill": Step(1, 11, 11)}
LONG = Step(1, 261, 261)  # groups of 128, and a second block
PAGE_BITS = 20


class Counter:
    """Bytes read and written, each once, and flops of products without a zero factor, by kernel function."""

    def __init__(self):
        self.kernel, self.launched = "", set()
        self.sizes = {}  # (kernel, written?, page) -> bytes of the element that begins at each address of a page
        self.flops = collections.Counter()

    def note(self, written, pointers, mask):
        at = pointers.data[np.broadcast_to(mask, np.shape(pointers.data))]
        size = pointers.get_element_ty().primitive_bitwidth // 8
        pages = at >> PAGE_BITS
        for page in pd.unique(pages):
            place = at[pages == page] & ((1 << PAGE_BITS) - 1)
            self.sizes.setdefault((self.kernel, written, page), np.zeros(1 << PAGE_BITS, np.uint8))[place] = size

    def nbytes(self, kernel, written):
        return sum(int(sizes.sum()) for (k, w, _), sizes in self.sizes.items() if (k, w) == (kernel, written))

    def watch(self, monkeypatch):
        builder, run = interpreter.InterpreterBuilder, interpreter.GridExecutor.__call__
        load, store, dot = builder.create_masked_load, builder.create_masked_store, builder.create_dot

        def counted_run(grid, *args, **kwargs):
            self.kernel = grid.fn.__name__
            self.launched.add(self.kernel)
            return run(grid, *args, **kwargs)

        def counted_load(this, pointers, mask, *rest):
            self.note(False, pointers, mask.data)
            return load(this, pointers, mask, *rest)

        def counted_store(this, pointers, value, mask, *rest):
            self.note(True, pointers, mask.data)
            return store(this, pointers, value, mask, *rest)

        def counted_dot(this, a, b, *rest):
            self.flops[self.kernel] += 2 * int(((a.data != 0).sum(0) * (b.data != 0).sum(1)).sum())
            return dot(this, a, b, *rest)

        monkeypatch.setattr(interpreter.GridExecutor, "__call__", counted_run)
        monkeypatch.setattr(builder, "create_masked_load", counted_load)
        monkeypatch.setattr(builder, "create_masked_store", counted_store)
        monkeypatch.setattr(builder, "create_dot", counted_dot)


def one_block_of_tokens(patch):
    """Attention of all tokens at once: blocks of tokens take the same scratch one after the other."""
    patch.setattr(prefill_attention, "TOKENS", 1 << 20)


def priced_for_this_process(patch):
    """What depends on tiles is priced with the interpreter's."""
    patch.setattr(hyper_connection, "GPU", hyper_connection.INTERPRETER)
    patch.setattr(experts, "GPU_UP", replace(experts.GPU_UP, ROWS=experts.INTERPRETER_ROWS))


def counted(call):
    with pytest.MonkeyPatch.context() as patch:
        counter = Counter()
        counter.watch(patch)
        call()
    return {k: (counter.nbytes(k, False), counter.nbytes(k, True), counter.flops[k]) for k in counter.launched}


def priced(kernels):
    """Kernel function -> bytes read, bytes written, flops; kernels with nothing to do are not launched."""
    functions = {name: case.kernel.fn.__name__ for name, case in aot.cases().items()}
    return {functions[name]: (cost.read, cost.written, cost.flops) for name, cost in kernels.items() if cost.moved}


def differences(step):
    table, calls = layer_costs(CONFIG, step), layer_calls(CONFIG, step, "cpu", seed=3)
    assert table.keys() == calls.keys()
    return disagreements(table, calls)


def disagreements(table, calls):
    """Call -> price and count, where they are not the same."""
    found = {name: counted(make()) for name, make in calls.items()}
    return {name: (priced(table[name]), got) for name, got in found.items() if got != priced(table[name])}


@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
def test_every_call_costs_what_it_moves_and_multiplies(monkeypatch, step):
    one_block_of_tokens(monkeypatch)
    priced_for_this_process(monkeypatch)
    assert differences(step) == {}


def test_calls_on_the_pool_cost_the_same_at_the_widths_of_pro():
    """More compressed rows than top-k, at strides of 61 layers."""
    config, step = preset("v4-pro"), Step(1, 5120, 1)
    assert disagreements(layer_costs(config, step), paged_calls(config, step, draws.Draw("cpu", 4))) == {}


@pytest.mark.slow
def test_a_long_prefill_costs_what_it_moves_and_multiplies(monkeypatch):
    one_block_of_tokens(monkeypatch)
    priced_for_this_process(monkeypatch)
    assert differences(LONG) == {}


@pytest.mark.slow
@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
def test_the_same_on_the_tiles_of_a_gpu(monkeypatch, step):
    one_block_of_tokens(monkeypatch)
    monkeypatch.setattr(launch, "INTERPRETER", False)
    assert differences(step) == {}


def test_every_kernel_that_is_compiled_has_a_price():
    compiled = aot.cases().keys()
    assert compiled == {kernel for step in STEPS.values() for call in layer_costs(CONFIG, step).values() for kernel in call}


def test_a_wrong_formula_is_seen(monkeypatch):
    """A weight counted once a token, a forgotten scale byte, one head too many."""
    x, w = draws.Draw("cpu", 1).fp8_rows(3, 200), draws.Draw("cpu", 2).fp8_weight(40, 200)
    got = counted(lambda: gemm_fp8(*x, *w))["gemm_fp8_kernel"]
    right = costs._gemm_fp8(3, 40, 200)
    assert got == (right.read, right.written, right.flops)
    for wrong in (costs._gemm_fp8(3, 120, 200), costs._gemm_fp8(3, 40, 201), costs._gemm_fp8(4, 40, 200)):
        assert got[0] != wrong.read and got[2] != wrong.flops


def test_a_step_is_a_decode_or_a_prefill():
    with pytest.raises(ValueError, match="one token of 9 or all"):
        Step(1, 9, 2)
