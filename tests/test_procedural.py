"""The procedural store: fixed for ever, sliceable, and shaped like trained weights."""

from __future__ import annotations

import hashlib
import math
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from reference.checkpoint import laws, noise
from reference.checkpoint.dequantize import dequantize
from reference.checkpoint.manifest import parameters
from reference.checkpoint.open import open_store
from reference.checkpoint.procedural import ProceduralStore
from reference.checkpoint.store import DTYPE_OF_TAG
from reference.checkpoint.values import verify
from reference.config import Config
from reference.errors import BadInput
from reference.presets import CONFIG_JSON

MINI = ProceduralStore("mini")
POOLED = ProceduralStore("mini", version=2)
RAGGED = ProceduralStore(
    Config.from_dict({**CONFIG_JSON["mini"], "hidden_size": 416, "moe_intermediate_size": 96, "q_lora_rank": 72})
)
# One tensor of every dtype, wide and narrow, plus those with rules of their own.
NAMES = [
    "embed.weight",
    "layers.2.attn.wq_a.weight",
    "layers.2.attn.wq_b.scale",
    "layers.2.attn.indexer.weights_proj.weight",
    "layers.1.attn.compressor.ape",
    "layers.1.ffn.gate.tid2eid",
    "layers.3.ffn.experts.5.w2.weight",
    "layers.3.ffn.experts.5.w2.scale",
    "layers.3.hc_ffn_base",
    "layers.3.attn.attn_sink",
    "norm.weight",
]


def digest(store, names):
    total = hashlib.sha256()
    for name in names:
        total.update(store.get(name).contiguous().view(torch.uint8).numpy().tobytes())
    return total.hexdigest()[:16]


def dense(store, name):
    scale = store.get(name.replace("weight", "scale")) if name.replace("weight", "scale") in store.tensors else None
    return dequantize(store.get(name), scale)


def test_version_1_draws_these_bits():
    """Baselines are keyed by the generator version: other bits need another version."""
    assert MINI.identity == "procedural:mini@0/g1"
    assert digest(MINI, MINI.tensors) == "02397ba1ae9c1afa"
    assert digest(ProceduralStore("mini", 7), NAMES) == "891fff8703ee12d9"
    assert digest(RAGGED, NAMES) == "fba329de9c975d79"


def test_version_2_draws_these_bits():
    assert POOLED.identity == "procedural:mini@0/g2"
    assert digest(POOLED, POOLED.tensors) == "6acfc01cfb0fe8f8"
    assert digest(ProceduralStore("mini", 7, 2), NAMES) == "efbf5b95d999d7b1"


def test_version_2_gives_views_of_one_pool():
    """What is read once is not copied: the same memory for the same tensor, for slices of it and from another store."""
    weight = POOLED.get("layers.3.ffn.experts.5.w2.weight")
    assert weight.data_ptr() == ProceduralStore("mini", version=2).get("layers.3.ffn.experts.5.w2.weight").data_ptr()
    assert POOLED.get("layers.3.ffn.experts.5.w2.weight", 2, 5).data_ptr() == weight[2:].data_ptr()
    scale = POOLED.get("layers.3.ffn.experts.5.w2.scale")
    assert POOLED.get("layers.3.ffn.experts.5.w2.scale", 2, 5).data_ptr() == scale[2:].data_ptr()


def test_real_sizes_have_version_2_and_version_1_by_name():
    assert [open_store(f"procedural:{name}").identity[-2:] for name in ("mini", "v4-pro-slim", "v4-pro", "v4-flash-0731")] == [
        "g1", "g1", "g2", "g2",
    ]  # fmt: skip
    assert open_store("procedural:v4-pro@3/g1").identity == "procedural:v4-pro@3/g1"
    assert open_store("procedural:mini/g2").identity == "procedural:mini@0/g2"


