"""One face for tokenizers: text to ids and back. Reads a checkpoint's tokenizer.json through `tokenizers`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from trtllm_replayssm.errors import CheckpointError, ConfigError

LONG = 4096  # characters or ids from which the library's batch functions are called: only they release the interpreter


class Tokenizer(Protocol):
    """What the runtime needs of a tokenizer; transformers' tokenizers fit too."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Text -> token ids."""
        ...

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Token ids -> text."""
        ...


class FastTokenizer:
    """A `tokenizers.Tokenizer` with the face above."""

    def __init__(self, backend: Any) -> None:
        """backend: a `tokenizers.Tokenizer`."""
        self.backend = backend
        self.joins = _joins_bytes(backend)  # the text of tokens is that of their bytes, one behind the other
        self._own: tuple[dict[int, str], dict[int, str]] = ({}, {})  # each at most as large as the vocabulary

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Text -> token ids. Other threads go on during a long text."""
        if len(text) < LONG:
            return list(self.backend.encode(text, add_special_tokens=add_special_tokens).ids)
        (encoding,) = self.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return list(encoding.ids)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Token ids -> text; bytes that are no UTF-8 become U+FFFD. Other threads go on during a long text."""
        if len(ids) >= LONG:
            return str(self.backend.decode_batch([list(ids)], skip_special_tokens=skip_special_tokens)[0])
        return str(self.backend.decode(ids, skip_special_tokens=skip_special_tokens))

    def own_text(self, token: int, skip_special_tokens: bool) -> str:
        """The text of a token by itself; where tokens join, it is also what it adds to a text that ended cleanly."""
        known = self._own[skip_special_tokens]
        text = known.get(token)
        if text is None:
            text = known[token] = self.decode([token], skip_special_tokens)
        return text


def _joins_bytes(backend: Any) -> bool:
    decoder = backend.decoder
    return decoder is not None and bool(json.loads(decoder.__getstate__()).get("type") == "ByteLevel")


def load_tokenizer(source: object) -> Tokenizer:
    """A tokenizer from a directory with tokenizer.json, that file, a `tokenizers.Tokenizer`, or one that fits already.

    Raises CheckpointError for a file that is missing or unreadable, ConfigError for another kind of object.
    """
    from tokenizers import Tokenizer as Backend

    if isinstance(source, Backend):
        return FastTokenizer(source)
    if isinstance(source, (str, Path)):
        path = Path(source)
        file = path / "tokenizer.json" if path.is_dir() else path
        if not file.is_file():
            raise CheckpointError("load_tokenizer", "tokenizer", expected="a tokenizer.json", got=f"no file {file}")
        try:
            return FastTokenizer(Backend.from_file(str(file)))
        except Exception as error:  # the library raises bare Exception
            raise CheckpointError("load_tokenizer", str(file), expected="a tokenizer.json", got=str(error)) from error
    if callable(getattr(source, "encode", None)) and callable(getattr(source, "decode", None)):
        return source  # type: ignore[return-value]
    raise ConfigError(
        "load_tokenizer", "tokenizer", expected="a path, a tokenizers.Tokenizer or encode and decode", got=type(source)
    )
