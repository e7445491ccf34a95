"""Faults that other servers had, over HTTP: one test per reported case.

I07 lengths of ids and logprobs at end tokens; I10 chunk boundaries, NaN; I11 logprobs 0; I13 prompts near the limit;
I16 stops split over tokens; I18 choices and seeds; I19 usage in streams; I21 sampled speculation. I14 (clients that
leave) is in test_disconnect.py, I22 (grammars) in test_guided.py.
"""

from __future__ import annotations

import json
from typing import Any, NoReturn

import httpx
import numpy as np
import pytest

from tests.runtime.fake_session import hash_model, script_model
from tests.runtime.harness import Bench, bench, noisy, scripted
from tests.server.harness import NAME, ask, events, over_asgi
from tests.server.scripted import LETTERS, serving, slow
from trtllm_replayssm.runtime.sampling.distribution import Logits
from trtllm_replayssm.runtime.server.logprobs import LOWEST
from trtllm_replayssm.runtime.server.service import Service

UNCACHED = {"prompt_tokens_details": {"cached_tokens": 0}}
ROUTES = ("/v1/completions", "/v1/chat/completions")


def no_constant(name: str) -> NoReturn:
    raise AssertionError(f"{name} is not JSON")


def post(server: Service, route: str, prompt: str = "a", **fields: Any) -> httpx.Response:
    """One request with a text prompt, to either endpoint."""
    own = {"prompt": prompt} if route == ROUTES[0] else {"messages": [{"role": "user", "content": prompt}]}
    return ask(server, route, {"model": NAME, "temperature": 0, **own, **fields})


def read(response: httpx.Response) -> Any:
    """The body, which must be JSON without NaN or infinity."""
    return json.loads(response.text, parse_constant=no_constant)


def scores(choice: Any) -> list[float]:
    """Log-probabilities of a choice of either endpoint."""
    logprobs = choice["logprobs"]
    return logprobs["token_logprobs"] if "tokens" in logprobs else [entry["logprob"] for entry in logprobs["content"]]


def piece_of(chunk: Any) -> str:
    """Text of one streamed part of either endpoint."""
    return chunk["text"] if "text" in chunk else chunk["delta"].get("content") or ""


def text(choice: Any) -> str:
    return choice["text"] if "text" in choice else choice["message"]["content"]


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("end", [2, 11])
@pytest.mark.parametrize("drafts", [True, False])
def test_i07_logprobs_ids_and_usage_have_one_length_for_each_end_token(route: str, end: int, drafts: bool) -> None:
    machine = scripted([0, 1, 0, end, 1, 1], tokenizer=LETTERS, eos_ids=(2, 11), drafts=drafts)
    with serving(machine) as server:
        on = {"logprobs": 2} if route == ROUTES[0] else {"logprobs": True, "top_logprobs": 2}
        body = read(post(server, route, **on, detokenize=False))
        (choice,) = body["choices"]
        assert choice["token_ids"] == [0, 1, 0, end] and choice["finish_reason"] == "stop"
        assert len(scores(choice)) == body["usage"]["completion_tokens"] == 4
        assert text(read(post(server, route, **on))["choices"][0]) == "aba"


@pytest.mark.parametrize("length", [7, 8, 9, 16, 17])
def test_i10_prompts_around_the_chunk_length_give_what_one_chunk_gives(length: int) -> None:
    answers = []
    for chunk in (8, None):
        with serving(bench("mtp", chunk=chunk, eos_ids=())) as server:
            body = {"model": NAME, "prompt": [1, *range(2, length + 1)], "max_tokens": 12, "detokenize": False,
                    "temperature": 0}  # fmt: skip
            answers.append(read(ask(server, "/v1/completions", body))["choices"][0]["token_ids"])
    assert answers[0] == answers[1] and len(answers[0]) == 12


@pytest.mark.parametrize("stream", [False, True])
def test_i10_logits_that_are_no_numbers_are_an_error_object_and_harm_nobody_else(stream: bool) -> None:
    def sick(tokens: Any) -> Logits:
        row = hash_model(24)(tokens)
        return row * np.float32("nan") if tokens[0] == 7 and len(tokens) > 3 else row

    with serving(bench(model=sick, eos_ids=())) as server:

        async def talk(client: httpx.AsyncClient) -> tuple[httpx.Response, httpx.Response]:
            body = {"model": NAME, "max_tokens": 8, "detokenize": False, "logprobs": 1}
            ill = await client.post("/v1/completions", json={**body, "prompt": [7], "stream": stream})
            return ill, await client.post("/v1/completions", json={**body, "prompt": [6]})

        ill, well = over_asgi(server, talk)
        if stream:
            assert ill.status_code == 200 and events(ill.text)[-1] == "[DONE]"
            assert "not finite" in json.loads(events(ill.text)[-2])["error"]["message"]
        else:
            assert ill.status_code == 500 and read(ill)["error"]["type"] == "server_error"
        assert len(read(well)["choices"][0]["token_ids"]) == 8
        assert server.llm.load().free_slots == 4


