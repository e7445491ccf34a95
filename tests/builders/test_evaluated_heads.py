"""The drafting heads of both families as evaluated networks, against the torch session, with several rows at once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("tensorrt_rtx", reason="needs the wheels of tensorrt-rtx-cu13")

from tests.builders.bundles import evaluated_session, trace_networks
from tests.builders.quantised import bf16_checkpoint
from tests.builders.test_evaluated_sessions import FLOAT32, REPLAY, assert_close
from tests.session.test_nemotron_mtp import directory
from trtllm_replayssm.builders.flavour import FlavourName
from trtllm_replayssm.builders.options import BuildOptions
from trtllm_replayssm.builders.parameters import CheckpointParameters
from trtllm_replayssm.config import PoolConfig
from trtllm_replayssm.runtime.session.base import DecodeRow, Logits, MtpRow, PrefillChunk
from trtllm_replayssm.runtime.session.torch_session import TorchSession
from trtllm_replayssm.weights.checkpoint import Checkpoint


def drive(session: TorchSession) -> Iterator[Logits]:
    """Prompts of different lengths, the head over each whole prompt, then steps of two rows with drafts between."""
    rng = np.random.default_rng(9)

    def tokens(count: int) -> list[int]:
        return [int(t) for t in rng.integers(0, session.geometry.vocab, count)]

    unused = session.allocate(0)
    slots, prompts = [session.allocate(1), session.allocate(2)], [tokens(3), tokens(25)]
    session.prefill([PrefillChunk(s, p, True) for s, p in zip(slots, prompts, strict=True)])
    following = [[*p[1:], t] for p, t in zip(prompts, tokens(2), strict=True)]
    for step in range(6):
        order = [1, 0] if step % 2 else [0, 1]
        yield from session.mtp_begin([MtpRow(slots[i], following[i]) for i in order])
        for _ in range(3):
            yield from session.mtp_next(tokens(2))
        counts = [1 + step % 4, 4 - step % 4]
        rows = [DecodeRow(slots[i], tokens(counts[i])) for i in order]
        yield from session.decode(rows)
        taken = [max(1, counts[i] - step % 2) for i in order]
        session.commit(taken)
        for i, n in zip(order, taken, strict=True):
            following[i] = tokens(n)
    session.free(unused)


@pytest.mark.parametrize("flavour", FlavourName)
@pytest.mark.parametrize("family", ["nemotron", "qwen"])
def test_the_head_drafts_what_the_torch_session_drafts(family: str, flavour: FlavourName, tmp_path: Path) -> None:
    source = bf16_checkpoint("qwen3_5-tiny") if family == "qwen" else directory(tmp_path / "checkpoint")
    options = BuildOptions(
        flavour=flavour, replay=REPLAY, activation=FLOAT32, max_batch=4, max_seq_len=64, context_tokens=32,
    )  # fmt: skip
    with Checkpoint.open(source) as checkpoint:
        assert checkpoint.geometry.mtp_pattern
        ours = evaluated_session(trace_networks(CheckpointParameters(checkpoint), options), tmp_path / "bundle")
        pool = PoolConfig(slots=4, max_seq_len=64, activation=FLOAT32)
        assert_close(drive(ours), drive(TorchSession.from_checkpoint(checkpoint, REPLAY, pool)))
