"""The server's side of `grammar_worker`: starts it, hands it schemas, and says what became of each."""

from __future__ import annotations

import json
import queue
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import IO, Any

from trtllm_replayssm.errors import RequestError
from trtllm_replayssm.runtime.server.errors import GenerationError
from trtllm_replayssm.runtime.server.grammar_worker import CRASHED, FAILED, OK, TOO_LARGE, TOO_SLOW
from trtllm_replayssm.runtime.server.run import STOPPED

_Lines = queue.SimpleQueue[bytes | None]
START_SECONDS = 60.0  # to load the compiler, on a machine that is busy
_PROGRAM = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1])\n"
    "from trtllm_replayssm.runtime.server.grammar_worker import main; main()"
)


@dataclass(slots=True)
class Trial:
    """One schema on trial. outcome: None until it is known."""

    job: int
    outcome: str | None = None
    message: str = ""
    done: threading.Event = field(default_factory=threading.Event)


class Trials:
    """Tries schemas out in another process, which it starts when needed. Safe in any thread."""

    def __init__(self, tokenizer: Mapping[str, Any], seconds: float) -> None:
        """tokenizer: of `describe_tokens`. seconds: for one schema."""
        self._tokenizer = tokenizer
        self._seconds = seconds
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._lines: _Lines = queue.SimpleQueue()  # for that process; None: no more
        self._trials: dict[int, tuple[Trial, subprocess.Popen[bytes]]] = {}
        self._serial = 0
        self._closed = False

    def start(self) -> None:
        """Start the process, so that the first schema need not wait for it."""
        with self._lock:
            self._running()

    def submit(self, schema: str) -> Trial:
        """Put a schema on trial. Raises GenerationError (503) when that is not possible."""
        with self._lock:
            process = self._running()
            trial = Trial(self._serial)
            self._serial += 1
            self._trials[trial.job] = (trial, process)
            self._say({"job": trial.job, "schema": schema, "seconds": self._seconds})
        return trial

    def wait(self, trial: Trial) -> None:
        """Block until a schema is known to compile. Raises RequestError when it does not, GenerationError (503)."""
        if not trial.done.wait(START_SECONDS + self._seconds):
            self._end()
        refused = {
            FAILED: ("a JSON schema that compiles", trial.message),
            TOO_SLOW: (f"a JSON schema that compiles within {self._seconds:g} s", "one that takes longer"),
            TOO_LARGE: ("a JSON schema of a moderate grammar", "one that takes too much memory"),
            CRASHED: ("a JSON schema that compiles", "one that the compiler cannot take"),
        }
        if trial.outcome in refused:
            expected, got = refused[trial.outcome]
            raise RequestError("request", "response_format", expected=expected, got=got)
        if trial.outcome != OK:
            raise GenerationError("the schema could not be tried out", status=503)

    def cancel(self, trial: Trial) -> None:
        """Nobody waits for a schema any more: end its trial."""
        with self._lock:
            if not trial.done.is_set():
                self._say({"cancel": trial.job})

    def close(self) -> None:
        """End the process and every trial; none starts after this."""
        with self._lock:
            self._closed = True
        self._end()

    def _end(self) -> None:
        """Its input ends, and so it ends its children and itself; `_listen` sees to the rest."""
        with self._lock:
            self._process = None
            self._lines.put(None)

    def _running(self) -> subprocess.Popen[bytes]:
        if self._closed:
            raise GenerationError(STOPPED, status=503)
        if self._process is None or self._process.poll() is not None:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _PROGRAM, json.dumps(sys.path)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip
            self._lines.put(None)
            self._lines = queue.SimpleQueue()
            for work, arguments in ((self._listen, (self._process,)), (_write, (self._process, self._lines))):
                threading.Thread(target=work, args=arguments, name="replayssm-schemas", daemon=True).start()
            self._say({"tokenizer": self._tokenizer})
        return self._process

    def _say(self, line: dict[str, object]) -> None:
        """Never blocks: the process may be busy with something else than its input."""
        self._lines.put(json.dumps(line).encode() + b"\n")

    def _listen(self, process: subprocess.Popen[bytes]) -> None:
        """Until the process ends; then whatever it had on trial has ended too."""
        assert process.stdout is not None, "opened with a pipe"
        output: IO[bytes] = process.stdout
        for line in output:
            answer = json.loads(line)
            self._settle(answer["job"], answer["outcome"], answer["message"])
        process.kill()  # if it closed its output for another reason
        process.wait()
        with self._lock:
            left = [job for job, (_, where) in self._trials.items() if where is process]
        for job in left:
            self._settle(job, None, "")

    def _settle(self, job: int, outcome: str | None, message: str) -> None:
        with self._lock:
            known = self._trials.pop(job, None)
        if known is not None:
            known[0].outcome, known[0].message = outcome, message
            known[0].done.set()


def _write(process: subprocess.Popen[bytes], lines: _Lines) -> None:
    """Hand on lines until there are no more, or the process has ended, which `_listen` sees."""
    assert process.stdin is not None, "opened with a pipe"
    with suppress(OSError):
        while (line := lines.get()) is not None:
            process.stdin.write(line)
            process.stdin.flush()
        process.stdin.close()
