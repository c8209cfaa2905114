"""The serial MTP block: what it is fed, and where its logits come from. Source: docs/pool.md §11, docs/model.md §8."""

from __future__ import annotations

from torch import Tensor

from .kernels.gemm_fp8 import gemm_fp8
from .kernels.mtp_streams import mtp_streams
from .kernels.norm import rms_norm_quantize
from .weights import MTPWeights


def enter_mtp(x: Tensor, embedded: Tensor, w: MTPWeights, eps: float) -> Tensor:
    """The model's last streams [t, s, D] and the embedded next tokens [t, D], bfloat16 -> the block's streams [t, s, D].

    Each stream is normed by itself.
    """
    _, codes, scales = rms_norm_quantize(embedded, w.enorm, eps)
    e = gemm_fp8(codes, scales, w.e_proj.codes, w.e_proj.scales)
    _, codes, scales = rms_norm_quantize(x.flatten(0, 1), w.hnorm, eps)
    h = gemm_fp8(codes, scales, w.h_proj.codes, w.h_proj.scales).view(x.shape)
    return mtp_streams(e, h)
