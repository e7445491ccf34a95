"""`LLM` over two processes that share the model."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from torch import distributed

from tests.paths import ROOT
from tests.session.sessions import reference
from trtllm_replayssm import LLM, NGramDecodingConfig, SamplingParams
from trtllm_replayssm.config import PoolConfig, ReplayConfig
from trtllm_replayssm.errors import ConfigError, ContractError
from trtllm_replayssm.runtime.checkpoint_session import checkpoint_session
from trtllm_replayssm.weights.checkpoint import Checkpoint

pytestmark = pytest.mark.timeout(240)
MODEL = ROOT / "tests" / "checkpoints" / "qwen-dense"


def test_llm_writes_the_same_text_on_two_ranks() -> None:
    entry = reference("qwen-dense")[2]
    drafts = NGramDecodingConfig(max_draft_len=3)
    settings: dict[str, Any] = {"max_batch_size": 2, "max_seq_len": 96, "speculative_config": drafts}
    params = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True)
    texts = []
    for ranks in (1, 2):
        with LLM(MODEL, tensor_parallel_size=ranks, **settings) as llm:
            texts.append(llm.generate([entry["input_ids"]], params)[0].outputs[0].token_ids)
    assert list(texts[0]) == list(texts[1]) == entry["greedy"][:16]


def test_a_replica_that_was_shut_down_leaves_its_place_to_another() -> None:
    """Though its name still stands for it."""
    with LLM(MODEL, tensor_parallel_size=2, max_batch_size=1, max_seq_len=32) as first:
        ranks = [process for process in multiprocessing.active_children() if process.name.startswith("rank ")]
        with pytest.raises(ConfigError, match="Shut down the first"):
            LLM(MODEL, tensor_parallel_size=2, max_batch_size=1, max_seq_len=32)
    for process in ranks:
        process.join(60)
    assert [process.exitcode for process in ranks] == [0]
    with LLM(MODEL, tensor_parallel_size=2, max_batch_size=1, max_seq_len=32) as second:
        params = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
        assert second.generate([[1, 2, 3]], params)[0].outputs[0].length == 2
    first.shutdown()
    with pytest.raises(ContractError, match="shut down"):
        first.generate([[1, 2, 3]], params)


def test_sizes_that_cannot_be_shared_are_refused_before_a_process_starts() -> None:
    with pytest.raises(ConfigError, match="tensor parallel"):
        LLM(MODEL, tensor_parallel_size=5, max_batch_size=1, max_seq_len=32)


def test_a_replica_that_could_not_start_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    for _ in range(2):  # the second try is not told that there is a replica already
        with pytest.raises(ContractError, match="state_cache"):
            checkpoint_session(
                Checkpoint.open(MODEL), ReplayConfig(), PoolConfig(slots=1, max_seq_len=32), state_cache="none",
                device="cpu", cuda_graphs=None, debug=False, ranks=2,
            )  # fmt: skip
    assert not distributed.is_initialized() and not list(tmp_path.glob("replayssm-ranks-*"))


def test_a_script_that_starts_itself_again_in_each_rank_is_told_so(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        f"from trtllm_replayssm import LLM\nLLM({str(MODEL)!r}, tensor_parallel_size=2, max_seq_len=32)\n"
    )
    ended = subprocess.run(
        [sys.executable, script], env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
        timeout=120, check=False,
    )  # fmt: skip
    assert ended.returncode != 0 and "__main__" in ended.stderr.splitlines()[-1], ended.stderr
