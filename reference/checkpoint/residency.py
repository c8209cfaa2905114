"""Which weights stay in memory and which are read ahead: accounts in bytes, blind to what the parts are.

Source: docs/checkpoint.md §9.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from typing import NamedTuple


class Part(NamedTuple):
    """Weights that are read and dropped together."""

    name: str
    nbytes: int


class Residency:
    """What stays of the parts in use: dense parts as they come first, then experts by recent use.

    Dense parts stay as long as `spare` bytes of `memory` are left beside them; of the others one is there at a time. Experts
    have what is left, and `together` of them are there in any case.
    """

    def __init__(self, memory: int, spare: int, together: int) -> None:
        self.memory, self.spare, self.together = memory, spare, together
        self._dense: dict[str, int] = {}
        self._passing: Part | None = None
        self._experts: OrderedDict[str, int] = OrderedDict()
        self._dense_bytes = self._expert_bytes = 0

    def __contains__(self, name: str) -> bool:
        return name in self._dense or name in self._experts or (self._passing is not None and self._passing.name == name)

    @property
    def nbytes(self) -> int:
        """Bytes of all that is there."""
        return self._dense_bytes + self._expert_bytes + (self._passing.nbytes if self._passing else 0)

    def hold(self, part: Part) -> None:
        """A dense part that stays whatever its size."""
        if part.name not in self._dense:
            self._dense[part.name] = part.nbytes
            self._dense_bytes += part.nbytes

    def stays(self, name: str) -> bool:
        """Whether a dense part is there for good."""
        return name in self._dense

    def enter(self, part: Part) -> list[str]:
        """A dense part is used -> the parts that leave: the dense part before it, and experts that find no room."""
        if self._passing is not None and self._passing.name == part.name:
            return []
        left, self._passing = ([self._passing.name] if self._passing else []), None
        if part.name not in self._dense:
            if self._dense_bytes + part.nbytes + self.spare <= self.memory:
                self.hold(part)
            else:
                self._passing = part
        return left + self._crowded_out()

    def use(self, part: Part) -> list[str]:
        """An expert is used -> the experts that leave for it, least recently used first."""
        if part.name not in self._experts:
            self._expert_bytes += part.nbytes
        self._experts[part.name] = part.nbytes
        self._experts.move_to_end(part.name)
        return self._crowded_out()

    def _crowded_out(self) -> list[str]:
        left = []
        while self.nbytes > self.memory and len(self._experts) > self.together:
            name, nbytes = self._experts.popitem(last=False)
            self._expert_bytes -= nbytes
            left.append(name)
        return left


class ReadAhead:
    """Parts in the order of their use. They are asked for while those asked for and not yet taken have `window` bytes."""

    def __init__(self, prefetch: Callable[[str], None], window: int) -> None:
        self._prefetch, self.window = prefetch, window
        self._waiting: deque[Part] = deque()
        self._coming: dict[str, int] = {}

    def clear(self) -> None:
        """Nothing is expected any more."""
        self._waiting.clear()
        self._coming.clear()

    def expect(self, parts: Iterable[Part]) -> None:
        """These will be used after those already expected; one that is expected keeps its place."""
        known = {*self._coming, *(part.name for part in self._waiting)}
        self._waiting.extend(part for part in parts if part.name not in known)
        self._ask()

    def take(self, name: str) -> None:
        """This one is used now: there is room for others."""
        if self._coming.pop(name, None) is None:
            self._waiting = deque(part for part in self._waiting if part.name != name)
        self._ask()

    def _ask(self) -> None:
        while self._waiting and (not self._coming or sum(self._coming.values()) + self._waiting[0].nbytes <= self.window):
            part = self._waiting.popleft()
            self._coming[part.name] = part.nbytes
            self._prefetch(part.name)
