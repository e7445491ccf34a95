"""Execution contexts: how many a session makes, and the device memory that the plan of a bundle counts for them."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("tensorrt_rtx", reason="needs the wheels of tensorrt-rtx-cu13")

from tests.builders.fake_runtime import FakeTensorRt
from trtllm_replayssm.builders.build_log import parse_messages
from trtllm_replayssm.builders.inspect_bundle import read_records
from trtllm_replayssm.cli import main
from trtllm_replayssm.config import CudaGraphConfig
from trtllm_replayssm.errors import ConfigError
from trtllm_replayssm.manifest import EngineMemory, read_manifest, write_manifest
from trtllm_replayssm.runtime import bundle as bundles
from trtllm_replayssm.runtime.llm import LLM
from trtllm_replayssm.runtime.session.tensorrt_contexts import ContextMemory, context_memory
from trtllm_replayssm.runtime.session.tensorrt_session import TensorRtSession

MESSAGES = """Total Host Persistent Memory: 80 bytes
Total Device Persistent Memory: {own} bytes
Max Scratch Memory: {part} bytes
Total Activation Memory: {shared} bytes"""


def test_the_builder_s_words_give_memory_by_profile() -> None:
    said = [MESSAGES.format(own=own, part=shared // 2, shared=shared) for own, shared in ((0, 4096), (512, 64))]
    assert parse_messages(said)[1:] == ((4096, 64), (0, 512))


def test_the_manifest_has_the_record_s_memory_of_every_engine(bundle: tuple[str, Path]) -> None:
    manifest, records = read_manifest(bundle[1]), read_records(bundle[1])
    assert manifest.memory == {r.engine: EngineMemory(shared=r.scratch_bytes, own=r.kept_bytes) for r in records}
    assert all(len(m.shared) == len(m.own) == len(manifest.profiles) for m in manifest.memory.values())
    assert max(max(m.shared) for m in manifest.memory.values()) > 0


@pytest.mark.usefixtures("records")
def test_a_session_makes_as_many_contexts_as_are_counted(bundle: tuple[str, Path], library: FakeTensorRt) -> None:
    manifest = read_manifest(bundle[1])
    for graphs in (CudaGraphConfig(), CudaGraphConfig(batch_sizes=(3,)), None):
        library.journal.clear()
        session = TensorRtSession.from_bundle(bundle[1], device="cpu", cuda_graphs=graphs)
        session.warm_up()
        made = {e.context for e in library.journal if e.what == "enqueue"}
        assert len(made) == context_memory(manifest, manifest.build.max_batch, graphs).recorded
        del session


def test_what_contexts_keep_is_counted_for_each_and_what_they_share_once(bundle: tuple[str, Path]) -> None:
    manifest = read_manifest(bundle[1])
    memory = {name: EngineMemory(shared=(7, 5, 6), own=(100, 10, 1)) for name in manifest.memory}
    engines, four = len(memory), replace(manifest, memory=memory)
    one = context_memory(four, 4, None)
    assert one == ContextMemory(recorded=0, kept_bytes=engines * 111, scratch_bytes=7)
    every = context_memory(four, 4, CudaGraphConfig(batch_sizes=(2, 4)))
    half = every.recorded // 2  # of one token a row, and of T_max
    assert every.kept_bytes - one.kept_bytes == half * 10 + half * 1 and every.scratch_bytes == 7
    assert context_memory(replace(four, memory={}), 4, None).scratch_bytes == 0


def altered(bundle: tuple[str, Path], tmp_path: Path) -> Path:
    """The bundle's manifest over contexts that keep a gigabyte each."""
    manifest = read_manifest(bundle[1])
    memory = {name: replace(m, own=tuple(1 << 30 for _ in m.own)) for name, m in manifest.memory.items()}
    write_manifest(tmp_path, replace(manifest, memory=memory))
    return tmp_path


def test_a_bundle_whose_contexts_do_not_fit_is_refused_before_it_is_loaded(
    bundle: tuple[str, Path], library: FakeTensorRt, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    monkeypatch.setattr(bundles, "_require_gpu", lambda *_: None)
    monkeypatch.setattr("trtllm_replayssm.runtime.device_memory.free_host_bytes", lambda: 8 << 30)
    with caplog.at_level(logging.INFO), LLM(bundle[1]):
        assert "execution contexts" in caplog.text
    with pytest.raises(ConfigError, match=r"at most 0 slots.*of execution contexts"):
        LLM(altered(bundle, tmp_path))


def test_a_bundle_is_planned_as_it_was_built(
    bundle: tuple[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    common = ["plan", str(bundle[1]), "--gpu-memory", "2"]
    assert main([*common, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    manifest = read_manifest(bundle[1])
    count = context_memory(manifest, manifest.build.max_batch, CudaGraphConfig())
    assert found["contexts"] == count.recorded > 0
    assert found["bytes"]["execution contexts"] == count.kept_bytes + count.scratch_bytes
    assert found["bytes"]["weights"] >= sum(r.bytes for r in read_records(bundle[1])) and found["slots"] > 0
    assert main(common) == 0
    out = capsys.readouterr().out
    assert f"contexts of recorded steps {count.recorded:16,}" in out
    assert found["built_for"] == manifest.build.max_batch < found["slots"]  # memory has room for more
    assert f"slots it was built for {manifest.build.max_batch:20,}" in out
    for flag, value in (("--window", "4"), ("--max-seq-len", "99"), ("--max-seq-len", "4096"),
                        ("--activation", "float16"), ("--draft-len", "0"), ("--max-batch-size", "5"),
                        ("--prefill-chunk", str(manifest.build.context_tokens + 1))):
        assert main([*common, flag, value]) == 1
        error = capsys.readouterr().err
        assert flag in error and "the bundle was built" in error and error.count("\n") == 1


def test_inspect_shows_contexts(bundle: tuple[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    manifest = read_manifest(bundle[1])
    count = context_memory(manifest, manifest.build.max_batch, CudaGraphConfig()).recorded
    assert main(["inspect", str(bundle[1])]) == 0
    assert f"contexts    {count:,} of recorded steps" in capsys.readouterr().out
    assert main(["inspect", str(bundle[1]), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["memory"]["recorded_contexts"] == count
