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

    def text(self, token: int) -> str:
        """A printable name."""
        return f"token_id:{token}" if self._tokens is None else self._tokens.text(token)

    def bytes(self, token: int) -> list[int] | None:
        """UTF-8 bytes, None when the model has no tokenizer."""
        return None if self._tokens is None else list(self._tokens.of(token))


def completion_logprobs(
    ids: Sequence[int], entries: Sequence[TokenLogprobs], top: int, offset: int, names: TokenNames
) -> CompletionLogprobs:
    """Form of /v1/completions. offset: characters of the tokens before these."""
    tokens = [names.text(token) for token in ids]
    offsets = []
    for text in tokens:
        offsets.append(offset)
        offset += len(text)
    best = [{names.text(i): _finite(e) for i, e in _best(entry, top)} for entry in entries]
    return CompletionLogprobs(
        tokens=tokens,
        token_logprobs=[_finite(entry[token]) for token, entry in zip(ids, entries, strict=True)],
        top_logprobs=best if top else None,
        text_offset=offsets,
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
