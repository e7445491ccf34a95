"""Steps of a session over engines as they are recorded, on a CPU: order, bindings, no waiting, results.

What a CUDA graph would hold is watched by `recording.RecordingPool` over the stand-in for TensorRT's runtime; native
operations are the reference's in the place of the kernels. Nothing of CUDA or TensorRT runs.
"""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import pytest
import torch

pytest.importorskip("tensorrt_rtx", reason="needs the wheels of tensorrt-rtx-cu13")

from tests.builders.fake_runtime import FakeCache, FakeTensorRt
from tests.builders.recording import NoWaiting, RecordingPool, WaitedError
from tests.builders.test_evaluated_sessions import FLOAT32, REPLAY, assert_close, drive
from tests.session.sessions import CHECKPOINTS, hashes, states
from tests.tolerance import REPLAY_LOGIT_NOISE
from trtllm_replayssm.bindings import EngineStep
from trtllm_replayssm.config import CudaGraphConfig, PoolConfig
from trtllm_replayssm.manifest import read_manifest
from trtllm_replayssm.runtime.session.base import DecodeRow, PrefillChunk
from trtllm_replayssm.runtime.session.tensorrt_session import TensorRtSession
from trtllm_replayssm.runtime.session.torch_session import TorchSession
from trtllm_replayssm.weights.checkpoint import Checkpoint

SIZES = (1, 2, 4)


def pool_of(session: TensorRtSession) -> RecordingPool:
    assert isinstance(session.graphs, RecordingPool)
    return session.graphs


@pytest.mark.usefixtures("records")
def test_recorded_steps_compute_what_the_torch_session_does(bundle: tuple[str, Path]) -> None:
    """Mixed rows in any order, padding, rejections: replays of few graphs, none of them made late."""
    name, path = bundle
    ours = TensorRtSession.from_bundle(path, device="cpu")
    assert ours.recorded.sizes == SIZES
    ours.warm_up()
    recorded = pool_of(ours).count
    assert recorded == 2 * len(SIZES) * 2  # forward and commit, of one token a row and of T_max
    with Checkpoint.open(CHECKPOINTS / name) as checkpoint:
        pool = PoolConfig(slots=4, max_seq_len=160, activation=FLOAT32)
        theirs = TorchSession.from_checkpoint(checkpoint, REPLAY, pool, cuda_graphs=None)
        assert_close([x.copy() for x in drive(ours)], drive(theirs))
        for slot in (1, 2):
            assert ours.cursors(slot) == theirs.cursors(slot)
            for x, y in zip(states(ours, slot), states(theirs, slot), strict=True):
                assert float((x - y).abs().max()) <= REPLAY_LOGIT_NOISE * float(y.abs().max())
    assert pool_of(ours).count == recorded and pool_of(ours).replays == 2 * 12


@pytest.mark.usefixtures("records")
def test_a_recorded_step_is_the_program_in_its_order(bundle: tuple[str, Path]) -> None:
    session = TensorRtSession.from_bundle(bundle[1], device="cpu")
    session.warm_up()
    program = read_manifest(bundle[1]).programs["main"]
    order = [Path(s.engine).stem if isinstance(s, EngineStep) else s.op for s in program.steps]
    forward = [events for events in pool_of(session).recorded if events]
    assert len(forward) == 2 * len(SIZES)
    assert all([event.name for event in events] == order for events in forward)


@pytest.mark.usefixtures("records")
def test_what_is_recorded_has_contexts_that_nothing_else_tells_anything(
    bundle: tuple[str, Path], library: FakeTensorRt
) -> None:
    """One context for each engine and shape, told everything before it first runs; prompts have contexts of theirs."""
    session = TensorRtSession.from_bundle(bundle[1], device="cpu")
    session.warm_up()
    for _ in drive(session):
        pass
    forward = [[e for e in events if e.what == "enqueue"] for events in pool_of(session).recorded if events]
    contexts = [e.context for events in forward for e in events]
    assert len(set(contexts)) == len(contexts)
    first = {
        c: next(i for i, e in enumerate(library.journal) if (e.what, e.context) == ("enqueue", c)) for c in contexts
    }
    for index, event in enumerate(library.journal):
        assert event.what != "tell" or index < first.get(event.context, len(library.journal))
    assert {e.context for e in library.journal if e.what == "enqueue"} > set(contexts)


