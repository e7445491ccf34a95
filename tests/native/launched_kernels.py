"""A pytest plugin: which kernels of the native library each test launches, by torch's profiler, a JSON line a test.

`python -m tests.native.sanitized` uses it while it records; the file is named by REPLAYSSM_LAUNCHED_KERNELS.
"""

from __future__ import annotations

import json
import os
from collections.abc import Generator

import pytest

NAMESPACE = "replayssm"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None]:
    """Profile the test itself."""
    import torch

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        result = yield
        torch.cuda.synchronize()
    names = {event.name() for event in profiler.profiler.kineto_results.events() if NAMESPACE in event.name()}
    with open(os.environ["REPLAYSSM_LAUNCHED_KERNELS"], "a", encoding="utf-8") as lines:
        lines.write(json.dumps({"test": item.nodeid, "kernels": sorted(names)}) + "\n")
    return result
