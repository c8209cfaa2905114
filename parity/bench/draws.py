"""Operands from a seed, in the dtypes of kernels. No code is zero or NaN, so that every product counts as one."""

from __future__ import annotations

import torch
from torch import Tensor

LEAST_SCALE, SCALES = 116, 5  # scale bytes 116 ... 120, 2^-11 ... 2^-7: E4M3 codes up to 448 become values of a few units


class Draw:
    """A stream of random tensors on a device."""

    def __init__(self, device: str, seed: int) -> None:
        self.device = device
        self.generator = torch.Generator(device).manual_seed(seed)

    def f32(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator, device=self.device)

    def bf16(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator, device=self.device, dtype=torch.bfloat16)

    def whole(self, low: int, high: int, *shape: int, dtype: torch.dtype = torch.uint8) -> Tensor:
        """Integers low ... high - 1."""
        return torch.randint(low, high, shape, generator=self.generator, device=self.device, dtype=dtype)

    def order(self, n: int) -> Tensor:
        """A permutation of 0 ... n - 1, int64."""
        return torch.randperm(n, generator=self.generator, device=self.device)

    def e4m3(self, *shape: int) -> Tensor:
        return self.whole(1, 0x7F, *shape) | (self.whole(0, 2, *shape) << 7)

    def e2m1(self, *shape: int) -> Tensor:
        """Two codes a byte."""
        return self.whole(1, 8, *shape) | (self.whole(1, 8, *shape) << 4) | (self.whole(0, 256, *shape) & 0x88)

    def scales(self, *shape: int) -> Tensor:
        return self.whole(LEAST_SCALE, LEAST_SCALE + SCALES, *shape)

    def fp8_rows(self, n: int, width: int) -> tuple[Tensor, Tensor]:
        return self.e4m3(n, width), self.scales(n, -(-width // 128))

    def fp8_weight(self, n: int, k: int) -> tuple[Tensor, Tensor]:
        return self.e4m3(n, k), self.scales(-(-n // 128), -(-k // 128))

    def fp4_weights(self, count: int, n: int, k: int) -> tuple[Tensor, Tensor]:
        return self.e2m1(count, n, k // 2), self.scales(count, n, -(-k // 32))

    def fp8_weights(self, count: int, n: int, k: int) -> tuple[Tensor, Tensor]:
        return self.e4m3(count, n, k), self.scales(count, -(-n // 128), -(-k // 128))

    def turns(self, n: int) -> tuple[Tensor, Tensor]:
        """cos and sin of random angles, float32 [n, 32]."""
        angle = self.f32(n, 32)
        return angle.cos(), angle.sin()