@pytest.mark.usefixtures("records")
def test_recording_moves_no_state(bundle: tuple[str, Path]) -> None:
    """A prompt in a slot before everything is recorded: what the slot remembers stays as it is."""
    session = TensorRtSession.from_bundle(bundle[1], device="cpu")
    slot = session.allocate(3)
    session.prefill([PrefillChunk(slot, list(range(9)), True)])
    before = hashes(session), session.cursors(slot)
    session.warm_up()
    assert (hashes(session), session.cursors(slot)) == before


@pytest.mark.usefixtures("records")
def test_steps_beyond_the_recorded_sizes_are_launched(bundle: tuple[str, Path]) -> None:
    """The highest slot says how many rows a step needs, not how many there are."""
    session = TensorRtSession.from_bundle(bundle[1], device="cpu", cuda_graphs=CudaGraphConfig(max_batch_size=2))
    session.warm_up()
    slots = [session.allocate(i) for i in range(3)]
    session.prefill([PrefillChunk(slot, [1, 2, 3], True) for slot in slots])
    for replayed, slot in ((0, 2), (1, 1), (2, 0)):
        before = pool_of(session).replays
        session.decode([DecodeRow(slots[slot], [5])])
        session.commit([1])
        assert pool_of(session).replays - before == (2 if replayed else 0)


@pytest.mark.usefixtures("records")
def test_an_engine_that_cannot_be_recorded_is_an_obstacle(bundle: tuple[str, Path], library: FakeTensorRt) -> None:
    """Asked of what has run since the last question, with the engine and its shapes in the answer."""
    session = TensorRtSession.from_bundle(bundle[1], device="cpu")
    network = session._model.network
    session.static_step(1, 1).forward()
    library.capturable = False
    assert network.obstacle() is None  # of what is not to be recorded nobody asks
    RecordingPool(library.journal, session._recording).captured(session.static_step(2, 1).forward)
    obstacle = network.obstacle()
    assert obstacle is not None and obstacle.startswith("tensorrt_rtx cannot record segments/000.engine with {")
    assert network.obstacle() is None


def test_compiled_kernels_are_kept_in_a_file(
    bundle: tuple[str, Path], library: FakeTensorRt, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "kernels"

    def run() -> bool | None:
        session = TensorRtSession.from_bundle(bundle[1], device="cpu", kernel_cache=file)
        slot = session.allocate(1)
        session.prefill([PrefillChunk(slot, [1, 2], True)])
        session.warm_up()
        return library.caches[-1].loaded

    assert run() is None
    assert file.read_bytes() == FakeCache.CONTENT and [p.name for p in tmp_path.iterdir()] == ["kernels"]
    assert run() is True and not caplog.records
    file.write_bytes(b"kernels for another GPU")
    assert run() is False and "kernels are compiled again" in caplog.text
    assert file.read_bytes() == FakeCache.CONTENT


def test_a_session_goes_with_its_last_reference(bundle: tuple[str, Path], library: FakeTensorRt) -> None:
    """No cycle holds it: its engines' memory is free at once, not when Python next collects garbage."""
    session = TensorRtSession.from_bundle(bundle[1], device="cpu")
    slot = session.allocate(1)
    session.prefill([PrefillChunk(slot, [1, 2], True)])
    session.decode([DecodeRow(slot, [5])])
    session.commit([1])
    gone = weakref.ref(session)
    gc.disable()
    try:
        del session
        assert gone() is None
    finally:
        gc.enable()


def test_the_watch_notices_what_waits() -> None:
    x = torch.arange(4)
    for wait in (lambda: x.sum().item(), lambda: x[x > 1], lambda: torch.nonzero(x), lambda: torch.tensor([1])):
        with pytest.raises(WaitedError), NoWaiting():
            wait()
