"""Prefill attention: the lists of decode attention, their window rows partly from this step's own payload.

Contract (docs/pool.md §8.4)
    q, sink, cos, sin     as decode_attention
    main_rows, rope_rows  pool planes from the layer's base, as decode_attention
    step_main, step_rope  payload of this step, a row a token, in the same build, as qk_norm_rope leaves it; any row stride
    indices, indptr       int32: one canonical list a token, [compressed rows ascending | window rows ascending]. Index
                          i >= 0 is a pool row, -1 - r row r of the payload
    out                   bfloat16 [t, h, head_dim], written whole
The window of the pool still holds what earlier tokens need, so it is written after this kernel. Both sources hold the
same bytes for the same token, and this runs decode attention's kernels on decode attention's tiles: the same list gives
the same bits, whichever source its rows come from. Tokens go TOKENS at a time, which bounds the scratch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .decode_attention import Lists, Tiles, attend, check_attention, list_of, tiles_for_heads
from .qk_norm_rope import require_rows

TOKENS = 64


def prefill_attention(
    q: Tensor,
    main_rows: Tensor,
    rope_rows: Tensor | None,
    step_main: Tensor,
    step_rope: Tensor | None,
    indices: Tensor,
    indptr: Tensor,
    sink: Tensor,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    *,
    scale: float,
    longest: int | None = None,
    tiles: Tiles | None = None,
) -> Tensor:
    """Attention output bfloat16 [t, h, head_dim]; shapes and dtypes in the file's contract. Raises ValueError.

    `longest` as in decode_attention.
    """
    tokens = q.shape[0]
    check_attention(q, sink, cos, sin)
    require_rows(main_rows, rope_rows, q.shape[2], "pool rows")
    require_rows(step_main, step_rope, q.shape[2], "payload")
    if (rope_rows is None) != (step_rope is None):
        raise ValueError("pool rows and payload are of different builds")
    lists = list_of(tokens, indices, indptr, longest)
    tiles = tiles or tiles_for_heads(q.shape[1])
    out = torch.empty_like(q)
    for first in range(0, tokens, TOKENS):
        block = slice(first, first + TOKENS)
        here = Lists(indices, indptr[first : first + TOKENS + 1], lists.longest)
        turn = None if cos is None or sin is None else (cos[block], sin[block])
        attend(q[block], (main_rows, rope_rows), (step_main, step_rope), here, sink, turn, out[block], scale, tiles)
    return out
