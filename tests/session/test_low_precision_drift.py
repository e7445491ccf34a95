"""How state error grows on trained checkpoints, teacher-forced by T = 8 verify steps over held-out prose.

A shared low-precision checkpoint rounds its own roundings again at every flush: the error of the slowest heads grows
with length. With a separate read copy the recurrence stays float32: where the inputs are the same (the first SSM
layer, which reads only embeddings) its state is bit-identical to the float32 run's at any length. Later layers see the
outputs of the read copies as inputs, so theirs differ a little, by less than a tenth of what sharing costs.

The float32 run has a float32 read copy, so that GDN re-derives its corrections in all runs. The errors printed are
those of the worst head of the model, relative to its state.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from tests.paths import models_dir, require_model
from tests.session.sessions import states
from trtllm_replayssm.config import PoolConfig, ReplayConfig
from trtllm_replayssm.dtypes import StateFormat
from trtllm_replayssm.runtime.session.base import DecodeRow, PrefillChunk
from trtllm_replayssm.runtime.session.torch_session import TorchSession
from trtllm_replayssm.weights.checkpoint import Checkpoint

PROMPT, WIDTH = 16, 8
TEXT = "heldout_kjv_isaiah_jeremiah.txt"
POOLS = {
    "float32": (StateFormat.FLOAT32, StateFormat.FLOAT32),
    "shared nvfp4": (StateFormat.NVFP4, None),
    "shared fp8": (StateFormat.FP8, None),
    "nvfp4 read": (StateFormat.FLOAT32, StateFormat.NVFP4),
}


def text_ids(model: Path, count: int) -> list[int]:
    """The first ids of the prose beside the models; skips the test when it is not there."""
    directory = models_dir()
    assert directory is not None
    path = directory.parent / "text" / TEXT
    if not path.exists():
        pytest.skip(f"needs {TEXT} in a directory `text` beside the models")
    encoder = Tokenizer.from_file(str(model / "tokenizer.json"))
    ids: list[int] = encoder.encode(path.read_text(encoding="utf-8")[: 8 * count]).ids[:count]
    assert len(ids) == count
    return ids


def errors_at(model: Path, lengths: list[int], pools: list[str]) -> dict[str, list[torch.Tensor]]:
    """For each pool and length: error of each layer and head [layers, H], relative to the float32 run's state."""
    ids = text_ids(model, lengths[-1])
    checkpoint, pool = Checkpoint.open(model), PoolConfig(slots=1, max_seq_len=lengths[-1])
    sessions = {}
    for name in pools:
        recurrence, read = POOLS[name]
        replay = ReplayConfig(window=16, max_step_tokens=WIDTH, recurrence=recurrence, read=read)
        session = sessions[name] = TorchSession.from_checkpoint(checkpoint, replay, pool)
        session.prefill([PrefillChunk(session.allocate(3), ids[:PROMPT], True)])
    found: dict[str, list[torch.Tensor]] = {name: [] for name in pools}
    for start in range(PROMPT, lengths[-1], WIDTH):
        for session in sessions.values():
            session.decode([DecodeRow(0, ids[start : start + WIDTH])])
            session.commit([WIDTH])
        if start + WIDTH in lengths:
            exact = torch.stack(states(sessions["float32"], 0)).double()
            for name, session in sessions.items():
                difference = torch.stack(states(session, 0)).double() - exact
                found[name].append(difference.flatten(2).norm(dim=-1) / exact.flatten(2).norm(dim=-1))
    return found


@pytest.mark.slow
@pytest.mark.timeout(900)  # about 100 s on a core of its own
@pytest.mark.parametrize(
    "name,lengths,growth,pools",
    [
        ("nemotron-tiny", [256, 1024, 2048, 4096], 1.5, list(POOLS)),
        ("qwen3_5-tiny", [256, 1024], 1.2, ["float32", "shared nvfp4", "nvfp4 read"]),
    ],
    ids=["mamba2", "gdn"],
)
def test_shared_error_grows_with_length_and_a_separate_recurrence_stays_exact(
    name: str, lengths: list[int], growth: float, pools: list[str]
) -> None:
    found = errors_at(require_model(name), lengths, pools)
    worst = {pool: [float(e.max()) for e in errors] for pool, errors in found.items()}
    for pool, errors in worst.items():
        print(f"{name} {pool}: " + ", ".join(f"{n} {e:.4f}" for n, e in zip(lengths, errors, strict=True)))
    for pool in (p for p in pools if p.startswith("shared")):
        assert worst[pool] == sorted(worst[pool]) and worst[pool][-1] > growth * worst[pool][0]
    for separate, shared in zip(found["nvfp4 read"], worst["shared nvfp4"], strict=True):
        assert float(separate[0].max()) == 0.0, "the first layer's recurrence is bit-identical"
        assert 0.0 < float(separate.max()) < shared / 10
