"""Two GPUs that share a model write what one writes, as long as it is decided."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.native import harness
from tests.paths import EXAMPLES
from trtllm_replayssm import LLM, SamplingParams
from trtllm_replayssm.runtime.outputs import CompletionOutput

GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
REASON = harness.unavailable() or (None if GPUS >= 2 else f"{GPUS} GPU")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(REASON is not None, reason=str(REASON)), pytest.mark.timeout(240)]
PROMPTS = ["The weather in the mountains", "def main():\n", "In the beginning", "SELECT * FROM"]
DECIDED = 0.25  # between the two best log-probabilities; bfloat16 sums in another order move them by up to 0.19


def test_two_gpus_write_the_text_of_one_as_long_as_it_is_decided() -> None:
    """With and without the devices' loop: log-probabilities keep requests on the host's path."""
    plain = SamplingParams(max_tokens=48, temperature=0.0, ignore_eos=True)
    answers, texts = [], []
    for ranks in (1, 2):
        with LLM(
            EXAMPLES / "qwen3_5-tiny-nvfp4", device="cuda", tensor_parallel_size=ranks, max_batch_size=4,
            max_seq_len=256, device_loop=True,
        ) as llm:  # fmt: skip
            done = llm.generate(PROMPTS, replace(plain, logprobs=2), use_tqdm=False)
            answers.append([o.outputs[0] for o in done])
            texts.append([o.outputs[0].token_ids for o in llm.generate(PROMPTS, plain, use_tqdm=False)])
    for got in (texts[0], texts[1], [two.token_ids for two in answers[1]]):
        assert sum(decided(*pair) for pair in zip(got, answers[0], strict=True)) >= 48


def decided(tokens: list[int], one: CompletionOutput) -> int:
    """How many tokens are those of `one`; it must have held the first other one for nearly as good."""
    assert one.logprobs is not None
    for step, (ours, theirs) in enumerate(zip(tokens, one.token_ids, strict=True)):
        best, second = sorted((entry.logprob for entry in one.logprobs[step].values()), reverse=True)[:2]
        if ours != theirs:
            assert best - second < DECIDED, f"token {step}: {ours} instead of {theirs}"
            return step  # from here on the texts may differ
    return len(tokens)
