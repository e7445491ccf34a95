"""Bodies are measured before anything is made of them; the refusal names the bound."""

from __future__ import annotations

import json
import socket
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.runtime.fake_session import hash_model
from tests.runtime.harness import bench, scripted
from tests.server.harness import NAME, ask, live, over_asgi, wait_for
from tests.server.scripted import LETTERS, byte_tokenizer, serving, slow
from tests.server.test_stalls import machine
from trtllm_replayssm.errors import ConfigError, RequestError
from trtllm_replayssm.runtime.server.bounds import MAX_DEPTH, BodyBounds, read_json
from trtllm_replayssm.runtime.server.limits import Limits
from trtllm_replayssm.runtime.server.protocol.common import MAX_BIASES, MAX_FIELDS
from trtllm_replayssm.runtime.server.service import CHARACTERS_PER_TOKEN, MIN_TOKENS, Service

WIDE = BodyBounds(values=1000, lists=200, names=200)
TINY = BodyBounds(values=4, lists=3, names=2)
COMPLETION = {"model": NAME, "prompt": "a"}
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**20), 10**20) | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(blacklist_categories=["Cs"]) | st.sampled_from('"\\[]{},:')),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=4),
    max_leaves=20,
)  # fmt: skip


def post(server: Service, content: bytes) -> httpx.Response:
    headers = {"Content-Type": "application/json"}
    return over_asgi(server, lambda client: client.post("/v1/completions", content=content, headers=headers))


@given(JSON, st.booleans())
@settings(deadline=None, max_examples=300)
def test_json_within_the_bounds_is_read_as_it_is(value: Any, ascii_only: bool) -> None:
    assert read_json(json.dumps(value, ensure_ascii=ascii_only).encode(), WIDE) == value


@given(JSON)
@settings(deadline=None, max_examples=300)
def test_what_is_counted_is_what_is_there(value: Any) -> None:
    lists = names = 0
    todo = [value]
    while todo:
        item = todo.pop()
        lists += isinstance(item, (list, dict))
        names += len(item) if isinstance(item, dict) else 0
        todo.extend(item.values() if isinstance(item, dict) else item if isinstance(item, list) else ())
    data = json.dumps(value).encode()
    assert read_json(data, BodyBounds(values=1000, lists=lists, names=names)) == value
    if lists:
        with pytest.raises(RequestError, match="lists and objects"):
            read_json(data, BodyBounds(values=1000, lists=lists - 1, names=names))
    if names:
        with pytest.raises(RequestError, match="names"):
            read_json(data, BodyBounds(values=1000, lists=lists, names=names - 1))


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("[1,2,3,4,5]", "at most 4 values, got about 5"),
        ("[[],[],[]]", "at most 3 lists"),
        ('{"a":1,"b":2,"c":3}', "at most 2 names"),
        ('["a","b","c","d","e","f","g"]', "at most 6 strings"),
        ("\ufeff{}", "JSON"),
        ('{"a":1', "JSON"),
        ("[NaN]", "finite"),
        ("[-Infinity]", "finite"),
        ('{"a":1,"a":1}', "a: expected each name once"),
        ('{"\\u0061":1,"a":2}', "a: expected each name once"),
    ],
)
def test_what_is_refused_says_why(text: str, what: str) -> None:
    with pytest.raises(RequestError, match=what):
        read_json(text.encode(), TINY)


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-32", "latin-1"])
def test_only_utf_8_is_json(encoding: str) -> None:
    with pytest.raises(RequestError):
        read_json('{"é":1}'.encode(encoding), WIDE)


@pytest.mark.parametrize("pair", ["[]", "{}"])
def test_levels_are_counted(pair: str) -> None:
    opening = pair[0] if pair == "[]" else '{"a":'
    bounds = BodyBounds(values=1000, lists=1000, names=1000)
    read_json((opening * MAX_DEPTH + "1" + pair[1] * MAX_DEPTH).encode(), bounds)
    with pytest.raises(RequestError, match="levels"):
        read_json((opening * (MAX_DEPTH + 1) + "1" + pair[1] * (MAX_DEPTH + 1)).encode(), bounds)


def test_the_largest_legal_request_is_within_the_bounds() -> None:
    limits = Limits(max_prompts=3)
    prompts = json.dumps({"prompt": [[1] * 500] * 3, "logit_bias": {str(i): 1 for i in range(MAX_BIASES)}})
    read_json(prompts.encode(), BodyBounds.of(limits, 500))
    with pytest.raises(RequestError, match="values"):
        read_json(json.dumps([1] * (4 * limits.body_lists + 1502)).encode(), BodyBounds.of(limits, 500))


