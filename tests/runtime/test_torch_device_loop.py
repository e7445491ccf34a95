"""Whole models on the CPU: with the device loop every request of random traffic gets the host path's tokens."""

from __future__ import annotations

from typing import Any

import pytest

from tests.paths import EXAMPLES
from tests.prefix.torch_engines import WITH_HEAD, session_of
from tests.runtime.torch_loops import KINDS, assert_same, bystander, make_engine, run, traffic
from trtllm_replayssm import LLM, SamplingParams
from trtllm_replayssm.errors import ConfigError

CASES = [
    ("nemotron-moe", "plain", "float32"),
    ("qwen-dense", "plain", "float16-nvfp4"),
    ("qwen-dense", "ngram", "fp8"),
    (WITH_HEAD, "mtp", "float32"),
    (WITH_HEAD, "mtp-sampled", "float32"),
]


@pytest.mark.parametrize(("name", "kind", "formats"), CASES)
def test_random_traffic_gets_the_tokens_of_the_host_s_path(name: str, kind: str, formats: str) -> None:
    """Admissions, cancellations and preemptions, greedy and sampled; no slot is lost, no other slot is touched."""
    results = []
    for ahead in (False, True):
        session = session_of(name, slots=7, max_seq_len=96, formats=formats)
        slot, held = bystander(session)
        engine = make_engine(session, kind, ahead=ahead, debug=True)
        results.append(run(engine, traffic(16, 60, seed=7, longest=20)))
        assert session.pools.slot_hash(slot) == held
        assert session.free_slots == 6 and engine.stats.preemptions > 0
    assert_same(results[1], results[0])


def test_the_llm_s_texts_are_those_without() -> None:
    """Text in, text out, with a stop string, which is found a step late; streamed text as well."""
    settings: list[dict[str, Any]] = [{}, {"temperature": 0.8, "seed": 3}, {"stop": "a"}, {"logprobs": 1}]
    params = [SamplingParams(max_tokens=24, **given) for given in settings]
    texts = []
    for device_loop in (False, True):
        with LLM(
            EXAMPLES / WITH_HEAD, speculative_config=KINDS["mtp"], device_loop=device_loop, max_seq_len=128
        ) as llm:
            done = llm.generate(["Once upon a time"] * len(params), params)
            stream = llm.generate_async("Once upon", params[0], streaming=True)
            streamed = [step.outputs[0].text_diff for step in stream]
        texts.append([(d.outputs[0].text, d.outputs[0].token_ids, d.outputs[0].finish_reason) for d in done])
        assert "".join(streamed) and texts[-1][2][2] == "stop" and "a" not in texts[-1][2][0]
        texts[-1].append(("".join(streamed), [], None))
    assert texts[0] == texts[1]


def test_the_setting_is_a_switch() -> None:
    with pytest.raises(ConfigError, match="device_loop"):
        LLM(EXAMPLES / WITH_HEAD, device_loop="yes")  # type: ignore[arg-type]
