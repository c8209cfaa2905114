"""Weights in other storages: judged where the kernels take them, otherwise not run with the reason, and never a crash."""

from __future__ import annotations

import pytest
import torch
from judge_cases import HOW, failing
from kernel_cases import mutant
from test_engine_storage import BaseStore
from torch import Tensor

from optimized.kernels import experts as experts_file
from parity import cases, experts, ops
from parity.flow import Flow, Judged, Setting
from reference.checkpoint.dequantize import dequantize
from reference.checkpoint.procedural import ProceduralStore
from reference.rounding import profile

EXPERT_OPS = ("ffn.experts.h", "ffn.experts.w2")
PHASES = ("prefill",)


class Base(BaseStore):
    """A base model with what stands at its ends."""

    def get(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        if name in self.change:
            return self.change[name][start:stop]
        return super().get(name, start, stop) if "." in name else ProceduralStore.get(self, name, start, stop)


def run(store: Base, *names: str) -> list[Judged]:
    """A CSA layer of this store, every op or these."""
    chosen = [op for op in ops.OPS if not names or op.name in names]
    setting = Setting(store, profile("pool-fp8"), cases.plan([9], [127], PHASES), chosen, HOW, 3)
    return list(Flow.start(setting).run_layer(0))


def not_run(judged: list[Judged]) -> dict[str, str]:
    return {j.op.name: j.missing for j in judged if j.missing}


def test_a_base_model_is_judged_in_every_op():
    judged = run(Base())
    assert not failing(judged) and not not_run(judged)
    assert {*EXPERT_OPS, "attn.compressor.values", "ffn.out"} <= {j.op.name for j in judged if j.verdicts}


def test_a_scale_of_another_block_is_found_in_fp8_experts(tmp_path, monkeypatch):
    wrong = mutant(experts_file, tmp_path, ("128) + first // 128, mask", "128) + 0 * first, mask"))
    monkeypatch.setattr(experts, "expert_gate_up", wrong.expert_gate_up)
    names = [f"layers.0.ffn.experts.{e}.w1.scale" for e in range(Base().config.n_routed_experts)]
    uneven = {name: Base().get(name) * torch.tensor([1.0, 4.0]) for name in names}  # unlike along a row
    assert set(failing(run(Base(uneven), *EXPERT_OPS))) == {"ffn.experts.h"}


def between(x: Tensor) -> Tensor:
    return x.float() * 1.5  # powers of two, as scales


def odd(x: Tensor) -> Tensor:
    return x.float() * 1.001  # more bits than bfloat16 has


def plain(x: Tensor) -> Tensor:
    return x.float().bfloat16()


LAYER = "layers.0."
REFUSED = [
    (f"{LAYER}attn.wq_b.weight", odd, "attn.wq_b.input attn.wq_b", "attn.q", "stored as float32"),
    (f"{LAYER}attn.wo_a.weight", plain, "attn.wo_a", "attn.wo_b", "stored as bfloat16"),
    (f"{LAYER}attn.wkv.scale", between, "attn.wkv.input attn.wkv", "attn.kv", "no power of two"),
    (f"{LAYER}ffn.shared_experts.w2.weight", plain, "ffn.shared_experts.w2.input ffn.shared_experts.w2", "ffn.out", "bfloat16"),
    (f"{LAYER}attn.compressor.wgate.weight", odd, "attn.compressor.values", "attn.compressor.row", "does not hold"),
    (f"{LAYER}attn.indexer.weights_proj.weight", odd, "attn.indexer.weights", "attn.indexer.q", "does not hold"),
    (f"{LAYER}ffn.gate.weight", odd, "ffn.gate.scores", "ffn.gate.experts", "does not hold"),
    ("embed.weight", odd, "embed", "hc_attn.pre", "does not hold"),
    ("head.weight", odd, "head.logits", "norm", "does not hold"),
    (f"{LAYER}ffn.experts.1.w2.scale", between, "ffn.experts.h ffn.experts.w2", "ffn.out", "no power of two"),
]


@pytest.mark.parametrize(("name", "change", "lost", "after", "words"), REFUSED)
def test_what_no_kernel_takes_is_not_run_and_says_why(name, change, lost, after, words):
    """The op after it is judged nevertheless, on the twin's payload."""
    judged = run(Base({name: change(Base().get(name))}), *lost.split(), after)
    assert not failing(judged) and any(j.verdicts for j in judged)
    missing = not_run(judged)
    assert set(missing) == set(lost.split()) and all(words in reason for reason in missing.values())


def test_weights_in_float32_that_bfloat16_holds_are_judged():
    name = "layers.0.attn.compressor.wgate.weight"
    judged = run(Base({name: Base().get(name).float()}), "attn.compressor.values")
    assert not failing(judged) and not not_run(judged)


def test_experts_that_are_not_stored_as_codes_are_not_run():
    store = Base()
    owners = [f"layers.0.ffn.experts.{e}.{w}" for e in range(store.config.n_routed_experts) for w in ("w1", "w2", "w3")]
    wide = {f"{o}.weight": dequantize(store.get(f"{o}.weight"), store.get(f"{o}.scale")).bfloat16() for o in owners}
    judged = run(Base(wide), *EXPERT_OPS, "ffn.out")
    assert not failing(judged) and set(not_run(judged)) == set(EXPERT_OPS)
