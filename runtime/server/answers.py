"""JSON of large answers, made beside the event loop: scores of thousands of tokens take seconds to write."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

from pydantic import BaseModel

from trtllm_replayssm.runtime.llm import RequestOutput
from trtllm_replayssm.runtime.server.service import Service
from trtllm_replayssm.runtime.server.stream import Shell

Result = TypeVar("Result")
SMALL = 1000  # entries that the loop may write itself


def whole_json(shell: BaseModel, choices: Iterable[BaseModel]) -> str:
    """A response (with no choices yet) and its choices. One at a time, so that no call holds the interpreter long."""
    return Shell(shell).around(*(choice.model_dump_json() for choice in choices))


def entries(outputs: Iterable[RequestOutput], top: int | None) -> int:
    """About how many items the news of these outputs have in JSON. top: candidates of a token, None without scores."""
    each = 1 if top is None else 2 + top
    return sum(each * choice.length_diff for output in outputs for choice in output.outputs)


async def written(service: Service, size: int, write: Callable[[], Result]) -> Result:
    """What `write` returns; it runs in another thread when there are many entries."""
    return write() if size < SMALL else await service.answers.run(write)
