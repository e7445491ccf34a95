"""The official `openai` client against a real port and a trained checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai import OpenAI

from tests.server.harness import NAME, QWEN, live, qwen_template, service
from trtllm_replayssm import LLM, MTPDecodingConfig, SamplingParams
from trtllm_replayssm.runtime.llm import RequestOutput

PROMPT = "The history of the"
CHAT: list[Any] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(QWEN, max_seq_len=256, max_batch_size=8, speculative_config=MTPDecodingConfig(max_draft_len=3)) as llm:
        yield llm


@pytest.fixture(scope="module")
def client(llm: LLM) -> Iterator[OpenAI]:
    with live(service(llm, qwen_template())) as url:
        yield OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0)


def direct(llm: LLM, prompt: str, **settings: Any) -> RequestOutput:
    """The engine's own answer, without HTTP."""
    return llm.generate(prompt, SamplingParams(**settings), use_tqdm=False)


def test_models(client: OpenAI) -> None:
    (model,) = client.models.list().data
    assert model.id == NAME and client.models.retrieve(NAME).id == NAME
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_a_completion_is_what_the_engine_says(client: OpenAI, llm: LLM) -> None:
    expected = direct(llm, PROMPT, max_tokens=24, temperature=0.0, logprobs=2)
    answer = client.completions.create(model=NAME, prompt=PROMPT, max_tokens=24, temperature=0, logprobs=2)
    choice, logprobs = answer.choices[0], answer.choices[0].logprobs
    assert choice.text == expected.outputs[0].text and choice.finish_reason == "length"
    assert answer.usage is not None and logprobs is not None and logprobs.token_logprobs is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(expected.prompt_token_ids), 24)
    drawn = zip(expected.outputs[0].token_ids, expected.outputs[0].logprobs or (), strict=True)
    wanted = [entry[token].logprob for token, entry in drawn]
    assert logprobs.token_logprobs == pytest.approx(wanted, abs=2e-4)
    assert logprobs.tokens is not None and "".join(logprobs.tokens) == choice.text
    for best in logprobs.top_logprobs or ():
        values = list(best.values())
        assert values == sorted(values, reverse=True) and len(values) == 2


def test_a_streamed_completion_joins_to_the_whole_one(client: OpenAI, llm: LLM) -> None:
    expected = direct(llm, PROMPT, max_tokens=24, temperature=0.0).outputs[0].text
    stream = client.completions.create(model=NAME, prompt=PROMPT, max_tokens=24, temperature=0, stream=True)
    chunks = list(stream)
    assert "".join(chunk.choices[0].text for chunk in chunks) == expected
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices[0].finish_reason] == ["length"]


def test_chat_whole_and_streamed_agree(client: OpenAI, llm: LLM) -> None:
    text = qwen_template().render(CHAT)
    expected = direct(llm, text, max_tokens=20, temperature=0.0, add_special_tokens=False).outputs[0].text
    answer = client.chat.completions.create(
        model=NAME, messages=CHAT, max_completion_tokens=20, temperature=0, logprobs=True, top_logprobs=3
    )
    message, logprobs = answer.choices[0].message, answer.choices[0].logprobs
    assert (message.role, message.content) == ("assistant", expected)
    assert logprobs is not None and logprobs.content is not None
    assert b"".join(bytes(entry.bytes or []) for entry in logprobs.content).decode() == expected
    assert all(entry.logprob == entry.top_logprobs[0].logprob for entry in logprobs.content)  # greedy
    stream = client.chat.completions.create(
        model=NAME, messages=CHAT, max_tokens=20, temperature=0, stream=True, stream_options={"include_usage": True}
    )
    *chunks, last = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == expected
    assert chunks[0].choices[0].delta.role == "assistant"
    assert last.usage == answer.usage and last.choices == []


def test_a_second_turn_sends_the_first_back_as_the_client_dumps_it(client: OpenAI) -> None:
    first = client.chat.completions.create(model=NAME, messages=CHAT, max_tokens=8, temperature=0).choices[0].message
    bare: Any = {"role": "assistant", "content": first.content}
    texts = []
    for reply in (first.model_dump(), bare):
        messages = [*CHAT, reply, {"role": "user", "content": "Go on"}]
        answer = client.chat.completions.create(model=NAME, messages=messages, max_tokens=8, temperature=0, store=False)
        texts.append(answer.choices[0].message.content)
    assert texts[0] == texts[1]
    response = client.responses.create(model=NAME, input="Hello", max_output_tokens=8)
    items: list[Any] = [item.model_dump() for item in response.output]
    again = client.responses.create(model=NAME, input=[*items, {"role": "user", "content": "x"}], max_output_tokens=4)
    assert again.usage is not None and again.usage.output_tokens > 0


