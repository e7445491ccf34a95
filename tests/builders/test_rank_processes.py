"""A bundle of two ranks loaded as a user loads it: processes, gloo between them, a stand-in for TensorRT in each."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("tensorrt_rtx", reason="needs the wheels of tensorrt-rtx-cu13")

from tests.builders.bundles import trace_networks
from tests.builders.fake_runtime import FakeTensorRt
from tests.builders.test_evaluated_sessions import FLOAT32, REPLAY, assert_close, drive, options
from tests.session.sessions import CHECKPOINTS
from tests.tolerance import LOGIT_NOISE
from trtllm_replayssm.builders.build_ranks import build_ranks
from trtllm_replayssm.builders.parameters import CheckpointParameters
from trtllm_replayssm.builders.sources import checkpoint_source
from trtllm_replayssm.bundle_parts import bundle_parts, read_parts
from trtllm_replayssm.config import PoolConfig
from trtllm_replayssm.errors import ConfigError, DeviceError, EngineMismatchError, UnsupportedError
from trtllm_replayssm.manifest import read_manifest
from trtllm_replayssm.runtime import bundle as bundles
from trtllm_replayssm.runtime.checkpoint_session import shared_session
from trtllm_replayssm.runtime.llm import LLM, NGramDecodingConfig, SamplingParams
from trtllm_replayssm.runtime.session import tensorrt_engines
from trtllm_replayssm.runtime.session.base import DecodeRow, Session
from trtllm_replayssm.runtime.session.ranks import ProcessRanks, Ranks
from trtllm_replayssm.runtime.session.shared_session import SharedSession
from trtllm_replayssm.runtime.session.tensorrt_kernels import KernelCache
from trtllm_replayssm.runtime.session.torch_session import TorchSession
from trtllm_replayssm.weights.checkpoint import Checkpoint
from trtllm_replayssm.weights.tensor_parallel import TensorParallel

pytestmark = pytest.mark.timeout(240)
NAME = "qwen-moe"
SHARED = replace(options(), tp_size=2)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real build of both ranks."""
    path = tmp_path_factory.mktemp("ranks") / "bundle"
    with checkpoint_source(CHECKPOINTS / NAME, SHARED) as source:
        build_ranks(source.parameters, source.config, path, SHARED, ranks=(0, 1))
    return path


def stand_in(part: Path, parallel: TensorParallel) -> FakeTensorRt:
    """A library that takes the engine files of one rank and evaluates its networks."""
    with Checkpoint.open(CHECKPOINTS / NAME) as checkpoint:
        wanted = replace(SHARED, tp_rank=parallel.rank)
        traced = trace_networks(CheckpointParameters(checkpoint), wanted)
        return FakeTensorRt(part, read_manifest(part), traced)


def rank_over_stand_in(parts: tuple[Path, ...], ranks: Ranks, *, kernel_cache: Path | None = None) -> Session:
    """One rank's session in its process."""
    before = sys.modules["tensorrt_rtx"]
    sys.modules["tensorrt_rtx"] = stand_in(parts[ranks.parallel.rank], ranks.parallel)  # type: ignore[assignment]
    try:
        return bundles.rank_bundle_session(
            parts, ranks, slots=4, device="cpu", plugin_library=None, kernel_cache=kernel_cache, cuda_graphs=None
        )
    finally:
        sys.modules["tensorrt_rtx"] = before


@pytest.fixture
def session(bundle: Path, tmp_path: Path) -> Iterator[SharedSession]:
    (_, manifest), _ = read_parts(bundle)
    make = partial(rank_over_stand_in, bundle_parts(bundle), kernel_cache=tmp_path / "kernels")
    made = shared_session(make, 2, "cpu", manifest.geometry)
    assert isinstance(made, SharedSession)
    yield made
    made.close()


