"""The bytes that each token stands for: log-probability entries and grammars need them, and decoding loses them.

A byte-level or byte-fallback vocabulary has tokens that end inside a UTF-8 character; decoded alone they are U+FFFD.
"""

from __future__ import annotations

import json
import re

from trtllm_replayssm.runtime.text.tokenizer import FastTokenizer, Tokenizer

_FALLBACK = re.compile(r"<0x([0-9A-F]{2})>")
REPLACEMENT = "\ufffd"
_SPACE = "\u2581"  # stands for a space in sentencepiece vocabularies


class TokenBytes:
    """Bytes and text of single tokens of one tokenizer. Immutable once made; may be shared between threads."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._pieces: dict[int, str] = {}
        self._special: frozenset[int] = frozenset()
        self._kind = ""
        self._count = 0
        if isinstance(tokenizer, FastTokenizer):
            backend = tokenizer.backend
            added = backend.get_added_tokens_decoder()
            self._special = frozenset(i for i, token in added.items() if token.special)
            self._pieces = {i: piece for piece, i in backend.get_vocab().items() if i not in added}
            self._kind = _decoder_kind(backend)
            self._count = max((*added, *self._pieces), default=-1) + 1
        self._alphabet = _byte_alphabet() if self._kind == "bytes" else {}

    @property
    def special(self) -> frozenset[int]:
        """Ids of special tokens; empty for a tokenizer that does not tell."""
        return self._special

    @property
    def count(self) -> int:
        """One more than the largest id that the tokenizer knows; 0 for one that does not tell."""
        return self._count

    def of(self, token: int) -> bytes:
        """The token's bytes. A special token has those of its name."""
        piece = self._pieces.get(token)
        if piece is not None and self._kind == "bytes" and all(c in self._alphabet for c in piece):
            return bytes(self._alphabet[c] for c in piece)
        if piece is not None and self._kind == "fallback":
            match = _FALLBACK.fullmatch(piece)
            return bytes([int(match[1], 16)]) if match else piece.replace(_SPACE, " ").encode()
        return self._tokenizer.decode([token], False).encode()

    def text(self, token: int) -> str:
        r"""The token as text; one that is not UTF-8 by itself as `bytes:\xe2\x80`, or `token_id:7` if they are lost."""
        data = self.of(token)
        try:
            text = data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
        return f"token_id:{token}" if REPLACEMENT in text else text


def _decoder_kind(backend: object) -> str:
    """'bytes' for byte-level decoders, 'fallback' for byte-fallback ones, '' for others."""
    decoder = getattr(backend, "decoder", None)
    state = decoder.__getstate__() if decoder is not None else b"null"
    found = json.loads(state)
    parts = found.get("decoders", [found]) if isinstance(found, dict) else []
    kinds = {part.get("type") for part in parts}
    if "ByteLevel" in kinds:
        return "bytes"
    return "fallback" if "ByteFallback" in kinds else ""


def _byte_alphabet() -> dict[str, int]:
    """The printable character of each byte in byte-level vocabularies (GPT-2): printable Latin-1 stands for itself."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}
