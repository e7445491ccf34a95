"""A torch session on CUDA runs its decode steps by the kernels and gives the text of the CPU session.

Activations are bfloat16, whose matrix products differ between devices, so the judge is a CUDA session that runs the
reference operations: the kernels may not move logits or states further from the CPU session than it does.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tests.native import harness
from tests.paths import EXAMPLES
from trtllm_replayssm.config import PoolConfig, ReplayConfig
from trtllm_replayssm.dtypes import ActivationDtype
from trtllm_replayssm.launches import TunedLaunch
from trtllm_replayssm.ops.dtypes import torch_dtype
from trtllm_replayssm.runtime.pools.state_pools import StatePools
from trtllm_replayssm.runtime.session import torch_session
from trtllm_replayssm.runtime.session.base import DecodeRow, PrefillChunk
from trtllm_replayssm.runtime.session.torch_session import TorchSession
from trtllm_replayssm.runtime.session.torch_weights import TorchWeights
from trtllm_replayssm.weights.checkpoint import Checkpoint

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(harness.unavailable() is not None, reason=str(harness.unavailable()))]

MODELS = ("nemotron-tiny-nvfp4", "qwen3_5-tiny-nvfp4")
PROMPT = [1, 45, 812, 77, 3071, 404, 29, 1500, 6, 911, 230, 58]
NEW_TOKENS = 64
FORCED_TOKENS = 40  # two windows and a half
Logits = NDArray[np.float32]


@cache
def weights(model: Path, device: str, activation: ActivationDtype) -> TorchWeights:
    """Shared by the sessions of a run: they only read them."""
    return TorchWeights(Checkpoint.open(model), torch_dtype(activation), torch.device(device))


def open_session(
    model: Path, device: str, widest: int, activation: ActivationDtype = ActivationDtype.BFLOAT16, *,
    conventional: bool = False, debug: bool = True, launches: tuple[TunedLaunch, ...] = (),
) -> TorchSession:  # fmt: skip
    pool = PoolConfig(slots=3, max_seq_len=160, activation=activation)
    replay = ReplayConfig(window=16, max_step_tokens=widest, launches=launches)
    with Checkpoint.open(model) as checkpoint:
        geometry = checkpoint.geometry
    pools = StatePools.allocate(geometry, replay, pool, conventional=conventional, device=torch.device(device))
    return TorchSession(weights(model, device, activation), pools, debug=debug)


def greedy(session: TorchSession) -> list[int]:
    """NEW_TOKENS tokens after the prompt, one a step."""
    slot = session.allocate(seed=1)
    logits = session.prefill([PrefillChunk(slot, PROMPT, True)])[0]
    assert logits is not None
    tokens = [int(logits.argmax())]
    while len(tokens) < NEW_TOKENS:
        logits = session.decode([DecodeRow(-1, []), DecodeRow(slot, [tokens[-1]])])[1][0]
        session.commit([0, 1])
        tokens.append(int(logits.argmax()))
    return tokens


@cache
def cpu_text(model: Path) -> list[int]:
    """What the model itself says on a CPU, so that most tokens are decided; once for all tests of it."""
    return greedy(open_session(model, "cpu", 1))


def forced(session: TorchSession, tokens: Sequence[int], widths: Sequence[int]) -> Logits:
    """Logits [n, V] after each of `tokens`, fed in steps of `widths` of which every second keeps one token only."""
    slot, rows, at, step = session.allocate(seed=1), [], 0, 0
    session.prefill([PrefillChunk(slot, PROMPT, True)])
    while at < len(tokens):
        part = list(tokens[at : at + widths[step % len(widths)]])
        taken = 1 if step % 2 else len(part)
        rows += list(session.decode([DecodeRow(slot, part)])[0][:taken])
        session.commit([taken])
        at, step = at + taken, step + 1
    return np.array(rows)


@pytest.mark.parametrize("conventional", [False, True], ids=["replay", "conventional"])
@pytest.mark.parametrize("widths", [(1,), (4, 3, 1, 2)], ids=["plain", "verify"])
@pytest.mark.parametrize("model", MODELS)
def test_kernels_stay_as_close_to_the_cpu_session_as_the_reference_on_cuda(
    model: str, widths: tuple[int, ...], conventional: bool, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    path, opened = EXAMPLES / model, partial(open_session, widest=max(widths), conventional=conventional)
    tokens = cpu_text(path)[:FORCED_TOKENS]
    expected = forced(opened(path, "cpu"), tokens, widths)
    with caplog.at_level(logging.WARNING):
        native = opened(path, "cuda")
    assert native._state_ops.native is not None, caplog.text
    assert not caplog.records
    got = forced(native, tokens, widths)
    assert native._state_ops.prompts is not None and native.graphs.count > 0
    monkeypatch.setattr(torch_session, "native_ops", lambda pools: None)
    reference = forced(opened(path, "cuda"), tokens, widths)
    noise, error = np.abs(reference - expected), np.abs(got - expected)
    # Another order of float32 sums moves a few bfloat16 roundings (mean within 1.2, the worst of all within 2); a wrong
    # rounding point, decay or record moves all of them by more.
    assert error.mean() <= 1.2 * noise.mean() and error.max() <= 2.0 * noise.max(), (error.max(), noise.max())
    top2 = np.partition(expected, -2, axis=-1)[:, -2:]
    decided = top2[:, 1] - top2[:, 0] > 2.0 * error.max()
    assert decided.sum() > len(expected) // 3, "the models decide most tokens clearly"
    assert (got.argmax(-1) == expected.argmax(-1))[decided].all()


def test_a_pool_that_no_kernel_serves_runs_the_reference_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        session = open_session(EXAMPLES / MODELS[0], "cuda", 1, ActivationDtype.FLOAT32)
    assert session._state_ops.native is None
    (line,) = caplog.messages
    assert "float32" in line and "\n" not in line
    forced(session, PROMPT[:3], (1,))
