"""Ranks in threads: sums that wait for the norm behind them.

The kernels are stood in for by their formulas, so that ranks on a CPU take the path of CUDA. Oracle O4: the session of
one rank, without kernels.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.parallel.thread_ranks import ThreadRanks, on_all, thread_ranks
from tests.session.sessions import checkpoint, force, open_session, sequence, start
from tests.session.test_joined_operations import Formulas
from tests.tolerance import REPLAY_LOGIT_NOISE
from trtllm_replayssm.config import PoolConfig, ReplayConfig
from trtllm_replayssm.dtypes import ActivationDtype
from trtllm_replayssm.ops import native_layers
from trtllm_replayssm.runtime.session.torch_session import TorchSession
from trtllm_replayssm.runtime.session.torch_state_ops import StateOps

REPLAY = ReplayConfig(window=8, max_step_tokens=4)
POOL = PoolConfig(slots=2, max_seq_len=64, activation=ActivationDtype.FLOAT32)


class FormulaInboxes:
    """The functions of `ops.native_ranks.Inboxes` that a forward pass calls; counts what it adds up."""

    def __init__(self, ranks: ThreadRanks, rows: int, channels: int) -> None:
        self.launches: Counter[str] = Counter()
        self._ranks, self._room, self._formulas = ranks, rows * channels, Formulas()

    def serves(self, x: Tensor) -> bool:
        served = x.numel() <= self._room
        self.launches["served" if served else "refused"] += 1
        return served

    def add_rms_norm(self, x: Tensor, *others: Any, unit_offset: bool) -> Tensor:
        self.launches["sum over ranks and norm"] += 1
        return self._formulas.add_rms_norm(self._ranks.add_up(x), *others, unit_offset=unit_offset)


class InboxRanks(ThreadRanks):
    """`ThreadRanks` with inboxes; opened: those that sessions asked for."""

    opened: FormulaInboxes

    def inboxes(self, rows: int, channels: int, dtype: torch.dtype, device: torch.device) -> Any:
        self.opened = FormulaInboxes(self, rows, channels)
        return self.opened


def logits_of(session: TorchSession, tokens: list[int]) -> np.ndarray:
    slot, first = start(session, tokens[:20])
    return np.concatenate([first[None], force(session, slot, tokens[20:30])])


@pytest.mark.parametrize("name", ["nemotron-moe", "qwen-moe", "qwen-dense"])
def test_sums_over_ranks_run_with_the_norm_behind_them(
    name: str, monkeypatch: pytest.MonkeyPatch, unwritten_memory_is_nan: None
) -> None:
    tokens = sequence(name)
    expected = logits_of(open_session(name), tokens)
    formulas = Formulas()
    for function in ("rms_norm", "add_rms_norm", "activation", "attention_inputs", "attention"):
        monkeypatch.setattr(native_layers, function, getattr(formulas, function))
    monkeypatch.setattr(StateOps, "native_heads", True)
    ranks = [InboxRanks(r.parallel, r._meeting) for r in thread_ranks(2)]

    def run(rank: int) -> np.ndarray:
        session = TorchSession.from_checkpoint(checkpoint(name), REPLAY, POOL, debug=True, ranks=ranks[rank])
        return logits_of(session, tokens)

    got = on_all(run, 2)
    np.testing.assert_array_equal(got[0], got[1])
    assert abs(got[0] - expected).max() <= REPLAY_LOGIT_NOISE
    for one in ranks:
        launches = one.opened.launches
        sums = launches["sum over ranks and norm"]
        assert sums == launches["served"] == 10 * launches["refused"] > 0, "ten steps fit, the prompt of 20 does not"