def test_bits_do_not_depend_on_the_number_of_threads():
    code = (
        "import hashlib, sys; from reference.checkpoint.procedural import ProceduralStore; import torch\n"
        "s = ProceduralStore('mini'); h = hashlib.sha256()\n"
        "[h.update(s.get(n).contiguous().view(torch.uint8).numpy().tobytes()) for n in sys.argv[1:]]\n"
        "print(h.hexdigest()[:16])"
    )
    run = subprocess.run(
        [sys.executable, "-c", code, *NAMES],
        env={**os.environ, "NUMBA_NUM_THREADS": "1"}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert run.stdout.strip() == digest(MINI, NAMES)


@pytest.mark.parametrize("store", [MINI, RAGGED, POOLED], ids=["mini", "ragged", "pooled"])
def test_every_tensor_has_its_shape_and_dtype(store):
    for name, info in store.tensors.items():
        values = store.get(name)
        assert (values.shape, values.dtype) == (info.shape, DTYPE_OF_TAG[info.dtype]), name


@given(st.sampled_from(NAMES), st.sampled_from([MINI, RAGGED, POOLED]), st.data())
def test_a_slice_is_the_slice_of_the_whole(name, store, data):
    rows = store.tensors[name].shape[0]
    start = data.draw(st.integers(0, rows))
    stop = data.draw(st.integers(start, rows))
    whole = store.get(name)[start:stop].contiguous().view(torch.uint8)
    assert torch.equal(store.get(name, start, stop).contiguous().view(torch.uint8), whole)


def test_nothing_is_damaged():
    verify(MINI, MINI.tensors, "mini")
    verify(RAGGED, RAGGED.tensors, "ragged")
    verify(POOLED, POOLED.tensors, "pooled")


def test_tensors_and_seeds_differ():
    stores = (MINI, ProceduralStore("mini", 1), POOLED, ProceduralStore("mini", 1, 2))
    seen = {digest(store, [name]) for store in stores for name in NAMES}
    assert len(seen) == len(stores) * len(NAMES)
    assert MINI.identity != ProceduralStore("mini", 1).identity != RAGGED.identity


@pytest.mark.parametrize("store", [MINI, POOLED], ids=["mini", "pooled"])
def test_neighbouring_blocks_never_share_an_exponent(store):
    for name, info in store.tensors.items():
        if info.dtype == "F8_E8M0":
            scale = store.get(name).view(torch.uint8).int()
            assert scale.diff(dim=0).ne(0).all() and scale.diff(dim=1).ne(0).all(), name


def test_all_codes_appear_but_nan():
    fp8 = MINI.get("layers.2.attn.wq_b.weight").view(torch.uint8).flatten().bincount(minlength=256)
    assert (fp8 == 0).nonzero().flatten().tolist() == [0x7F, 0xFF]
    fp4 = torch.cat([MINI.get(f"layers.2.ffn.experts.{e}.w1.weight").view(torch.uint8).flatten() for e in range(8)])
    assert torch.stack([fp4 & 15, fp4 >> 4]).flatten().bincount(minlength=16).min() > 0


def test_hash_rows_use_all_experts():
    rows = MINI.get("layers.1.ffn.gate.tid2eid")
    counts = rows.flatten().bincount(minlength=8)
    assert counts.min() > 0.8 * counts.float().mean()
    assert all(len(set(row)) == 3 for row in rows.tolist())


WIDTH_SPREAD = 0.1
WIDTH_STEP = (16 - 1 / 16) / 256 / 1.02 / 2  # half a step of 256 more of +2, where the mean square is least


@pytest.mark.parametrize("name", ["embed.weight", "layers.0.attn.wq_b.weight", "layers.3.hc_ffn_fn", "head.weight"])
def test_width_is_the_law_s(name):
    """Within 10 %: row widths are drawn too, and a small scale grid does not average out."""
    parameter = next(p for shard in parameters(MINI.config).values() for p in shard if p.name == name)
    values = dense(MINI, name)
    assert values.std().item() == pytest.approx(laws.law(MINI.config, parameter).std, rel=WIDTH_SPREAD)
    assert abs(values.mean()) < 4 * values.std() / math.sqrt(values.numel())


def test_every_law_is_met_by_the_scales_of_version_2():
    """On average over all weights (the few scales of one are far from their mean), and each base and steps by themselves."""
    ratios = []
    for shard in parameters(POOLED.config).values():
        for p in shard:
            if p.dtype in laws.CODE_STD:
                ratios.append(dense(POOLED, p.name).square().mean().item() / laws.law(POOLED.config, p).std ** 2)
    assert abs(sum(ratios) / len(ratios) - 1) < WIDTH_SPREAD
    for tag, rows in (("F8_E4M3", np.zeros(16)), ("I8", np.repeat([0, -2, 2], [12, 3, 1]))):
        for std in np.geomspace(1e-4, 10, 50):
            exponent, wide = noise.fitted(std, tag == "I8")
            steps = np.repeat([0, -2, 2], [128, 128 - wide, wide])
            power = np.mean(4.0 ** (exponent + steps)) * np.mean(4.0**rows) * (1 + 4) / 2
            assert power * laws.CODE_STD[tag] ** 2 == pytest.approx(std**2, rel=WIDTH_STEP)


def test_weights_have_outlier_rows_and_columns():
    """As rows of 4x among 16, and one column of 4x in 128, measured on codes, where scales do not interfere."""
    codes = MINI.get("layers.2.attn.wq_b.weight").float()
    rows, columns = codes.square().mean(1).sqrt(), codes.square().mean(0).sqrt()
    assert rows.max() > 3 * rows.median()
    assert columns.max() > 1.5 * columns.median()
    assert (columns > 1.5 * columns.median()).sum() == 1


def test_nibbles_and_neighbours_are_uncorrelated():
    """Correlations stay within 5 standard errors of zero."""
    name = "layers.2.ffn.shared_experts.w1"
    values = MINI.get(f"{name}.weight").float()
    low, high = values[:, 0::2].flatten(), values[:, 1::2].flatten()
    above, below = values[:-1].flatten(), values[1:].flatten()
    for x, y in ((low, high), (above, below)):
        assert abs(torch.corrcoef(torch.stack([x, y]))[0, 1]) < 5 / math.sqrt(len(x))


def test_norms_and_sinks_are_far_from_neutral():
    norm = MINI.get("norm.weight").float()
    assert norm.min() > 0 and norm.max() > 2 and norm.min() < 0.3
    sink = MINI.get("layers.2.attn.attn_sink")
    assert sink.max() - sink.min() > 2
    base = MINI.get("layers.2.hc_attn_base")
    assert base[8:].view(4, 4).diagonal().min() > base[8:].view(4, 4)[~torch.eye(4, dtype=torch.bool)].max()


def test_bytes_are_counted():
    store = ProceduralStore("mini")
    store.get("embed.weight", 3, 5)
    assert store.bytes_read == 2 * 256 * 2


@pytest.mark.parametrize(
    ("model", "part"),
    [("procedural:v5", "v4-pro"), ("procedural:mini@x", "seed"), ("procedural:mini@", "seed"), ("procedural:mini@-1", "seed"),
     ("procedural:mini@1/g", "generator"), ("procedural:mini/gx", "generator"), ("procedural:mini/g3", "generator 3")],
)
def test_unknown_models_are_refused(model, part):
    with pytest.raises(BadInput, match=part):
        open_store(model)


def test_unknown_names_and_rows_are_refused():
    with pytest.raises(BadInput, match=r"layers\.9\.nothing"):
        MINI.get("layers.9.nothing")
    with pytest.raises(BadInput, match="512 rows"):
        MINI.get("embed.weight", 500, 513)


def test_seed_is_part_of_the_name():
    assert open_store("procedural:mini@7").identity == "procedural:mini@7/g1"


def test_all_that_is_drawn_once_can_be_drawn_at_once(monkeypatch):
    """The same weights, and nothing is left to draw but rows of the embedding."""
    for name, nbytes in (("POOL_BYTES", 1 << 24), ("SEGMENT", 1 << 21), ("SCALE_BYTES", 1 << 22)):
        monkeypatch.setattr(noise, name, nbytes)
    caches = (noise.pool, noise.scale_pool)
    names = [n for n in ProceduralStore("mini", 3, 2).tensors if n.startswith(("layers.2.", "norm", "head"))]
    weights = []
    for at_once in (False, True):
        for cache in caches:
            cache.cache_clear()
        store = ProceduralStore("mini", 3, 2)
        if at_once:
            store.draw()
            for where in (noise.NoisePool, noise.ScalePool, ProceduralStore):
                monkeypatch.setattr(where, "_draw", None)
            assert store.bytes_read == 0
        weights.append([store.get(name).clone().view(torch.uint8) for name in names])
    for cache in caches:
        cache.cache_clear()
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True)) and len(names) > 20
