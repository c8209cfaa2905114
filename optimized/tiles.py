"""Interpreter tiles that fit a small model: there a tile costs what it holds, also where nothing lies.

Constants of a model, like those of a kernel variant: no batch changes them. Compiled kernels keep their own (None).
Source: docs/pool.md §6.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from reference.config import Config

from .kernels import decode_attention, embed, expert_sum, hyper_connection, index_logits, topk
from .kernels.launch import INTERPRETER, power_of_two


@dataclass(frozen=True)
class ModelTiles:
    attention: decode_attention.Tiles | None = None
    index_logits: index_logits.Tiles | None = None
    topk: topk.Tiles | None = None
    streams: hyper_connection.Tiles | None = None
    embed: embed.Tiles | None = None
    expert_sum: expert_sum.Tiles | None = None


def tiles_for_model(config: Config) -> ModelTiles:
    if not INTERPRETER:
        return ModelTiles()
    attention = decode_attention.tiles_for_heads(config.num_attention_heads)
    listed = power_of_two(config.sliding_window + config.index_topk)
    keys = power_of_two(8 * config.index_topk)
    width = power_of_two(config.hidden_size)
    streams = hyper_connection.INTERPRETER
    return ModelTiles(
        attention=replace(attention, ROWS=max(16, min(listed, attention.ROWS))),
        index_logits=index_logits.Tiles(COLS=max(16, min(keys, index_logits.INTERPRETER.COLS))),
        topk=topk.Tiles(COLS=max(256, min(keys, topk.INTERPRETER.COLS))),
        streams=replace(streams, STEP=min(width, streams.STEP), COLS=min(width, streams.COLS)),
        embed=replace(embed.INTERPRETER, COLS=min(width, embed.INTERPRETER.COLS)),
        expert_sum=replace(expert_sum.INTERPRETER, COLS=min(width, expert_sum.INTERPRETER.COLS)),
    )
