"""Text of a growing token sequence, piece by piece; the pieces joined are the text of the whole sequence.

A token may end inside a UTF-8 character. Decoding then shows U+FFFD at the end, one or, where a decoder falls back to
bytes, one for each byte; they are held back until a token completes the character or the sequence ends.
"""

from __future__ import annotations

from trtllm_replayssm.runtime.text.tokenizer import Tokenizer

REPLACEMENT = "\ufffd"
# Tokens of a window that never ended cleanly before its end is taken as it is: bytes that are no text at all.
MAX_WINDOW_TOKENS = 64
MAX_HELD = 3  # bytes of an unfinished UTF-8 character, at most


class Detokenizer:
    """Decodes one output sequence.

    The last piece that ended cleanly is kept as context, [start, clean), because a decoder may treat the first token
    of what it is given differently; [clean, end) are the tokens since.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special_tokens
        self._ids: list[int] = []
        self._start = 0
        self._clean = 0
        self._sent = 0  # characters of [start, end) handed out, context included
        self._window = ""
        self._context = ""  # the text of [start, clean)

    def push(self, token: int) -> str:
        """The text that this token makes final; may be empty."""
        self._ids.append(token)
        self._window = self._tokenizer.decode(self._ids[self._start :], self._skip_special)
        dirty = self._window.endswith(REPLACEMENT)
        if dirty and len(self._ids) - self._clean < MAX_WINDOW_TOKENS:
            if not self._window.startswith(self._context):
                self._drop_context()
            run = len(self._window) - len(self._window.rstrip(REPLACEMENT))
            return self._take(len(self._window) - min(run, MAX_HELD))
        piece = self._take(len(self._window))
        if self._tokenizer.decode(self._ids[self._clean :], self._skip_special):
            self._start = self._clean  # skipped tokens alone would be no context
        self._clean = len(self._ids)
        self._window = self._tokenizer.decode(self._ids[self._start :], self._skip_special)
        self._context = self._window
        self._sent = len(self._window)
        return piece

    def finish(self) -> str:
        """What was held back."""
        return self._take(len(self._window))

    def _drop_context(self) -> None:
        """Go on from clean: a decoder marks every byte of a run that ends unfinished, also those already handed out."""
        self._start = self._clean
        self._sent = max(self._sent - len(self._context), 0)
        self._context = ""
        self._window = self._tokenizer.decode(self._ids[self._start :], self._skip_special)

    def _take(self, end: int) -> str:
        piece = self._window[self._sent : end]
        self._sent = max(self._sent, end)
        return piece
