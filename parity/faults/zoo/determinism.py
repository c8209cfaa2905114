"""Bits that depend on what else is in the batch, or on how a prompt was cut."""

from __future__ import annotations

from ..change import edit
from ..fault import OWN, Fault

SCHEDULES = ("tests/test_engine_schedules.py::test_chunks_across_every_edge_give_the_bits_of_one_step",)
COMPANY = ("tests/test_engine.py::test_bits_depend_neither_on_the_schedule_nor_on_company",)
BITS = "bits"
SHARED = "    total += tl.load(shared"
STEP = "tiles = tiles or tiles_for_width(x.shape[2])\n    mixes = _check(x, fn, base, scale, 3)\n    return _mix"

FAULTS = (
    Fault("determinism.split-by-tokens", "order", "sgl-project/sglang#37292", "S3",
          "the product of a mix is cut by the number of tokens in the step", BITS,
          edit("kernels.hyper_connection", (STEP, STEP.replace("tiles = tiles or tiles_for_width(x.shape[2])",
               "tiles = replace(tiles or tiles_for_width(x.shape[2]), STEP=64 if len(x) > 4 else 128)"))),
          tests=(*SCHEDULES, *COMPANY), also=("sgl-project/sglang#36174",)),
    Fault("determinism.attention-tile-by-tokens", "order", OWN, "S3",
          "a tile of attention is as high as the number of tokens in the step leaves room for", BITS,
          edit("kernels.decode_attention", ("parts = max(1, ceil_div(lists.longest, tiles.SPLIT))",
               "tiles = Tiles(tiles.HEADS, 16 if tokens > 4 else 32, tiles.SPLIT, tiles.JOIN)\n"
               "    parts = max(1, ceil_div(lists.longest, tiles.SPLIT))")), tests=(*SCHEDULES, *COMPANY)),
    Fault("determinism.norm-by-batch", "order", OWN, "S3", "a norm's mean is that of all rows of a tile", BITS,
          edit("kernels.row_tiles", ("tl.rsqrt(tl.sum(x * x, 1) / WIDTH + eps)",
                                     "tl.rsqrt(tl.sum(x * x, 1) / WIDTH + eps + 1e-7 * x.shape[0] * tl.max(tl.max(x, 1), 0))")),
          tests=(*SCHEDULES, *COMPANY)),
    Fault("determinism.sum-narrow-in-long-steps", "lost bits", OWN, "S3",
          "experts of a long step are added with fewer bits", BITS,
          edit("kernels.expert_sum", (SHARED, "    total = tl.where(T > 4, (total + 1024.0) - 1024.0, total)\n" + SHARED)),
          tests=(*SCHEDULES, *COMPANY)),
)  # fmt: skip
