"""What a grammar, or anything else that forbids tokens, must offer so that drafted positions stay exact.

An implementation follows one choice: it has absorbed the tokens that the choice emitted, and is asked about positions
ahead of them, behind a prefix of drafts. Nothing drafted may leave a trace, whether it is accepted later or not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from trtllm_replayssm.errors import RequestError

Result = TypeVar("Result")


class LogitsMask(Protocol):
    """Which tokens may come next in one choice."""

    def allowed(self, drafted: Sequence[int]) -> NDArray[np.bool_] | None:
        """Allowed ids [V] bool after the emitted tokens and `drafted`, at least one of them True; None: all.

        None as well behind a drafted token that is itself forbidden: verification never gets there.
        """
        ...

    def accept(self, token: int) -> None:
        """The choice emitted a token."""
        ...

    def fork(self) -> LogitsMask:
        """A copy that goes on alone."""
        ...


class GuardedMask:
    """A caller's mask, held to its contract: whatever goes wrong in it is a RequestError of its own request."""

    def __init__(self, mask: LogitsMask) -> None:
        self._mask = mask

    def allowed(self, drafted: Sequence[int], vocab: int) -> NDArray[np.bool_] | None:
        """See `LogitsMask.allowed`; the answer is checked."""
        answer: object = _call("allowed", lambda: self._mask.allowed(drafted))
        if answer is None:
            return None
        if not isinstance(answer, np.ndarray) or answer.dtype != np.bool_ or answer.shape != (vocab,):
            kind = f"{answer.dtype} {list(answer.shape)}" if isinstance(answer, np.ndarray) else type(answer).__name__
            raise _error("allowed", f"an array [{vocab}] bool", kind)
        if not answer.any():
            raise _error("allowed", "at least one allowed token", "none")
        return answer

    def accept(self, token: int) -> None:
        """See `LogitsMask.accept`."""
        _call("accept", lambda: self._mask.accept(token))

    def fork(self) -> GuardedMask:
        """See `LogitsMask.fork`."""
        return GuardedMask(_call("fork", self._mask.fork))


def _call(method: str, action: Callable[[], Result]) -> Result:
    try:
        return action()
    except Exception as error:  # the mask is the caller's code
        raise _error(method, "no exception", f"{type(error).__name__}: {str(error)[:200]}") from error


def _error(method: str, expected: str, got: str) -> RequestError:
    return RequestError("sampling", "logits_mask", expected=f"{expected} from {method}()", got=got)
