"""Changes that a fault makes, and takes back: a line of a module's source, or one named function, wherever it is known.

Nothing is copied: a changed module is made from the source as it stands, so a fault follows the code, and one whose line is
gone fails loudly. Source: docs/faults.md §1.
"""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any, Protocol

PACKAGES = ("optimized.", "parity.")  # whose modules know the functions that change
USERS = ("parity.flow", "parity.alone", "optimized.generate")  # that must know them before they change
_serial = itertools.count()


class Change(Protocol):
    def apply(self, undo: ExitStack) -> None:
        """Make the change; what takes it back goes on `undo`."""
        ...


@dataclass(frozen=True)
class Edit:
    """Pairs (old, new) of text in the source of `module`, each of which stands there once. With `within` only the modules of
    these names see what has changed."""

    module: str
    pairs: tuple[tuple[str, str], ...]
    within: tuple[str, ...] = ()

    def source(self) -> str:
        """The changed source. Raises ValueError for text that does not stand there exactly once."""
        text = Path(str(importlib.import_module(self.module).__file__)).read_text()
        for old, new in self.pairs:
            if text.count(old) != 1:
                raise ValueError(f"{old!r} stands {text.count(old)} times in {self.module}")
            text = text.replace(old, new)
        return text

    def apply(self, undo: ExitStack) -> None:
        honest = importlib.import_module(self.module)
        changed = _loaded(self.source(), honest, undo)
        for name, old in _functions(honest).items():
            _replace(old, getattr(changed, name), self.within, undo)
        for name, owner in vars(honest).items():
            if isinstance(owner, type) and owner.__module__ == honest.__name__:
                _methods(owner, getattr(changed, name), undo)


@dataclass(frozen=True)
class Wrap:
    """`around` makes of the honest function `name` of `module` (`Class.method` for a method) the one in its place."""

    module: str
    name: str
    around: Callable[[Callable[..., Any]], Callable[..., Any]]
    within: tuple[str, ...] = ()

    def apply(self, undo: ExitStack) -> None:
        owner: Any = importlib.import_module(self.module)
        *classes, name = self.name.split(".")
        for part in classes:
            owner = getattr(owner, part)
        honest = getattr(owner, name)
        if classes:
            setattr(owner, name, self.around(honest))
            undo.callback(setattr, owner, name, honest)
        else:
            _replace(honest, self.around(honest), self.within, undo)


@dataclass(frozen=True)
class Both:
    """Changes that make a fault only together."""

    parts: tuple[Change, ...]

    def apply(self, undo: ExitStack) -> None:
        for part in self.parts:
            part.apply(undo)


@contextmanager
def turned_on(change: Change | None) -> Iterator[None]:
    """The change, as long as this lasts; None changes nothing."""
    for module in USERS:
        importlib.import_module(module)
    with ExitStack() as undo:
        if change is not None:
            change.apply(undo)
        yield


def edit(module: str, *pairs: tuple[str, str], within: str = "") -> Edit:
    """An edit of `optimized.<module>`, seen by `optimized.<within>` alone if that is given."""
    return Edit(f"optimized.{module}", pairs, (f"optimized.{within}",) if within else ())


def wrap(where: str, around: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Wrap:
    """A wrap of `optimized.<module>:<name>`."""
    module, name = where.split(":")
    return Wrap(f"optimized.{module}", name, around)


def _loaded(source: str, honest: ModuleType, undo: ExitStack) -> ModuleType:
    """A module beside `honest`, in its package, made of this source; a file, as the interpreter of kernels reads it."""
    directory = undo.enter_context(tempfile.TemporaryDirectory(prefix="v4parity-fault-"))
    name = f"{honest.__package__}.changed_{next(_serial)}"
    path = Path(directory) / f"{name}.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    undo.callback(sys.modules.pop, name)
    spec.loader.exec_module(module)
    return module


def _functions(module: ModuleType) -> dict[str, Any]:
    """Functions, kernels among them, that a module defines itself."""
    found = {name: x for name, x in vars(module).items() if callable(x) and not isinstance(x, type)}
    return {name: x for name, x in found.items() if getattr(getattr(x, "fn", x), "__module__", None) == module.__name__}


def _methods(honest: type, changed: type, undo: ExitStack) -> None:
    """Give a class the methods of another one that are written differently."""
    for name, old in list(vars(honest).items()):
        new = vars(changed).get(name)
        if isinstance(old, FunctionType) and isinstance(new, FunctionType) and _words(old.__code__) != _words(new.__code__):
            setattr(honest, name, new)
            undo.callback(setattr, honest, name, old)


def _words(code: CodeType) -> tuple[Any, ...]:
    """What a function does, without the lines it stands on."""
    constants = [_words(c) if isinstance(c, CodeType) else repr(c) for c in code.co_consts]
    return code.co_code, code.co_names, constants


def _replace(old: Any, new: Any, within: tuple[str, ...], undo: ExitStack) -> None:
    """Put `new` wherever a module of ours knows `old`, under whatever name."""
    for name, module in list(sys.modules.items()):
        if name.startswith(PACKAGES) and (not within or name in within):
            for known, x in list(vars(module).items()):
                if x is old:
                    setattr(module, known, new)
                    undo.callback(setattr, module, known, old)
