"""Ops on the residual streams and at the model's ends: embedding, mixes, norms, head. Candidate and twin side by side.

Source: docs/judge.md §7.
"""

from __future__ import annotations

import torch
from torch import Tensor

from optimized.kernels.embed import embed
from optimized.kernels.gemm_bf16 import gemm_bf16
from optimized.kernels.hyper_connection import Tiles as MixTiles
from optimized.kernels.hyper_connection import hc_head, hc_post, hc_pre
from optimized.kernels.hyper_connection import tiles_for_width as mix_tiles
from optimized.kernels.mtp_streams import mtp_streams
from optimized.kernels.norm import INTERPRETER as NORM_TILES
from optimized.kernels.norm import rms_norm, rms_norm_quantize
from reference import formats
from reference.hyper_connection import HyperConnection, HyperHead
from reference.norm import rms_norm as reference_norm

from .budget import mixes, spans
from .budget.bounded import Bounded, exact
from .candidates import ACTIVATION_BLOCK, tall, there
from .judge import Codes, Dense, Places, Stored
from .step import Step
from .storage import exactly_bf16, in_bf16
from .twins import Expectation, Expectations, StoredOutputs, product, token_places

NORM_INPUT = {"attn_norm": "hc_attn.u", "ffn_norm": "hc_ffn.u", "attn.q_norm": "attn.wq_a", "enorm": "embed"}


def bf16(x: Tensor) -> Tensor:
    """A payload as kernels take it: its values are bfloat16 already."""
    return x.to(torch.bfloat16)


def rows_embedded(step: Step, op: str) -> dict[str, Stored]:
    """Rows of the tokens' own part of the table, into all streams, or into one for MTP."""
    ids, place = step.batch.ids.unique(return_inverse=True)
    count = 1 if step.mtp else step.config.hc_mult
    return {op: embed(*there(exactly_bf16(step.embed(ids)), place), count).cpu()}


def rows_expected(step: Step, op: str, stored: StoredOutputs) -> Expectations:
    count = 1 if step.mtp else step.config.hc_mult
    x = step.embed(step.batch.ids)[:, None].expand(-1, count, -1)
    return {op: Expectation(Dense(exact(x), "bf16", "tsd"), step.places)}


def added(step: Step, op: str) -> dict[str, Stored]:
    """The two projections of a drafter's input -> its streams."""
    return {op: mtp_streams(*there(bf16(step.capture["e_proj"]), bf16(step.capture["h_proj"]))).cpu()}


def added_expected(step: Step, op: str, stored: StoredOutputs) -> Expectations:
    """One float32 addition."""
    y = step.capture["e_proj"][:, None] + step.capture["h_proj"]
    return {op: Expectation(Dense(Bounded(y, step.how.u * y.abs()), "bf16", "tsd"), step.places)}


def _norm(step: Step, op: str) -> tuple[Tensor, Tensor, float]:
    """Input [t, d], weight and eps of a norm."""
    if op == "norm":
        assert step.head is not None
        return _collapsed(step), step.head[1], step.config.rms_norm_eps
    x = step.streams.flatten(0, 1) if op == "hnorm" else step.capture[NORM_INPUT[op]]
    owner: object = step.mtp if op in ("enorm", "hnorm") else step.block
    for part in op.split("."):
        owner = getattr(owner, part)
    assert isinstance(owner, Tensor)
    return x, owner, step.config.rms_norm_eps


def normed(step: Step, op: str) -> dict[str, Stored]:
    """The norm, and where a linear follows the codes that the same kernel makes."""
    x, weight, eps = _norm(step, op)
    tiles = tall(NORM_TILES, len(x), x.shape[1])
    if op == "norm":
        return {op: rms_norm(*there(bf16(x), weight.float()), eps, tiles=tiles).cpu()}
    y, codes, scales = rms_norm_quantize(*there(bf16(x), weight.float()), eps, tiles=tiles)
    return {op: y.cpu(), f"{op}.codes": (codes.cpu(), scales.cpu())}


def norm_expected(step: Step, op: str, stored: StoredOutputs) -> Expectations:
    """The norm within its bound; codes to the bit, from the candidate's own rounded norm."""
    x, weight, eps = _norm(step, op)
    places = token_places(step, len(x))
    out = {op: Expectation(Dense(spans.rms_norm(exact(x), weight, eps, step.how), "bf16", "td"), places)}
    if op != "norm":
        y = stored[op]
        assert isinstance(y, Tensor)
        out[f"{op}.codes"] = Expectation(Codes(exact(y), ACTIVATION_BLOCK, formats.E4M3_AMAX_FLOOR, "td"), places)
    return out


def _tiles(x: Tensor) -> MixTiles | None:
    """Tiles for streams x [t, s, d]."""
    return tall(mix_tiles(x.shape[2]), len(x), x.shape[2], "ROWS", "MIX_ROWS")


def _mix(step: Step, op: str) -> tuple[str, HyperConnection, Tensor]:
    """`hc_attn` or `hc_ffn`, its weights, and the streams before it."""
    part = op.split(".")[0]
    mix: HyperConnection = getattr(step.block, part)
    return part, mix, step.block_streams(part)


