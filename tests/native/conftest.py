"""The native library for its tests: opened for those that call the C interface, found by the product in the others."""

from __future__ import annotations

import pytest

from tests.native import harness
from trtllm_replayssm.ops import _abi


@pytest.fixture(scope="session")
def library() -> _abi.Library:
    return _abi.Library(harness.LIBRARY)


@pytest.fixture
def installed_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """The product's operations call the library that is tested."""
    monkeypatch.setenv("REPLAYSSM_NATIVE_LIBRARY", str(harness.LIBRARY))
