"""Named rounding sites, and profiles that switch them on. The only place where a value loses bits.

A site is one call, `x = sites("attn.kv", x)`: the identity unless the profile names it, so that the modules read as
mathematics. The same call is a tap: a listener sees every value under its checkpoint-like path
(`layers.30.attn.kv`), after rounding. Where a module works in parts (blocks of queries, sequences, experts) a tap fires
once a part; an expert's taps hold the tokens it was given. Source: docs/model.md §11; the profiles are
the tables in `profiles/`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from importlib import resources
from typing import Any

import torch
from torch import Tensor

from . import formats
from .errors import BadInput

Tap = Callable[[str, Tensor], None]

# Every site of the model, by its name within a block (of the model or of MTP where it is outside a block).
SITES = frozenset(
    """
    attn.compressor.gates attn.compressor.norm attn.compressor.pooled attn.compressor.row attn.compressor.values
    attn.indexer.compressor.gates attn.indexer.compressor.hadamard attn.indexer.compressor.norm
    attn.indexer.compressor.pooled attn.indexer.compressor.rotated attn.indexer.compressor.row
    attn.indexer.compressor.values attn.indexer.dot attn.indexer.q attn.indexer.q_hadamard attn.indexer.q_rotated
    attn.indexer.scores attn.indexer.weighted attn.indexer.weights attn.indexer.weights_proj attn.indexer.wq_b
    attn.indexer.wq_b.input attn.kv attn.kv_norm attn.o attn.o_rotated attn.p attn.q attn.q_head_norm.eps
    attn.q_head_norm.mean attn.q_head_norm.out attn.q_head_norm.rsqrt attn.q_head_norm.square attn.q_norm attn.wkv
    attn.wkv.input attn.wo_a attn.wo_b attn.wo_b.input attn.wq_a attn.wq_a.input attn.wq_b attn.wq_b.input attn_norm
    e_proj e_proj.input embed enorm ffn.experts.h ffn.experts.w1 ffn.experts.w1.input ffn.experts.w2
    ffn.experts.w2.input ffn.experts.w3 ffn.experts.w3.input ffn.gate.scores ffn.gate.weights ffn.out
    ffn.shared_experts.h ffn.shared_experts.w1 ffn.shared_experts.w1.input ffn.shared_experts.w2
    ffn.shared_experts.w2.input ffn.shared_experts.w3 ffn.shared_experts.w3.input ffn_norm h_proj h_proj.input
    hc_attn.comb hc_attn.post hc_attn.pre hc_attn.streams hc_attn.u hc_ffn.comb hc_ffn.post hc_ffn.pre hc_ffn.streams
    hc_ffn.u hc_head head.logits hnorm norm rope.angle rope.table streams
    """.split()
)
QUANTISERS = ("e4m3", "e2m1")
PLAIN = ("f32", "bf16")


@dataclass(frozen=True)
class Rounding:
    """What one site does: a plain rounding (`f32`, `bf16`), or quantise and dequantise in blocks (`e4m3`, `e2m1`).

    Blocks run along the last dimension. `scale` and `ties` spell out the rules: a power of two rounded up, ties to
    even; a table with other rules is refused, not misread. `kept` is the format of the channels a quantiser spares (the
    rotated ones of a cache row); empty means as they come.
    """

    format: str
    block: int = 0
    amax_floor: float = 0.0
    kept: str = ""
    scale: str = "ceil"
    ties: str = "even"

    def __post_init__(self) -> None:
        if self.format not in (*PLAIN, *QUANTISERS):
            raise BadInput(f"rounding profile: unknown format {self.format!r}")
        if self.format in QUANTISERS and (self.block < 1 or not self.amax_floor > 0):
            raise BadInput(f"rounding profile: {self.format} needs a block size and an amax floor above 0")
        if self.kept not in ("", *PLAIN):
            raise BadInput(f"rounding profile: spared channels cannot be kept as {self.kept!r}")
        if (self.scale, self.ties) != ("ceil", "even"):
            raise BadInput(f"rounding profile: scale rule {self.scale!r} with ties {self.ties!r} is not defined here")

    def __call__(self, x: Tensor, carrier: str, spare: int = 0) -> Tensor:
        """Round x [..., n], keeping its dtype. `carrier` is the format in which a quantiser receives its input."""
        if self.format in PLAIN:
            return _plain(x, self.format)
        if spare:
            spared = x[..., -spare:]
            spared = _plain(spared, self.kept) if self.kept else spared
            return torch.cat([self(x[..., :-spare], carrier), spared], dim=-1)
        return self._through_codes(_plain(x.float(), carrier)).to(x.dtype)

    def _through_codes(self, x: Tensor) -> Tensor:
        if self.format == "e4m3":
            code, scale = formats.quantize_e4m3(x, self.block, self.amax_floor)
            return formats.dequantize_blocks(formats.e4m3_decode(code), scale, self.block)
        code, scale = formats.quantize_e2m1(x, self.block, self.amax_floor)
        return formats.dequantize_blocks(formats.e2m1_decode(code), scale, self.block)


def _plain(x: Tensor, name: str) -> Tensor:
    return formats.round_bf16(x) if name == "bf16" else x.to(torch.float32).to(x.dtype)


@dataclass(frozen=True)
class Profile:
    """The rounding contract of one build: site -> rounding. `carrier` is `f32` or `bf16`."""

    name: str
    carrier: str = "f32"
    sites: Mapping[str, Rounding] = field(default_factory=dict)

    def without(self, *sites: str) -> Profile:
        """The same profile with some sites switched off."""
        unknown = [site for site in sites if site not in self.sites]
        if unknown:
            raise KeyError(f"profile {self.name} has no site {unknown[0]!r}")
        return Profile(self.name, self.carrier, {s: r for s, r in self.sites.items() if s not in sites})

    def to_json(self) -> dict[str, Any]:
        """The form a trace manifest carries."""
        used = {_key(rounding): asdict(rounding) for rounding in self.sites.values()}
        names = {site: _key(rounding) for site, rounding in self.sites.items()}
        return {"name": self.name, "carrier": self.carrier, "formats": used, "sites": names}

    @classmethod
    def from_json(cls, table: Mapping[str, Any]) -> Profile:
        """Raises BadInput for an unknown format or carrier, or a site without one."""
        try:
            known = {name: Rounding(**fields) for name, fields in table["formats"].items()}
            sites = {site: known[name] for site, name in table["sites"].items()}
            profile = cls(str(table["name"]), str(table["carrier"]), sites)
        except (KeyError, TypeError, AttributeError) as error:
            raise BadInput(f"rounding profile: {error!r}") from None
        if profile.carrier not in PLAIN:
            raise BadInput(f"rounding profile {profile.name}: unknown carrier {profile.carrier!r}")
        unknown = sorted(set(sites) - SITES)
        if unknown:
            raise BadInput(f"rounding profile {profile.name}: no site is called {unknown[0]!r}")
        if "rope.angle" in sites and sites["rope.angle"].format != "f32":
            raise BadInput(f"rounding profile {profile.name}: rope.angle can only be f32")
        return profile


def _key(rounding: Rounding) -> str:
    """A name for a rounding that tells it from every other: `bf16`, `e4m3_64>=0.0001+bf16`."""
    if rounding.format in PLAIN:
        return rounding.format
    return f"{rounding.format}_{rounding.block}>={rounding.amax_floor!r}" + (f"+{rounding.kept}" if rounding.kept else "")


EXACT = Profile("exact")


def profile_names() -> list[str]:
    files = resources.files("reference").joinpath("profiles").iterdir()
    return ["exact", *sorted(f.name.removesuffix(".json") for f in files if f.name.endswith(".json"))]


@lru_cache
def profile(name: str) -> Profile:
    """A shipped profile by name. Raises KeyError with the known names."""
    if name == "exact":
        return EXACT
    if name not in profile_names():
        raise KeyError(f"unknown profile {name!r}; known: {', '.join(profile_names())}")
    return Profile.from_json(json.loads(resources.files("reference").joinpath(f"profiles/{name}.json").read_text()))


@dataclass(frozen=True)
class Sites:
    """The sites of one place in the model.

    `taps` is the prefix of tap names (`layers.30.ffn.experts.5.`), `path` that of site names (`ffn.experts.`): which
    block and which expert it is does not matter to a profile.
    """

    profile: Profile = EXACT
    tap: Tap | None = None
    taps: str = ""
    path: str = ""

    def block(self, name: str) -> Sites:
        """Sites of a block, `layers.30` or `mtp.0.block`."""
        return replace(self, taps=f"{name}.", path="")

    def at(self, part: str, index: int | None = None) -> Sites:
        """Sites of a part of this module: `sites.at("indexer")`, `sites.at("experts", 5)`."""
        number = "" if index is None else f"{index}."
        return replace(self, taps=f"{self.taps}{part}.{number}", path=f"{self.path}{part}.")

    def __call__(self, site: str, x: Tensor, spare: int = 0) -> Tensor:
        """Round x [..., n] if the profile says so (a quantiser spares the last `spare` channels), then show it to the tap."""
        rounding = self.profile.sites.get(self.path + site)
        if rounding is not None:
            x = rounding(x, self.profile.carrier, spare)
        if self.tap is not None:
            self.tap(self.taps + site, x)
        return x

    def has(self, site: str) -> bool:
        return self.path + site in self.profile.sites
