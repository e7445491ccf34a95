"""What a grammar, or anything else that forbids tokens, must offer so that drafted positions stay exact.

An implementation follows one choice: it has absorbed the tokens that the choice emitted, and is asked about positions
ahead of them, behind a prefix of drafts. Nothing drafted may leave a trace, whether it is accepted later or not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


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
