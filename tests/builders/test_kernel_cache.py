"""The file of compiled kernels as a setting of `LLM`: where it is written, and what is refused before a load."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("tensorrt_rtx", reason="needs the wheels of tensorrt-rtx-cu13")

from tests.builders.fake_runtime import FakeCache, FakeTensorRt
from tests.session.sessions import CHECKPOINTS
from trtllm_replayssm.errors import ConfigError
from trtllm_replayssm.manifest import read_manifest
from trtllm_replayssm.runtime import bundle as bundles
from trtllm_replayssm.runtime.llm import LLM, SamplingParams
from trtllm_replayssm.runtime.replica import ReplicaOptions
from trtllm_replayssm.runtime.session.tensorrt_kernels import KernelCache


@pytest.fixture
def no_gpu_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bundles, "_require_gpu", lambda *_: None)


@pytest.mark.usefixtures("no_gpu_needed")
def test_an_llm_leaves_compiled_kernels_for_the_next_one(
    bundle: tuple[str, Path], library: FakeTensorRt, tmp_path: Path
) -> None:
    file, found = tmp_path / "kernels", []
    for _ in range(2):
        with LLM(bundle[1], kernel_cache=file) as llm:
            llm.generate([1, 2, 3], SamplingParams(max_tokens=1, temperature=0.0, detokenize=False))
        found.append((file.read_bytes(), library.caches[-1].loaded))
    assert found == [(FakeCache.CONTENT, None), (FakeCache.CONTENT, True)]


@pytest.mark.usefixtures("no_gpu_needed")
def test_a_file_that_could_not_be_written_is_refused_before_engines_load(
    bundle: tuple[str, Path], library: FakeTensorRt, tmp_path: Path
) -> None:
    for path in (tmp_path / "missing" / "kernels", tmp_path, bundle[1] / "kernels"):
        with pytest.raises(ConfigError, match="kernel_cache"):
            LLM(bundle[1], kernel_cache=path)
    assert not library.executed


def test_engines_that_hold_their_kernels_and_checkpoints_have_no_such_file(bundle: tuple[str, Path]) -> None:
    manifest = read_manifest(bundle[1])
    plugins = replace(manifest, build=replace(manifest.build, flavour="tensorrt"))
    with pytest.raises(ConfigError, match=r"kernel_cache: expected none.*tensorrt"):
        bundles.fitted(ReplicaOptions(kernel_cache="kernels"), plugins)
    with pytest.raises(ConfigError, match=r"kernel_cache: expected none: a checkpoint"):
        LLM(CHECKPOINTS / bundle[0], kernel_cache="kernels")


def test_a_disk_that_fills_up_costs_the_file_and_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    kernels = KernelCache(folder / "kernels")

    class Config:
        def create_runtime_cache(self) -> FakeCache:
            return FakeCache()

        def set_runtime_cache(self, cache: FakeCache) -> bool:
            return True

    kernels.give_to(Config())
    folder.rmdir()
    with caplog.at_level(logging.WARNING):
        kernels.save()
    assert "cannot be kept" in caplog.text