def test_i10_a_token_of_probability_zero_has_a_finite_logprob() -> None:
    def one_hot(tokens: Any) -> Logits:
        row = np.full(24, -np.inf, np.float32)
        row[5] = 0
        return row

    with serving(bench(model=one_hot, tokenizer=LETTERS)) as server:
        body = read(post(server, "/v1/completions", logprobs=3, max_tokens=2))
        assert set(body["choices"][0]["logprobs"]["top_logprobs"][0].values()) == {0.0, LOWEST}


@pytest.mark.parametrize(("top", "status"), [(0, 200), (1, 200), (20, 200), (21, 400), (-1, 400)])
@pytest.mark.parametrize("stream", [False, True])
def test_i11_logprobs_of_zero_are_on_and_too_many_are_refused(top: int, status: int, stream: bool) -> None:
    with serving(scripted([0, 1, 2], tokenizer=LETTERS, eos_ids=(2,))) as server:
        completion = post(server, ROUTES[0], logprobs=top, stream=stream)
        chat = post(server, ROUTES[1], logprobs=True, top_logprobs=top, stream=stream)
        assert (completion.status_code, chat.status_code) == (status, status)
        if status != 200:
            assert read(completion)["error"]["param"] == "logprobs"
        elif not stream:
            logprobs = read(completion)["choices"][0]["logprobs"]
            assert len(logprobs["token_logprobs"]) == 3
            assert (logprobs["top_logprobs"] is None) == (top == 0)
            assert all(len(entry) == top for entry in logprobs["top_logprobs"] or ())
            assert [len(e["top_logprobs"]) for e in read(chat)["choices"][0]["logprobs"]["content"]] == [top] * 3


def test_i11_chat_logprobs_without_top_logprobs_score_the_drawn_tokens() -> None:
    with serving(scripted([0, 1, 2], tokenizer=LETTERS, eos_ids=(2,))) as server:
        content = read(post(server, ROUTES[1], logprobs=True))["choices"][0]["logprobs"]["content"]
        assert [entry["token"] for entry in content] == ["a", "b", "<end>"]
        assert [entry["top_logprobs"] for entry in content] == [[], [], []]
        refused = post(server, ROUTES[1], top_logprobs=2)
        assert refused.status_code == 400 and read(refused)["error"]["param"] == "top_logprobs"


@pytest.mark.parametrize("kind", ["plain", "ngram", "mtp"])
@pytest.mark.parametrize("short_by", [1, 2, 3, 6])
def test_i13_a_prompt_near_the_limit_ends_with_length(kind: str, short_by: int) -> None:
    with serving(bench(kind, draft_len=5, eos_ids=(), max_seq_len=32)) as server:
        prompt = [1 + i % 3 for i in range(32 - short_by)]
        body = read(ask(server, "/v1/completions", {"model": NAME, "prompt": prompt, "detokenize": False}))
        assert body["choices"][0]["finish_reason"] == "length"
        counts = {"prompt_tokens": 32 - short_by, "completion_tokens": short_by, "total_tokens": 32}
        assert body["usage"] == counts | UNCACHED
        refused = ask(server, "/v1/completions", {"model": NAME, "prompt": [1] * 32})
        assert refused.status_code == 400 and read(refused)["error"]["param"] == "prompt"


@pytest.mark.parametrize("drafts", [True, False])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("stop", "shown", "found"),
    [
        (["beta gamma"], "a", "beta gamma"),
        (["gam", "gamma"], "abeta ", "gam"),
        (["beta gammax", "ta g"], "abe", "ta g"),
        (["never"], "abeta gamma delta", None),
    ],
)
def test_i16_a_stop_split_over_tokens_ends_the_text_and_nothing_past_it_is_sent(
    drafts: bool, stream: bool, stop: list[str], shown: str, found: str | None
) -> None:
    machine = scripted([0, 3, 4, 5, 6, 7, 2], tokenizer=LETTERS, eos_ids=(2,), drafts=drafts)
    with serving(machine) as server:
        response = post(server, ROUTES[1], stop=stop, stream=stream)
        if not stream:
            (choice,) = read(response)["choices"]
            assert text(choice) == shown
        else:
            chunks = [json.loads(data)["choices"][0] for data in events(response.text)[:-1]]
            assert "".join(chunk["delta"].get("content") or "" for chunk in chunks) == shown
            choice = chunks[-1]
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", found)


def test_i18_choices_with_a_seed_are_distinct_reproducible_and_end_on_their_own() -> None:
    runs = []
    for kind in ("plain", "ngram", "mtp", "mtp"):
        with serving(bench(kind)) as server:
            body = {"model": NAME, "prompt": [1, 2, 3], "n": 4, "seed": 5, "temperature": 1.3, "max_tokens": 25,
                    "detokenize": False}  # fmt: skip
            choices = read(ask(server, ROUTES[0], body))["choices"]
            runs.append([(c["index"], c["token_ids"], c["finish_reason"]) for c in choices])
    assert all(run == runs[0] for run in runs)
    assert [index for index, _, _ in runs[0]] == [0, 1, 2, 3]
    assert len({tuple(ids) for _, ids, _ in runs[0]}) == 4 and len({len(ids) for _, ids, _ in runs[0]}) > 1