def test_content_parts_are_joined(client: OpenAI) -> None:
    parts: list[Any] = [{"role": "user", "content": [{"type": "text", "text": "He"}, {"type": "text", "text": "llo"}]}]
    plain: list[Any] = [{"role": "user", "content": "Hello"}]
    answers = [
        client.chat.completions.create(model=NAME, messages=messages, max_tokens=8, temperature=0)
        for messages in (parts, plain)
    ]
    assert answers[0].choices[0].message.content == answers[1].choices[0].message.content


def test_seeded_sampling_is_reproducible_and_choices_differ(client: OpenAI) -> None:
    def texts(seed: int) -> list[str]:
        answer = client.completions.create(model=NAME, prompt=PROMPT, n=3, seed=seed, max_tokens=12, temperature=1.2)
        return [choice.text for choice in answer.choices]

    assert texts(7) == texts(7) != texts(8)
    assert len(set(texts(7))) == 3 and texts(-1) == texts(-1)


def test_several_prompts_and_choices_are_numbered_prompt_by_prompt(client: OpenAI) -> None:
    answer = client.completions.create(model=NAME, prompt=[PROMPT, "1"], n=2, max_tokens=6, temperature=0)
    alone = [
        client.completions.create(model=NAME, prompt=prompt, max_tokens=6, temperature=0).choices[0].text
        for prompt in (PROMPT, PROMPT, "1", "1")
    ]
    assert [(choice.index, choice.text) for choice in answer.choices] == list(enumerate(alone))
    stream = client.completions.create(model=NAME, prompt=[PROMPT, "1"], n=2, max_tokens=6, temperature=0, stream=True)
    pieces = [""] * 4
    for chunk in stream:
        pieces[chunk.choices[0].index] += chunk.choices[0].text
    assert pieces == [choice.text for choice in answer.choices]


def test_echo_token_prompts_and_truncation(client: OpenAI, llm: LLM) -> None:
    assert llm.tokenizer is not None
    ids = llm.tokenizer.encode(PROMPT)
    answer = client.completions.create(model=NAME, prompt=ids, echo=True, max_tokens=4, temperature=0)
    assert answer.choices[0].text.startswith(PROMPT)
    cut = client.completions.create(
        model=NAME, prompt=PROMPT, max_tokens=4, temperature=0, echo=True, extra_body={"truncate_prompt_tokens": 2}
    )
    assert cut.usage is not None and cut.usage.prompt_tokens == 2
    assert cut.choices[0].text.startswith(llm.tokenizer.decode(ids[-2:]))


def test_stop_strings_and_stop_tokens(client: OpenAI, llm: LLM) -> None:
    whole = client.completions.create(model=NAME, prompt=PROMPT, max_tokens=24, temperature=0).choices[0].text
    stop = whole[5:8]
    cut = client.completions.create(model=NAME, prompt=PROMPT, max_tokens=24, temperature=0, stop=[stop]).choices[0]
    assert cut.text == whole[: whole.index(stop)] and cut.finish_reason == "stop"
    assert llm.tokenizer is not None
    token = direct(llm, PROMPT, max_tokens=24, temperature=0.0).outputs[0].token_ids[3]
    by_token = client.completions.create(
        model=NAME, prompt=PROMPT, max_tokens=24, temperature=0, extra_body={"stop_token_ids": [token]}
    )
    assert by_token.usage is not None and by_token.usage.completion_tokens <= 4
    assert by_token.choices[0].finish_reason == "stop"


def test_a_bias_moves_the_choice(client: OpenAI) -> None:
    answer = client.completions.create(model=NAME, prompt=PROMPT, max_tokens=4, temperature=0, logit_bias={"79": 100})
    again = client.completions.create(model=NAME, prompt=PROMPT, max_tokens=4, temperature=0)
    assert len(set(answer.choices[0].text)) == 1 and answer.choices[0].text != again.choices[0].text


def test_tools_are_refused_clearly(client: OpenAI) -> None:
    tools: list[Any] = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    with pytest.raises(openai.BadRequestError, match="calls no tools") as caught:
        client.chat.completions.create(model=NAME, messages=CHAT, tools=tools)
    assert caught.value.param == "tools"


def test_an_unknown_model_is_not_found(client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.completions.create(model="gpt-4o", prompt="x")
    assert caught.value.code == "model_not_found"


def test_responses_whole_and_streamed_agree(client: OpenAI) -> None:
    answer = client.responses.create(
        model=NAME, input="Hello", instructions="Be brief.", max_output_tokens=12, temperature=0
    )
    assert answer.status == "incomplete" and answer.usage is not None and answer.usage.output_tokens == 12
    chat = client.chat.completions.create(model=NAME, messages=CHAT, max_tokens=12, temperature=0)
    assert answer.output_text == chat.choices[0].message.content
    events = list(
        client.responses.create(
            model=NAME, input=CHAT, max_output_tokens=12, temperature=0, stream=True
        )
    )
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == answer.output_text
    assert [e.sequence_number for e in events] == list(range(len(events)))
    assert events[0].type == "response.created" and events[-1].type == "response.incomplete"
    with pytest.raises(openai.BadRequestError, match="nothing is stored"):
        client.responses.create(model=NAME, input="x", store=True)
