"""What an engine stored of one layer, as an op's outputs, and as rows that later steps read. Source: docs/single.md §6."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from optimized.engine import FORMS
from optimized.pool.geometry import pooled_tokens
from reference.block import Block
from reference.compressor import Compressor
from reference.config import Config
from reference.errors import BadInput

from .. import row_forms
from ..budget.codes import dequantize
from ..judge import Codes, Stored
from ..single import layouts
from ..single.contract import Item, contract, tap
from ..single.drawing import Inputs
from .tape import Held, Segment, Tape

NO = "the trace has no {}"
STORAGE = {torch.bfloat16: "bf16", torch.float32: "f32", torch.float64: "f64", torch.uint8: "bytes"}
ROWS = ("attn.kv", "attn.compressor.row")
KEYS = "attn.indexer.compressor.row"


class Missing(Exception):
    """Why an op is not judged in a step."""


@dataclass(frozen=True)
class Reader:
    """One layer of a tape; `profile` names the build."""

    tape: Tape
    config: Config
    layer: int
    profile: str
    block: Block

    def segment(self, k: int) -> Segment:
        return self.tape.segments[k]

    def need(self, name: str, k: int) -> Held:
        """Raises Missing."""
        held = self.tape.get(self.layer, name, k)
        if held is None:
            raise Missing(NO.format(name))
        return held

    def outputs(self, op: str, k: int) -> dict[str, Held]:
        """Outputs of an op in one step by the contract's names, those that are held. Raises Missing without the first."""
        if op in ROWS and (whole := self.tape.get(self.layer, op, k)):
            return self._row(op, whole, k)
        if op == KEYS:
            return self._key(self.need(op, k), k)
        c = contract(op, self.config, self.layer, FORMS[self.profile].rows)
        held = {name: self._output(op, name, k) for name in c.outputs}
        if held[c.outputs[0]] is None:
            raise Missing(NO.format(op if op in ROWS else tap(op, c.outputs[0])))
        return {name: x for name, x in held.items() if x is not None}

    def _output(self, op: str, name: str, k: int) -> Held | None:
        if name in ("cos", "sin"):
            table, positions = self.tape.table(self.layer, name), self.segment(k).positions
            there = table is not None and all(p in table for p in positions)
            return Held(torch.stack([table[p] for p in positions]), "f32") if table and there else None
        held = self.tape.get(self.layer, tap(op, name), k)
        if held is None or name not in ("head.logits", "embed"):
            return held
        if name == "embed":  # one for all streams
            count = 1 if self.layer >= self.config.num_hidden_layers else self.config.hc_mult
            return held if held.value.ndim == 3 else Held(held.value[:, None].expand(-1, count, -1), held.storage)
        return Held(held.value[-1:], held.storage, slack=None if held.slack is None else held.slack[-1:])

    def _row(self, op: str, whole: Held, k: int) -> dict[str, Held]:
        """A row by its parts: as numbers, or out of a cache's bytes."""
        if whole.layout != "plain":
            tensors = {"row": whole.value} | ({} if whole.slots is None else {"slots": whole.slots})
            return {name: held(x) for name, x in layouts.stored(self.bare(op, k), tensors, {"row": whole.layout}).items()}
        if FORMS[self.profile].rows == "bf16":
            return {"row": whole}
        nope = self.config.head_dim - self.config.qk_rope_head_dim
        x = whole.numbers()
        return {"nope": Held(x[:, :nope], "f64"), "rope": Held(x[:, nope:], "f64")}

    def _key(self, whole: Held, k: int) -> dict[str, Held]:
        if whole.layout == "plain":
            return {"keys": whole}
        tensors = {"keys": whole.value} | ({} if whole.scale is None else {"keys.scale": whole.scale})
        tensors |= {} if whole.slots is None else {"slots": whole.slots}
        found = layouts.stored(self.bare(KEYS, k), tensors, {"keys": whole.layout})["keys"]
        return {"keys": held(found, "e2m1" if FORMS[self.profile].keys.form == "fp4" else "e4m3")}

    def bare(self, op: str, k: int) -> Inputs:
        """An op's batch, and none of its other inputs."""
        positions = torch.tensor(self.segment(k).positions)
        batch = {"ids": torch.zeros_like(positions), "positions": positions, "bounds": torch.tensor([0, len(positions)])}
        return Inputs(op, self.config, self.layer, self.segment(k).phase, self.profile, batch)

    def rows(self, op: str, k: int) -> tuple[range, Tensor]:
        """Rows that a step left, float64 [n, d], and which they are: positions, or numbers of entries. Raises Missing."""
        s, parts = self.segment(k), self.outputs(op, k)
        ratio = 1 if op == "attn.kv" else self.config.ratio(self.layer)
        which = range(s.start // ratio, s.end // ratio)
        names = [name for name in ("row", "keys", "nope", "rope") if name in parts]
        x = torch.cat([parts[name].numbers() for name in names], 1)
        if len(x) != len(which):
            raise Missing(f"{op} has {len(x)} rows of a step that completes {len(which)}")
        return which, x

    def ring(self, base: str, part: str, k: int) -> tuple[range, Tensor]:
        """Of a step's tokens, by position, what a compressor holds: the ring itself where it is held, else what has to go into
        it, which one float32 addition makes of the projections. Raises Missing."""
        s, compressor = self.segment(k), self.compressor(base)
        own = self.tape.get(self.layer, f"{base}.state.{part}", k)
        if own is not None:
            kept = min(len(s.positions), pooled_tokens(compressor.ratio))
            return range(s.end - kept, s.end), own.numbers()
        if part == "values":
            return range(s.start, s.end), self.need(f"{base}.values", k).numbers()
        scores = self.need(f"{base}.scores", k).numbers().float()
        bias = compressor.ape.float()[torch.tensor(s.positions) % compressor.ratio]
        return range(s.start, s.end), (scores + bias).double()

    def compressor(self, base: str) -> Compressor:
        """`attn.compressor` or `attn.indexer.compressor`."""
        owner = self.block.attn.indexer if base.startswith("attn.indexer") else self.block.attn
        assert owner is not None and owner.compressor is not None
        return owner.compressor


def held(x: Stored, codes: str = "e4m3") -> Held:
    """Something stored, as a tape holds it."""
    if isinstance(x, tuple):
        return Held(x[0], codes, x[1])
    return Held(x, STORAGE.get(x.dtype, "i64"))


def joined(parts: Sequence[Held], columns: int | None = None, fill: int = 0) -> Held:
    """One tap of several steps, one below the other; tables of rows are as wide as `columns`. Raises Missing where some are
    codes and some numbers."""
    if len({(x.coded, x.scale is None, x.slack is None) for x in parts}) > 1:
        raise Missing("it is stored in one way here, in another there")
    values = [x.value for x in parts]
    if columns is not None:
        values = [pad(x, (0, max(0, columns - x.shape[1])), value=fill)[:, :columns] for x in values]
    scale = None if parts[0].scale is None else torch.cat([x.scale for x in parts if x.scale is not None])
    slack = None if parts[0].slack is None else torch.cat([x.slack for x in parts if x.slack is not None])
    return Held(torch.cat(values), parts[0].storage, scale, slack=slack)


def plain(x: Held, item: Item) -> Stored | None:
    """A tap as a verdict takes it: pairs of codes and scale bytes, integers, numbers in the coarsest format, from the op's on,
    that holds them all. None for numbers where there should be codes."""
    if item.coded:
        return pair(x) if x.coded and x.scale is not None else None
    if not x.value.is_floating_point():
        return x.value
    if item.storage in ("bf16", "row") and x.slack is None and fits_bf16(x.value):
        return x.value.to(torch.bfloat16)
    return x.value if x.storage == "bf16" else x.value.float()


def pair(x: Held) -> tuple[Tensor, Tensor]:
    """Codes, one a byte, and scale bytes."""
    assert x.scale is not None
    return row_forms.key_codes(x.value, x.scale, "fp4" if x.storage == "e2m1x2" else "fp8")


def fits_bf16(x: Tensor) -> bool:
    return bool(((x.to(torch.bfloat16).to(x.dtype) == x) | x.isnan()).all())


def encoded(x: Tensor, expected: Codes, name: str) -> tuple[Tensor, Tensor]:
    """Codes and scale bytes behind numbers: under the twin's scales where those hold them, else under a block's own. Raises
    BadInput for numbers that are no codes."""
    grid, block = expected.grid, expected.block
    _, twins = grid.quantize(expected.expected.value.float(), block, expected.floor)
    own_codes, own = grid.quantize(x.float(), block, expected.floor)
    step = torch.exp2(twins.double() - 127).repeat_interleave(block, -1)[..., : x.shape[-1]]
    codes = grid.encode((x / step).clamp(-grid.largest, grid.largest).float())
    exact = (grid.decode(codes).double() * step == x).unflatten(-1, (-1, block)).all(-1)
    wide = exact.repeat_interleave(block, -1)
    codes, scales = torch.where(wide, codes, own_codes), torch.where(exact, twins, own)
    if not torch.equal(dequantize(codes, scales, block, grid), x):
        raise BadInput(f"output {name}: numbers that are no {grid.name} codes in blocks of {block}")
    return codes, scales