@pytest.mark.parametrize("route", ROUTES)
def test_i18_a_stream_ends_each_choice_once_and_sends_nothing_of_it_afterwards(route: str) -> None:
    with serving(bench("mtp", tokenizer=LETTERS, vocab=64, model=hash_model(64), eos_ids=(0, 1, 2, 3, 4))) as server:
        response = post(server, route, stream=True, n=4, seed=5, temperature=1.3, max_tokens=25)
        chunks = [json.loads(data)["choices"][0] for data in events(response.text)[:-1]]
        for index in range(4):
            reasons = [chunk["finish_reason"] for chunk in chunks if chunk["index"] == index]
            assert reasons[-1] in ("stop", "length") and reasons[:-1] == [None] * (len(reasons) - 1)
        pieces = [[piece_of(chunk) for chunk in chunks if chunk["index"] == index] for index in range(4)]
        assert len({len("".join(parts)) for parts in pieces}) > 1, "the choices end at different lengths"


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("wanted", [True, False, None])
def test_i19_a_stream_ends_with_one_usage_chunk_without_choices_when_asked(route: str, wanted: bool | None) -> None:
    with serving(scripted([0, 1, 0, 2], tokenizer=LETTERS, eos_ids=(2,))) as server:
        options = {} if wanted is None else {"stream_options": {"include_usage": wanted}}
        *chunks, done = events(post(server, route, stream=True, **options).text)
        parts = [json.loads(chunk) for chunk in chunks]
        assert done == "[DONE]"
        if wanted:
            assert parts[-1]["choices"] == []
            assert parts[-1]["usage"] == {"prompt_tokens": 1, "completion_tokens": 4, "total_tokens": 5} | UNCACHED
            assert all(part["usage"] is None and part["choices"] for part in parts[:-1])
        else:
            assert all("usage" not in part and part["choices"] for part in parts)


def test_i19_stream_options_without_a_stream_are_refused() -> None:
    with serving(scripted([0, 2], tokenizer=LETTERS, eos_ids=(2,))) as server:
        refused = post(server, ROUTES[0], stream_options={"include_usage": True})
        assert refused.status_code == 400 and read(refused)["error"]["param"] == "stream_options"


@pytest.mark.parametrize("settings", [{"temperature": 0.3}, {"temperature": 2.0}, {"temperature": 1.0, "top_p": 0.8}])
def test_i21_sampled_text_is_the_same_with_and_without_drafts(settings: dict[str, float]) -> None:
    model, answers = hash_model(24), {}
    for kind in ("plain", "ngram", "mtp"):
        machine: Bench = bench(kind, model=model, head_model=noisy(model, hash_model(24, salt=9), every=3), eos_ids=())
        with serving(machine) as server:
            body = {"model": NAME, "prompt": [1, 2, 1, 2], "seed": 3, "max_tokens": 50, "detokenize": False, **settings}
            answers[kind] = read(ask(server, ROUTES[0], body))["choices"][0]["token_ids"]
            if kind == "mtp":
                assert server.llm.stats()["accepted_tokens"]
    assert answers["plain"] == answers["ngram"] == answers["mtp"]


@pytest.mark.parametrize("drafts", [True, False])
def test_characters_cut_into_several_tokens_reach_a_stream_whole(drafts: bool) -> None:
    machine = scripted([14, 15, 8, 9, 10, 0, 8, 2], tokenizer=LETTERS, eos_ids=(2,), drafts=drafts)
    with serving(machine) as server:
        chunks = [json.loads(data)["choices"][0] for data in events(post(server, ROUTES[0], stream=True).text)[:-1]]
        assert "".join(chunk["text"] for chunk in chunks) == "é€a\ufffd"
        assert [chunk["text"] for chunk in chunks if "\ufffd" in chunk["text"]] == [chunks[-1]["text"]]


@pytest.mark.parametrize("seconds", [0, 0.03])
def test_a_stream_of_scores_names_every_token_once_however_it_is_cut(seconds: float) -> None:
    model = slow(script_model(64, 1, [14, 15, 0, 1, 2]), seconds)
    with serving(bench(model=model, vocab=64, tokenizer=LETTERS, eos_ids=(2,))) as server:
        stream = post(server, ROUTES[0], stream=True, logprobs=1).text
        chunks = [json.loads(data)["choices"][0] for data in events(stream)[:-1]]
        names = [name for chunk in chunks for name in chunk["logprobs"]["tokens"]]
        offsets = [at for chunk in chunks for at in chunk["logprobs"]["text_offset"]]
        assert names[2:] == ["a", "b", "<end>"] and len(names) == 5
        assert seconds == 0 or len(chunks) > 2
        assert offsets == [sum(map(len, names[:i])) for i in range(5)]
