"""A rank's session on one device whose peer echoes it: sums inside the kernel, recorded and not, give the bits of sums
made before the residual's. Doubling is exact, so both round once. Rows have 256 channels: those of more are norms whose
squares the two kernels add up in another order (the last bit of a norm, which logits show).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.native import harness
from tests.native.test_experts_session import CONFIGS, checkpoint

pytestmark = [
    pytest.mark.gpu, pytest.mark.skipif(harness.unavailable() is not None, reason=str(harness.unavailable())),
    pytest.mark.usefixtures("installed_library"),
]  # fmt: skip

if harness.unavailable() is None:
    import torch

    from trtllm_replayssm.config import EVERY_BATCH, PoolConfig, ReplayConfig
    from trtllm_replayssm.dtypes import ActivationDtype
    from trtllm_replayssm.ops.native_ranks import MARK, Inboxes
    from trtllm_replayssm.runtime.session.base import DecodeRow, PrefillChunk
    from trtllm_replayssm.runtime.session.torch_session import TorchSession
    from trtllm_replayssm.weights.checkpoint import Checkpoint
    from trtllm_replayssm.weights.tensor_parallel import TensorParallel

PROMPTS = [[5, 6, 7, 8, 9, 10, 11], [300, 2, 17], list(range(40, 75))]
SLOTS = 4


class OwnEcho:
    """Implements `Ranks`: the first of two, whose peer holds the same. sums: through inboxes."""

    def __init__(self, *, sums: bool) -> None:
        self.parallel = TensorParallel(2, 0)
        self.launches, self._sums = 0, sums

    def add_up(self, x: Any) -> Any:
        return x + x

    def join(self, x: Any) -> Any:
        return torch.cat([x, x], dim=-1)

    def inboxes(self, rows: int, channels: int, dtype: Any, device: Any) -> Any:
        if not self._sums:
            return None
        own = torch.full((2, 2, rows, channels), MARK, dtype=dtype, device=device)
        spare = torch.full_like(own, MARK)
        # what goes to the peer's inbox arrives where its words are taken from
        addresses = (own.data_ptr(), own[0, 1].data_ptr())
        turn = torch.zeros(rows, dtype=torch.int32, device=device)
        given_up = torch.zeros(1, dtype=torch.int32, pin_memory=True)
        return Inboxes(0, own, addresses, turn, given_up, 5.0, spare, self._count)

    def communicator(self) -> Any:
        return object()

    def _count(self) -> None:
        self.launches += 1


@pytest.mark.parametrize("graphs", [True, False], ids=["recorded", "plain"])
@pytest.mark.parametrize("name", CONFIGS)
def test_sums_inside_the_kernel_give_the_bits_of_sums_before_it(tmp_path: Path, name: str, *, graphs: bool) -> None:
    opened = Checkpoint.open(checkpoint(tmp_path / name, name))
    assert opened.geometry.hidden == 256
    pool = PoolConfig(slots=SLOTS, max_seq_len=128, activation=ActivationDtype.BFLOAT16)
    results, ranks = [], [OwnEcho(sums=sums) for sums in (False, True)]
    for own in ranks:
        session = TorchSession.from_checkpoint(
            opened, ReplayConfig(window=8), pool, device="cuda", cuda_graphs=EVERY_BATCH if graphs else None,
            ranks=own,
        )  # fmt: skip
        session.warm_up()
        slots = [session.allocate(seed) for seed in range(len(PROMPTS))]
        chunks = [PrefillChunk(slot, prompt, True) for slot, prompt in zip(slots, PROMPTS, strict=True)]
        logits = [torch.from_numpy(first) for first in session.prefill(chunks) if first is not None]
        for step in range(20):
            rows = [DecodeRow(slot, [3 + 11 * step + slot]) for slot in slots[: 1 + step % len(slots)]]
            logits += [torch.from_numpy(row) for row in session.decode(rows)]
            session.commit([1] * len(rows))
        results.append(logits)
        session.check_integrity()
    assert all(torch.equal(a, b) and bool(a.isfinite().all()) for a, b in zip(*results, strict=True))
    assert ranks[0].launches == 0 and ranks[1].launches > 2 * len(opened.geometry.layers)
