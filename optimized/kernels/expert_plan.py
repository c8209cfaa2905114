"""Which rows of which expert a program computes: pairs (token, slot) sorted by expert, in whole blocks. Torch, no kernel.

Nothing here waits for a device: the number of blocks is a bound from shapes alone, and surplus blocks have no expert.
Source: docs/pool.md §9.5.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .launch import require


@dataclass(frozen=True)
class ExpertPlan:
    """A pair is the number token * k + slot.

    rows          int32 [blocks, height]: pairs by ascending expert, then token; -1 fills up an expert's last block
    block_expert  int32 [blocks]: -1 for blocks that are not needed
    summands      int32 [t, k]: a token's pairs by ascending expert; -1, first, for padding
    """

    rows: Tensor
    block_expert: Tensor
    summands: Tensor


def plan_experts(experts: Tensor, count: int, height: int) -> ExpertPlan:
    """Plan for experts int32 [t, k] out of `count` (-1: padding) with blocks of `height` rows. Raises ValueError."""
    require(experts, "experts", torch.int32, (None, None), dense=2)
    tokens, slots = experts.shape
    pairs, device = tokens * slots, experts.device
    key = experts.flatten().long()
    key = torch.where(key < 0, count, key)  # padding last
    order = torch.argsort(key, stable=True)
    key = key[order]
    sizes = torch.zeros(count + 1, dtype=torch.long, device=device).scatter_add_(0, key, torch.ones_like(key))
    ends = torch.cumsum((sizes[:-1] + height - 1) // height, 0)  # blocks up to and with each expert
    blocks = pairs // height + min(pairs, count)
    first_row = torch.cat([ends.new_zeros(1), ends]) * height
    first_pair = torch.cumsum(sizes, 0) - sizes
    place = first_row[key] + torch.arange(pairs, device=device) - first_pair[key]
    place = torch.where(key < count, place, blocks * height)  # a row past the end takes all padding
    rows = torch.full((blocks * height + 1,), -1, dtype=torch.int32, device=device)
    rows[place] = order.int()
    owner = torch.searchsorted(ends, torch.arange(blocks, device=device), right=True)
    return ExpertPlan(
        rows[:-1].view(blocks, height), torch.where(owner < count, owner, -1).int(), in_ascending_order(experts)
    )


def in_ascending_order(experts: Tensor) -> Tensor:
    """`ExpertPlan.summands` of experts int32 [t, k]."""
    tokens, slots = experts.shape
    by_expert = torch.argsort(experts, dim=1)
    pair = torch.arange(tokens, device=experts.device)[:, None] * slots + by_expert
    return torch.where(experts.gather(1, by_expert) < 0, -1, pair).int()