def test_two_processes_compute_what_the_torch_session_does(session: SharedSession, tmp_path: Path) -> None:
    with Checkpoint.open(CHECKPOINTS / NAME) as checkpoint:
        theirs = TorchSession.from_checkpoint(
            checkpoint, REPLAY, PoolConfig(slots=4, max_seq_len=160, activation=FLOAT32)
        )
        assert_close(drive(session), drive(theirs))  # type: ignore[arg-type]
        assert session.cursors(1) == theirs.cursors(1)
    session.warm_up()
    assert {path.name for path in tmp_path.iterdir()} == {"kernels.rank0", "kernels.rank1"}, "each compiles its own"
    snapshot = session.save(1)
    assert {name.partition("/")[0] for name in snapshot.arrays()} == {"0", "1"}
    copy = session.restore(snapshot)
    answers = []
    for slot in (1, copy):
        answers += session.decode([DecodeRow(slot, [3, 4])])
        session.commit([0])
    np.testing.assert_allclose(answers[0], answers[1], atol=LOGIT_NOISE, rtol=0)  # steps of three and of four rows


def test_llm_writes_the_text_of_the_checkpoint(
    bundle: Path, session: SharedSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bundles, "bundle_session", lambda *_: session)
    params, prompt = SamplingParams(max_tokens=12, temperature=0.0, detokenize=False), [1, 2, 3, 4, 5]
    texts = []
    with LLM(bundle, speculative_config=NGramDecodingConfig(max_draft_len=3)) as llm:
        texts.append(list(llm.generate(prompt, params).outputs[0].token_ids))  # type: ignore[union-attr]
    with LLM(CHECKPOINTS / NAME, replay_config=REPLAY, max_seq_len=160) as llm:
        texts.append(list(llm.generate(prompt, params).outputs[0].token_ids))  # type: ignore[union-attr]
    assert texts[0] == texts[1] and len(texts[0]) == 12


def test_a_rank_that_cannot_load_its_part_is_named_and_leaves_no_process(bundle: Path) -> None:
    swapped = partial(rank_over_stand_in, tuple(reversed(bundle_parts(bundle))))
    (_, manifest), _ = read_parts(bundle)
    with pytest.raises((ConfigError, EngineMismatchError), match=r"engines of rank [01] of 2"):
        shared_session(swapped, 2, "cpu", manifest.geometry)
    assert not torch.distributed.is_initialized()


class Context:
    """An execution context of `tensorrt` that takes or refuses a communicator."""

    def __init__(self, takes: bool, given: list[Any]) -> None:
        self._takes, self._given = takes, given

    def set_optimization_profile_async(self, profile: int, stream: int) -> bool:
        return True

    def set_device_memory(self, address: int, size: int) -> None:
        pass

    def set_communicator(self, communicator: Any) -> bool:
        self._given.append(communicator)
        return self._takes

    def execute_async_v3(self, stream: int) -> bool:
        return bool(self._given)  # collective layers need it


def library(takes: bool, given: list[Any]) -> SimpleNamespace:
    """The module `tensorrt` with one engine."""
    engine = SimpleNamespace(device_memory_size_v2=16, create_execution_context=lambda _: Context(takes, given))
    return SimpleNamespace(
        ILogger=type("ILogger", (), {}), Runtime=lambda _: SimpleNamespace(deserialize_cuda_engine=lambda _: engine),
        ExecutionContextAllocationStrategy=SimpleNamespace(USER_MANAGED=0), __name__="tensorrt",
        get_plugin_registry=lambda: SimpleNamespace(load_library=lambda _: True),
    )  # fmt: skip


@pytest.mark.parametrize("takes", [True, False])
def test_engines_with_collective_layers_are_given_the_communicator_once_a_context(
    takes: bool, bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[Any] = []
    monkeypatch.setattr(tensorrt_engines, "_library", lambda _: library(takes, given))
    manifest = read_manifest(bundle / "rank0")
    manifest = replace(manifest, build=replace(manifest.build, flavour="tensorrt"))
    engines = tensorrt_engines.TensorRtEngines(
        bundle / "rank0", manifest, torch.device("cpu"), KernelCache(), "x.so", "the capsule"
    )
    if not takes:
        with pytest.raises(DeviceError, match="a communicator it takes"):
            engines.bind("segments/000.engine", 0, {}, {}, own=False)
        return
    for profile, own in ((0, False), (1, False), (0, False), (1, True)):
        engines.bind("segments/000.engine", profile, {}, {}, own=own)()
    assert given == ["the capsule"] * 3


def test_ranks_without_nccl_have_no_communicator(session: SharedSession) -> None:
    with pytest.raises(UnsupportedError, match="gloo"):
        ProcessRanks(TensorParallel(2, 0)).communicator()
