"""The pool's memory: one allocation, its planes, and the views that kernels take. Source: docs/pool.md §1 to §4."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from .geometry import FIELD_ALIGN, Geometry, round_up
from .index_rows import PAGE_ROWS, Layout, key_bytes, scale_count

POISON = 0xFF  # NaN in every format that the pool stores: E4M3, scale bytes, bfloat16, float32


class Pool:
    """Planes for a number of blocks and slots, zeros at first.

    `memory` uint8 [bytes]; `planes[i]` uint8 [plane_rows, row_bytes[i]]. Slots are named by position, counted from
    row 0 in slots; `slot_position` gives the position of the g-th request group, from the top.
    """

    def __init__(self, geometry: Geometry, blocks: int, slots: int, device: str = "cpu") -> None:
        self.geometry = geometry
        self.plane_rows = geometry.plane_rows(blocks, slots)
        self.slots = geometry.slot_positions(self.plane_rows)
        sizes = [round_up(self.plane_rows * width, FIELD_ALIGN) for width in geometry.row_bytes]
        self.memory = torch.from_numpy(np.zeros(sum(sizes), np.uint8)).to(device)  # lazy pages, unlike torch.zeros
        self.planes = tuple(
            part[: self.plane_rows * width].view(self.plane_rows, width)
            for part, width in zip(self.memory.split(sizes), geometry.row_bytes, strict=True)
        )

    def poison(self) -> None:
        """Fill every byte so that whatever is read without having been written is NaN."""
        self.memory.fill_(POISON)

    def slot_position(self, group: int) -> int:
        return self.slots - 1 - group

    def block(self, block: int) -> tuple[Tensor, ...]:
        """Bytes of a block in each plane: uint8 [envelope, row_bytes]."""
        rows = self.geometry.envelope
        return tuple(plane[block * rows : (block + 1) * rows] for plane in self.planes)

    def slot(self, position: int) -> tuple[Tensor, ...]:
        """Bytes of a slot in each plane: uint8 [slot_rows, row_bytes]."""
        rows = self.geometry.slot_rows
        return tuple(plane[position * rows : (position + 1) * rows] for plane in self.planes)

    def layer_rows(self, layer: int) -> tuple[Tensor, ...]:
        """Each plane from the layer's base to its end: what a list's indices count from. 2buff: uint8 [rows, head_dim]
        and bfloat16 [rows, rope]; bf16: bfloat16 [rows, head_dim]. Views of different layers overlap."""
        first, *rest = (plane[self.geometry.base(layer) :] for plane in self.planes)
        if rest:
            return first, rest[0].view(torch.bfloat16)
        return (first.view(torch.bfloat16),)

    def state(self, name: str, layer: int) -> Tensor:
        """Ring of one state field and layer in all slots: float32 [slots, ring, width], strided by whole slots."""
        geometry = self.geometry
        field = next(f for f in geometry.fields if f.name == name)
        plane = self.planes[field.plane].reshape(-1).view(torch.float32)
        start = field.offset // 4 + geometry.ordinal(layer) * field.ring * field.width
        slot_stride = geometry.slot_rows * geometry.row_bytes[field.plane] // 4
        size, stride = (self.slots, field.ring, field.width), (slot_stride, field.width, 1)
        return plane.as_strided(size, stride, plane.storage_offset() + start)

    def open_slot(self, position: int) -> None:
        """Compressor rings of a slot as a new request finds them: values 0, scores -inf."""
        for field in self.geometry.fields:
            for layer, kind in enumerate(self.geometry.kinds):
                if field.name.startswith(kind):
                    self.state(field.name, layer)[position] = -torch.inf if field.name.endswith("score") else 0.0


class IndexPool:
    """Index keys of all CSA layers, a page of 64 a block and layer, zeros at first. Same block numbers as the pool.

    `keys` uint8 [layers, blocks, key bytes of a page] and `scales` [layers, blocks, scales of a page], uint8 (fp4) or
    float32 (fp8). Joined layouts keep a page's scales right behind its keys, so both are then strided by whole pages.
    """

    def __init__(self, geometry: Geometry, blocks: int, layout: Layout, device: str = "cpu") -> None:
        self.geometry, self.layout = geometry, layout
        width, layers = geometry.config.index_head_dim, geometry.count("csa")
        key, scale = PAGE_ROWS * key_bytes(layout.form, width), PAGE_ROWS * scale_count(layout.form, width)
        dtype = torch.uint8 if layout.form == "fp4" else torch.float32
        page = key + scale * dtype.itemsize
        self.memory = torch.from_numpy(np.zeros(layers * blocks * page, np.uint8)).to(device)
        if layout.joined:
            pages = self.memory.view(layers, blocks, page)
            self.keys, self.scales = pages[..., :key], pages[..., key:].view(dtype)
        else:
            keys, scales = self.memory.split([layers * blocks * key, layers * blocks * (page - key)])
            self.keys, self.scales = keys.view(layers, blocks, key), scales.view(dtype).view(layers, blocks, scale)

    def poison(self) -> None:
        """Fill every byte so that whatever is read without having been written is NaN, in FP4 by its scale."""
        self.memory.fill_(POISON)

    def pages(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and scales of a CSA layer: [blocks, ...] each, strided by block."""
        at = self.geometry.ordinal(layer)
        return self.keys[at], self.scales[at]

    def block(self, block: int) -> tuple[Tensor, Tensor]:
        """Bytes of a block's pages of all layers: keys and scales, uint8 [layers, ...]."""
        return self.keys[:, block], self.scales[:, block].view(torch.uint8)
