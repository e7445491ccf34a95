"""What is no HTTP is refused in the same shape; other forms of a target are served."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.runtime.harness import scripted
from tests.server.harness import NAME, live
from tests.server.scripted import LETTERS, serving
from trtllm_replayssm.runtime.server.service import Service

POST = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"


@pytest.fixture(scope="module")
def server() -> Iterator[Service]:
    settings = {"header_bytes": 2000, "api_key": "secret"}
    with serving(scripted([0, 2], tokenizer=LETTERS, eos_ids=(2,)), **settings) as made, live(made):
        yield made


def talk(server: Service, *parts: bytes) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body of what one connection answers before it ends."""
    data = b""
    with socket.create_connection(("127.0.0.1", server.settings.port), timeout=10) as connection:
        for part in parts:
            connection.sendall(part)
        while piece := connection.recv(65536):
            data += piece
    head, _, body = data.partition(b"\r\n\r\n")
    first, *lines = head.decode("latin-1").split("\r\n")
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
    return int(first.split()[1]), headers, body


def error(answer: tuple[int, dict[str, str], bytes], status: int) -> dict[str, Any]:
    assert answer[0] == status and answer[1]["content-type"] == "application/json", answer
    assert answer[1]["connection"] == "close" and int(answer[1]["content-length"]) == len(answer[2])
    content = json.loads(answer[2])
    assert set(content) == {"error"} and set(content["error"]) == {"message", "type", "param", "code"}
    return dict(content["error"])


@pytest.mark.parametrize(
    "data",
    [
        b"nonsense\r\n\r\n",
        b"GET /health\r\n\r\n",
        b"GET /health HTTP/1.1\r\n\r\n",  # no Host
        b"GET /he alth HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /h\xe9alth HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: x\r\nno colon\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: x\r\nContent-Length: many\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",  # TLS
        CHUNKED + b"zz\r\n{}\r\n0\r\n\r\n",
        CHUNKED + b"2\r\n{}x\r\n0\r\n\r\n",
    ],
)
def test_what_is_no_http_is_a_400_in_json(server: Service, data: bytes) -> None:
    found = error(talk(server, data), 400)
    assert found["type"] == "invalid_request_error" and found["message"].startswith("this is not an HTTP/1.1 request")


@pytest.mark.parametrize("size", [5000, 200_000, 3_000_000])
def test_headers_far_over_the_limit_are_a_431_in_json(server: Service, size: int) -> None:
    found = error(talk(server, b"GET /health HTTP/1.1\r\nHost: x\r\nX: " + b"y" * size), 431)
    assert (found["type"], found["code"]) == ("request_too_large", "headers_too_large")


def test_a_client_that_goes_on_sending_is_cut_off(server: Service) -> None:
    with socket.create_connection(("127.0.0.1", server.settings.port), timeout=10) as connection:
        begin = time.monotonic()
        with pytest.raises(OSError):
            while time.monotonic() < begin + 8:
                connection.sendall(b"\0" * 1000)
                time.sleep(0.01)
        assert 0.5 < time.monotonic() - begin < 6


def test_the_server_goes_on(server: Service) -> None:
    test_what_is_no_http_is_a_400_in_json(server, CHUNKED + b"zz\r\n")
    assert httpx.get(f"http://127.0.0.1:{server.settings.port}/health").status_code == 200
    assert server.gate.inside == 0


@pytest.mark.parametrize("scheme", [b"http://", b"https://", b"HTTP://"])
def test_a_target_may_name_the_host(server: Service, scheme: bytes) -> None:
    tail = b" HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
    assert talk(server, b"GET " + scheme + b"x:1/health" + tail + b"\r\n")[0] == 200
    assert b"<html" in talk(server, b"GET " + scheme + b"x" + tail + b"\r\n")[2]
    assert talk(server, b"GET " + scheme + b"x/v1/models" + tail + b"\r\n")[0] == 401  # the key is asked for here too
    status, _, body = talk(
        server, b"GET " + scheme + b"x/v1/models/%74iny?a=b" + tail + b"Authorization: Bearer secret\r\n\r\n"
    )
    assert status == 200 and json.loads(body)["id"] == NAME


@pytest.mark.parametrize("kind", [b"", b"text/plain", b"application/x-www-form-urlencoded", b"application/jsonp"])
def test_a_body_of_another_type_is_refused_by_its_type(server: Service, kind: bytes) -> None:
    body = json.dumps({"model": NAME, "prompt": "a"}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer secret\r\nConnection: close\r\n"
    typed = b"" if not kind else b"Content-Type: " + kind + b"\r\n"
    found = error(talk(server, head + typed + b"Content-Length: %d\r\n\r\n" % len(body) + body), 400)
    assert found["param"] == "Content-Type" and f"got {kind.decode() or 'none'}. With curl" in found["message"]
    typed = b"Content-Type: application/json; charset=utf-8\r\n"
    assert talk(server, head + typed + b"Content-Length: %d\r\n\r\n" % len(body) + body)[0] == 200


@pytest.mark.parametrize("header", ["Content-Encoding: gzip", "Transfer-Encoding: chunked"])
def test_headers_that_change_what_the_body_is_are_refused(server: Service, header: str) -> None:
    data = POST + f"Authorization: Bearer secret\r\nContent-Length: 5\r\n{header}\r\n\r\n".encode()
    assert error(talk(server, data + b"0\r\n\r\n"), 400)["param"] in ("Content-Encoding", "Content-Length")


def test_a_client_that_closes_its_sending_side_reads_what_is_ready(server: Service) -> None:
    with socket.create_connection(("127.0.0.1", server.settings.port), timeout=10) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        connection.shutdown(socket.SHUT_WR)
        began, data = time.monotonic(), b""
        while piece := connection.recv(65536):
            data += piece
    assert data.startswith(b"HTTP/1.1 200 OK") and time.monotonic() - began < 5
