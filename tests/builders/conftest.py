"""Bundles of small checkpoints, and a stand-in for the library that runs them. Built once, TensorRT imported then."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.session.sessions import CHECKPOINTS
from trtllm_replayssm.manifest import read_manifest
from trtllm_replayssm.runtime.session import torch_session
from trtllm_replayssm.runtime.session.capture import GraphPool, Recording
from trtllm_replayssm.runtime.session.tensorrt_ops import NativeStepOps
from trtllm_replayssm.runtime.session.torch_state_ops import StateOps
from trtllm_replayssm.weights.checkpoint import Checkpoint

if TYPE_CHECKING:
    from tests.builders.fake_runtime import FakeTensorRt
    from tests.builders.recording import RecordingPool


@pytest.fixture(scope="session", params=["qwen-dense", "nemotron-moe"])
def bundle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """(name of the checkpoint, a real build of it); what a test alters in it, it puts back."""
    from tests.builders.test_evaluated_sessions import options
    from trtllm_replayssm.builders.build import build
    from trtllm_replayssm.builders.sources import checkpoint_source

    path = tmp_path_factory.mktemp("bundles") / request.param
    with checkpoint_source(CHECKPOINTS / request.param, options()) as source:
        build(source.parameters, source.config, path, options())
    return request.param, path


@pytest.fixture
def library(bundle: tuple[str, Path], monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeTensorRt]:
    """In the place of TensorRT's runtime, for the bundle."""
    from tests.builders.bundles import trace_networks
    from tests.builders.fake_runtime import FakeTensorRt
    from tests.builders.test_evaluated_sessions import options
    from trtllm_replayssm.builders.parameters import CheckpointParameters

    name, path = bundle
    with Checkpoint.open(CHECKPOINTS / name) as checkpoint:
        traced = trace_networks(CheckpointParameters(checkpoint), options())
        fake = FakeTensorRt(path, read_manifest(path), traced)
        monkeypatch.setitem(sys.modules, "tensorrt_rtx", fake)
        yield fake


@pytest.fixture
def records(library: FakeTensorRt, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sessions record as on a GPU whose kernels serve the pools."""
    from tests.builders.recording import Event, RecordingPool, on_the_device

    def pool(
        device: torch.device, *, enabled: bool, recording: Recording, obstacle: Callable[[], str | None]
    ) -> RecordingPool | GraphPool:
        return RecordingPool(library.journal, recording, obstacle) if enabled else GraphPool(device, enabled=False)

    def noted(self: NativeStepOps, step: Any, context: Any, memory: Any, run: Any = NativeStepOps.run) -> None:
        library.journal.append(Event("run", step.op, 0, step.layer))
        on_the_device(run)(self, step, context, memory)

    monkeypatch.setattr(torch_session, "GraphPool", pool)
    monkeypatch.setattr(torch_session, "waits_for_nothing", lambda pools, native: True)
    monkeypatch.setattr(NativeStepOps, "run", noted)
    monkeypatch.setattr(StateOps, "commit", on_the_device(StateOps.commit))
