"""The reference against transformers' own model, loaded by `from_pretrained` from a written checkpoint directory.

transformers keeps float32 islands: norms, rotary tables, stream mixes, compressor softmax, index scores. For the float64
comparison its module is compiled anew with every float32 in it read as float64.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from bounds import FAR, PEER_FLOAT32, PEER_FLOAT64, assert_within, distance
from strategies import run, smallest_margin, tokens
from torch import Tensor

from reference.checkpoint.open import open_store
from reference.checkpoint.store import WeightStore
from reference.checkpoint.writer import write_checkpoint
from reference.model import Model
from reference.presets import CONFIG_JSON

pytestmark = pytest.mark.oracle
transformers = pytest.importorskip("transformers", reason="the extra `oracle` is not installed")

MODELING = "transformers.models.deepseek_v4.modeling_deepseek_v4"
TIE_STEP = 2.0**-100  # lost in any score but 0
CLEAR = 2e-5  # a selection this far from a tie (of the largest score) comes out the same in float32
PREFILL, TOTAL = 126, 150  # decoding completes a block of 128; both are past 4 * topk + 3 of mini


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("checkpoint") / "mini"
    write_checkpoint(open_store("procedural:mini"), CONFIG_JSON["mini"], out, lambda number, name: None)
    return out


@pytest.fixture(scope="module")
def store(directory: Path) -> WeightStore:
    return open_store(str(directory))


@pytest.fixture(scope="module")
def peer(directory: Path) -> Any:
    """transformers' model in float32, FP8 and FP4 weights dequantised (to bfloat16 in part, which is exact)."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        directory,
        dtype=torch.float32,
        attn_implementation="eager",
        experts_implementation="eager",
        quantization_config=transformers.FineGrainedFP8Config(dequantize=True),
    )
    return lower_row_wins(model.float().eval())


def lower_row_wins(model: Any) -> Any:
    """Four index heads often all reject a row, whose score is then exactly 0: of such ties take the lower row, as here."""

    def separate(module: Any, inputs: Any, scores: Tensor) -> Tensor:
        return scores - TIE_STEP * torch.arange(scores.shape[-1], dtype=scores.dtype)

    for module in model.modules():
        if type(module).__name__ == "DeepseekV4IndexerScorer":
            module.register_forward_hook(separate)
    return model


def widened_module() -> ModuleType:
    """transformers' file with its float32 islands turned into float64."""
    spec = importlib.util.find_spec(MODELING)
    assert spec is not None and spec.origin is not None
    source = Path(spec.origin).read_text()
    islands = len(re.findall(r"\.float\(\)|torch\.float32\b|torch\.float\b", source))
    assert islands >= 20, "transformers changed: its float32 islands are not where they were"
    source = re.sub(r"\.float\(\)", ".double()", source)
    source = re.sub(r"torch\.float32\b|torch\.float\b", "torch.float64", source)
    module = ModuleType(f"{MODELING}_widened")
    module.__package__, module.__file__ = MODELING.rpartition(".")[0], spec.origin
    sys.modules[module.__name__] = module
    exec(compile(source, spec.origin, "exec"), module.__dict__)
    return module


@pytest.fixture(scope="module")
def wide_peer(peer: Any) -> Iterator[Any]:
    """The same weights (exact in float32) in the float64 build."""
    module = widened_module()
    model = module.DeepseekV4ForCausalLM(peer.config).double()
    model.load_state_dict({name: value.double() for name, value in peer.state_dict().items()})
    widen_yarn(model)
    yield lower_row_wins(model.eval())
    del sys.modules[module.__name__]


def widen_yarn(model: Any) -> None:
    """YaRN frequencies come from a file shared by all models, in float32: taken again, by its own function, in float64."""
    rope = importlib.import_module("transformers.modeling_rope_utils")
    source = re.sub(r"torch\.float32\b|torch\.float\b", "torch.float64", Path(rope.__file__).read_text())
    wide: dict[str, Any] = {"__name__": "widened_rope"}
    exec(compile(source.replace("from .utils", "from transformers.utils"), rope.__file__, "exec"), wide)
    frequencies, _ = wide["ROPE_INIT_FUNCTIONS"]["yarn"](model.config, torch.device("cpu"), layer_type="compress")
    assert frequencies.dtype == torch.float64
    for module in model.modules():
        if hasattr(module, "compress_inv_freq"):
            assert module.main_inv_freq.dtype == torch.float64
            module.compress_inv_freq.data = frequencies


@torch.inference_mode()
def peer_logits(peer: Any, ids: Tensor) -> Tensor:
    """Prefill, then one token at a time from the cache."""
    out = peer(ids[None, :PREFILL], use_cache=True)
    logits = [out.logits[0]]
    for i in range(PREFILL, len(ids)):
        out = peer(ids[None, i : i + 1], past_key_values=out.past_key_values, use_cache=True)
        logits.append(out.logits[0])
    return torch.cat(logits)


def test_float32(store: WeightStore, peer: Any) -> None:
    prompts = (tokens(TOTAL, seed, store.config.vocab_size) for seed in range(20))
    ids = next(prompt for prompt in prompts if smallest_margin(store, prompt) > CLEAR)
    ours = run(Model(store, torch.float32), ids, range(PREFILL, TOTAL))
    assert_within(PEER_FLOAT32, ours, peer_logits(peer, ids))


def test_float64(store: WeightStore, wide_peer: Any) -> None:
    ids = tokens(TOTAL, 1, store.config.vocab_size)
    ours = run(Model(store, torch.float64), ids, range(PREFILL, TOTAL))
    assert_within(PEER_FLOAT64, ours, peer_logits(wide_peer, ids))


def test_the_comparison_sees_a_swapped_weight(store: WeightStore, wide_peer: Any) -> None:
    """The smallest tensors count too: one sink exchanged with its neighbour moves logits by many bounds."""
    ids = tokens(40, 2, store.config.vocab_size)
    before = peer_logits(wide_peer, ids)
    sinks = wide_peer.model.layers[0].self_attn.sinks.data
    sinks[[0, 1]] = sinks[[1, 0]]
    try:
        assert distance(peer_logits(wide_peer, ids), before) > FAR * PEER_FLOAT64
    finally:
        sinks[[0, 1]] = sinks[[1, 0]]
