"""The indexer of CSA layers: which compressed rows a query attends to. Source: docs/model.md §6."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .compressor import Compressor
from .hadamard import hadamard
from .linear import Linear, project
from .rope import rotate
from .rounding import Sites

SCORE_ELEMENTS = 1 << 24  # products q·k held at a time


def index_scores(q: Tensor, weights: Tensor, keys: Tensor, sites: Sites) -> Tensor:
    """q [t, h, d], weights [t, h], keys [c, d] -> scores [t, c] = sum_h w * ReLU(q·k). A weight may be negative."""
    dots = torch.relu(sites("dot", torch.einsum("thd,cd->thc", q, keys)))
    return sites("scores", sites("weighted", weights[:, :, None] * dots).sum(1))


def select_topk(scores: Tensor, visible: Tensor, k: int) -> Tensor:
    """Row numbers [t, min(k, c)] of the k largest of scores[t, :visible[t]], ascending, then -1 where there are fewer.

    Among equal scores the lower row number wins. A NaN counts as largest, so that it shows.
    """
    c = scores.shape[1]
    k = min(k, c)
    column = torch.arange(c, device=scores.device)
    hidden = column >= visible[:, None]
    scores = scores.nan_to_num(nan=torch.inf, posinf=torch.inf, neginf=-torch.inf).masked_fill(hidden, -torch.inf)
    threshold = scores.topk(k, dim=-1).values[:, -1:]  # the k-th largest
    above = scores > threshold
    ties = (scores == threshold) & ~hidden
    taken = above | (ties & (ties.cumsum(-1) <= k - above.sum(-1, keepdim=True)))
    picks = torch.where(taken, column, c).sort(-1).values[:, :k]
    return picks.masked_fill_(picks == c, -1)


@dataclass(frozen=True)
class Indexer:
    """Weights: wq_b [h*d, q_lora], weights_proj [h, D], and a compressor that makes the keys."""

    wq_b: Linear
    weights_proj: Linear
    compressor: Compressor
    n_heads: int
    head_dim: int
    topk: int

    def queries(self, qr: Tensor, table: tuple[Tensor, Tensor], sites: Sites) -> Tensor:
        """Query latents qr [t, q_lora] -> [t, h, d]: RoPE, no norm, Hadamard."""
        q = project(self.wq_b, qr, sites, "wq_b").unflatten(-1, (self.n_heads, self.head_dim))
        q = sites("q_hadamard", hadamard(sites("q_rotated", rotate(q, table))))
        return sites("q", q)

    def weights(self, x: Tensor, sites: Sites) -> Tensor:
        """Inputs x [t, D] -> the weight of each head [t, h], scaled once for head size and number of heads."""
        scale = self.head_dim**-0.5 * self.n_heads**-0.5
        return sites("weights", project(self.weights_proj, x, sites, "weights_proj") * scale)

    def select(self, q: Tensor, weights: Tensor, keys: Tensor, positions: Tensor, sites: Sites) -> Tensor:
        """Picks [t, min(topk, c)] for queries at positions [t] among keys [c, d], a block of queries at a time."""
        step = max(1, SCORE_ELEMENTS // max(1, self.n_heads * len(keys)))
        picks = []
        for i in range(0, len(q), step):
            scores = index_scores(q[i : i + step], weights[i : i + step], keys, sites)
            visible = (positions[i : i + step] + 1) // self.compressor.ratio
            picks.append(select_topk(scores, visible, self.topk))
        return sites("picks", torch.cat(picks))
