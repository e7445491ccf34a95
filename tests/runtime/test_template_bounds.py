"""A template's time and memory: a bomb ends its own rendering, and neither this process nor the next rendering."""

from __future__ import annotations

import gc
import resource
import sys
import threading
import time
from pathlib import Path

import pytest

from trtllm_replayssm.errors import RequestError
from trtllm_replayssm.runtime.text.chat_template import ChatTemplate

MESSAGES = [{"role": "user", "content": "BOMB"}]
SECONDS = 0.6
# A quiet conversation renders as its text; the word BOMB sets each of these off.
BOMBS = {
    "repetition": "{{ 'x' * 10 ** 9 }}",
    "list": "{{ ([1] * 10 ** 9) | length }}",
    "centre": "{{ 'x' | center(10 ** 9) }}",
    "format": "{{ '%01000000000d' % 1 }}",
    "justify": "{{ 'x'.ljust(10 ** 9) }}",
    "doubling": "{% set ns = namespace(s='x') %}{% for i in range(40) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
    "power": "{{ 10 ** (10 ** (messages | length + 8)) }}",
    "loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "recursion": "{% macro f() %}{{ f() }}{{ f() }}{% endmacro %}{{ f() }}",
    "output": "{% for i in range(99999) %}{{ 'x' * 9999 }}{% endfor %}",
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_is_a_refusal_and_the_next_conversation_is_rendered(name: str) -> None:
    bomb = f"{{% if messages[0].content == 'BOMB' %}}{BOMBS[name]}{{% endif %}}{{{{ messages[0].content }}}}"
    template = ChatTemplate(bomb, seconds=SECONDS, memory_bytes=256 << 20)
    begin, before = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(2):
        with pytest.raises(RequestError) as caught:
            template.render(MESSAGES)
        assert caught.value.argument == "messages" and len(str(caught.value)) < 500
        assert template.render([{"role": "user", "content": "é\ud800"}]) == "é\ud800"
    assert time.monotonic() - begin < 30
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < (64 << 20) // 1024


def test_a_rendering_that_took_too_much_says_what_is_allowed() -> None:
    with pytest.raises(RequestError, match=r"within 0\.3 s and 256 MiB"):
        ChatTemplate(BOMBS["loops"], seconds=0.3, memory_bytes=256 << 20).render(MESSAGES)


def test_constant_expressions_are_not_computed_when_a_template_is_loaded() -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for source in (BOMBS["repetition"], BOMBS["centre"], BOMBS["list"]):
        ChatTemplate(source)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < (64 << 20) // 1024


def test_threads_share_one_template() -> None:
    template, texts = ChatTemplate("{{ messages[0].content }}"), dict[int, str]()

    def render(number: int) -> None:
        texts[number] = template.render([{"role": "user", "content": f"{number} " * 20_000}])

    threads = [threading.Thread(target=render, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert texts == {i: f"{i} " * 20_000 for i in range(6)}


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_the_child_ends_with_its_template() -> None:
    template = ChatTemplate("{{ messages | length }}")
    assert template.render(MESSAGES) == "1"
    child = template._process._child
    assert child is not None and Path(f"/proc/{child.pid}").exists()
    del template
    gc.collect()
    assert child.poll() is not None and not Path(f"/proc/{child.pid}").exists()
