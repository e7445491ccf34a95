"""What the host does beside the device at each step: once where once is enough, and no more for a longer answer."""

from __future__ import annotations

import asyncio
import gc
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from tests.runtime.harness import Bench, PieceTokenizer, bench
from tests.runtime.idle_steps import IdleSteps
from trtllm_replayssm.runtime import traffic_meter
from trtllm_replayssm.runtime.device.entry import SamplingMode
from trtllm_replayssm.runtime.llm import LLM, RequestOutput, SamplingParams
from trtllm_replayssm.runtime.text.growing import GrowingText

WORDS = PieceTokenizer([b"w%d " % i for i in range(64)])
TEXT = list(range(1, 64))


def machine(rows: int, tokens: int, emitted: tuple[int, ...] = (1,)) -> Bench:
    """An engine whose device computes nothing."""
    steps = IdleSteps(TEXT, emitted=emitted)
    return bench(
        vocab=64, eos_ids=(), slots=rows, max_seq_len=tokens + 8, draft_len=max(3, steps.max_draft_len), ahead=True,
        steps=steps, tokenizer=WORDS, debug=False,
    )  # fmt: skip


class Waits(IdleSteps):
    """Of every three launches the device has waited for the last one."""

    def launch(self, slots: Sequence[int], mode: SamplingMode) -> bool:
        super().launch(slots, mode)
        return self._launches % 3 == 0


def streams(rows: int, tokens: int, look: Callable[[RequestOutput], Any]) -> list[list[Any]]:
    """What readers in one event loop see of as many requests, each at its own pace."""

    async def read(llm: LLM, number: int) -> list[Any]:
        params = SamplingParams(max_tokens=tokens, temperature=0.0, seed=number)
        return [look(output) async for output in llm.generate_async([1], params, streaming=True)]

    async def read_all(llm: LLM) -> list[list[Any]]:
        return await asyncio.gather(*(read(llm, i) for i in range(rows)))

    with LLM.from_engine(machine(rows, tokens).engine) as llm:
        return asyncio.run(read_all(llm))


@pytest.mark.parametrize("emitted", [(1,), (1, 4, 2)])
def test_tokens_of_a_device_that_computes_nothing_arrive_whole(emitted: tuple[int, ...]) -> None:
    driver = machine(8, 50, emitted)
    for seed in range(8):
        driver.add([1], max_tokens=50, temperature=0.0, seed=seed)
    for number, output in driver.run().items():
        begin = 31 * number % len(TEXT)
        assert output.outputs[0].token_ids[1:] == [TEXT[(begin + i) % len(TEXT)] for i in range(49)]


def test_launches_that_the_device_waited_for_are_counted() -> None:
    driver = bench(vocab=64, eos_ids=(), slots=2, ahead=True, steps=Waits(TEXT), tokenizer=WORDS)
    driver.add([1], max_tokens=31, temperature=0.0)
    driver.run()
    stats = driver.engine.stats.as_dict()
    assert (stats["launches"], stats["late_launches"]) == (30, 10)


def test_bytes_of_rows_alike_are_worked_out_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Any, ...]] = []
    step_bytes = traffic_meter.step_bytes
    monkeypatch.setattr(traffic_meter, "step_bytes", lambda *a: asked.append(a) or step_bytes(*a))
    driver = machine(32, 100)
    for _ in range(32):
        driver.add([1], max_tokens=100, temperature=0.0)
    driver.run()
    assert driver.engine.stats.decode_rows == 32 * 99
    assert len(asked) == len(set(map(str, asked))) <= driver.session.replay.window + 1


def test_an_event_loop_is_called_once_a_step_however_many_readers_it_has() -> None:
    calls: list[int] = []

    async def read(llm: LLM, number: int) -> int:
        params = SamplingParams(max_tokens=40, temperature=0.0, seed=number)
        return len([output async for output in llm.generate_async([1], params, streaming=True)])

    async def read_all(llm: LLM) -> list[int]:
        loop = asyncio.get_running_loop()
        call = loop.call_soon_threadsafe
        loop.call_soon_threadsafe = lambda *a, **more: calls.append(1) or call(*a, **more)  # type: ignore[method-assign,assignment]
        return await asyncio.gather(*(read(llm, i) for i in range(32)))

    with LLM.from_engine(machine(32, 40).engine) as llm:
        seen = asyncio.run(read_all(llm))
        assert 1 <= len(calls) <= llm._engine.stats.steps
    assert min(seen) >= 1


def test_readers_of_what_is_new_join_no_text(monkeypatch: pytest.MonkeyPatch) -> None:
    joined: list[int] = []
    upto = GrowingText.upto
    monkeypatch.setattr(GrowingText, "upto", lambda self, count: joined.append(count) or upto(self, count))
    found = streams(4, 100, lambda output: output.outputs[0].text_diff)
    assert ["".join(text).count(" ") for text in found] == [100] * 4
    assert not joined


def test_a_text_grows_and_what_was_published_does_not() -> None:
    text = GrowingText(["a"])
    seen = []
    for piece in ("", "b", "cd", "", "e"):
        text.add(piece)
        seen.append(len(text))
    assert [text.upto(count) for count in seen] == ["a", "ab", "abcd", "abcd", "abcde"]
    assert (text.upto(1), text.upto(0), text.between(1, 3), text.between(2, 2)) == ("a", "", "bcd", "")
    text.add("f")
    assert (text.upto(len(text)), text.upto(4)) == ("abcdef", "abcde")


def test_an_output_stays_as_it_was_and_can_be_sent() -> None:
    (outputs,) = streams(1, 30, lambda output: (output, output.outputs[0].length))
    whole = outputs[-1][0].outputs[0].text
    assert whole == WORDS.decode(outputs[-1][0].outputs[0].token_ids) and outputs[-1][1] == 30
    for output, length in outputs:
        (choice,) = output.outputs
        assert choice.length == length and choice.text == WORDS.decode(choice.token_ids[:length])
        copy = pickle.loads(pickle.dumps(output))
        assert copy == output and copy.outputs[0].text == choice.text


def test_a_longer_answer_leaves_the_collector_no_more_to_walk() -> None:
    def tracked(tokens: int) -> int:
        driver = machine(8, 500)
        for _ in range(8):
            driver.add([1], max_tokens=500, temperature=0.0)
        for _ in range(tokens):
            driver.step()
        gc.collect()
        return len(gc.get_objects())

    tracked(20)
    assert abs(tracked(400) - tracked(20)) < 200  # 8 rows of 380 tokens more
