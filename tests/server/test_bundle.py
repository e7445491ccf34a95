"""A bundle of TensorRT engines in the place of a checkpoint: what it fixes, what it needs, and that it is served."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("tensorrt_rtx", reason="needs the wheels of tensorrt-rtx-cu13")

from tests.builders.bundles import evaluated_session, manifest_of, trace_networks
from tests.builders.test_evaluated_sessions import options
from tests.server.harness import COMMAND, NAME, ask, service
from tests.session.sessions import CHECKPOINTS
from trtllm_replayssm.builders.parameters import CheckpointParameters
from trtllm_replayssm.config import ReplayConfig
from trtllm_replayssm.errors import ConfigError, ReplaySSMError
from trtllm_replayssm.manifest import Manifest, write_manifest
from trtllm_replayssm.runtime import bundle
from trtllm_replayssm.runtime.llm import LLM, KvCacheConfig, MTPDecodingConfig, NGramDecodingConfig, SamplingParams
from trtllm_replayssm.runtime.session.base import Session
from trtllm_replayssm.weights.checkpoint import Checkpoint

MODEL = CHECKPOINTS / "qwen-dense"
MISSING_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="what a machine without a GPU says")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Manifest, Session]:
    """A directory with a manifest, and a session whose engines are evaluated with torch."""
    path = tmp_path_factory.mktemp("bundle")
    with Checkpoint.open(MODEL) as checkpoint:
        traced = trace_networks(CheckpointParameters(checkpoint), options())
        session = evaluated_session(traced, path)
    manifest = manifest_of(traced)
    write_manifest(path, manifest)
    return path, manifest, session


@MISSING_GPU
@pytest.mark.parametrize("flags", [(), ("--device", "cpu")])
def test_serving_a_bundle_without_a_gpu_ends_with_one_line_that_says_what_it_needs(
    made: tuple[Path, Manifest, Session], flags: tuple[str, ...]
) -> None:
    command = [*COMMAND, "serve", str(made[0]), "--port", "0", *flags]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert run.returncode == 1 and run.stdout == ""
    (line,) = [text for text in run.stderr.splitlines() if text.startswith("trtllm-replayssm:")]
    assert "bundle" in line and "compute capability 12.0" in line and "tensorrt_rtx none" in line
    assert "Traceback" not in run.stderr


def test_a_bundle_is_served_with_the_text_of_its_checkpoint(
    made: tuple[Path, Manifest, Session], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, manifest, session = made
    monkeypatch.setattr(bundle, "bundle_session", lambda *_: session)
    body = {"model": NAME, "prompt": [1, 2, 3, 4, 5], "max_tokens": 12, "temperature": 0, "detokenize": False}
    texts = []
    with LLM(path, speculative_config=NGramDecodingConfig(max_draft_len=3)) as llm:
        assert (llm.max_seq_len, llm.load().max_batch_size) == (160, 4)
        texts.append(ask(service(llm), "/v1/completions", body).json()["choices"][0]["token_ids"])
    with LLM(MODEL, replay_config=manifest.replay, max_seq_len=160) as llm:
        output = llm.generate([1, 2, 3, 4, 5], SamplingParams(max_tokens=12, temperature=0.0, detokenize=False))
        texts.append(list(output.outputs[0].token_ids))  # type: ignore[union-attr]
    assert texts[0] == texts[1] and len(texts[0]) == 12


WISHES: list[tuple[dict[str, Any], str]] = [
    ({"max_seq_len": 200}, "max_seq_len"),
    ({"dtype": "bfloat16"}, "dtype"),
    ({"state_cache": "conventional"}, "state_cache"),
    ({"max_batch_size": 5}, "max_batch_size"),
    ({"prefill_chunk": 65}, "prefill_chunk"),
    ({"speculative_config": MTPDecodingConfig(max_draft_len=4)}, "speculative_config"),
    ({"replay_config": ReplayConfig(window=16)}, "replay_config"),
    ({"kv_cache_config": KvCacheConfig(mamba_ssm_cache_dtype="fp8")}, "mamba_ssm_cache_dtype"),
]


@pytest.mark.parametrize(("wish", "name"), WISHES)
def test_what_the_build_fixed_cannot_be_wished_otherwise(
    made: tuple[Path, Manifest, Session], wish: dict[str, Any], name: str
) -> None:
    with pytest.raises(ConfigError, match="bundle") as caught:
        LLM(made[0], **wish)
    assert caught.value.argument == name and caught.value.hint is not None and "Build" in caught.value.hint


def test_a_bundle_without_all_its_ranks_and_a_plugin_library_without_a_bundle_are_refused(
    made: tuple[Path, Manifest, Session], tmp_path: Path
) -> None:
    manifest = replace(made[1], build=replace(made[1].build, tp_size=2))
    write_manifest(tmp_path, manifest)
    with pytest.raises(ReplaySSMError, match=r"engines of all 2 ranks, from rank0 on, got those of 0"):
        LLM(tmp_path)
    with pytest.raises(ConfigError, match="plugin_library"):
        LLM(MODEL, plugin_library="x.so")
