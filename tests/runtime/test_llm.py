"""LLM, its loop and its handles, over an engine without a model."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import weakref
from collections.abc import Iterator

import pytest

from tests.runtime.harness import Bench, PieceTokenizer, bench, scripted
from trtllm_replayssm.errors import ContractError, RequestError
from trtllm_replayssm.runtime.llm import LLM
from trtllm_replayssm.runtime.outputs import RequestOutput
from trtllm_replayssm.runtime.sampling.params import SamplingParams

LETTERS = PieceTokenizer([bytes([97 + i]) for i in range(24)])
LONG = SamplingParams(max_tokens=None, end_id=-1)
# The model answers a one-token prompt with these letters, four a step
SCRIPT = [i % 20 for i in range(50)]
TEXT = "".join(chr(97 + i) for i in SCRIPT)


class Gate:
    """Lets an engine step only as often as it is told; wide open by default."""

    def __init__(self, machine: Bench) -> None:
        self.permits = threading.Semaphore(0)
        self.open = True
        step = machine.engine.step

        def gated() -> object:
            if not self.open:
                self.permits.acquire()
            return step()

        machine.engine.step = gated  # type: ignore[method-assign, assignment]

    def shut(self) -> None:
        self.open = False

    def let(self, steps: int) -> None:
        for _ in range(steps):
            self.permits.release()

    def release(self) -> None:
        self.open = True
        self.let(1)


@pytest.fixture
def machine() -> Bench:
    return scripted(SCRIPT, draft_len=3, tokenizer=LETTERS, vocab=24)


@pytest.fixture
def llm(machine: Bench) -> Iterator[LLM]:
    with LLM.from_engine(machine.engine) as ready:
        yield ready


@pytest.fixture
def gate(machine: Bench) -> Iterator[Gate]:
    gate = Gate(machine)
    yield gate
    gate.release()


def wait_until(condition, seconds: float = 10.0) -> None:  # type: ignore[no-untyped-def]
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "the condition never came true"
        time.sleep(0.002)


def test_one_prompt_gives_one_output_and_a_list_gives_a_list(llm: LLM) -> None:
    params = SamplingParams(max_tokens=6)
    one = llm.generate("x", params)
    assert isinstance(one, RequestOutput) and one.finished
    assert (one.prompt, one.prompt_token_ids) == ("x", [23])
    assert (one.outputs[0].text, one.outputs[0].token_ids, one.outputs[0].finish_reason) == (
        "abcdef",
        SCRIPT[:6],
        "length",
    )
    assert isinstance(llm.generate([23], params), RequestOutput)
    assert isinstance(llm.generate({"prompt_token_ids": [23]}, params), RequestOutput)
    assert isinstance(llm.generate({"prompt": "x"}, params), RequestOutput)
    many = llm.generate(["x", [23], {"prompt": "x"}], [SamplingParams(max_tokens=n) for n in (1, 2, 3)], use_tqdm=True)
    assert isinstance(many, list)
    assert [o.outputs[0].text for o in many] == ["a", "ab", "abc"]
    assert [o.prompt for o in many] == ["x", None, "x"]
    assert llm.generate(["x"]) and llm.generate([]) == []


def test_defaults_are_greedy_with_32_tokens(llm: LLM) -> None:
    output = llm.generate("x")
    assert isinstance(output, RequestOutput) and len(output.outputs[0].token_ids) == 32


def test_an_invalid_prompt_of_a_list_is_refused_before_anything_runs(llm: LLM, machine: Bench) -> None:
    with pytest.raises(RequestError, match="empty prompt"):
        llm.generate(["x", ""])
    with pytest.raises(RequestError, match="one per prompt"):
        llm.generate(["x", "x"], [LONG])
    with pytest.raises(RequestError, match="inputs"):
        llm.generate({"text": "x"})
    assert machine.engine.stats.steps == 0
    assert llm.generate("x", SamplingParams(max_tokens=1))


def test_a_stream_read_in_step_shows_every_token_once(llm: LLM, gate: Gate) -> None:
    gate.shut()
    handle = llm.generate_async("x", SamplingParams(max_tokens=10, logprobs=0), streaming=True)
    text, ids, logprobs, outputs = "", [], [], 0
    gate.let(1)
    for output in handle:
        choice = output.outputs[0]
        text += choice.text_diff
        ids += choice.token_ids_diff
        logprobs += choice.logprobs_diff
        outputs += 1
        assert (choice.text, choice.token_ids) == (text, ids)
        gate.let(1)
    assert (text, ids, len(logprobs)) == (TEXT[:10], SCRIPT[:10], 10)
    assert outputs == 4  # the prompt's token, then 4, 4 and 1


def test_a_slow_reader_misses_outputs_but_no_token(llm: LLM) -> None:
    handle = llm.generate_async("x", SamplingParams(max_tokens=40), streaming=True)
    handle.result(10)
    outputs = list(handle)
    assert [o.outputs[0].text_diff for o in outputs] == [TEXT[:40]]


def test_without_streaming_only_the_end_is_published(llm: LLM) -> None:
    handle = llm.generate_async("x", SamplingParams(max_tokens=9))
    outputs = list(handle)
    assert len(outputs) == 1 and outputs[0].finished and outputs[0].outputs[0].text == TEXT[:9]
    assert handle.finished and handle.outputs[0].text == TEXT[:9] and handle.prompt_token_ids == [23]


def test_handles_can_be_awaited_and_iterated_over_in_an_event_loop(llm: LLM) -> None:
    async def main() -> tuple[str, list[str]]:
        awaited = llm.generate_async("x", SamplingParams(max_tokens=12))
        streamed = llm.generate_async("x", SamplingParams(max_tokens=12), streaming=True)

        async def read() -> list[str]:
            return [output.outputs[0].text_diff async for output in streamed]

        done, pieces = await asyncio.gather(awaited, read())
        return done.outputs[0].text, pieces

    text, pieces = asyncio.run(main())
    assert text == "".join(pieces) == TEXT[:12]


def test_abort_frees_the_slot_and_ends_the_stream(llm: LLM, machine: Bench, gate: Gate) -> None:
    gate.shut()
    handle = llm.generate_async("x", LONG, streaming=True)
    gate.let(3)
    wait_until(lambda: len(handle.outputs[0].token_ids) == 9)
    handle.abort()
    gate.release()
    output = handle.result(10)
    assert output.outputs[0].finish_reason == "cancelled"
    assert output.outputs[0].token_ids == SCRIPT[: len(output.outputs[0].token_ids)]
    assert machine.session.free_slots == machine.session.pool.slots
    handle.abort()  # nothing happens now
    assert llm.generate("x", SamplingParams(max_tokens=2))


def test_a_reader_whose_event_loop_is_gone_stops_nobody(llm: LLM, gate: Gate) -> None:
    gate.shut()
    handle = llm.generate_async("x", LONG, streaming=True)

    async def leave() -> None:
        waiting = asyncio.ensure_future(handle.aresult())
        await asyncio.sleep(0.01)
        assert not waiting.done()

    asyncio.run(leave())
    gate.release()
    assert handle.result(10).outputs[0].finish_reason == "length"


def test_many_threads_share_one_llm(llm: LLM) -> None:
    texts: list[str] = []

    def work(count: int) -> None:
        for _ in range(5):
            output = llm.generate("x", SamplingParams(max_tokens=count), use_tqdm=False)
            assert isinstance(output, RequestOutput)
            texts.append(output.outputs[0].text)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(1, 7)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(texts) == sorted(TEXT[:n] for n in range(1, 7) for _ in range(5))


def test_a_failing_engine_reports_to_every_waiter_and_refuses_new_work(llm: LLM, machine: Bench, gate: Gate) -> None:
    gate.shut()
    handles = [llm.generate_async("x", LONG, streaming=streaming) for streaming in (True, False)]
    machine.session.decode = broken_decode  # type: ignore[method-assign, assignment]
    gate.release()
    for handle in handles:
        with pytest.raises(ZeroDivisionError):
            handle.result(10)
        with pytest.raises(ZeroDivisionError):
            list(handle)
    with pytest.raises(ZeroDivisionError):
        llm.generate("x")
    llm.shutdown()


@pytest.mark.parametrize("ending", ["failure", "shutdown"])
def test_a_request_that_the_engine_has_not_seen_yet_ends_with_the_loop(machine: Bench, gate: Gate, ending: str) -> None:
    llm = LLM.from_engine(machine.engine)
    gate.shut()
    first = llm.generate_async("x", LONG)
    wait_until(lambda: machine.engine.has_work)  # the engine's thread waits inside a step from now on
    unseen = llm.generate_async("x", LONG)
    closing = threading.Thread(target=llm.shutdown)
    if ending == "failure":
        machine.session.prefill = broken_decode  # type: ignore[method-assign, assignment]
    else:
        closing.start()
        wait_until(lambda: llm._loop._closing)
    gate.release()
    for handle in (first, unseen):
        if ending == "failure":
            with pytest.raises(ZeroDivisionError):
                handle.result(10)
        else:
            assert handle.result(10).outputs[0].finish_reason == "cancelled"
    llm.shutdown()


def broken_decode(rows: object) -> object:
    raise ZeroDivisionError


def test_shutdown_cancels_what_runs_and_refuses_what_comes(machine: Bench, gate: Gate) -> None:
    llm = LLM.from_engine(machine.engine)
    gate.shut()
    handle = llm.generate_async("x", LONG)
    closing = threading.Thread(target=llm.shutdown)
    closing.start()
    wait_until(lambda: llm._loop._closing)
    gate.release()
    closing.join()
    llm.shutdown()
    assert handle.result(1).outputs[0].finish_reason == "cancelled"
    with pytest.raises(ContractError, match="shut down"):
        llm.generate("x")


def test_an_llm_that_is_forgotten_stops_its_thread() -> None:
    llm = LLM.from_engine(bench().engine)
    thread = llm._loop._thread
    gone = weakref.ref(llm)
    del llm
    gc.collect()
    assert gone() is None
    thread.join(5)
    assert not thread.is_alive()


def test_a_wait_that_begins_after_the_news_does_not_block(llm: LLM) -> None:
    handle = llm.generate_async("x", SamplingParams(max_tokens=2))
    handle.result(10)

    async def late() -> None:
        await asyncio.wait_for(handle._wait(0), 5)

    asyncio.run(late())


def test_timeout_of_result(llm: LLM, gate: Gate) -> None:
    gate.shut()
    handle = llm.generate_async("x", LONG)
    with pytest.raises(TimeoutError, match="not finished"):
        handle.result(0.01)


def test_properties_and_counters(llm: LLM, machine: Bench) -> None:
    llm.generate("x", SamplingParams(max_tokens=9))
    assert llm.tokenizer is LETTERS and llm.max_seq_len == 64 and llm.geometry is machine.session.geometry
    assert not llm._loop._handles  # finished requests are forgotten
    stats = llm.stats()
    assert stats["output_tokens"] == 9 and stats["acceptance"] == {"4": 2}
