"""The engine beside its twin, both running freely on the same tokens: how far apart they end. Source: docs/judge.md §2.

It describes and judges nothing: a code on the other side of one rounding moves all that comes after it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .metrics import kl, relative_l2


def compare(got: Mapping[str, Tensor], twin: Mapping[str, Tensor]) -> dict[str, Any]:
    """Outputs of one prompt, `logits` and `mtp_logits` [n, V] and `hidden` [layers, n, hc, D], in any float dtype -> figures
    under the same names: of logits as `of_logits`, of hidden the relative L2 after each layer."""
    figures: dict[str, Any] = {}
    for name, values in got.items():
        c, t = values.double(), twin[name].double()
        if name == "hidden":
            figures[name] = [relative_l2(a, b) for a, b in zip(c, t, strict=True)]
        elif len(c):
            figures[name] = of_logits(c, t)
    return figures


def of_logits(c: Tensor, t: Tensor) -> dict[str, Any]:
    """float64 [n, V] of the engine and of the twin, n > 0 -> rows, relative L2, KL (mean, largest), top-1 agreement."""
    away = kl(c, t)
    return {
        "rows": len(c),
        "relative_l2": relative_l2(c, t),
        "kl_mean": away.mean().item(),
        "kl_max": away.max().item(),
        "top1": (c.argmax(-1) == t.argmax(-1)).double().mean().item(),
    }


def pooled(got: list[Tensor], twin: list[Tensor]) -> dict[str, Any]:
    """`of_logits` over the rows of all prompts."""
    return of_logits(torch.cat(got).double(), torch.cat(twin).double())


def table(figures: Mapping[str, Mapping[str, Any]]) -> str:
    """Figures of named prompts as text: a line for each prompt and output, then the layers."""
    lines = [f"{'prompt':16} {'output':12} {'rows':>6} {'rel. L2':>9} {'KL mean':>9} {'KL max':>9} {'top-1':>7}"]
    for prompt, outputs in figures.items():
        for name, f in outputs.items():
            if name == "hidden":
                continue
            numbers = f"{f['rows']:6} {f['relative_l2']:9.2e} {f['kl_mean']:9.2e} {f['kl_max']:9.2e} {f['top1']:7.1%}"
            lines.append(f"{prompt:16} {name:12} {numbers}")
    for prompt, outputs in figures.items():
        if "hidden" in outputs:
            lines.append(f"{prompt:16} rel. L2 after each layer: " + " ".join(f"{x:.1e}" for x in outputs["hidden"]))
    return "\n".join(lines)
