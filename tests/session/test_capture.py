"""When work is recorded and when it is only called, over a stand-in for torch's CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from tests.session.sessions import open_session
from trtllm_replayssm.runtime.session.capture import GraphPool, Recording

GPU = torch.device("cuda")


class FakeStream:
    def __init__(self, device: Any = None) -> None:
        self.waited_for: list[Any] = []

    def wait_stream(self, other: Any) -> None:
        self.waited_for.append(other)


class FakeGraph:
    replays = 0

    def replay(self) -> None:
        self.replays += 1


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What happens, in order: "on", "off": another stream is current or no longer; "record", "recorded"."""
    events: list[str] = []

    @contextmanager
    def noted(begin: str, end: str) -> Iterator[None]:
        events.append(begin)
        yield
        events.append(end)

    current = FakeStream()
    monkeypatch.setattr(torch.cuda, "Stream", FakeStream)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: object())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: noted("on", "off"))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", FakeGraph)
    monkeypatch.setattr(torch.cuda, "graph", lambda graph, **options: noted("record", "recorded"))
    return events


def work(log: list[str], recording: Recording) -> Callable[[], int]:
    def run() -> int:
        log.append("work" if recording.active else "call")
        return 7

    return run


def test_work_is_warmed_up_asked_about_and_recorded_once(log: list[str]) -> None:
    def nothing() -> None:
        log.append("ask")

    recording = Recording()
    pool = GraphPool(GPU, recording=recording, obstacle=nothing)
    replay = pool.captured(work(log, recording))
    assert log == ["on", "work", "work", "ask", "off", "record", "work", "recorded"]
    assert (replay(), pool.count, recording.active) == (7, 1, False) and len(log) == 8


def test_an_obstacle_leaves_all_work_to_be_called_and_is_told_once(
    log: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    recording = Recording()
    pool = GraphPool(GPU, recording=recording, obstacle=lambda: "engine 3 allocates")
    one = pool.captured(work(log, recording))
    assert log == ["on", "work", "work", "off"]
    other = pool.captured(work(log, recording))
    assert (one(), other()) == (7, 7) and log[4:] == ["call", "call"]
    assert [record.message for record in caplog.records] == [
        "steps are launched one operation after another, not replayed: engine 3 allocates"
    ]
    assert (pool.count, pool.records, recording.active) == (0, False, False)


def test_work_that_fails_leaves_nothing_recording(log: list[str]) -> None:
    recording = Recording()
    pool = GraphPool(GPU, recording=recording)
    with pytest.raises(ZeroDivisionError):
        pool.captured(lambda: 1 // 0)
    assert not recording.active and pool.count == 0


@pytest.mark.parametrize(("device", "enabled"), [("cpu", True), ("cuda", False)])
def test_nothing_is_recorded_without_a_gpu_or_when_it_is_not_wanted(device: str, enabled: bool, log: list[str]) -> None:
    pool = GraphPool(torch.device(device), enabled=enabled)
    run = work(log, Recording())
    assert pool.captured(run) is run and not log


@pytest.mark.parametrize("name", ["nemotron-dense", "nemotron-moe", "qwen-dense", "qwen-moe"])
def test_routed_experts_without_kernels_are_an_obstacle(name: str) -> None:
    """They read on the host which experts were chosen, which ends a recording with an error."""
    obstacle = open_session(name)._model.network.obstacle()
    assert obstacle is None if name.endswith("dense") else obstacle is not None and "experts" in obstacle
