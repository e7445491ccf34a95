"""Ranks in threads choose tokens from a vocabulary that they cut. Oracle: the argmax of all logits."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.parallel.thread_ranks import on_all, thread_ranks
from tests.session.sessions import checkpoint, sequence, start
from trtllm_replayssm.config import PoolConfig, ReplayConfig
from trtllm_replayssm.dtypes import ActivationDtype
from trtllm_replayssm.runtime.session.best_tokens import best_tokens
from trtllm_replayssm.runtime.session.torch_session import TorchSession

REPLAY = ReplayConfig(window=8, max_step_tokens=4)
POOL = PoolConfig(slots=2, max_seq_len=64, activation=ActivationDtype.FLOAT32)


def whole_and_parts(values: Callable[[Tensor], None]) -> tuple[Tensor, list[Tensor]]:
    logits = torch.randn(3, 2, 12, generator=torch.Generator().manual_seed(3))
    values(logits)
    return logits.argmax(-1), list(logits.split(4, dim=-1))


def _plain(logits: Tensor) -> None:
    """As drawn."""


def _tied(logits: Tensor) -> None:
    """The largest stands on two ranks, and twice on one."""
    logits[..., [2, 5, 7]] = 9.0


def _infinite(logits: Tensor) -> None:
    logits[..., 4:] = float("-inf")
    logits[0] = float("-inf")


def _broken(logits: Tensor) -> None:
    logits[1, :, 6] = logits[1, :, 10] = float("nan")


@pytest.mark.parametrize("values", [_plain, _tied, _infinite, _broken])
def test_a_cut_vocabulary_gives_the_token_of_the_whole(values: Callable[[Tensor], None]) -> None:
    expected, parts = whole_and_parts(values)
    ranks = thread_ranks(3)
    for got in on_all(lambda rank: best_tokens(parts[rank], 12, ranks[rank]), 3):
        assert got.dtype is torch.int64 and torch.equal(got, expected)
    assert all(rank.calls == 1 for rank in ranks)


def test_whole_logits_are_nobody_else_s_business() -> None:
    expected, parts = whole_and_parts(_tied)
    ranks = thread_ranks(3)
    assert torch.equal(best_tokens(torch.cat(parts, dim=-1), 12, ranks[0]), expected)
    assert torch.equal(best_tokens(torch.cat(parts, dim=-1), 12, None), expected)
    assert ranks[0].calls == 0


def test_a_step_chooses_the_token_of_all_logits_from_its_part() -> None:
    name = "qwen-dense"
    ranks = thread_ranks(2)

    def run(rank: int) -> tuple[Tensor, Tensor, int, int]:
        session = TorchSession.from_checkpoint(checkpoint(name), REPLAY, POOL, ranks=ranks[rank])
        slot, _ = start(session, sequence(name)[:20])
        step = session.static_step(1, 1)
        step.slot.fill_(slot)
        step.num_tokens.fill_(1)
        step.ids.fill_(sequence(name)[20])
        whole = step.forward().logits
        step.commit(torch.zeros(1, dtype=torch.int64))
        own = step.forward(own_logits=True).logits
        return whole.argmax(-1), step.best(own), whole.shape[-1], own.shape[-1]

    for whole, best, vocab, part in on_all(run, 2):
        assert torch.equal(whole, best) and vocab == 2 * part == checkpoint(name).geometry.vocab
