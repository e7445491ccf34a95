"""JSON grammars through xgrammar, which is optional: a mask per position, rolled back behind rejected drafts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trtllm_replayssm.errors import RequestError, UnsupportedError
from trtllm_replayssm.runtime.server.grammar_worker import compile_schema, describe_tokens, load_compiler, reason
from trtllm_replayssm.runtime.text.token_bytes import TokenBytes

_SPACE = 0x20  # the first character that JSON allows in a string


class GrammarMask:
    """The mask of one choice. After the grammar's end only end tokens are allowed."""

    def __init__(self, matcher: Any, vocab: int, end_ids: Sequence[int]) -> None:
        """matcher: an xgrammar.GrammarMatcher at the state to go on from."""
        self._matcher = matcher
        self._bits = np.zeros((1, -(-vocab // 32)), np.int32)
        self._end = np.zeros(vocab, np.bool_)
        self._end[list(end_ids)] = True
        self._end_ids = tuple(end_ids)
        self._over = False

    def allowed(self, drafted: Sequence[int]) -> NDArray[np.bool_] | None:
        """See `LogitsMask`. The matcher steps over the drafts and back."""
        if self._over:
            return self._end
        stepped = 0
        try:
            for token in drafted:
                if self._matcher.is_terminated() or not self._matcher.accept_token(token):
                    return None
                stepped += 1
            if self._matcher.is_terminated():
                return self._end
            self._matcher.fill_next_token_bitmask(self._bits)
            bits = np.unpackbits(self._bits[0].view(np.uint8), bitorder="little")[: self._end.size].astype(np.bool_)
            return bits if bits.any() else self._end
        finally:
            if stepped:
                self._matcher.rollback(stepped)

    def accept(self, token: int) -> None:
        """See `LogitsMask`."""
        self._over = self._over or self._matcher.is_terminated() or not self._matcher.accept_token(token)

    def fork(self) -> GrammarMask:
        """See `LogitsMask`."""
        copy = GrammarMask(self._matcher.fork(), self._end.size, self._end_ids)
        copy._over = self._over
        return copy


class Grammars:
    """Compiles JSON schemas for one vocabulary; tokenizer: its description, see `describe_tokens`.

    Raises UnsupportedError where xgrammar is not installed.
    """

    def __init__(self, tokens: TokenBytes, num_tokens: int, vocab: int, end_ids: Sequence[int]) -> None:
        """num_tokens: ids that the tokenizer knows, at most vocab, the model's."""
        try:
            import xgrammar
        except ImportError as error:
            raise UnsupportedError(
                "request", "response_format", expected="text (the package xgrammar is not installed)", got="a grammar",
                hint="On the server, in a checkout: pip install -e '.[guided]'",
            ) from error  # fmt: skip
        if not end_ids:
            raise UnsupportedError("request", "response_format", expected="a model with an end token", got="none")
        # b"" keeps a token out of every grammar: special ones are no text, and JSON on one line has no control
        # characters, which the compiler lets through in strings of a bounded length.
        pieces = [
            b"" if i in tokens.special or min(tokens.of(i), default=0) < _SPACE else tokens.of(i)
            for i in range(min(num_tokens, vocab))
        ]
        self.tokenizer = describe_tokens(pieces, vocab, end_ids)
        self._compiler = load_compiler(self.tokenizer)
        self._matcher = xgrammar.GrammarMatcher
        self._vocab = vocab
        self._end_ids = tuple(end_ids)

    def compile(self, schema: str) -> Any:
        """The grammar of a schema: an xgrammar.CompiledGrammar. Raises RequestError for one that does not compile."""
        try:
            return compile_schema(self._compiler, schema)
        except Exception as error:  # xgrammar raises what its C++ side throws
            raise RequestError(
                "request", "response_format", expected="a JSON schema that compiles", got=reason(error)
            ) from error

    def mask(self, grammar: Any) -> GrammarMask:
        """A mask of a grammar of `compile`, at its beginning."""
        return GrammarMask(self._matcher(grammar), self._vocab, self._end_ids)
