"""bfloat16 activations: replay loses no more against float32 than conventional decoding does at the same precision."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.e2e.bundled import NEMOTRON, QWEN
from trtllm_replayssm.config import PoolConfig, ReplayConfig
from trtllm_replayssm.dtypes import ActivationDtype
from trtllm_replayssm.runtime.session.base import DecodeRow, PrefillChunk
from trtllm_replayssm.runtime.session.torch_session import TorchSession
from trtllm_replayssm.runtime.text.tokenizer import load_tokenizer
from trtllm_replayssm.weights.checkpoint import Checkpoint

TEXT = (
    "The handler sends the log records to the appropriate destination. When a record is made, the logger passes it to "
    "every handler that is attached, and each handler decides by its own level whether the record is written. "
)
PROMPT_TOKENS = 12


def teacher_forced(model: Path, ids: list[int], activation: ActivationDtype, state_cache: str) -> NDArray[np.float32]:
    """Logits [tokens, V] of a decode that consumes `ids` one by one after a short prompt."""
    pool = PoolConfig(slots=1, max_seq_len=256, activation=activation)
    with Checkpoint.open(model) as checkpoint:
        session = TorchSession.from_checkpoint(checkpoint, ReplayConfig(), pool, state_cache=state_cache, debug=True)
        slot = session.allocate(seed=1)
        session.prefill([PrefillChunk(slot, ids[:PROMPT_TOKENS], True)])
        logits = []
        for token in ids[PROMPT_TOKENS:]:
            logits.append(session.decode([DecodeRow(slot, [token])])[0][0])
            session.commit([1])
    return np.stack(logits)


@pytest.mark.parametrize("model", [QWEN, NEMOTRON], ids=lambda path: path.name)
def test_replay_in_bfloat16_is_as_close_to_float32_as_conventional_decoding(model: Path) -> None:
    ids = list(load_tokenizer(model).encode(TEXT))
    assert len(ids) > PROMPT_TOKENS + 32, "two windows at least"
    exact = teacher_forced(model, ids, ActivationDtype.FLOAT32, "conventional")
    baseline = np.abs(teacher_forced(model, ids, ActivationDtype.BFLOAT16, "conventional") - exact)
    logits = teacher_forced(model, ids, ActivationDtype.BFLOAT16, "replay")
    replayed = np.abs(logits - exact)
    # mean and worst error: 1.2 separates another order of float32 sums (about 1.02) from a wrong rounding point
    assert replayed.mean() <= 1.2 * baseline.mean(), (replayed.mean(), baseline.mean())
    assert replayed.max() <= 2.0 * baseline.max(), (replayed.max(), baseline.max())
    top2 = np.partition(exact, -2, axis=-1)[:, -2:]
    decided = top2[:, 1] - top2[:, 0] > 2.0 * replayed.max()
    assert decided.sum() > len(exact) // 4
    assert (exact.argmax(-1) == logits.argmax(-1))[decided].all()
