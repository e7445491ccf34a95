"""The bundled checkpoints through the public API, and how two greedy runs are compared."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.paths import EXAMPLES
from trtllm_replayssm import LLM, MTPDecodingConfig, NGramDecodingConfig, RequestOutput, SamplingParams

QWEN = EXAMPLES / "qwen3_5-tiny-nvfp4"
NEMOTRON = EXAMPLES / "nemotron-tiny-nvfp4"
PROMPTS = ["The history of the", "And the LORD said unto", "To install a package on a Debian system, you should", "1"]

# Largest difference of two correct evaluations of one logit of these models: 7e-4 seen between T = 1 and T = 4, where a
# GDN correction rounds to its other float16 neighbour; 3e-5 without GDN. A greedy token is decided when the top two
# differ by more. 1e-1 would let a wrong state pass.
NOISE = 1e-3


def drafter(kind: str, draft_len: int) -> MTPDecodingConfig | NGramDecodingConfig | None:
    """None for draft_len 0."""
    if draft_len == 0:
        return None
    if kind == "mtp":
        return MTPDecodingConfig(max_draft_len=draft_len)
    return NGramDecodingConfig(max_draft_len=draft_len, max_matching_ngram_size=3)


def run(
    model: Path, params: SamplingParams | Sequence[SamplingParams], prompts: Sequence[str] = PROMPTS, **options: Any
) -> tuple[list[RequestOutput], dict[str, Any]]:
    """Outputs of all prompts in one mixed batch, and the engine's counters."""
    with LLM(model, max_seq_len=256, debug=True, **options) as llm:
        outputs = llm.generate(list(prompts), params)
        assert isinstance(outputs, list)
        return outputs, llm.stats()


def assert_same_greedy(ours: list[RequestOutput], theirs: list[RequestOutput]) -> int:
    """Token for token, up to the first position that `theirs` (run with logprobs=2) left undecided; tokens compared."""
    compared = 0
    for a, b in zip(ours, theirs, strict=True):
        for i, (x, y) in enumerate(zip(a.outputs[0].token_ids, b.outputs[0].token_ids, strict=True)):
            best, second = sorted((e.logprob for e in b.outputs[0].logprobs[i].values()), reverse=True)[:2]
            if best - second <= NOISE:
                break
            assert x == y, f"{b.prompt!r}: token {i}: {x} instead of {y}, margin {best - second:.2e}"
            compared += 1
    return compared
