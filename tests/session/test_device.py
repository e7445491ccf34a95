"""Which devices a session and an engine take: the GPU that their threads launch kernels on, or none."""

from __future__ import annotations

import pytest
import torch

from trtllm_replayssm.errors import ConfigError
from trtllm_replayssm.runtime.llm import LLM
from trtllm_replayssm.runtime.session.device import usable_device


@pytest.fixture
def current(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of the thread's current GPU, of several."""
    number = [0]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: number[0])
    return number


def test_the_current_gpu_is_taken_by_either_name(current: list[int]) -> None:
    assert usable_device("cuda") == torch.device("cuda") and usable_device("cuda:0") == torch.device("cuda", 0)
    current[0] = 1  # as it is in the process of a rank
    assert usable_device("cuda:1") == torch.device("cuda", 1)


@pytest.mark.parametrize("name", ["cuda:1", "cuda:99"])
def test_another_gpu_than_the_current_one_is_refused(name: str, current: list[int]) -> None:
    with pytest.raises(ConfigError, match=f"device: expected cuda, which is cuda:0 here, got '{name}'.*VISIBLE"):
        usable_device(name)


def test_an_engine_wants_the_gpu_that_its_own_thread_begins_with(current: list[int]) -> None:
    current[0] = 1
    with pytest.raises(ConfigError, match=r"LLM: device: expected the first GPU.*, got cuda:1 as the current one"):
        LLM("nowhere", device="cuda")
