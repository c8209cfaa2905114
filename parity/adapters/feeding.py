"""Inputs of an op out of a tape: payloads of the same step, and what earlier steps of the request left.

Nothing here comes from the twin: what the tape does not hold is missing, with the reason. Source: docs/single.md §6.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from optimized.engine import FORMS
from reference import formats
from reference.errors import BadInput

from ..budget.codes import dequantize
from ..candidates import ACTIVATION_BLOCK, SOURCE
from ..drift import CHOICES
from ..single.checks import wrong_choice
from ..single.contract import BATCH, ITEMS, Sizes, contract, held_tokens
from ..single.drawing import Inputs
from .reading import KEYS, NO, Missing, Reader, joined, pair
from .tape import Held

Rows = Callable[[int], tuple[range, Tensor]]


@dataclass(frozen=True)
class Feed(Reader):
    """`spans`: inputs that were not held, and from which payload they follow to the bit, noted as ops ask for them."""

    spans: dict[str, str] = field(default_factory=dict)

    def inputs(self, op: str, steps: Sequence[int]) -> Inputs:
        """What an op is given in these steps, each a sequence of its own. Raises Missing."""
        return self.together(op, steps, [self.of_step(op, k) for k in steps])

    def together(self, op: str, steps: Sequence[int], parts: Sequence[dict[str, Tensor]]) -> Inputs:
        """Inputs of several steps, each as `of_step` gives it."""
        bounds = torch.tensor([0, *(len(p["positions"]) for p in parts)]).cumsum(0)
        width = max(self.segment(k).end for k in steps) // 4  # of a table of scores
        tensors = {name: _together(name, [p[name] for p in parts], width) for name in parts[0]}
        return Inputs(op, self.config, self.layer, self.segment(steps[0]).phase, self.profile, {**tensors, "bounds": bounds})

    def of_step(self, op: str, k: int) -> dict[str, Tensor]:
        """The same in one step, but for the bounds of a batch. Raises Missing."""
        bare = self.bare(op, k)
        sizes = Sizes.of(self.config, self.layer, bare.batch, op)
        found = {"ids": self.ids(k, (op,)), "positions": bare["positions"]}
        for name in contract(op, self.config, self.layer, FORMS[self.profile].rows).inputs:
            if name in (*BATCH, "cos", "sin"):  # a step asks for the table itself
                continue
            for part, x in self._input(op, name, k).items():
                found[part] = x if part.endswith(".scale") else _shaped(name, x, sizes)
            if name in CHOICES and (wrong := wrong_choice(name, found[name], found["positions"], self.config, self.layer)):
                raise Missing(wrong)
        return found

    def ids(self, k: int, of: Sequence[str] = ("embed", "ffn.gate.experts")) -> Tensor:
        """Token ids; a drafter's are those of the tokens after. Zeros where none of these ops looks at them. Raises Missing."""
        s, drafter = self.segment(k), self.layer >= self.config.num_hidden_layers
        embeds, hashes = "embed" in of and drafter, "ffn.gate.experts" in of and self.config.is_hash_layer(self.layer)
        if not (embeds or hashes or of == ("embed",)):
            return torch.zeros(len(s.positions), dtype=torch.int64)
        if own := self.tape.get(self.layer if drafter else 0, "ids", k):
            return self._known(own.numbers())
        if not drafter:
            raise Missing(NO.format("ids"))
        same = [j for j, other in enumerate(self.tape.segments) if other.request == s.request]
        return self._gathered(k, range(s.start + 1, s.end + 1), same, self._first_ids, "ids of the tokens after")

    def _known(self, ids: Tensor) -> Tensor:
        """Raises BadInput for ids outside the vocabulary."""
        outside = ids[(ids < 0) | (ids >= self.config.vocab_size)].tolist()
        if outside:
            raise BadInput(f"{self.tape.name}: ids: {outside[0]} is outside the vocabulary of {self.config.vocab_size}")
        return ids

    def _first_ids(self, k: int) -> tuple[range, Tensor]:
        ids = self.tape.get(0, "ids", k)
        if ids is None:
            raise Missing(NO.format("ids"))
        return range(self.segment(k).start, self.segment(k).end), self._known(ids.numbers())

    def _input(self, op: str, name: str, k: int) -> dict[str, Tensor]:
        past = {"window": self._window, "compressed": self._compressed, "keys": self._keys}
        if name in past:
            return {name: past[name](k)}
        if name.startswith("state."):
            return {name: self._state(op.removesuffix(".row"), name.removeprefix("state."), k)}
        if name == "streams":
            return {name: self._streams(op, k)}
        if name == "attn.kv":
            return {name: self.rows("attn.kv", k)[1]}
        item = ITEMS[name]
        if item.storage == "e4m3":
            codes, scales = self._codes(name, k)
            return {name: codes, f"{name}.scale": scales}
        return {name: _cast(self._payload(name, k), item.storage)}

    def _payload(self, name: str, k: int) -> Tensor:
        held = self.need(name, k)
        if held.slack is not None:
            raise Missing(f"{name} is there as partial sums, and what their sum was rounded to is not")
        return held.numbers()

    def _codes(self, name: str, k: int) -> tuple[Tensor, Tensor]:
        """Codes and scale bytes of a linear's input; where nobody stored them, those that its quantiser has to make."""
        held, source = self.tape.get(self.layer, name, k), SOURCE.get(name.removesuffix(".input"))
        if held is None and source is not None:
            x = self._payload(source, k).flatten(0, -2)
            self.spans[name] = source
        elif held is None:
            raise Missing(NO.format(name))
        else:
            x = held.numbers()
            if held.coded and held.scale is not None and held.scale.dtype == torch.uint8:
                return pair(held)
        codes, scales = formats.quantize_e4m3(x.float(), ACTIVATION_BLOCK)
        if held is not None and not torch.equal(dequantize(codes, scales, ACTIVATION_BLOCK), x):
            raise Missing(f"{name} holds numbers that are no E4M3 codes in blocks of {ACTIVATION_BLOCK}")
        return codes, scales

    def _streams(self, op: str, k: int) -> Tensor:
        """Streams before the layer [t, s, D]; `hnorm` gets those before the drafter."""
        drafter = self.layer >= self.config.num_hidden_layers
        own = None if op == "hnorm" else self.tape.get(self.layer, "streams", k)
        if own is None and drafter and op != "hnorm":
            raise Missing(NO.format("streams"))
        before = own or self.tape.get(self.layer - 1, "hc_ffn.streams", k)
        if self.layer == 0 and before is None and (embedded := self.tape.get(0, "embed", k)):
            x = embedded.numbers()
            return x if x.ndim == 3 else x[:, None].repeat(1, self.config.hc_mult, 1)
        if before is None:
            raise Missing(NO.format("embed" if self.layer == 0 else "hc_ffn.streams of the layer before"))
        return before.numbers()

    def streams(self, k: int) -> Tensor:
        """Streams before the layer, of a drafter before its projections. Raises Missing."""
        return self._streams("hnorm" if self.layer >= self.config.num_hidden_layers else "", k)

    def _window(self, k: int) -> Tensor:
        start = self.segment(k).start
        first = max(0, start - (self.config.sliding_window - 1))
        return self._past(k, "attn.kv", range(first, start), self.config.head_dim)

    def _compressed(self, k: int) -> Tensor:
        count = self.segment(k).end // self.config.ratio(self.layer)
        return self._past(k, "attn.compressor.row", range(count), self.config.head_dim)

    def _keys(self, k: int) -> Tensor:
        count = self.segment(k).end // self.config.ratio(self.layer)
        return self._past(k, KEYS, range(count), self.config.index_head_dim)

    def _past(self, k: int, op: str, wanted: range, width: int) -> Tensor:
        """Rows that this step and those before it left."""
        if not wanted:
            return torch.zeros(0, width, dtype=torch.float64)
        return self._gathered(k, wanted, [k, *self.tape.before(k)], lambda j: self.rows(op, j), f"{op} of earlier tokens")

    def _state(self, base: str, part: str, k: int) -> Tensor:
        start, compressor = self.segment(k).start, self.compressor(base)
        wanted = range(start - held_tokens(start, compressor.ratio), start)
        if not wanted:
            return torch.zeros(0, compressor.ape.shape[1])
        what = f"{base} of earlier tokens"
        return self._gathered(k, wanted, self.tape.before(k), lambda j: self.ring(base, part, j), what).float()

    def _gathered(self, k: int, wanted: range, steps: Sequence[int], read: Rows, what: str) -> Tensor:
        """Rows of these numbers for step k, each from the first of the steps that has it. Raises Missing."""
        found: dict[int, Tensor] = {}
        for j in steps:
            if len(found) == len(wanted):
                break
            if self.segment(j).end > wanted.start or wanted.start == 0:
                numbers, rows = read(j)
                for n in set(numbers) & set(wanted) - set(found):
                    found[n] = rows[n - numbers.start]
        lost = next((n for n in wanted if n not in found), None)
        if lost is not None:
            begun = self.segment((self.tape.before(k) or [k])[-1]).start
            raise Missing(NO.format(what) + (f": the request begins at position {begun}" if begun else ""))
        return torch.stack([found[n] for n in wanted])


def _together(name: str, parts: list[Tensor], width: int) -> Tensor:
    """One input of several steps."""
    if name == "attn.indexer.scores":
        return joined([Held(x, "f32") for x in parts], width).value
    return torch.cat(parts)


def _cast(x: Tensor, storage: str) -> Tensor:
    """Numbers in the dtype that twins take them in: float64 where kernels store bfloat16, as it may be finer here."""
    return x.to({"f32": torch.float32, "i32": torch.int32, "i64": torch.int64}.get(storage, x.dtype))


def _shaped(name: str, x: Tensor, sizes: Sizes) -> Tensor:
    """An input in the contract's shape; tables of rows may be narrower. Raises Missing for another size."""
    shape = sizes.shape(ITEMS[name])
    if name in ("attn.indexer.scores", "attn.indexer.picks") and x.ndim == 2 and len(x) == shape[0]:
        fill = 0 if name.endswith("scores") else -1
        return joined([Held(x, "")], shape[1], fill).value
    if x.numel() != math.prod(shape):
        raise Missing(f"{name} is {list(x.shape)}, expected {list(shape)}")
    return x.reshape(shape)
