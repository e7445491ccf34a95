"""Log-probabilities of a prompt's own tokens, for `echo` with `logprobs`.

The engine scores what it emits. So the prompt is generated: a request for its first token goes on greedily under a mask
that allows the next token of the prompt and no other. Scores are those of the model before any mask. It takes a step
for each token (fewer with drafts), where a prompt that is only read takes a step for each chunk.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from trtllm_replayssm.runtime.sampling.logprobs import TokenLogprobs
from trtllm_replayssm.runtime.sampling.params import SamplingParams
from trtllm_replayssm.runtime.server.service import Service

NO_END = -1


class ForcedTokens:
    """A `LogitsMask` that allows these tokens one after the other, then any."""

    def __init__(self, ids: Sequence[int], vocab: int, done: int = 0) -> None:
        """done: tokens emitted already."""
        self._ids = ids
        self._vocab = vocab
        self._done = done

    def allowed(self, drafted: Sequence[int]) -> NDArray[np.bool_] | None:
        """See `LogitsMask`."""
        at = self._done + len(drafted)
        if list(self._ids[self._done : at]) != list(drafted) or at >= len(self._ids):
            return None
        one = np.zeros(self._vocab, np.bool_)
        one[self._ids[at]] = True
        return one

    def accept(self, token: int) -> None:
        """See `LogitsMask`."""
        self._done += 1

    def fork(self) -> ForcedTokens:
        """See `LogitsMask`."""
        return ForcedTokens(self._ids, self._vocab, self._done)


async def prompt_scores(
    service: Service, prompts: Sequence[list[int]], top: int, priority: float
) -> list[list[TokenLogprobs]]:
    """For each prompt (token ids), one entry per token but the first, which follows nothing. Raises as `start`.

    top: the best candidates of each position beside the prompt's own token.
    """
    vocab = service.llm.geometry.vocab
    longer = [ids for ids in prompts if len(ids) > 1]
    settings = [
        SamplingParams(
            max_tokens=len(ids) - 1, temperature=0.0, end_id=NO_END, detokenize=False, logprobs=top,
            logits_mask=ForcedTokens(ids[1:], vocab),
        )
        for ids in longer
    ]  # fmt: skip
    run = service.start([ids[:1] for ids in longer], settings, streaming=False, priority=priority)
    try:
        outputs = iter(await run.results())
    finally:
        run.close()
    return [list(next(outputs).outputs[0].logprobs or ()) if len(ids) > 1 else [] for ids in prompts]