def test_the_server_refuses_with_the_bound_and_the_field() -> None:
    with serving(scripted([0, 2], tokenizer=LETTERS, eos_ids=(2,)), body_lists=100) as server:
        lists = post(server, b'{"prompt":[' + b",".join([b"[]"] * 200) + b"]}")
        assert lists.status_code == 400 and "at most 100 lists and objects" in lists.json()["error"]["message"]
        twice = post(server, b'{"model":"tiny","prompt":"a","max_tokens":1,"max_tokens":2}')
        assert twice.status_code == 400 and twice.json()["error"]["param"] == "max_tokens"
        many = ask(server, "/v1/completions", {**COMPLETION, **{f"k{i}": 1 for i in range(MAX_FIELDS)}})
        assert many.status_code == 400 and f"at most {MAX_FIELDS} fields" in many.json()["error"]["message"]


@pytest.mark.parametrize("key", ["05", "+5", "5 ", "٥", "", "-5", "5.0", "9" * 30])
def test_a_bias_has_one_way_to_name_its_token(key: str) -> None:
    with serving(scripted([0, 2], tokenizer=LETTERS, eos_ids=(2,))) as server:
        answer = ask(server, "/v1/completions", {**COMPLETION, "logit_bias": {"5": 1, key: 1}})
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "logit_bias", answer.text
        biases = {str(i): 1 for i in range(MAX_BIASES + 1)}
        refused = ask(server, "/v1/completions", {**COMPLETION, "logit_bias": biases})
        assert refused.status_code == 400 and f"at most {MAX_BIASES} members" in refused.json()["error"]["message"]


def test_long_texts_are_cut_on_request_and_refused_far_beyond_any_fit() -> None:
    with serving(machine(5000)) as server:
        body = {"model": NAME, "max_tokens": 1, "prompt": "ab" * 20_000}
        refused = ask(server, "/v1/completions", body)
        assert refused.status_code == 400 and "max_seq_len - 1 = 4999" in refused.json()["error"]["message"]
        cut = ask(server, "/v1/completions", {**body, "truncate_prompt_tokens": 4000})
        assert cut.status_code == 200 and cut.json()["usage"]["prompt_tokens"] == 4000
        longest = max(MIN_TOKENS, CHARACTERS_PER_TOKEN * 5000)
        for text, status in (("a" * longest, 400), ("a" * (longest + 1), 400), ("a" * MIN_TOKENS, 200)):
            answer = ask(server, "/tokenize", {"prompt": text})
            assert answer.status_code == status and (status == 400 or answer.json()["count"] == MIN_TOKENS)
        assert f"at most {longest} characters" in ask(server, "/tokenize", {"prompt": "a" * (longest + 1)}).text


def test_long_texts_have_the_tokens_that_short_ones_have() -> None:
    tokenizer, text = byte_tokenizer(), "häl lo\u20ac" * 3000
    assert tokenizer.encode(text) == [token for _ in range(3000) for token in tokenizer.encode("häl lo\u20ac")]
    assert tokenizer.decode(tokenizer.encode(text)) == text
    with serving(machine(1 << 16)) as server:
        ids = ask(server, "/tokenize", {"prompt": text}).json()["tokens"]
        assert ask(server, "/detokenize", {"tokens": ids}).json()["prompt"] == text


def test_bodies_of_all_connections_together_are_bounded_and_counted_down_again() -> None:
    machine = bench(model=slow(hash_model(64), 0.01), tokenizer=LETTERS, vocab=64, eos_ids=(), slots=1, max_seq_len=300)
    limits = {"body_bytes": 1000, "all_bodies_bytes": 1500}
    with serving(machine, **limits) as server, live(server) as url:
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 900\r\n\r\n"
        with socket.create_connection(("127.0.0.1", server.settings.port), timeout=10) as incomplete:
            incomplete.sendall(head + b" " * 800)
            body = json.dumps({**COMPLETION, "max_tokens": 1}).encode().ljust(700)
            headers = {"Content-Type": "application/json"}

            def post(data: bytes) -> httpx.Response:
                return httpx.post(f"{url}/v1/completions", content=data, headers=headers, timeout=20)

            wait_for(lambda: post(body.ljust(701)).status_code == 429, "the first body to be held")
            refused = post(body.ljust(701))
            assert refused.json()["error"]["type"] == "rate_limit_error" and int(refused.headers["Retry-After"]) >= 1
            assert "at most 1500 bytes" in refused.json()["error"]["message"]
            assert [post(body).status_code for _ in range(3)] == [200] * 3
        wait_for(lambda: post(body.ljust(1000)).status_code == 200, "the first body to be given back")
        assert [post(body.ljust(1000)).status_code for _ in range(3)] == [200] * 3
    with pytest.raises(ConfigError, match="all_bodies_bytes"):
        Limits(body_bytes=1000, all_bodies_bytes=999)
