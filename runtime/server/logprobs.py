"""Log-probabilities in OpenAI's two forms. Values are finite: JSON has no infinity."""

from __future__ import annotations

from collections.abc import Sequence

from trtllm_replayssm.runtime.sampling.logprobs import Logprob, TokenLogprobs
from trtllm_replayssm.runtime.server.protocol.chat import ChatLogprobs, TokenLogprob, TopLogprob
from trtllm_replayssm.runtime.server.protocol.completions import CompletionLogprobs
from trtllm_replayssm.runtime.text.token_bytes import TokenBytes

LOWEST = -9999.0  # stands for a probability of 0


class TokenNames:
    """Tokens as responses name them: their text, or `token_id:7` for a model without a tokenizer."""

    def __init__(self, tokens: TokenBytes | None) -> None:
        self._tokens = tokens
        self._known: dict[int, tuple[str, list[int] | None]] = {}  # at most the vocabulary; one name is asked for often

    def text(self, token: int) -> str:
        """A printable name."""
        return self._of(token)[0]

    def bytes(self, token: int) -> list[int] | None:
        """UTF-8 bytes, None when the model has no tokenizer. Not to be changed."""
        return self._of(token)[1]

    def _of(self, token: int) -> tuple[str, list[int] | None]:
        known = self._known.get(token)
        if known is None:
            if self._tokens is None:
                known = f"token_id:{token}", None
            else:
                known = self._tokens.text(token), list(self._tokens.of(token))
            self._known[token] = known
        return known


def completion_logprobs(
    ids: Sequence[int], entries: Sequence[TokenLogprobs], top: int, offset: int, names: TokenNames
) -> CompletionLogprobs:
    """Form of /v1/completions. offset: characters of the tokens before these."""
    tokens = [names.text(token) for token in ids]
    offsets = []
    for text in tokens:
        offsets.append(offset)
        offset += len(text)
    best: list[dict[str, float] | None] = [
        {names.text(i): _finite(e) for i, e in _best(entry, top)} for entry in entries
    ]
    return CompletionLogprobs(
        tokens=tokens,
        token_logprobs=[_finite(entry[token]) for token, entry in zip(ids, entries, strict=True)],
        top_logprobs=best if top else None,
        text_offset=offsets,
    )


def prompt_logprobs(
    ids: Sequence[int], entries: Sequence[TokenLogprobs], top: int, names: TokenNames
) -> CompletionLogprobs:
    """Form of /v1/completions for a prompt. entries: of all tokens but the first, which follows nothing."""
    first = names.text(ids[0])
    none: list[dict[str, float] | None] | None = [None] if top else None
    start = CompletionLogprobs(tokens=[first], token_logprobs=[None], top_logprobs=none, text_offset=[0])
    return joined(start, completion_logprobs(ids[1:], entries, top, len(first), names))


def joined(first: CompletionLogprobs, second: CompletionLogprobs) -> CompletionLogprobs:
    """Scores of tokens that follow each other, with equal settings and offsets that go on."""
    best = None
    if first.top_logprobs is not None and second.top_logprobs is not None:
        best = first.top_logprobs + second.top_logprobs
    return CompletionLogprobs(
        tokens=first.tokens + second.tokens,
        token_logprobs=first.token_logprobs + second.token_logprobs,
        top_logprobs=best,
        text_offset=first.text_offset + second.text_offset,
    )


def chat_logprobs(
    ids: Sequence[int], entries: Sequence[TokenLogprobs], top: int, names: TokenNames
) -> ChatLogprobs:
    """Form of /v1/chat/completions."""
    content = []
    for token, entry in zip(ids, entries, strict=True):
        best = [
            TopLogprob(token=names.text(i), logprob=_finite(e), bytes=names.bytes(i)) for i, e in _best(entry, top)
        ]
        content.append(
            TokenLogprob(
                token=names.text(token), logprob=_finite(entry[token]), bytes=names.bytes(token), top_logprobs=best
            )
        )
    return ChatLogprobs(content=content)


def _best(entry: TokenLogprobs, top: int) -> list[tuple[int, Logprob]]:
    """The `top` best, best first; the drawn token is among them only when it is one of them."""
    return sorted(entry.items(), key=lambda item: (-item[1].logprob, item[0]))[:top]


def _finite(entry: Logprob) -> float:
    return max(entry.logprob, LOWEST)
