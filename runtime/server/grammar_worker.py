"""A program of its own that tries out whether a JSON schema compiles: bounded in time and memory, and expendable.

The compiler is native code that cannot be stopped, may need any amount of time and memory, and may crash. Here each
schema has a process: this one loads the compiler once and forks. Lines of JSON in: {"tokenizer"} first, then
{"job", "schema", "seconds"} or {"cancel": job}; one line {"job", "outcome", "message"} out for each job.
It ends, and all its children, when its input does.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import resource
import signal
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from typing import Any

OK, FAILED, TOO_LARGE, TOO_SLOW, CRASHED = "ok", "failed", "too large", "too slow", "crashed"
MAX_MESSAGE = 300
MAX_GRAMMAR_BYTES = 32 << 20
MEMORY_BYTES = 512 << 20  # of one compilation, beyond what the compiler occupies anyway
_SIGNALS = {-signal.SIGALRM: TOO_SLOW, -signal.SIGKILL: TOO_LARGE}
ANY_OBJECT = '{"type": "object"} '  # json_object's; with a blank at the end no client's schema is the same text
_INPUT, _OUTPUT = 0, 1
_PLACE = re.compile(r"(?:\[[\d:]+\] )?\S+\.(?:cc|h|cpp):\d+: ")


def describe_tokens(pieces: Sequence[bytes], vocab: int, end_ids: Sequence[int]) -> dict[str, Any]:
    """A tokenizer in JSON. pieces: the bytes of each id, at most vocab; b"" for one that is no text."""
    return {"pieces": [piece.decode("latin-1") for piece in pieces], "vocab": vocab, "end_ids": list(end_ids)}


def load_compiler(tokenizer: Mapping[str, Any]) -> Any:
    """The compiler for a tokenizer of `describe_tokens`. Raises ImportError where xgrammar is not installed."""
    import xgrammar

    pieces = [piece.encode("latin-1") for piece in tokenizer["pieces"]]
    tokens = xgrammar.TokenizerInfo(
        pieces,
        xgrammar.VocabType.RAW,
        vocab_size=tokenizer["vocab"],
        stop_token_ids=tokenizer["end_ids"],
        add_prefix_space=False,
    )
    return xgrammar.GrammarCompiler(tokens, max_threads=1, cache_enabled=False)


def compile_schema(compiler: Any, schema: str) -> Any:
    """The grammar of a JSON schema. Raises what xgrammar's C++ side throws."""
    return compiler.compile_json_schema(
        schema,
        strict_mode=schema != ANY_OBJECT,
        any_whitespace=False,  # a model that loops on blanks would never come to the end
    )


def reason(error: Exception) -> str:
    """What the compiler says, without the time and the place in its own source."""
    return " ".join(_PLACE.sub("", str(error)).split())[:MAX_MESSAGE]


class Worker:
    """The loop: reads commands, forks, reports."""

    def __init__(self) -> None:
        self._compiler: Any = None
        self._jobs: dict[int, tuple[ForkProcess, Connection]] = {}
        self._input = b""

    def run(self) -> None:
        """Until the input ends."""
        while self._read():
            for job, (process, answer) in list(self._jobs.items()):
                if not process.is_alive():
                    del self._jobs[job]
                    self._report(job, process, answer)
        for process, _ in self._jobs.values():
            process.kill()

    def _read(self) -> bool:
        """Wait for input or the end of a child, and do what is asked; False when the input has ended."""
        ready = wait([_INPUT, *(process.sentinel for process, _ in self._jobs.values())])
        if _INPUT not in ready:
            return True
        data = os.read(_INPUT, 1 << 16)
        *lines, self._input = (self._input + data).split(b"\n")
        for line in lines:
            self._command(json.loads(line))
        return bool(data)

    def _command(self, command: dict[str, Any]) -> None:
        if "tokenizer" in command:
            self._compiler = load_compiler(command["tokenizer"])
        elif "cancel" in command:
            known = self._jobs.get(command["cancel"])
            if known is not None:
                known[0].kill()
        else:
            context = multiprocessing.get_context("fork")  # nothing else runs in this process
            answer, sender = context.Pipe(duplex=False)
            arguments = (self._compiler, command["schema"], command["seconds"], sender)
            process = context.Process(target=_try, args=arguments, daemon=True)
            process.start()
            sender.close()
            self._jobs[command["job"]] = (process, answer)

    def _report(self, job: int, process: ForkProcess, answer: Connection) -> None:
        outcome, message = _SIGNALS.get(process.exitcode or 0, CRASHED), ""
        if process.exitcode == 0 and answer.poll():
            outcome, message = answer.recv()
        answer.close()
        process.close()
        line = json.dumps({"job": job, "outcome": outcome, "message": message})
        os.write(_OUTPUT, line.encode() + b"\n")


def _try(compiler: Any, schema: str, seconds: float, answer: Connection) -> None:
    """The child: compile and end. The alarm ends it in the middle of native code."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    outcome, message = OK, ""
    try:
        _limit_memory()
        if compile_schema(compiler, schema).memory_size_bytes > MAX_GRAMMAR_BYTES:
            outcome = TOO_LARGE
    except MemoryError:
        outcome = TOO_LARGE
    except Exception as error:
        message = reason(error)
        outcome = TOO_LARGE if "bad_alloc" in message else FAILED
    answer.send((outcome, message))


def _limit_memory() -> None:
    with open("/proc/self/statm", encoding="ascii") as file:
        used = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_BYTES, used + MEMORY_BYTES))


def main() -> None:
    """The program. Signals to its group are the server's to answer; this one ends with its input."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    Worker().run()
