"""One seed, one text: whatever drafts, batch and form of the answer. A trained checkpoint, sampled at temperature 0.9.

Runs that split tokens into steps differently have logits that differ in the last bits, and a draw by the inverse of the
cumulative distribution changes where its random number lies within that noise of a border. So two runs may part only
at such a draw; which one it is, is computed here from the model alone.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

import numpy as np
import pytest

from tests.server.harness import NAME, QWEN, ask, events, service
from tests.tolerance import REPLAY_LOGIT_NOISE
from trtllm_replayssm.config import PoolConfig, ReplayConfig
from trtllm_replayssm.runtime.llm import LLM, MTPDecodingConfig, NGramDecodingConfig
from trtllm_replayssm.runtime.sampling.distribution import probabilities
from trtllm_replayssm.runtime.sampling.params import SamplingParams
from trtllm_replayssm.runtime.session.base import PrefillChunk
from trtllm_replayssm.runtime.session.torch_session import TorchSession
from trtllm_replayssm.spec.philox import Domain, choice_seed, uniform
from trtllm_replayssm.weights.checkpoint import Checkpoint

TEMPERATURE = 0.9
SEEDS, TOKENS, LENGTH = range(25), 48, 128
PROMPT = "The history of the"
# A logit that moves by e moves a cumulative probability c by at most 2 c (1 - c) e / T, which is e / (2 T). Both runs
# and the model that judges them have the noise.
BORDER = 2 * REPLAY_LOGIT_NOISE / (2 * TEMPERATURE)


@pytest.fixture(scope="module")
def judge() -> Iterator[TorchSession]:
    with Checkpoint.open(QWEN) as checkpoint:
        yield TorchSession.from_checkpoint(checkpoint, ReplayConfig(), PoolConfig(slots=1, max_seq_len=LENGTH))


def runs(speculative: MTPDecodingConfig | NGramDecodingConfig | None, batch: int) -> tuple[list[int], list[list[int]]]:
    """Prompt ids, and the output of each seed."""
    with LLM(QWEN, max_seq_len=LENGTH, max_batch_size=batch, speculative_config=speculative) as llm:
        params = [SamplingParams(max_tokens=TOKENS, temperature=TEMPERATURE, seed=s, ignore_eos=True) for s in SEEDS]
        outputs = llm.generate([PROMPT] * len(SEEDS), params, use_tqdm=False)
    assert isinstance(outputs, list)
    return outputs[0].prompt_token_ids, [list(output.outputs[0].token_ids) for output in outputs]


def beyond(judge: TorchSession, ids: list[int], seed: int, token: int) -> float:
    """How far the random number of the draw after `ids` lies outside the token's part of the distribution; 0: in it."""
    slot = judge.allocate(seed)
    (logits,) = judge.prefill([PrefillChunk(slot, ids, True)])
    judge.free(slot)
    assert logits is not None
    weights = probabilities(logits.astype(np.float64), SamplingParams(temperature=TEMPERATURE))
    u = uniform(choice_seed(seed, 0), len(ids), Domain.TOKEN)
    borders = np.concatenate([[0.0], np.cumsum(weights)])
    return max(float(borders[token]) - u, u - float(borders[token + 1]), 0.0)


@pytest.fixture(scope="module")
def alone() -> tuple[list[int], list[list[int]]]:
    """One sequence at a time, without drafts."""
    return runs(None, 1)


def test_tokens_are_the_draws_of_the_model_from_seed_and_position(
    judge: TorchSession, alone: tuple[list[int], list[list[int]]]
) -> None:
    """Without this, the next test could accept any two texts."""
    prompt, texts = alone
    outside = [
        beyond(judge, [*prompt, *texts[seed][:i]], seed, texts[seed][i]) for seed in (0, 7) for i in range(TOKENS)
    ]
    wrong = [beyond(judge, [*prompt, *texts[0][:i]], 1, texts[0][i]) for i in range(TOKENS)]  # another seed's
    assert max(outside) <= BORDER and np.mean([d == 0 for d in outside]) > 0.95
    assert np.mean([d > BORDER for d in wrong]) > 0.5


@pytest.mark.parametrize(
    ("speculative", "batch"),
    [(None, 8), (MTPDecodingConfig(max_draft_len=3), 8), (NGramDecodingConfig(max_draft_len=3), 5)],
    ids=["batch", "mtp", "ngram"],
)
def test_a_seed_gives_one_text_up_to_draws_at_a_border(
    judge: TorchSession, alone: tuple[list[int], list[list[int]]],
    speculative: MTPDecodingConfig | NGramDecodingConfig | None, batch: int,
) -> None:  # fmt: skip
    prompt, texts = alone
    _, others = runs(speculative, batch)
    parted = 0
    for seed, (mine, theirs) in enumerate(zip(texts, others, strict=True)):
        i = next((i for i, pair in enumerate(zip(mine, theirs, strict=True)) if pair[0] != pair[1]), None)
        if i is None:
            continue
        parted += 1
        for token in (mine[i], theirs[i]):
            assert beyond(judge, [*prompt, *mine[:i]], seed, token) <= BORDER, (seed, i, token)
    print(f"{parted} of {len(texts)} texts of {TOKENS} tokens part")
    assert parted < len(texts) // 2


def test_a_streamed_answer_and_a_whole_one_are_the_same_text() -> None:
    body = {"model": NAME, "prompt": PROMPT, "max_tokens": 24, "temperature": TEMPERATURE, "seed": 5}
    with LLM(QWEN, max_seq_len=LENGTH, max_batch_size=2) as llm:
        server = service(llm)
        whole = ask(server, "/v1/completions", body).json()["choices"][0]["text"]
        stream = events(ask(server, "/v1/completions", {**body, "stream": True}).text)
    assert "".join(json.loads(data)["choices"][0]["text"] for data in stream[:-1]) == whole
