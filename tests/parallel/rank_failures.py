"""What tests of ranks that fail or hang expect of the rank that calls them."""

from __future__ import annotations

import time

import pytest

from trtllm_replayssm.errors import InvariantError
from trtllm_replayssm.runtime.session.shared_session import SharedSession


def assert_named_and_ended(shared: SharedSession, words: str, seconds: float) -> None:
    """A call fails with `words` within `seconds`, the next one because a process has ended; closes the session."""
    began = time.monotonic()
    try:
        with pytest.raises(InvariantError, match=words):
            shared.check_integrity()
        assert time.monotonic() - began < seconds
        with pytest.raises(InvariantError, match=r"rank \d.*its process has ended"):
            shared.allocate(1)
    finally:
        shared.close()
