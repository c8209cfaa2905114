"""Who plays: the rounding sites of a model as switches, gathered into players four ways. Source: docs/attribution.md §3."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from reference.config import Config
from reference.rounding import Profile, Rounding

from ..cases import layer_id

EMBED, HEAD = "embed", "head"
Switch = tuple[str, str]  # a place (`embed`, `layer_00`, `head`) and a site
Switches = frozenset[Switch]

_AT = {EMBED: ("embed",), HEAD: ("hc_head", "norm", "head.logits")}
_MTP = ("e_proj", "h_proj", "enorm", "hnorm", "streams")
_PARTS = ("attn.indexer", "attn.compressor", "ffn.experts", "ffn.shared_experts", "ffn.gate", "hc_attn", "hc_ffn", "rope")
_STORED_AS = {"attn.kv_norm": "attn.kv", "attn.p": "attn.core", "attn.o": "attn.core", "attn.o_rotated": "attn.core"}


def places(config: Config, layers: Iterable[int], whole: bool) -> list[str]:
    """Where values are rounded, in order: the chosen layers; of a whole model the embedding before them and the head."""
    inside = [layer_id(config, i) for i in layers]
    return [EMBED, *inside, HEAD] if whole else inside


def switches(config: Config, profile: Profile, where: Iterable[str]) -> Switches:
    """Every site of the profile at every place that has it."""
    kinds = {layer_id(config, i): config.kind(i) for i in range(config.num_hidden_layers)}
    return frozenset((place, site) for place in where for site in profile.sites if _has(place, site, kinds.get(place, "")))


def _has(place: str, site: str, kind: str) -> bool:
    if place in _AT:
        return site in _AT[place]
    outside = (*_AT[EMBED], *_AT[HEAD], *_MTP)
    if site in outside or site.startswith(("e_proj.", "h_proj.")):
        return False
    if site.startswith("attn.indexer."):
        return kind == "csa"
    return kind != "window" or not site.startswith("attn.compressor.")


def op_of(site: str) -> str:
    """The part of a layer that a site belongs to: a product with its input, a cache row, a module with all it stores."""
    name = site.removesuffix(".input")
    part = next((part for part in _PARTS if name.startswith(f"{part}.")), name)
    return "attn.q" if part.startswith("attn.q_head_norm.") else _STORED_AS.get(part, part)


def format_of(rounding: Rounding) -> str:
    """`bf16`, `e4m3 per 64`."""
    return f"{rounding.format} per {rounding.block}" if rounding.block else rounding.format


def gather(every: Switches, profile: Profile, by: str) -> dict[str, Switches]:
    """Players by `site`, `op`, `layer` or `format`, each with its switches."""
    name_of: dict[str, Callable[[Switch], str]] = {
        "site": lambda s: s[1],
        "op": lambda s: op_of(s[1]),
        "layer": lambda s: s[0],
        "format": lambda s: format_of(profile.sites[s[1]]),
    }
    found: dict[str, set[Switch]] = {}
    for switch in sorted(every):
        found.setdefault(name_of[by](switch), set()).add(switch)
    return {name: frozenset(found[name]) for name in found}


WAYS = ("format", "layer", "op", "site")
