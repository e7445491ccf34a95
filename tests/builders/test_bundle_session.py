"""A bundle from disk, loaded as a user loads it, over a stand-in for TensorRT's runtime that evaluates the networks.

Everything of the session but the library itself: manifest and hashes, engine files, profiles, shapes, addresses, caches
updated in place, native operations between. Compared with the torch session, logits and states.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("tensorrt_rtx", reason="needs the wheels of tensorrt-rtx-cu13")

from tests.builders.fake_runtime import FakeTensorRt, executed_profiles
from tests.builders.test_evaluated_sessions import FLOAT32, REPLAY, assert_close, drive
from tests.session.sessions import CHECKPOINTS, states
from tests.tolerance import REPLAY_LOGIT_NOISE
from trtllm_replayssm.config import PoolConfig
from trtllm_replayssm.errors import ConfigError, EngineMismatchError
from trtllm_replayssm.manifest import read_manifest
from trtllm_replayssm.runtime.session.base import DecodeRow, PrefillChunk
from trtllm_replayssm.runtime.session.tensorrt_engines import TensorRtEngines
from trtllm_replayssm.runtime.session.tensorrt_kernels import KernelCache
from trtllm_replayssm.runtime.session.tensorrt_session import TensorRtSession, pools_of
from trtllm_replayssm.runtime.session.torch_session import TorchSession
from trtllm_replayssm.weights.checkpoint import Checkpoint


def test_a_loaded_bundle_computes_what_the_torch_session_does(
    bundle: tuple[str, Path], library: FakeTensorRt
) -> None:
    name, path = bundle
    ours = TensorRtSession.from_bundle(path, device="cpu")
    with Checkpoint.open(CHECKPOINTS / name) as checkpoint:
        theirs = TorchSession.from_checkpoint(
            checkpoint, REPLAY, PoolConfig(slots=4, max_seq_len=160, activation=FLOAT32)
        )
        assert_close(drive(ours), drive(theirs))
        for slot in (1, 2):
            assert ours.cursors(slot) == theirs.cursors(slot)
            for x, y in zip(states(ours, slot), states(theirs, slot), strict=True):
                assert float((x - y).abs().max()) <= REPLAY_LOGIT_NOISE * float(y.abs().max())
    engines = len({n for n, _ in library.executed})
    # three prompt chunks; twelve steps, of which none has one token in every row
    assert executed_profiles(library) == {0: 3 * engines, 2: 12 * engines}


def test_a_step_over_the_same_buffers_binds_nothing_again(bundle: tuple[str, Path], library: FakeTensorRt) -> None:
    session = TensorRtSession.from_bundle(bundle[1], device="cpu")
    slot = session.allocate(1)
    session.prefill([PrefillChunk(slot, [1, 2, 3], True)])
    told = []
    for width in (1, 1, 3, 3, 1):
        session.decode([DecodeRow(slot, [5] * width)])
        session.commit([1])
        told.append(sum(event.what == "tell" for event in library.journal))
    assert told[0] == told[1] < told[2] == told[3] == told[4]


def test_a_snapshot_restores_into_another_session_of_the_bundle(
    bundle: tuple[str, Path], library: FakeTensorRt
) -> None:
    path = bundle[1]
    one, other = (TensorRtSession.from_bundle(path, device="cpu") for _ in range(2))
    for _ in drive(one):
        pass
    slot = other.restore(one.save(1))
    assert other.cursors(slot) == one.cursors(1)
    for x, y in zip(states(other, slot), states(one, 1), strict=True):
        assert bool((x == y).all())


def test_what_does_not_fit_is_refused_before_anything_runs(
    bundle: tuple[str, Path], library: FakeTensorRt, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = bundle[1]
    with pytest.raises(ConfigError, match=r"1\.\.4, the max_batch"):
        TensorRtSession.from_bundle(path, slots=5, device="cpu")
    monkeypatch.setattr(library, "deserialize_cuda_engine", lambda data: None)
    with pytest.raises(EngineMismatchError, match=r"segments/000\.engine|000\.engine"):
        TensorRtSession.from_bundle(path, device="cpu")
    monkeypatch.setattr(library, "__version__", "1.8.0")
    with pytest.raises(EngineMismatchError, match=r"tensorrt_version: expected 1\.7"):
        TensorRtSession.from_bundle(path, device="cpu")
    monkeypatch.setitem(sys.modules, "tensorrt_rtx", None)
    with pytest.raises(ConfigError, match="pip install"):
        TensorRtSession.from_bundle(path, device="cpu")
    assert not library.executed


@pytest.mark.parametrize(
    ("part", "change", "said"),
    [
        ("replay", {"window": 9}, "window: expected 8, got 9"),
        ("build", {"activation": "float16"}, "activation: expected float32, got float16"),
        ("build", {"max_seq_len": 161}, "max_seq_len: expected 160, got 161"),
    ],
)
def test_pools_of_other_settings_are_refused(
    part: str, change: dict[str, Any], said: str, bundle: tuple[str, Path], library: FakeTensorRt
) -> None:
    path = bundle[1]
    manifest = read_manifest(path)
    settings: Any = {part: replace(getattr(manifest, part), **change)}
    engines = TensorRtEngines(path, manifest, torch.device("cpu"), KernelCache())
    with pytest.raises(EngineMismatchError, match=said):
        TensorRtSession(manifest, path, engines, pools_of(replace(manifest, **settings), None, "cpu"))


def test_an_altered_bundle_is_refused(bundle: tuple[str, Path], library: FakeTensorRt) -> None:
    path = bundle[1]
    engine = path / "segments" / "001.engine"
    original = engine.read_bytes()
    try:
        engine.write_bytes(original[:-1])
        with pytest.raises(EngineMismatchError, match=r"segments/001\.engine: expected SHA-256"):
            TensorRtSession.from_bundle(path, device="cpu")
    finally:
        engine.write_bytes(original)
