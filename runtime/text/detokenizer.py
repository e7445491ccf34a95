"""Text of a growing token sequence, piece by piece; the pieces joined are the text of the whole sequence.

A token may end inside a UTF-8 character. Decoding then shows U+FFFD at the end, one or, where a decoder falls back to
bytes, one for each byte; they are held back until a token completes the character or the sequence ends.
"""

from __future__ import annotations

from collections.abc import Callable

from trtllm_replayssm.runtime.text.tokenizer import FastTokenizer, Tokenizer

REPLACEMENT = "\ufffd"
# Tokens of a window that never ended cleanly before its end is taken as it is: bytes that are no text at all.
MAX_WINDOW_TOKENS = 64
MAX_HELD = 3  # bytes of an unfinished UTF-8 character, at most
# Tokens that such a window goes on with where tokens join: of a byte or more each, so that what is held back, three
# U+FFFD of up to three bytes each, is in it behind the three bytes that may belong to a character before it.
KEPT_TOKENS = 4 * MAX_HELD


class Detokenizer:
    """Decodes one output sequence.

    The window are the latest tokens: `clean` of them, whose text is handed out, as context, because a decoder may treat
    the first token of what it is given differently; then the tokens since, which have not ended cleanly. There is no
    context, and no decoding of a token that ends cleanly, where the text of a token is known to be its own.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special_tokens
        self._own: Callable[[int, bool], str] | None = None
        if isinstance(tokenizer, FastTokenizer) and tokenizer.joins:
            self._own = tokenizer.own_text
        self._ids: list[int] = []  # of the window
        self._clean = 0
        self._sent = 0  # characters of the window handed out, context included
        self._window = ""
        self._context = ""  # the text of the clean tokens

    def push(self, token: int) -> str:
        """The text that this token makes final; may be empty."""
        if self._own is not None:
            text = self._own(token, self._skip_special)
            if not text or not (self._ids or text.endswith(REPLACEMENT)):
                return text  # no bytes, also none of a character that has begun; or characters of its own
        self._ids.append(token)
        self._window = self._tokenizer.decode(self._ids, self._skip_special)
        dirty = self._window.endswith(REPLACEMENT)
        if dirty and (self._own is not None or len(self._ids) - self._clean < MAX_WINDOW_TOKENS):
            if not self._window.startswith(self._context):
                self._drop_context()
            run = len(self._window) - len(self._window.rstrip(REPLACEMENT))
            piece = self._take(len(self._window) - min(run, MAX_HELD))
            if len(self._ids) >= MAX_WINDOW_TOKENS and self._own is not None:
                self._keep_end()
            return piece
        piece = self._take(len(self._window))
        self._shorten()
        self._clean = len(self._ids)
        self._context = self._window
        self._sent = len(self._window)
        return piece

    def finish(self) -> str:
        """What was held back."""
        return self._take(len(self._window))

    def _shorten(self) -> None:
        """Keep the tokens behind the clean ones as the context of what comes; skipped tokens alone would be none."""
        if self._own is not None:
            self._ids, self._window = [], ""
            return
        latest = self._ids[self._clean :]
        text = self._tokenizer.decode(latest, self._skip_special)
        if text:
            self._ids, self._window = latest, text

    def _keep_end(self) -> None:
        """Go on with the last tokens alone, which show what is held back as all of them do: UTF-8 tells where its
        characters begin."""
        held = len(self._window) - self._sent
        self._ids = self._ids[-KEPT_TOKENS:]
        self._window = self._tokenizer.decode(self._ids, self._skip_special)
        self._sent = len(self._window) - held

    def _drop_context(self) -> None:
        """Go on behind the clean tokens: a decoder marks every byte of a run that ends unfinished, also those already
        handed out."""
        del self._ids[: self._clean]
        self._clean = 0
        self._sent = max(self._sent - len(self._context), 0)
        self._context = ""
        self._window = self._tokenizer.decode(self._ids, self._skip_special)

    def _take(self, end: int) -> str:
        piece = self._window[self._sent : end]
        self._sent = max(self._sent, end)
        return piece
