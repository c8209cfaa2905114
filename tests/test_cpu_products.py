"""Products with packed weights: every code and every scale exactly, any shape to within its bound, bits of a row alone."""

from __future__ import annotations

import os
import subprocess
import sys

import numba
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import TINY, MemoryStore, tiny_store

from optimized.cpu import fused, vnni
from optimized.cpu.fused import SCALES, Products, best
from reference.checkpoint.dequantize import dequantize
from reference.checkpoint.procedural import ProceduralStore
from reference.errors import BadInput
from reference.model import Model
from reference.state import SequenceState

HERE = [kernels for kernels in fused.KERNELS[fused.KERNELS.index(best()) :] if kernels != "torch"]
KINDS = ("fp8", "fp4", "bf16")
RELATIVE_L2 = 1e-6  # of float32 sums at the widths of the releases


def random_bytes(seed: int, *shape: int) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def normal(seed: int, *shape: int, dtype=torch.float32) -> torch.Tensor:
    return torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def misaligned(values: torch.Tensor, offset: int) -> torch.Tensor:
    """The same bytes `offset` elements behind an aligned address."""
    held = torch.empty(values.numel() + offset, dtype=values.dtype)
    held[offset:] = values.flatten()
    return held[offset:].view(values.shape)


def stored(kind: str, rows: int, width: int, seed: int, offset: int = 0, scales=(100, 130)):
    """A weight of random codes and its scale bytes, each in [scales)."""
    if kind == "bf16":
        return misaligned(normal(seed, rows, width).bfloat16(), offset), None
    shape = (rows, -(-width // 32)) if kind == "fp4" else (-(-rows // 128), -(-width // 128))
    scale = scales[0] + random_bytes(seed + 1, *shape) % (scales[1] - scales[0])
    codes = random_bytes(seed, rows, width // 2 if kind == "fp4" else width)
    if kind == "fp8":
        codes[(codes & 0x7F) == 0x7F] = 0x21
    codes = misaligned(codes, offset).view(torch.int8 if kind == "fp4" else torch.float8_e4m3fn)
    return codes, misaligned(scale, offset).view(torch.float8_e8m0fnu)


def every_code_and_scale(kind: str):
    """[rows, 128] with every code in every scale, one scale to a row."""
    scales = torch.arange(SCALES[0], SCALES[1] + 1, dtype=torch.uint8)
    if kind == "fp4":
        rows = torch.arange(256, dtype=torch.uint8).view(4, 64).repeat(len(scales), 1)
        return rows.view(torch.int8), scales.repeat_interleave(4)[:, None].repeat(1, 4).view(torch.float8_e8m0fnu)
    codes = torch.cat([torch.arange(0x7F), torch.arange(0x80, 0xFF), torch.zeros(2)]).to(torch.uint8).view(2, 128)
    rows = codes.repeat(64 * len(scales), 1).view(torch.float8_e4m3fn)
    return rows, scales[:, None].view(torch.float8_e8m0fnu)


def columns_seen(products, weight, scale, tokens: int, dtype) -> torch.Tensor:
    """The weight as read through unit vectors, `tokens` at a time, [rows, 128]."""
    unit = torch.eye(128, dtype=dtype)
    return torch.cat([products([(weight, scale, x, 0, len(weight))])[0] for x in unit.split(tokens)]).T


def misread(products):
    """The products, but for one code: 0x35 is read as 0x34."""

    def run(jobs):
        def change(w):
            codes = w.view(torch.uint8)
            return torch.where(codes == 0x35, codes - 1, codes).view(w.dtype)

        return products([(change(w), *rest) for w, *rest in jobs])

    return run


@pytest.mark.parametrize("kernels", HERE)
@pytest.mark.parametrize("kind", ["fp8", "fp4"])
@pytest.mark.parametrize("tokens", [1, 3, 128])
def test_every_code_in_every_scale_is_read_exactly(kernels, kind, tokens):
    weight, scale = every_code_and_scale(kind)
    products = Products(kernels)
    want = dequantize(weight, scale)
    assert torch.equal(columns_seen(products, weight, scale, tokens, torch.float32), want)
    assert not torch.equal(columns_seen(misread(products), weight, scale, tokens, torch.float32), want)


def bound(x, weight, scale):
    """What float32 sums of as many terms as there are inputs can be off by, whatever their order."""
    terms = dequantize(weight, scale, torch.float64).abs()
    return x.shape[1] * torch.finfo(x.dtype).eps * (x.double().abs() @ terms.T)


@pytest.mark.parametrize("kernels", HERE)
@given(st.sampled_from(KINDS), st.integers(1, 140), st.sampled_from([32, 96, 128, 160, 256, 1408]), st.integers(1, 40),
       st.integers(0, 7), st.data())  # fmt: skip
@settings(max_examples=40)
def test_any_shape_is_right_to_within_its_bound(kernels, kind, rows, width, tokens, offset, data):
    start = data.draw(st.integers(0, rows))
    stop = data.draw(st.integers(start, rows))
    weight, scale = stored(kind, rows, width, seed=rows + width, offset=offset)
    x = normal(tokens, tokens, 2 * width)[:, :width]  # a strided view
    (y,) = Products(kernels)([(weight, scale, x, start, stop)])
    want = x.double() @ dequantize(weight, scale, torch.float64)[start:stop].T
    assert ((y.double() - want).abs() <= bound(x, weight, scale)[:, start:stop]).all()


@pytest.mark.parametrize("kernels", HERE)
@pytest.mark.parametrize(("kind", "width"), [("fp8", 16384), ("fp4", 7168), ("bf16", 7168)])
@pytest.mark.parametrize("tokens", [1, 16])
def test_error_at_real_widths(kernels, kind, width, tokens):
    weight, scale = stored(kind, 256, width, seed=1)
    x = normal(2, tokens, width)
    want = x.double() @ dequantize(weight, scale, torch.float64).T
    (y,) = Products(kernels)([(weight, scale, x, 0, 256)])
    assert (y.double() - want).norm() <= RELATIVE_L2 * want.norm()


def hard_inputs() -> dict[str, torch.Tensor]:
    """Tokens [1, 512] that integers of one unit of 32 columns cannot hold, or only just."""
    plain = normal(11, 1, 512)
    huge, scattered, edge = plain.clone(), plain.clone(), plain.clone()
    huge[:, ::32] *= 1e4
    scattered *= 2.0 ** (torch.arange(512) // 32 * 4 - 30)
    edge[:, ::32] = 4 - 2**-21  # the largest magnitude: one order of integers more would leave the three bytes
    gaps = plain * (torch.arange(512) // 64 % 2)
    all_of_it = {"subnormal": plain * 2.0**-132, "large": plain * 2.0**100}
    return {"huge": huge, "units apart": scattered, "edge": edge, "zero units": gaps, **all_of_it}


def without_outliers(seed: int):
    """FP4 weights [256, 512] of which half the rows do not see every 32nd column: an error beside it shows there."""
    weight, scale = stored("fp4", 256, 512, seed=seed, scales=(127, 140))
    codes = weight.view(torch.uint8)
    codes[::2, ::16] &= 0xF0
    return weight, scale


def hard_errors(products) -> dict[str, float]:
    """Relative L2 error of each hard token over the rows that see its large inputs, and over the others; the larger one."""
    weight, scale = without_outliers(12)
    found = {}
    for name, x in hard_inputs().items():
        want = (x.double() @ dequantize(weight, scale, torch.float64).T)[0]
        (y,) = products([(weight, scale, x, 0, 256)])
        found[name] = max(float((y[0, i::2].double() - want[i::2]).norm() / want[i::2].norm()) for i in (0, 1))
    return found


@pytest.mark.parametrize("kernels", HERE)
def test_inputs_of_any_range_are_multiplied_as_exactly(kernels, monkeypatch):
    """And what integers leave out is what makes it so: without it, small inputs beside a huge one are lost."""
    found = hard_errors(Products(kernels))
    if kernels == "vector":  # its E2M1 values are 2^14 times too small until the end of a block
        assert found.pop("subnormal") > RELATIVE_L2
    assert max(found.values()) <= RELATIVE_L2, found
    if kernels == "vnni":
        prepare = vnni.prepare_few
        monkeypatch.setattr(vnni, "prepare_few", lambda *into: [prepare(*into), into[-1].fill(False)])
        lost = hard_errors(Products(kernels))
        assert lost["huge"] > RELATIVE_L2 and all(e <= RELATIVE_L2 for name, e in lost.items() if name != "huge")


@pytest.mark.parametrize("kernels", HERE)
def test_infinity_and_nan_show_and_touch_no_other_token(kernels):
    weight, scale = stored("fp4", 40, 256, seed=1)
    x = normal(3, 4, 256)
    (want,) = Products(kernels)([(weight, scale, x, 0, 40)])
    x[1, 7], x[2, 9] = torch.inf, torch.nan
    (y,) = Products(kernels)([(weight, scale, x, 0, 40)])
    assert not y[1].isfinite().any() and y[2].isnan().all() and torch.equal(y[[0, 3]], want[[0, 3]])


@pytest.mark.parametrize("kind", KINDS)
def test_float64_sums(kind):
    weight, scale = stored(kind, 70, 512, seed=3)
    for tokens in (1, 2, 9):
        x = normal(4, tokens, 512, dtype=torch.float64)
        want = x @ dequantize(weight, scale, torch.float64).T
        (y,) = Products()([(weight, scale, x, 0, 70)])
        assert y.dtype == torch.float64
        assert ((y - want).abs() <= 2 * bound(x, weight, scale)).all()  # both sides sum


@pytest.mark.parametrize("kernels", HERE)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("width", [160, 1408])
def test_bits_of_a_row_depend_on_nothing_beside_it(kernels, kind, width):
    """Not on the tokens, rows, jobs or threads of the call."""
    weight, scale = stored(kind, 300, width, seed=5)
    other, other_scale = stored(kind, 64, width, seed=6)
    x, products = normal(7, 70, width), Products(kernels)
    x[[3, 11, 12], 40] = 2.0**30  # tokens of which integers leave out much
    (alone,) = products([(weight, scale, x[11:12], 131, 132)])
    for tokens in (slice(9, 12), slice(8, 14), slice(0, 70)):
        jobs = [(other, other_scale, x[:5], 3, 60), (weight, scale, x[tokens], 7, 290), (weight, scale, x, 130, 135)]
        y = products(jobs)
        assert torch.equal(y[1][11 - tokens.start, 131 - 7 : 132 - 7], alone[0]) and torch.equal(y[2][11, 1:2], alone[0])
    allowed = numba.get_num_threads()
    numba.set_num_threads(numba.config.NUMBA_NUM_THREADS)
    try:
        (many,) = products([(weight, scale, x.repeat(20, 1), 131, 300)])
    finally:
        numba.set_num_threads(allowed)
    assert torch.equal(many[11, :1], alone[0])


@pytest.mark.parametrize(("byte", "says"), [(0, "scale byte 0 at element 5"), (241, "scale byte 241"), (255, "scale byte 255")])
def test_scales_out_of_range_are_refused(byte, says):
    weight, scale = stored("fp8", 256, 512, seed=8)
    scale.view(torch.uint8)[1, 1] = byte
    with pytest.raises(BadInput, match=f"some.name: {says}.*outside 1..240"):
        Products().admit("some.name", weight, scale)


def test_codes_of_no_number_are_refused_once_a_name():
    weight, scale = stored("fp8", 130, 256, seed=9)
    products = Products()
    assert products.admit("sound", weight, scale)
    for code in (0x7F, 0xFF):
        weight.view(torch.uint8)[129, 4] = code
        with pytest.raises(BadInput, match=rf"bad: E4M3 code of no number at element {129 * 256 + 4}$"):
            products.admit("bad", weight, scale)


def test_what_is_not_taken():
    """F32 weights and scales and other devices are left to the caller; a scale of another shape is damage."""
    weight, scale = stored("fp8", 130, 256, seed=9)
    assert not Products().admit("w", weight.float(), None)
    assert not Products().admit("w", weight, scale.float())
    assert not Products().admit("w", weight, None)
    assert not Products("torch").admit("w", weight, scale)
    with pytest.raises(BadInput, match=r"w: scale \(1, 2\) does not fit"):
        Products().admit("w", weight, scale[:1])


WARM = """
import sys, torch
from numba.core.dispatcher import Dispatcher
from test_cpu_products import KINDS, normal, stored
from optimized.cpu import plain, vector, vnni
from optimized.cpu.fused import Products

loops = [loop for file in (plain, vector, vnni) for loop in vars(file).values() if isinstance(loop, Dispatcher)]
products = Products()
if sys.argv[1] == "warm":
    products.warm(torch.float32)
known = [list(loop.signatures) for loop in loops]
for kind in KINDS:
    weight, scale = stored(kind, 300, 256, seed=5)
    for tokens in (1, 3, 1100):
        assert products.admit("w", weight, scale)
        products([(weight, scale, normal(7, tokens, 256), 7, 290)])
print([list(loop.signatures) for loop in loops] == known, products.multiply_adds == 3 * 1104 * 256 * 283)
"""


@pytest.mark.parametrize(("first", "says"), [("warm", ["True", "True"]), ("cold", ["False", "True"])])
def test_a_warm_step_compiles_nothing(first, says):
    """And warming counts nothing. In a process of its own: what was compiled in this one stays."""
    child = subprocess.run([sys.executable, "-c", WARM, first], capture_output=True, text=True, check=True,
                           env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})  # fmt: skip
    assert child.stdout.split() == says


@pytest.mark.parametrize("bad", [(-1, 3), (3, 2), (0, 131)])
def test_rows_outside_are_refused(bad):
    weight, scale = stored("fp8", 130, 256, seed=9)
    with pytest.raises(ValueError, match="do not fit"):
        Products()([(weight, scale, normal(0, 1, 256), *bad)])
    with pytest.raises(ValueError, match="do not fit"):
        Products()([(weight, scale, normal(0, 1, 128), 0, 3)])


def test_the_best_kernels_are_those_of_the_cpu(monkeypatch):
    from llvmlite import binding

    half = {"avx512f", "avx512bw", "avx2", "f16c", "fma"}
    wide = {*half, "avx512vbmi"}
    for has, want in (({*wide, "avx512vnni"}, "vnni"), (wide, "avx512"), (half, "vector"), ({"sse2"}, "plain")):
        monkeypatch.setattr(binding, "get_host_cpu_features", lambda has=has: dict.fromkeys(has, True))
        assert best.__wrapped__() == want
    monkeypatch.setattr(fused, "find_spec", lambda name: None)
    assert best.__wrapped__() == "torch"


def logits(store, products, dtype, memory):
    model = Model(store, dtype, memory=memory, products=products)
    ids = torch.arange(3, 43)
    return model, model.logits(model.forward([ids], [SequenceState()]))


@pytest.mark.parametrize("store", [tiny_store(), ProceduralStore("mini")], ids=["tiny", "mini"])
@pytest.mark.parametrize("memory", [0, 1 << 40])
def test_a_model_has_the_same_logits_with_them(store, memory):
    _, want = logits(store, None, torch.float64, memory)
    model, got = logits(store, Products(), torch.float64, memory)
    assert (got - want).abs().max() <= 2**16 * torch.finfo(torch.float64).eps * want.abs().max()  # as between tile sizes
    assert model.loader.block(0).attn.wq_a.products is model.loader.products


def test_damage_is_refused_when_a_model_meets_it():
    store = tiny_store()
    damaged = dict(store.values)
    damaged["layers.1.attn.wq_a.weight"] = damaged["layers.1.attn.wq_a.weight"].clone()
    damaged["layers.1.attn.wq_a.weight"].view(torch.uint8)[3, 7] = 0x7F
    with pytest.raises(BadInput, match=rf"layers\.1\.attn\.wq_a: E4M3 code of no number at element {3 * 160 + 7}"):
        logits(MemoryStore(TINY, damaged), Products(), torch.float32, 0)
