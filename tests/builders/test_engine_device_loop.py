"""The device loop over engines: every request of random traffic gets the tokens of the host's path, on a CPU.

The networks are evaluated with torch. With "recorded" steps everything that a CUDA graph would hold is watched as well:
sampling, acceptance, commit and drafts wait for nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("tensorrt_rtx", reason="needs the wheels of tensorrt-rtx-cu13")

from tests.builders.bundles import EvaluatorEngines, evaluated_session, trace_networks
from tests.builders.recording import RecordingPool, on_the_device
from tests.builders.test_evaluated_plugins import ExactDense
from tests.builders.test_evaluated_sessions import FLOAT32, REPLAY
from tests.prefix.torch_engines import WITH_HEAD, bundled
from tests.runtime.torch_loops import assert_same, make_engine, run, traffic
from tests.session.sessions import checkpoint
from trtllm_replayssm.builders.flavour import FlavourName
from trtllm_replayssm.builders.options import BuildOptions
from trtllm_replayssm.config import CudaGraphConfig
from trtllm_replayssm.runtime.session import torch_session
from trtllm_replayssm.runtime.session.base import DecodeRow, PrefillChunk
from trtllm_replayssm.runtime.session.capture import Recording
from trtllm_replayssm.runtime.session.tensorrt_contexts import context_memory
from trtllm_replayssm.runtime.session.tensorrt_ops import NativeStepOps
from trtllm_replayssm.runtime.session.tensorrt_session import TensorRtSession
from trtllm_replayssm.runtime.session.torch_state_ops import StateOps

CASES = [
    (FlavourName.RTX, "nemotron-moe", "plain"),
    (FlavourName.RTX, "qwen-dense", "ngram"),
    (FlavourName.RTX, WITH_HEAD, "mtp"),
    (FlavourName.TENSORRT, WITH_HEAD, "mtp"),
    (FlavourName.RTX, WITH_HEAD, "mtp-sampled"),
]


def open_session(flavour: FlavourName, name: str, directory: Path) -> TensorRtSession:
    target = {} if flavour is FlavourName.TENSORRT else {"target": "12.0"}
    options = BuildOptions(
        flavour=flavour, replay=REPLAY, activation=FLOAT32, max_batch=5, max_seq_len=96, context_tokens=64, **target
    )
    parameters = ExactDense(bundled() if name == WITH_HEAD else checkpoint(name))
    return evaluated_session(trace_networks(parameters, options), directory)


def bystander(session: TensorRtSession) -> tuple[int, str]:
    """A slot between others that no engine knows, and the hash of what it holds."""
    low, slot = session.allocate(seed=98), session.allocate(seed=99)
    session.prefill([PrefillChunk(slot, [3, 1, 4, 1, 5, 9, 2, 6], True)])
    session.decode([DecodeRow(slot, [5])])
    session.commit([1])
    session.free(low)
    return slot, session.pools.slot_hash(slot)


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sessions record as on a GPU whose kernels serve the pools."""

    def pool(
        device: torch.device, *, enabled: bool, recording: Recording, obstacle: Callable[[], str | None]
    ) -> RecordingPool:
        return RecordingPool([], recording, obstacle)

    monkeypatch.setattr(torch_session, "GraphPool", pool)
    monkeypatch.setattr(torch_session, "waits_for_nothing", lambda pools, native: True)
    for owner, method in ((NativeStepOps, "run"), (StateOps, "commit")):
        monkeypatch.setattr(owner, method, on_the_device(getattr(owner, method)))


def answers(session: TensorRtSession, kind: str, *, ahead: bool) -> Any:
    slot, held = bystander(session)
    engine = make_engine(session, kind, ahead=ahead)
    engine.warm_up()
    done = run(engine, traffic(8, 60, seed=7, longest=14))
    assert session.pools.slot_hash(slot) == held and session.free_slots == 4
    return done


@pytest.mark.parametrize(("flavour", "name", "kind"), CASES)
def test_random_traffic_gets_the_tokens_of_the_host_s_path(
    flavour: FlavourName, name: str, kind: str, tmp_path: Path
) -> None:
    host, device = (answers(open_session(flavour, name, tmp_path / f"{a}"), kind, ahead=a) for a in (False, True))
    assert_same(device, host)


@pytest.mark.usefixtures("recorded")
@pytest.mark.parametrize("flavour", FlavourName)
def test_the_contexts_of_a_recorded_head_are_counted(
    flavour: FlavourName, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """First drafts over T_max tokens a row, further ones over one, as the steps of the model."""
    made = []

    def bind(
        self: EvaluatorEngines, engine: str, profile: int, *tensors: Any, own: bool, run: Any = EvaluatorEngines.bind
    ) -> Callable[[], None]:
        made.append(own)
        call: Callable[[], None] = run(self, engine, profile, *tensors, own=own)
        return call

    monkeypatch.setattr(EvaluatorEngines, "bind", bind)
    session = open_session(flavour, WITH_HEAD, tmp_path)
    session.warm_up()
    counted = context_memory(session._manifest, session.pool.slots, CudaGraphConfig())
    assert "mtp" in session._manifest.programs and sum(made) == counted.recorded > 0


@pytest.mark.usefixtures("recorded")
@pytest.mark.parametrize(("flavour", "name", "kind"), CASES)
def test_recorded_steps_of_the_device_loop_wait_for_nothing(
    flavour: FlavourName, name: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = open_session(flavour, name, tmp_path / "recorded")
    assert isinstance(session.graphs, RecordingPool)
    watched = answers(session, kind, ahead=True)
    assert session.graphs.replays > 0
    monkeypatch.undo()
    assert_same(watched, answers(open_session(flavour, name, tmp_path / "launched"), kind, ahead=True))
