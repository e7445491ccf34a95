"""Bundles of small checkpoints, and a stand-in for the library that runs them. Built once, TensorRT imported then."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.session.sessions import CHECKPOINTS
from trtllm_replayssm.manifest import read_manifest
from trtllm_replayssm.weights.checkpoint import Checkpoint

if TYPE_CHECKING:
    from tests.builders.fake_runtime import FakeTensorRt


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
