"""Sites and profiles: every site of every profile is a place in the model, and acts there."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache

import pytest
import torch
from strategies import TINY, MemoryStore, adversarial, normal, tiny_store, tokens
from torch import Tensor

from reference import formats as F
from reference.errors import BadInput
from reference.model import Model
from reference.rounding import Profile, Rounding, Sites, profile, profile_names
from reference.state import SequenceState

N = 129


@cache
def visited() -> dict[str, Tensor]:
    """Site name -> its first value in a model and its MTP block: exact, float64, the embedding finer than bfloat16."""
    values: dict[str, Tensor] = {}
    fine = tiny_store().values["embed.weight"].float() * (1 + 2.0**-12)
    store = MemoryStore(TINY, {**tiny_store().values, "embed.weight": fine})

    def tap(name: str, x: Tensor) -> None:
        values.setdefault(site_of(name), x.clone())

    model = Model(store, torch.float64, memory=1 << 40, tap=tap)
    streams = model.forward([tokens(N, 0)], [SequenceState()])
    model.logits(streams)
    model.mtp_logits(streams, [tokens(N, 1)], [SequenceState()])
    return values


def site_of(tap: str) -> str:
    """`layers.3.ffn.experts.5.w1` -> `ffn.experts.w1`; the rotary sites are named once for all modules."""
    parts = tap.split(".")
    if parts[0] == "layers":
        parts = parts[2:]
    elif parts[0] == "mtp":
        parts = parts[3:] if parts[2] == "block" else parts[2:]
    parts = [part for part in parts if not part.isdecimal()]
    return ".".join(parts[parts.index("rope") :] if "rope" in parts else parts)


@pytest.mark.parametrize("name", profile_names())
def test_every_site_of_a_profile_is_in_the_model(name: str) -> None:
    known = set(visited()) | {"rope.angle"}  # the angle is a working type, not a value that is shown
    assert set(profile(name).sites) <= known


def test_a_misspelt_site_is_found() -> None:
    misspelt = Profile("typo", sites={"attn.kvnorm": Rounding("bf16")})
    assert not set(misspelt.sites) <= set(visited())


@pytest.mark.parametrize("name", [n for n in profile_names() if n != "exact"])
def test_every_site_of_a_profile_acts(name: str) -> None:
    """Alone, on the values the model really has there: some lie between the values of the format."""
    inert = []
    for site, rounding in profile(name).sites.items():
        value = visited().get(site)
        if value is not None:
            keep = TINY.qk_rope_head_dim if site in ("attn.kv", "attn.compressor.row") else 0
            rounded = Sites(Profile("one", profile(name).carrier, {site: rounding}))(site, value, spare=keep)
            if torch.equal(rounded, value):
                inert.append(site)
    assert not inert


def test_angles_are_float32_products_far_out() -> None:
    """The site reproduces fl32(p) * fl32(f) instead of improving it, also in a float64 run."""
    from reference.rope import Rope

    rope, far = Rope.of_layer(TINY, 0), torch.tensor([0, 65_537, 999_999])
    cos, sin = rope.table(far, torch.float64, Sites(profile("official")).at("attn"))
    angle = far.float()[:, None] * rope.frequencies(torch.float32)
    assert torch.equal(cos, angle.cos().double())
    assert torch.equal(sin, angle.sin().double())
    exact = rope.table(far, torch.float64, Sites())[0]
    assert float((exact - cos).abs().amax()) > float(torch.finfo(torch.float32).eps) * 1000


def test_a_site_is_the_identity_unless_named() -> None:
    x = normal(0, 3, 8)
    assert Sites()("attn.kv", x) is x
    assert Sites(profile("qat"))("attn.kv_norm", x) is x
    assert Sites(profile("qat")).block("layers.7").at("attn").has("kv")
    assert not Sites(profile("qat")).has("kv")


def test_taps_see_rounded_values_under_full_names() -> None:
    seen: list[tuple[str, Tensor]] = []
    sites = Sites(profile("official"), lambda name, x: seen.append((name, x))).block("layers.7").at("ffn").at("experts", 5)
    x = normal(0, 2, 64)
    out = sites("w1", x)
    assert seen[0][0] == "layers.7.ffn.experts.5.w1"
    assert seen[0][1] is out
    assert torch.equal(out, F.round_bf16(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_quantisers_take_float32_whatever_surrounds_them(dtype: torch.dtype) -> None:
    """A float64 value just above a float32 tie is a tie to the quantiser."""
    x = torch.zeros(1, 64, dtype=torch.float64)
    x[0, 0], x[0, 1] = 448, 1.0625 + 2.0**-40  # 1.0625 lies between the codes 1 and 1.125: to even, down
    out = Rounding("e4m3", 64, 1e-4)(x.to(dtype), "f32")
    assert out.dtype == dtype
    assert out[0, 1] == 1


def test_carrier_rounds_before_the_quantiser() -> None:
    x = torch.zeros(1, 64)
    x[0, 0], x[0, 1] = 448, 1.0625 + 2.0**-10  # above the tie in float32, on it in bfloat16
    quantise = Rounding("e4m3", 64, 1e-4)
    assert quantise(x, "f32")[0, 1] == 1.125
    assert quantise(x, "bf16")[0, 1] == 1


@pytest.mark.parametrize("kept", ["", "bf16"])
def test_spared_channels(kept: str) -> None:
    x = adversarial(1, 2, 96)
    out = Rounding("e4m3", 64, 1e-4, kept)(x, "f32", spare=32)
    assert torch.equal(out[:, -32:], F.round_bf16(x[:, -32:]) if kept else x[:, -32:])
    assert torch.equal(out[:, :64], Rounding("e4m3", 64, 1e-4)(x[:, :64], "f32"))


def test_without() -> None:
    fewer = profile("official").without("attn.kv", "norm")
    assert set(profile("official").sites) - set(fewer.sites) == {"attn.kv", "norm"}
    with pytest.raises(KeyError, match=r"no site 'attn\.vk'"):
        fewer.without("attn.vk")


@pytest.mark.parametrize("name", profile_names())
def test_json_round_trip(name: str) -> None:
    text = json.dumps(profile(name).to_json())
    assert Profile.from_json(json.loads(text)) == profile(name)


def damage(change: Callable[[dict], None]) -> dict:
    table = json.loads(json.dumps(profile("official").to_json()))
    change(table)
    return table


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t.pop("sites"),
        lambda t: t.pop("carrier"),
        lambda t: t.update(carrier="fp16"),
        lambda t: t["sites"].update({"attn.kv": "e5m2_64"}),
        lambda t: t["formats"]["bf16"].update(format="fp16"),
        lambda t: t["formats"]["bf16"].update(colour="red"),
        lambda t: t.update(formats=[]),
        lambda t: t.update(sites="attn.kv"),
    ],
)
def test_damaged_profiles_are_refused(change: Callable[[dict], None]) -> None:
    with pytest.raises(BadInput, match="rounding profile"):
        Profile.from_json(damage(change))


def test_unknown_profile() -> None:
    with pytest.raises(KeyError, match="unknown profile 'fp4'; known: exact, official"):
        profile("fp4")
