"""The child process that renders one chat template: reads a JSON line per conversation, writes one per answer.

It ends with its input. Whatever a template does with memory or time ends here and not in the server: the address space
is limited, and a timer that counts the processor's time ends the process in the middle of a rendering.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import IO, Any

from jinja2 import Template

from trtllm_replayssm.runtime.text.sandbox import environment, render


def main(seconds: float, memory_bytes: int) -> None:
    """Serve until the input ends. First line: the template's source; then the variables of each rendering."""
    _limit_memory(memory_bytes)
    # Answers go to a descriptor of their own, so that nothing printed can be taken for one.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    lines = iter(sys.stdin.buffer.readline, b"")
    source = json.loads(next(lines))
    template: Template | None = None
    for line in lines:
        _timer(seconds)
        try:
            if template is None:  # compiling folds constant expressions, so it is bounded like rendering
                template = environment().from_string(source)
            answer: dict[str, Any] = {"text": render(template, json.loads(line))}
            data = json.dumps(answer).encode()
        except Exception as error:  # a template is a program: it can fail in any way
            data = json.dumps({"error": f"{type(error).__name__}: {error}"[:200]}).encode()
        _timer(0)
        _answer(answers, data)


def _limit_memory(memory_bytes: int) -> None:
    try:
        import resource
    except ImportError:  # not a POSIX system
        return
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))


def _timer(seconds: float) -> None:
    """Arm (0: disarm) the timer whose signal ends this process."""
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_PROF, seconds)


def _answer(answers: IO[bytes], data: bytes) -> None:
    answers.write(data + b"\n")
    answers.flush()
