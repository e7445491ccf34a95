"""`LLM` over two processes that share the model."""

from __future__ import annotations

from typing import Any

import pytest

from tests.paths import ROOT
from tests.session.sessions import reference
from trtllm_replayssm import LLM, NGramDecodingConfig, SamplingParams
from trtllm_replayssm.errors import ConfigError

pytestmark = pytest.mark.timeout(240)
MODEL = ROOT / "tests" / "checkpoints" / "qwen-dense"


def test_llm_writes_the_same_text_on_two_ranks() -> None:
    entry = reference("qwen-dense")[2]
    drafts = NGramDecodingConfig(max_draft_len=3)
    settings: dict[str, Any] = {"max_batch_size": 2, "max_seq_len": 96, "speculative_config": drafts}
    params = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True)
    texts = []
    for ranks in (1, 2):
        with LLM(MODEL, tensor_parallel_size=ranks, **settings) as llm:
            texts.append(llm.generate([entry["input_ids"]], params)[0].outputs[0].token_ids)
    assert list(texts[0]) == list(texts[1]) == entry["greedy"][:16]


def test_sizes_that_cannot_be_shared_are_refused_before_a_process_starts() -> None:
    with pytest.raises(ConfigError, match="tensor parallel"):
        LLM(MODEL, tensor_parallel_size=5, max_batch_size=1, max_seq_len=32)
