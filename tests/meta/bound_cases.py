"""Right kernels in float32, one a bound, each with sums as an accumulator of `how` keeps them, and the bound they must keep.

A case takes a seed and an arithmetic and returns what the kernel stores, float32, and what the judge expects of it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from judge_cases import generator, uneven
from torch import Tensor

from parity.budget import gates, mixes, spans
from parity.budget.bounded import Arithmetic, Bounded, dot, exact

Case = Callable[[int, Arithmetic], tuple[Tensor, Bounded]]
FRACTION = {"hopper-fp8": 13, "tf32": 10}  # bits behind the first that an accumulator or an operand keeps


def cut(t: Tensor, bits: int, nearest: bool) -> Tensor:
    """float32 with `bits` bits of fraction, rounded half up in magnitude or cut off."""
    unit = 1 << (23 - bits)
    return ((t.contiguous().view(torch.int32) + (unit >> 1 if nearest else 0)) & -unit).view(torch.float32)


def operand(t: Tensor, how: Arithmetic) -> Tensor:
    """What enters a matrix product."""
    return cut(t, FRACTION[how.name], nearest=True) if how.operand else t


def summed(terms: Tensor, how: Arithmetic) -> Tensor:
    """terms [..., k], float32, one after the other into an accumulator."""
    total = torch.zeros(terms.shape[:-1])
    for k in range(terms.shape[-1]):
        total = total + terms[..., k]
        total = cut(total, FRACTION[how.name], nearest=False) if how.truncates else total
    return total


def product(a: Tensor, b: Tensor, how: Arithmetic) -> Tensor:
    """a [..., n, k] times b [..., m, k] transposed."""
    return summed(operand(a, how)[..., :, None, :] * operand(b, how)[..., None, :, :], how)


def bf16(*shape: int, g: torch.Generator) -> Tensor:
    return torch.randn(*shape, generator=g).bfloat16().float()


def dot_case(seed: int, how: Arithmetic):
    """Same signs in half the cases, where error piles up."""
    g = generator(seed)
    x, w = bf16(9, 96, g=g), torch.randn(33, 96, generator=g)
    if seed % 2:
        x, w = x.abs(), w.abs()
    return product(x, w, how), dot(exact(x), exact(w), how)


def norm_case(seed: int, how: Arithmetic):
    g = generator(seed)
    x, weight = uneven(g, 40, 192), torch.rand(192, generator=g) + 0.5
    total = torch.zeros(40, 1)
    for k in range(192):
        total = total + x[:, k, None] * x[:, k, None]
    got = weight * (x * torch.rsqrt(total / 192 + 2e-6))
    return got, spans.rms_norm(exact(x), weight.double(), 2e-6, how)


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    still, even, odd = x[:, :64], x[:, 64::2], x[:, 65::2]
    return torch.cat([still, torch.stack([even * cos - odd * sin, odd * cos + even * sin], -1).flatten(-2)], -1)


def rotate_case(seed: int, how: Arithmetic):
    g = generator(seed)
    x, angle = uneven(g, 30, 128), torch.rand(30, 32, generator=g) * 100
    cos, sin = angle.cos(), angle.sin()
    return turned(x, cos, sin), spans.rotate(exact(x), exact(cos), exact(sin), how)


def butterflies(x: Tensor) -> Tensor:
    n, half = x.shape[-1], 1
    while half < n:
        a, b = x.unflatten(-1, (-1, 2, half)).unbind(-2)
        x, half = torch.stack([a + b, a - b], -2).flatten(-3), 2 * half
    return x * n**-0.5


def hadamard_case(seed: int, how: Arithmetic):
    x = uneven(generator(seed), 20, 128)
    return butterflies(x), spans.hadamard(exact(x), how)


def pooled_case(seed: int, how: Arithmetic):
    g = generator(seed)
    values, gate = uneven(g, 20, 8, 96), 3 * torch.randn(20, 8, 96, generator=g)
    gate[:3, :4] = -torch.inf  # a first block with nothing before it
    e = torch.exp(gate - gate.amax(1, keepdim=True))
    return (e * values).sum(1) / e.sum(1), spans.pooled(exact(values), exact(gate), how)


def attention_case(seed: int, how: Arithmetic):
    """Probabilities rounded to bfloat16 in the numerator only; both products in the accumulator. In some cases queries are
    faint and rows do not cancel: then what counts is the sum over rows."""
    g = generator(seed)
    q, rows = bf16(3, 2, 64, g=g), bf16(3, 320, 64, g=g)
    if seed % 2:
        q, rows = q * 2.0**-6, rows.abs()
    absent, sink = torch.rand(3, 320, generator=g) < 0.3, torch.randn(2, generator=g) * 2
    s = (product(q, rows, how) * 64**-0.5).masked_fill(absent[:, None], -torch.inf)
    peak = s.amax(-1, keepdim=True)
    p = torch.exp(s - peak)
    total = p.sum(-1, keepdim=True) + torch.exp(sink[:, None] - peak)
    got = product(p.bfloat16().float(), rows.mT, how) / total
    return got, spans.sink_attention(q.double(), rows.double(), absent, sink.double(), how)


def index_case(seed: int, how: Arithmetic):
    """Weights of either sign; queries that do not cancel in half the cases."""
    g = generator(seed)
    q, weights, keys = bf16(4, 6, 64, g=g), torch.randn(4, 6, generator=g), bf16(30, 64, g=g)
    if seed % 2:
        q, keys, weights = q.abs(), keys.abs(), weights.abs()
    dots = product(q, keys[None], how).relu()  # [t, h, c]
    got = torch.zeros(4, 30)
    for h in range(6):
        got = got + weights[:, h, None] * dots[:, h]
    return got, spans.index_scores(q.double(), weights.double(), keys.double(), how)


def mixed(seed: int, how: Arithmetic) -> tuple[Tensor, Bounded]:
    """Logits of a mix of four streams: the projection over the streams' common rms, scaled and shifted."""
    g = generator(seed)
    x, fn = bf16(8, 4, 32, g=g) * torch.randn(8, 1, 1, generator=g).exp().bfloat16().float(), torch.randn(24, 128, generator=g)
    scale, base = torch.rand(1, generator=g) + 0.5, torch.randn(24, generator=g)
    v = x.flatten(1)
    squares = summed(v * v, how)[:, None]
    got = product(v, fn, how) * torch.rsqrt(squares / 128 + 1e-6) * scale + base
    m = mixes.stream_mixes(x.double(), fn.double(), 1e-6, how)
    return got, mixes.affine(m, scale.double(), base.double(), how)


