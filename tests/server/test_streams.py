"""What a stream costs at each step: its bytes are those that h11 makes, and nothing grows with the answer."""

from __future__ import annotations

import gc
import json
from collections.abc import Sequence
from typing import Any

import h11
import pytest

from tests.runtime.harness import bench
from tests.server.harness import NAME, ask, events
from tests.server.scripted import LETTERS, serving
from trtllm_replayssm.runtime.outputs import Prefix
from trtllm_replayssm.runtime.server.http import Connection
from trtllm_replayssm.runtime.server.protocol.common import Usage
from trtllm_replayssm.runtime.server.protocol.completions import Completion, CompletionChoice
from trtllm_replayssm.runtime.server.serve import spare_the_collector
from trtllm_replayssm.runtime.server.stream import Shell
from trtllm_replayssm.runtime.text.growing import GrowingText

BODIES: Sequence[bytes] = (b"data: {}\n\n", b"", b"x" * 300, bytes(range(256)))
LENGTH = str(sum(map(len, BODIES))).encode()
ASKED = {
    "chunks": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "until the end": b"GET / HTTP/1.0\r\n\r\n",
    "head": b"HEAD / HTTP/1.1\r\nHost: x\r\n\r\n",
}


def wire(connection: h11.Connection, asked: bytes, headers: list[tuple[bytes, bytes]], bodies: Sequence[bytes]) -> Any:
    """The bytes of an answer, event by event, and where it leaves the connection."""
    connection.receive_data(asked)
    while connection.next_event() not in (h11.NEED_DATA, h11.PAUSED):
        pass
    sent = [connection.send(h11.Response(status_code=200, headers=headers))]
    sent += [connection.send(h11.Data(data=body)) for body in bodies]
    sent.append(connection.send(h11.EndOfMessage()))
    return sent, connection.our_state, connection.their_state


@pytest.mark.parametrize("headers", [[], [(b"Content-Length", LENGTH)], [(b"Transfer-Encoding", b"chunked")]])
@pytest.mark.parametrize("asked", ASKED.values(), ids=ASKED.keys())
def test_an_answer_is_what_h11_makes_of_it(asked: bytes, headers: list[tuple[bytes, bytes]]) -> None:
    bodies = [b""] if asked.startswith(b"HEAD") else BODIES
    ours, theirs = Connection(h11.SERVER), h11.Connection(h11.SERVER)
    assert wire(ours, asked, headers, bodies) == wire(theirs, asked, headers, bodies)
    if ours.our_state is h11.DONE and ours.their_state is h11.DONE:  # the next answer on it is another one
        for connection in (ours, theirs):
            connection.start_next_cycle()
        length = [(b"Content-Length", LENGTH)]
        again = wire(ours, ASKED["chunks"], length, BODIES)
        assert again == wire(theirs, ASKED["chunks"], length, BODIES)


def test_data_that_nobody_may_send_is_refused_as_by_h11() -> None:
    connection = Connection(h11.SERVER)
    wire(connection, ASKED["chunks"], [], BODIES)
    with pytest.raises(h11.LocalProtocolError):
        connection.send(h11.Data(data=b"late"))


def test_chunks_of_a_stream_do_not_pass_through_the_state_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    passed: list[type] = []
    process = h11.Connection._process_event

    def counted(self: h11.Connection, role: Any, event: Any) -> None:
        passed.append(type(event))
        process(self, role, event)

    monkeypatch.setattr(h11.Connection, "_process_event", counted)
    wire(Connection(h11.SERVER), ASKED["chunks"], [], [b"data: {}\n\n"] * 100)
    assert len(passed) <= 6 and h11.Data not in passed


def test_steps_of_many_streams_leave_the_collector_alone() -> None:
    body = {"model": NAME, "prompt": [[5]] * 16, "n": 4, "max_tokens": 60, "temperature": 0, "stream": True}
    threshold = gc.get_threshold()
    spare_the_collector()
    try:
        with serving(bench(vocab=64, eos_ids=(), tokenizer=LETTERS, max_seq_len=64, slots=64)) as server:
            before = [generation["collections"] for generation in gc.get_stats()]
            response = ask(server, "/v1/completions", body)
            after = [generation["collections"] for generation in gc.get_stats()]
    finally:
        gc.set_threshold(*threshold)
        gc.unfreeze()
    assert response.status_code == 200 and len(events(response.text)) > 64
    assert sum(after) - sum(before) <= 2


@pytest.mark.parametrize("usage", [True, False], ids=["usage", "no usage"])
def test_a_chunk_is_its_shell_around_its_choices(usage: bool) -> None:
    choices = [CompletionChoice(index=i, text='"choices":[]é\u2028', stop_reason=i or "x") for i in range(3)]
    part = Completion(id='"choices":[]', created=1, model="m", choices=[], usage=Usage.of(1, 2, 0))
    shell, left_out = Shell(part, usage=usage), set() if usage else {"usage"}
    for count in range(3):
        whole = part.model_copy(update={"choices": choices[:count]}).model_dump_json(exclude=left_out)
        assert shell.around(*(choice.model_dump_json() for choice in choices[:count])) == whole


@pytest.mark.parametrize("logprobs", [None, 2])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_stream_looks_at_what_is_new_alone(
    path: str, logprobs: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def whole(*args: object) -> None:
        raise AssertionError("all of an answer was looked at")

    monkeypatch.setattr(Prefix, "entries", whole)
    monkeypatch.setattr(GrowingText, "upto", whole)
    body: dict[str, Any] = {"model": NAME, "max_tokens": 40, "temperature": 0, "stream": True}
    if path == "/v1/completions":
        body |= {"prompt": [5], "logprobs": logprobs}
    else:
        body |= {"messages": [{"role": "user", "content": "a"}]}
        body |= {} if logprobs is None else {"logprobs": True, "top_logprobs": logprobs}
    with serving(bench(vocab=64, eos_ids=(), tokenizer=LETTERS, max_seq_len=64)) as server:
        response = ask(server, path, body)
    *parts, done = events(response.text)
    assert response.status_code == 200 and done == "[DONE]", response.text
    last = json.loads(parts[-1])["choices"][0]
    assert last["finish_reason"] == "length"
