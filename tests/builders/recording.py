"""A stand-in for CUDA graphs on a CPU: work that is "recorded" is watched, and so is each of its replays.

Recording and replays must enqueue the same engines with the same contexts, shapes and addresses in the same order, tell
no context anything, and do nothing for which the host would wait for a device. No test here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes as disable_current_modes

from trtllm_replayssm.runtime.session.capture import Recording

Result = TypeVar("Result")
WAITING = {"_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_dim", "equal", "is_nonzero"}
MADE_ON_THE_HOST = {"lift_fresh"}  # torch.tensor(...): sent with a copy that waits


@dataclass(frozen=True)
class Event:
    """what: "tell" or "enqueue", of an engine's context; "run", of a native operation.

    detail: a shape or address; all that the context knows; the operation's layer.
    """

    what: str
    name: str
    context: int
    detail: object


class WaitedError(AssertionError):
    """The host would have waited for the device, or sent it memory that is not pinned."""


class NoWaiting(TorchDispatchMode):
    """Raises at an operation for which the host waits when its tensors are on a GPU."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in WAITING | MADE_ON_THE_HOST or (name.startswith("index") and _by_mask(args)):
            raise WaitedError(str(func))
        return func(*args, **(kwargs or {}))


def _by_mask(args: Any) -> bool:
    """An index that is a mask: its length is not known before it is counted."""
    indices = args[1] if len(args) > 1 and isinstance(args[1], (list, tuple)) else ()
    return any(isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8) for index in indices)


class RecordingPool:
    """In the place of `session.capture.GraphPool`. journal: what the library's stand-in writes."""

    def __init__(
        self, journal: list[Event], recording: Recording, obstacle: Callable[[], str | None] = lambda: None
    ) -> None:
        self.records = True
        self._recording = recording
        self.recorded: list[list[Event]] = []
        self.replays = 0
        self._journal = journal
        self._obstacle = obstacle

    @property
    def count(self) -> int:
        return len(self.recorded)

    def captured(self, work: Callable[[], Result], warm_ups: int = 2) -> Callable[[], Result]:
        self._recording.active = True
        with torch.inference_mode():
            for _ in range(warm_ups):
                work()
        assert self._obstacle() is None
        _, events = self._watched(work)
        self._recording.active = False
        self.recorded.append(events)

        def replay() -> Result:
            result, again = self._watched(work, recorded=True)
            assert again == events
            self.replays += 1
            return result

        return replay

    def _watched(self, work: Callable[[], Result], *, recorded: bool = False) -> tuple[Result, list[Event]]:
        """recorded: a real replay calls nothing; this one asks for the contexts that the recording had."""
        begin, before = len(self._journal), self._recording.active
        self._recording.active = before or recorded
        with torch.inference_mode(), NoWaiting():
            result = work()
        self._recording.active = before
        events = self._journal[begin:]
        assert all(event.what != "tell" for event in events), "recorded work binds nothing"
        return result, events


def on_the_device(function: Callable[..., Result]) -> Callable[..., Result]:
    """A reference operation that stands for a kernel: what it does is not the host's."""

    def run(*args: Any, **kwargs: Any) -> Result:
        with disable_current_modes():
            return function(*args, **kwargs)

    return run
