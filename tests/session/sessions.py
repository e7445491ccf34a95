"""Torch sessions over the small reference checkpoints, and what a test wants to read back from them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.tolerance import CORRECTION_LOGIT_NOISE, LOGIT_NOISE, REPLAY_LOGIT_NOISE
from trtllm_replayssm.config import PoolConfig, ReplayConfig
from trtllm_replayssm.dtypes import ActivationDtype
from trtllm_replayssm.ops.dtypes import torch_dtype
from trtllm_replayssm.ops.reference import gdn, mamba2
from trtllm_replayssm.runtime.pools.state_pools import StatePools
from trtllm_replayssm.runtime.session.base import DecodeRow, Logits, PrefillChunk
from trtllm_replayssm.runtime.session.torch_session import TorchSession
from trtllm_replayssm.runtime.session.torch_weights import TorchWeights
from trtllm_replayssm.shapes import SsmKind
from trtllm_replayssm.weights.checkpoint import Checkpoint

CHECKPOINTS = Path(__file__).resolve().parents[1] / "checkpoints"
NAMES = ("nemotron-dense", "nemotron-moe", "nemotron-moe-groups", "qwen-dense", "qwen-moe")
FAMILIES = ("nemotron-moe", "qwen-moe")
CPU = torch.device("cpu")


@cache
def checkpoint(name: str) -> Checkpoint:
    return Checkpoint.open(CHECKPOINTS / name)


@cache
def weights(name: str, activation: ActivationDtype) -> TorchWeights:
    """Shared by all sessions of a test run; a session only reads them."""
    return TorchWeights(checkpoint(name), torch_dtype(activation), CPU)


@cache
def reference(name: str) -> list[dict[str, Any]]:
    """Prompts of 5, 17 and 40 ids with their top-20 logits, 24 greedy ids and margins."""
    prompts: list[dict[str, Any]] = json.loads((CHECKPOINTS / name / "reference.json").read_text())["prompts"]
    return prompts


def sequence(name: str, prompt: int = 2) -> list[int]:
    """A reference prompt and its greedy continuation."""
    entry = reference(name)[prompt]
    return [*entry["input_ids"], *entry["greedy"]]


def open_session(
    name: str, *, window: int = 8, widest: int = 4, slots: int = 4, max_seq_len: int = 160,
    activation: ActivationDtype = ActivationDtype.FLOAT32, conventional: bool = False, **formats: Any,
) -> TorchSession:  # fmt: skip
    """A session that poisons dead memory before each step and checks its pools after it."""
    replay = ReplayConfig(window=window, max_step_tokens=widest, **formats)
    pool = PoolConfig(slots=slots, max_seq_len=max_seq_len, activation=activation)
    pools = StatePools.allocate(checkpoint(name).geometry, replay, pool, conventional=conventional, device=CPU)
    return TorchSession(weights(name, activation), pools, debug=True)


def start(session: TorchSession, prompt: Sequence[int], seed: int = 1) -> tuple[int, Logits]:
    """A new slot with its prompt absorbed, and the prompt's last logits."""
    slot = session.allocate(seed)
    logits = session.prefill([PrefillChunk(slot, prompt, True)])[0]
    assert logits is not None
    return slot, logits


def force(session: TorchSession, slot: int, tokens: Sequence[int]) -> Logits:
    """Teacher-forced plain decoding: logits [n, V] after each token."""
    rows = []
    for token in tokens:
        rows.append(session.decode([DecodeRow(slot, [token])])[0][0])
        session.commit([1])
    return np.array(rows)


def assert_agree(name: str, got: Logits, want: Logits) -> None:
    """Logits [steps, V] of two replay runs of one model. qwen-moe has steps whose router amplifies a last bit."""
    steps = np.abs(got - want).max(-1)
    if name == "qwen-moe":
        assert np.median(steps) <= REPLAY_LOGIT_NOISE and steps.max() <= CORRECTION_LOGIT_NOISE[1], steps
    else:
        assert steps.max() <= (REPLAY_LOGIT_NOISE if name.startswith("qwen") else LOGIT_NOISE), steps


def hashes(session: TorchSession) -> list[str]:
    """Of every slot, free ones included."""
    return [session.pools.slot_hash(s) for s in range(session.pool.slots)]


def records(session: TorchSession, slot: int) -> list[torch.Tensor]:
    """Committed records of all layers, oldest first, bytes."""
    cursors, found = session.cursors(slot), []
    for state in session.pools.ssm.values():
        rows = session.replay.ring_rows
        places = [(cursors.origin + i) % rows for i in range(cursors.h)]
        found += [t[slot, :, places].contiguous().view(torch.uint8) for t in state.ring_tensors()]  # type: ignore[union-attr]
    return found


def states(session: TorchSession, slot: int) -> list[torch.Tensor]:
    """The recurrent state of each layer with all committed records applied, float32."""

    index, found = torch.tensor([slot]), []
    for layer, state in session.pools.ssm.items():
        if session.pools.conventional:
            found.append(state.states[slot, session.pools.cursors.origin[slot]])  # type: ignore[union-attr]
        elif session.geometry.ssm.kind is SsmKind.GDN:
            found.append(gdn.gdn_fold(state, session.pools.cursors, index)[0])  # type: ignore[arg-type]
        else:
            name = f"backbone.layers.{layer}.mixer.A_log"
            a = -session._weights.vector(name).exp()
            found.append(mamba2.mamba2_fold(state, session.pools.cursors, index, a)[0])  # type: ignore[arg-type]
    return found