def gate_case(seed: int, how: Arithmetic):
    got, z = mixed(seed, how)
    return 1 / (1 + torch.exp(-got)), mixes.sigmoid(z, how)


def sinkhorn_case(seed: int, how: Arithmetic):
    """Twenty rounds, after the kernel's own logits; a third of the cases far from uniform."""
    got, z = mixed(seed, how)
    far = 4.0 if seed % 3 == 0 else 1.0
    got, z = (got[:, 8:] * far).unflatten(1, (4, 4)), Bounded(z.value[:, 8:] * far, z.bound[:, 8:] * far)
    e = torch.exp(got - got.amax(2, keepdim=True))
    c = e / e.sum(2, keepdim=True) + 1e-6
    c = c / (c.sum(1, keepdim=True) + 1e-6)
    for _ in range(19):
        c = c / (c.sum(2, keepdim=True) + 1e-6)
        c = c / (c.sum(1, keepdim=True) + 1e-6)
    logits = Bounded(z.value.unflatten(1, (4, 4)), z.bound.unflatten(1, (4, 4)))
    return c.flatten(1), _flat(mixes.sinkhorn(logits, 20, 1e-6, how))


def _flat(x: Bounded) -> Bounded:
    return Bounded(x.value.flatten(1), x.bound.flatten(1))


def collapse_case(seed: int, how: Arithmetic):
    """Streams under the kernel's own weights."""
    weight, expected = gate_case(seed, how)
    x = uneven(generator(seed + 100), 8, 4, 64)
    got = torch.zeros(8, 64)
    for s in range(4):
        got = got + weight[:, s, None] * x[:, s]
    return got, mixes.weighted_streams(x.double(), expected[:, :4], how)


def spread_case(seed: int, how: Arithmetic):
    g = generator(seed)
    z, x = uneven(g, 8, 64), uneven(g, 8, 4, 64)
    post, comb = 2 * torch.rand(8, 4, generator=g), torch.rand(8, 4, 4, generator=g)
    got = post[:, :, None] * z[:, None]
    for j in range(4):
        got = got + comb[:, j, :, None] * x[:, j, None]
    parts = (t.double() for t in (z, x, post, comb))
    return got.flatten(1), _flat(mixes.spread_streams(*parts, how))


def router_case(seed: int, how: Arithmetic):
    """Logits around zero, and far out to both sides; sums that do not cancel."""
    g = generator(seed)
    x, w = bf16(9, 96, g=g), torch.randn(16, 96, generator=g) * (0.02, 0.2, 1.0)[seed % 3]
    if seed % 4 == 3:
        x, w = x.abs(), w.abs()
    z = product(x, w, how)
    score = torch.sqrt(z.clamp_min(0) + torch.log1p(torch.exp(-z.abs())))
    return score, gates.sqrt_softplus(dot(exact(x), exact(w), how), how)


def share_case(seed: int, how: Arithmetic):
    """From the kernel's own scores; in half the cases these are given."""
    score, expected = router_case(seed, how)
    expected = exact(score) if seed % 2 else expected
    total = torch.zeros(9, 1)
    for k in range(6):
        total = total + score[:, k, None]
    return score[:, :6] / total * 2.5, gates.normalised(expected[:, :6], 2.5, how)


def expert_case(seed: int, how: Arithmetic):
    """Both products through bfloat16, clamps that bite, and the routing weight."""
    g = generator(seed)
    x, w1, w3 = bf16(9, 64, g=g), bf16(24, 64, g=g) / 4, bf16(24, 64, g=g) / 4
    weight = torch.rand(9, 1, generator=g)
    gate, up = (product(x, w, how).bfloat16().float() for w in (w1, w3))
    gate, up = gate.clamp(max=1.5), up.clamp(-1.5, 1.5)
    got = gate / (1 + torch.exp(-gate)) * up * weight
    bounds = (gates.to_bf16(dot(exact(x), exact(w), how)) for w in (w1, w3))
    return got, gates.swiglu(*bounds, 1.5, weight.double(), how)


PRODUCTS: list[Case] = [
    dot_case, attention_case, index_case, gate_case, sinkhorn_case, collapse_case, router_case, share_case, expert_case,
]  # fmt: skip
CASES: list[Case] = [*PRODUCTS, norm_case, rotate_case, hadamard_case, pooled_case, spread_case]
