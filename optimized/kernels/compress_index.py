"""Index compressor: the compressor of CSA over the indexer's projections, its rows rotated and written as index keys.

Contract (docs/pool.md §8.6)
    as compress.py, with d = index_head_dim, except for the target:
    keys, scales  uint8 [blocks, 64 * key bytes], and uint8 [blocks, 64 * d/32] (FP4) or float32 [blocks, 64] (FP8): pages
                  of one layer (`IndexPool.pages`), any block stride; the dtype of the scales says which form
    order         where the bytes of a key lie in its page
    rounding  float32 up to the quantiser, over the Hadamard rotation of all channels: E2M1 per 32, amax floor 6 * 2^-126, or
              E4M3 over the key, amax floor 1e-4. The FP8 scale is a power of two, stored as float32.
Writes one key and its scales a plan row, every byte of them.
"""

from __future__ import annotations

from torch import Tensor

from .compress import INTERPRETER, Group, Tiles, launch_compress
from .index_layout import ORDERS, PAGE_ROWS, require_pages
from .launch import tiles_for_mode

GPU = Tiles(SLOTS=8, num_warps=2)


def compress_index(
    kv: Tensor,
    score: Tensor,
    kv_state: Tensor,
    score_state: Tensor,
    plan: Tensor,
    slots: Tensor,
    ape: Tensor,
    norm_weight: Tensor,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    keys: Tensor,
    scales: Tensor,
    block_table: Tensor,
    *,
    order: str = "natural",
    ratio: int = 4,
    tiles: Tiles | None = None,
) -> None:
    """Write the key of every group that the plan completes; shapes and dtypes in the file's contract. Raises ValueError."""
    group = Group(
        kv, score, kv_state, score_state, plan, slots, ape, norm_weight, eps, cos, sin, block_table, ratio
    )
    group.check()
    form = "fp4" if require_pages(keys, scales, order, norm_weight.shape[0]) else "fp8"
    launch_compress(group, keys, scales, form, ORDERS[order], 0, PAGE_ROWS, tiles or tiles_for_mode(GPU, INTERPRETER))
