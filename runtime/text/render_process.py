"""Renders chat templates in a child process, because a template is a program that comes with a checkpoint.

Inside a process nothing can stop `'x' * 10 ** 9` or loops in loops. The child may take so much memory and processor
time for one rendering; one that takes more ends, and the next rendering gets a new child.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping
from typing import Any

from trtllm_replayssm.errors import RequestError

SECONDS = 5.0
MEMORY_BYTES = 1 << 30  # of address space; the longest text takes less than half of it
_START = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from trtllm_replayssm.runtime.text.render_worker import main; main(float(sys.argv[2]), int(sys.argv[3]))"
)


class RenderProcess:
    """One template's child; it starts with the first rendering and ends with this object. Safe in any thread."""

    def __init__(self, source: str, *, seconds: float = SECONDS, memory_bytes: int = MEMORY_BYTES) -> None:
        """source: Jinja. seconds, memory_bytes: of one rendering at most; they act on POSIX systems."""
        self._source = source
        self._seconds = seconds
        self._memory_bytes = memory_bytes
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None
        self._opening = b""  # what a new child reads first
        self._closer: weakref.finalize[..., RenderProcess] | None = None

    def render(self, variables: Mapping[str, Any]) -> str:
        """The text for these variables, which must be JSON. Raises RequestError, whatever fails."""
        try:
            line = json.dumps(variables).encode() + b"\n"
        except (ValueError, TypeError, RecursionError) as error:
            raise _refused(f"{type(error).__name__}: {error}"[:200]) from error
        with self._lock:
            answer = self._ask(line)
        if answer is None:
            limits = f"{self._seconds:g} s and {self._memory_bytes >> 20} MiB"
            raise _refused("a rendering that ended early", expected=f"a rendering within {limits}")
        if "error" in answer:
            raise _refused(answer["error"])
        return str(answer["text"])

    def _ask(self, line: bytes) -> dict[str, Any] | None:
        """The child's answer, None when it ended instead."""
        if self._child is None or self._child.poll() is not None:
            self._start()
        child = self._child
        assert child is not None and child.stdin is not None and child.stdout is not None, "started, with pipes"
        try:
            child.stdin.write(self._opening + line)
            child.stdin.flush()
            self._opening = b""
            data = child.stdout.readline()
        except OSError:  # it ended before it had read everything
            data = b""
        if data.endswith(b"\n"):
            return dict(json.loads(data))
        self._stop()
        return None

    def _start(self) -> None:
        self._stop()
        arguments = (json.dumps(sys.path), str(self._seconds), str(self._memory_bytes))
        self._child = subprocess.Popen(
            [sys.executable, "-c", _START, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            start_new_session=True,  # signals of the terminal are the server's business
        )  # fmt: skip
        self._closer = weakref.finalize(self, _end, self._child)
        self._opening = json.dumps(self._source).encode() + b"\n"

    def _stop(self) -> None:
        if self._closer is not None:
            self._closer()
        self._child = self._closer = None


def _end(child: subprocess.Popen[bytes]) -> None:
    child.kill()
    for pipe in (child.stdin, child.stdout):
        if pipe is not None:
            try:
                pipe.close()
            except OSError:  # bytes that the child no longer reads
                continue
    child.wait()


def _refused(got: str, *, expected: str = "messages that the model's template accepts") -> RequestError:
    return RequestError("chat template", "messages", expected=expected, got=got)
