"""What the host does for a decode step, in ms of CPU time, beside a device that computes nothing.

    python -m tests.tools.host_step [--rows 256] [--way stream] [--emitted 1] [--tokens 512] [--ms 0] [--stop] [--parts]

way: engine (its steps alone), whole (LLM.generate), stream (LLM.generate_async, each handle iterated over in one event
loop), server (streams of /v1/completions over HTTP; the clients are a process of their own). --emitted 1,4,2: tokens
of a row's steps, in turn. --ms: what a step takes on the device; then `step` shows what a step takes altogether, and
`late` the share of launches that found the device without work. `seen`: outputs that readers took a step and row; a
reader that comes late takes two in one, so that only with enough --ms its thread's time is that of every step's output.
--switch: ms after which a thread that computes lets another one. --parts: CPU time of the engine's thread by part.
`gc`: the collector's part of all threads.

CPU time of a thread hardly depends on what else the machine does; `step`, `late` and `seen` do.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import numpy as np

from tests.paths import EXAMPLES
from tests.runtime.harness import Bench, bench
from tests.runtime.idle_steps import IdleSteps
from trtllm_replayssm.runtime.handle import _Reader
from trtllm_replayssm.runtime.llm import LLM, RequestOutput, SamplingParams
from trtllm_replayssm.runtime.text.tokenizer import load_tokenizer

VOCAB = 8192
SOURCE = (
    "The state of a recurrent layer is read once a step and written once a window; what a step adds is kept as a short "
    "list of records beside it. Prices rose by 3.5 % (2024: 17,250 €), 日本 and naïve café; def f(x): return x\n"
)
PROMPT = 128
QWEN = EXAMPLES / "qwen3_5-tiny-nvfp4"


def machine(options: argparse.Namespace, steps: IdleSteps) -> Bench:
    """An engine of as many slots as rows."""
    idle = np.zeros(VOCAB, np.float32)
    return bench(
        model=lambda tokens: idle, vocab=VOCAB, eos_ids=(), slots=options.rows, draft_len=max(steps.max_draft_len, 1),
        max_seq_len=PROMPT + options.tokens, tokenizer=load_tokenizer(QWEN), ahead=True, steps=steps, debug=False,
        max_num_tokens=options.rows * (PROMPT + 1 + steps.max_draft_len),
    )  # fmt: skip


def settings(options: argparse.Namespace) -> dict[str, Any]:
    """Of every request."""
    chosen: dict[str, Any] = {"max_tokens": options.tokens, "temperature": 0.8 if options.sampled else 0.0}
    return chosen | ({"stop": ["no such text", "\n\nHuman:"]} if options.stop else {})


class Watch:
    """CPU time of threads between the moments at which all rows have begun and the first one is about to end."""

    def __init__(self, engine: Any, threads: dict[str, Callable[[], float]]) -> None:
        self._engine, self._threads, self._seen = engine, threads, 0
        self._collected = self._began = 0.0
        gc.callbacks.append(self._collects)

    def _collects(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._began = time.thread_time()
        else:
            self._collected += time.thread_time() - self._began

    def read(self) -> tuple[int, float, dict[str, float]]:
        return self._engine.stats.steps, time.perf_counter(), {name: cpu() for name, cpu in self._threads.items()}

    def run(self, options: argparse.Namespace, steps: IdleSteps) -> dict[str, float]:
        """ms a step, over half of the steps behind the first one of all rows."""
        while self._engine.stats.output_tokens < 4 * options.rows or self._engine.load().running < options.rows:
            time.sleep(0.002)
        begin, late = self.read(), self._engine.stats.late_launches
        seen, collected = self._seen, self._collected
        while self._engine.stats.steps < begin[0] + options.tokens // (1 + steps.max_draft_len) // 2:
            time.sleep(0.002)
        end = self.read()
        count = end[0] - begin[0]
        found = {name: 1e3 * (end[2][name] - begin[2][name]) / count for name in self._threads}
        return {
            **found, "step": 1e3 * (end[1] - begin[1]) / count,
            "late": (self._engine.stats.late_launches - late) / count,
            "seen": (self._seen - seen) / count / options.rows, "gc": 1e3 * (self._collected - collected) / count,
        }  # fmt: skip

    def count(self) -> None:
        """From now on count outputs that readers take."""
        take = _Reader.take

        def counted(reader: _Reader) -> RequestOutput:
            self._seen += 1
            return take(reader)

        _Reader.take = counted  # type: ignore[method-assign]


def cpu_of(thread: threading.Thread) -> Callable[[], float]:
    """Its CPU time in seconds."""
    assert thread.ident is not None, "it runs"
    clock = time.pthread_getcpuclockid(thread.ident)
    return lambda: time.clock_gettime(clock)


def thread(name: str) -> threading.Thread:
    return next(t for t in threading.enumerate() if t.name == name)


def run_engine(options: argparse.Namespace, steps: IdleSteps) -> dict[str, float]:
    driver = machine(options, steps)
    for i in range(options.rows):
        driver.add([1 + i % 9] * PROMPT, **settings(options), seed=i)
    first, last = span(options, steps)
    while driver.engine.stats.steps < first:
        driver.step()
    watch = Watch(driver.engine, {"engine": time.thread_time})
    begin = watch.read()
    while driver.engine.stats.steps < last:
        driver.step()
    end = watch.read()
    return {"engine": 1e3 * (end[2]["engine"] - begin[2]["engine"]) / (end[0] - begin[0])}


def run_llm(options: argparse.Namespace, steps: IdleSteps, *, streaming: bool) -> dict[str, float]:
    driver = machine(options, steps)
    with LLM.from_engine(driver.engine) as llm:

        async def client(i: int) -> None:
            handle = llm.generate_async(
                [1 + i % 9] * PROMPT, SamplingParams(**settings(options), seed=i), streaming=streaming
            )
            if not streaming:
                await handle.aresult()
                return
            async for output in handle:
                assert output.outputs[0].text_diff is not None

        async def clients() -> None:
            await asyncio.gather(*(client(i) for i in range(options.rows)))

        reader = threading.Thread(target=lambda: asyncio.run(clients()), name="readers")
        reader.start()
        watch = Watch(llm._engine, {"engine": cpu_of(thread("replayssm-engine")), "loop": cpu_of(reader)})
        watch.count()
        found = watch.run(options, steps)
        reader.join()
    return found


def run_server(options: argparse.Namespace, steps: IdleSteps) -> dict[str, float]:
    from tests.server.harness import NAME, live, service  # libraries that the other ways do not need
    from trtllm_replayssm.runtime.server.serve import spare_the_collector

    driver = machine(options, steps)
    spare_the_collector()
    with LLM.from_engine(driver.engine) as llm, live(service(llm, max_queue_size=options.rows)) as url:
        body = json.dumps({"model": NAME, "prompt": [1] * PROMPT, "stream": True, **settings(options)})
        loop = next(t for t in threading.enumerate() if "run" in t.name)
        watch = Watch(llm._engine, {"engine": cpu_of(thread("replayssm-engine")), "loop": cpu_of(loop)})
        watch.count()
        reader = subprocess.Popen(
            [sys.executable, "-m", "tests.tools.host_step", "--read", url.rpartition(":")[2], "--rows",
             str(options.rows)], stdin=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert reader.stdin is not None
        reader.stdin.write(body)
        reader.stdin.close()
        found = watch.run(options, steps)
        reader.wait()
    return found


def read(port: int, rows: int) -> None:
    """As many clients, which read to the end and look at nothing."""
    import selectors

    body = sys.stdin.read().encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {len(body)}\r\n\r\n"
    select = selectors.DefaultSelector()
    for _ in range(rows):
        connection = socket.create_connection(("127.0.0.1", port))
        connection.sendall(head.encode() + body)
        select.register(connection, selectors.EVENT_READ)
    while select.get_map():
        for key, _ in select.select():
            if not key.fileobj.recv(1 << 16):  # type: ignore[union-attr]
                select.unregister(key.fileobj)
        time.sleep(0.005)


def span(options: argparse.Namespace, steps: IdleSteps) -> tuple[int, int]:
    """Numbers of the steps between which all rows decode."""
    whole = options.tokens // (1 + steps.max_draft_len)
    return 8, whole - 8


@contextmanager
def parts(found: Counter[str]) -> Iterator[None]:
    """Time of named methods without that of others among them, in `found`, in seconds."""
    from trtllm_replayssm.runtime import loop
    from trtllm_replayssm.runtime.device_loop import DeviceLoop
    from trtllm_replayssm.runtime.engine import Engine
    from trtllm_replayssm.runtime.handle import RequestHandle
    from trtllm_replayssm.runtime.scheduler.output import OutputBuffer
    from trtllm_replayssm.runtime.scheduler.scheduler import Scheduler
    from trtllm_replayssm.runtime.text.detokenizer import Detokenizer
    from trtllm_replayssm.runtime.text.stops import StopMatcher
    from trtllm_replayssm.runtime.traffic_meter import TrafficMeter

    open_parts: list[float] = []

    def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def call(*args: Any, **more: Any) -> Any:
            begin = time.thread_time()
            open_parts.append(0.0)
            try:
                return function(*args, **more)
            finally:
                spent = time.thread_time() - begin
                found[name] += spent - open_parts.pop()
                if open_parts:
                    open_parts[-1] += spent

        return call

    targets: list[tuple[Any, str, str]] = [
        (Scheduler, "plan", "plan"), (Engine, "_admit", "admit"), (IdleSteps, "launch", "(device)"),
        (IdleSteps, "read", "(device)"), (DeviceLoop, "advance", "rows"), (Detokenizer, "push", "text"),
        (StopMatcher, "push", "stops"), (OutputBuffer, "push", "output"), (TrafficMeter, "decode_row", "traffic"),
        (loop, "request_output", "values"), (RequestHandle, "publish", "publish"), (Engine, "step", "step"),
        (loop.EngineLoop, "_turn", "loop"),
    ]  # fmt: skip
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in targets]
    for owner, name, part in targets:
        setattr(owner, name, timed(part, getattr(owner, name)))
    try:
        yield
    finally:
        for owner, name, function in before:
            setattr(owner, name, function)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--way", choices=("engine", "whole", "stream", "server"), default="stream")
    parser.add_argument("--emitted", default="1")
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--ms", type=float, default=0.0)
    parser.add_argument("--stop", action="store_true")
    parser.add_argument("--sampled", action="store_true")
    parser.add_argument("--parts", action="store_true")
    parser.add_argument("--switch", type=float, default=5.0)
    parser.add_argument("--read", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.read is not None:
        return read(options.read, options.rows)
    sys.setswitchinterval(options.switch / 1e3)
    text = load_tokenizer(QWEN).encode(SOURCE, add_special_tokens=False)
    steps = IdleSteps(text, emitted=[int(n) for n in options.emitted.split(",")], seconds=options.ms / 1e3, yields=6)
    ways: dict[str, Callable[[], dict[str, float]]] = {
        "engine": lambda: run_engine(options, steps), "server": lambda: run_server(options, steps),
        "whole": lambda: run_llm(options, steps, streaming=False),
        "stream": lambda: run_llm(options, steps, streaming=True),
    }  # fmt: skip
    spent: Counter[str] = Counter()
    if options.parts:
        with parts(spent):
            found = ways[options.way]()
    else:
        found = ways[options.way]()
    line = f"{options.way} rows {options.rows} emitted {options.emitted} tokens {options.tokens} "
    print(line + " ".join(f"{name} {value:.2f}" for name, value in found.items()))
    for name, seconds in spent.most_common():
        print(f"  {name:10} {1e3 * seconds / steps._launches:.3f}")


if __name__ == "__main__":
    main()