def mixed(step: Step, op: str) -> dict[str, Stored]:
    """Streams -> a sub-layer's input, and how to spread its output."""
    part, mix, x = _mix(step, op)
    weights = there(bf16(x), mix.fn.float(), mix.base.float(), mix.scale.float())
    u, post, comb = hc_pre(*weights, mix.iterations, mix.hc_eps, mix.rms_eps, tiles=_tiles(x))
    return {f"{part}.u": u.cpu(), f"{part}.post": post.cpu(), f"{part}.comb": comb.cpu()}


def mix_expected(step: Step, op: str, stored: StoredOutputs) -> Expectations:
    """Projection, sigmoids, Sinkhorn and the weighted sum as one span: nothing in between is stored."""
    part, mix, x = _mix(step, op)
    how, (t, s, _) = step.how, x.shape
    m = mixes.stream_mixes(x, mix.fn, mix.rms_eps, how)
    first, second, third = (slice(0, s), slice(s, 2 * s), slice(2 * s, None))
    z = [mixes.affine(m[:, cut], mix.scale[i], mix.base[cut], how) for i, cut in enumerate((first, second, third))]
    gate = mixes.sigmoid(z[1], how)
    logits = Bounded(z[2].value.view(t, s, s), z[2].bound.view(t, s, s))
    expected = {
        "u": Dense(_collapse(x, z[0], mix.hc_eps, step), "bf16", "td"),
        "post": Dense(Bounded(2 * gate.value, 2 * gate.bound), "f32", "ts", fair=False),  # exp may err to one side
        "comb": Dense(mixes.sinkhorn(logits, mix.iterations, mix.hc_eps, how), "f32", "tss", fair=False),
    }
    return {f"{part}.{name}": Expectation(dense, step.places) for name, dense in expected.items()}


def _collapse(x: Tensor, z: Bounded, eps: float, step: Step) -> Bounded:
    """Streams under the weights sigmoid(z) + eps."""
    weight = mixes.sigmoid(z, step.how)
    bound = weight.bound + step.how.u * (weight.largest + eps)
    return mixes.weighted_streams(x, Bounded(weight.value + eps, bound), step.how)


def _spread(step: Step, op: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Sub-layer output, streams before it, post and comb as float32 holds them."""
    part = op.split(".")[0]
    z = step.capture["attn.wo_b" if part == "hc_attn" else "ffn.out"]
    return z, step.block_streams(part), step.capture[f"{part}.post"].float(), step.capture[f"{part}.comb"].float()


def spread(step: Step, op: str) -> dict[str, Stored]:
    """Sub-layer output and the streams before it -> streams after it."""
    z, x, post, comb = _spread(step, op)
    return {op: hc_post(*there(bf16(z), bf16(x), post, comb.contiguous()), tiles=_tiles(x)).cpu()}


def spread_expected(step: Step, op: str, stored: StoredOutputs) -> Expectations:
    z, x, post, comb = _spread(step, op)
    y = mixes.spread_streams(z, x, post.double(), comb.double(), step.how)
    return {op: Expectation(Dense(y, "bf16", "tsd"), step.places)}


def _head_mix(step: Step) -> tuple[HyperHead, Tensor]:
    assert step.head is not None
    return step.head[0], step.capture["hc_ffn.streams"]


def _collapsed(step: Step) -> Tensor:
    """The payload of the last norm: the candidate's last mix where it made one, else the twin's."""
    own = step.stored.get("hc_head")
    if isinstance(own, Tensor):
        return own.double()
    mix, x = _head_mix(step)
    return mix(x, step.sites)


def collapsed(step: Step, op: str) -> dict[str, Stored]:
    """Streams -> one, the last mix."""
    mix, x = _head_mix(step)
    weights = there(bf16(x), mix.fn.float(), mix.base.float(), mix.scale.float())
    return {op: hc_head(*weights, mix.hc_eps, mix.rms_eps, tiles=_tiles(x)).cpu()}


def collapse_expected(step: Step, op: str, stored: StoredOutputs) -> Expectations:
    mix, x = _head_mix(step)
    m = mixes.stream_mixes(x, mix.fn, mix.rms_eps, step.how)
    z = mixes.affine(m, mix.scale, mix.base, step.how)
    return {op: Expectation(Dense(_collapse(x, z, mix.hc_eps, step), "bf16", "td"), step.places)}


def _head_input(step: Step) -> tuple[Tensor, Tensor]:
    """Last normed token of each sequence [b, d], as its payload, and the numbers of those tokens."""
    assert step.head is not None
    last = torch.tensor(step.batch.bounds[1:]) - 1
    own = step.stored.get("norm")
    if isinstance(own, Tensor):
        return own[last].double(), last
    x = step.sites("norm", reference_norm(_collapsed(step)[last], step.head[1], step.config.rms_norm_eps))
    return x, last


def logits(step: Step, op: str) -> dict[str, Stored]:
    """The output matrix, for the token that is asked for one: the last of each sequence."""
    assert step.head is not None
    return {op: gemm_bf16(*there(bf16(_head_input(step)[0]), in_bf16(step.head[2]))).cpu()}


def logits_expected(step: Step, op: str, stored: StoredOutputs) -> Expectations:
    assert step.head is not None
    x, last = _head_input(step)
    y = product(exact(x), step.head[2], step)
    places = Places({name: values[last] for name, values in step.places.labels.items()})
    return {op: Expectation(Dense(y, "f32", "td"), places)}

