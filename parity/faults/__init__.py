"""Planted faults: small switchable changes of correct code, most of them mistakes that public engines have made.

`FAULTS` in the order of families, `BY_NAME`, `OUT_OF_REACH`. Source: docs/faults.md.
"""

from __future__ import annotations

from .fault import Fault
from .zoo import (
    attention,
    cache,
    compressor,
    determinism,
    experts,
    indexer,
    loading,
    mtp,
    paging,
    quantisation,
    rope,
    streams,
)
from .zoo.out_of_reach import OUT_OF_REACH

FAMILIES = (
    compressor, indexer, rope, attention, cache, quantisation, experts, streams, mtp, loading, paging, determinism,
)  # fmt: skip
FAULTS: tuple[Fault, ...] = tuple(fault for family in FAMILIES for fault in family.FAULTS)
BY_NAME = {fault.name: fault for fault in FAULTS}

__all__ = ["BY_NAME", "FAULTS", "OUT_OF_REACH", "Fault"]
