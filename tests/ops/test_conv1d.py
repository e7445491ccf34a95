"""The convolution over its rolling window: the specification, splits, rollback, chunks, mixed rows, dead rows.

Oracle O1 with a bound of one float32 step per tap; bit-identical across splits (A15, A13, A22, B08, D15).
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.ops.layers import CPU, NAN
from tests.tolerance import FLOAT32_STEP
from trtllm_replayssm.ops.layer_state import CursorTensors
from trtllm_replayssm.ops.reference import commit
from trtllm_replayssm.ops.reference.conv1d import conv1d_update
from trtllm_replayssm.ops.reference.rows import step_rows
from trtllm_replayssm.spec.conv1d import conv_prefill

CHANNELS, WIDEST, SLOTS = 19, 6, 4


class Conv:
    """Windows of all slots, NaN wherever nothing was written, and steps over them."""

    def __init__(self, kernel: int = 4, dtype: torch.dtype = torch.float32, *, bias: bool = True) -> None:
        g = torch.Generator().manual_seed(kernel)
        self.weight = torch.randn(CHANNELS, 1, kernel, generator=g)
        self.bias = torch.randn(CHANNELS, generator=g) if bias else None
        self.window = torch.full((SLOTS, kernel - 1 + WIDEST, CHANNELS), NAN, dtype=dtype)
        self.cursors = CursorTensors.allocate(SLOTS, CPU)

    def step(self, x: Tensor, slots: list[int], counts: list[int], accepted: list[int] | None = None) -> Tensor:
        """x [B, T, C]; NaN beyond the counts. Positions move by what is accepted."""
        live = (torch.arange(x.shape[1]) < torch.tensor(counts)[:, None]) & (torch.tensor(slots) >= 0)[:, None]
        rows = step_rows("test", torch.tensor(slots), torch.tensor(counts), SLOTS, x.shape[1])
        x = x.masked_fill(~live[..., None], NAN)
        out = conv1d_update(self.window, self.cursors, rows, x, self.weight, self.bias)
        assert (out[~live] == 0).all() and out[live].isfinite().all()
        taken = torch.tensor(counts if accepted is None else accepted)
        commit.finish_chunk(self.cursors, rows.active_slot, taken[rows.active])
        return out

    def run(self, x: Tensor, split: list[int], slot: int = 2) -> Tensor:
        """x [n, C] in pieces of the sizes in `split`."""
        pieces, start = [x[:0].float()], 0
        for size in filter(None, split):
            pieces.append(self.step(x[None, start : start + size], [slot], [size])[0])
            start += size
        assert start == len(x)
        return torch.cat(pieces)

    def live(self, slot: int = 2) -> Tensor:
        """The taps the next token will see, oldest first."""
        taps, position = self.weight.shape[-1] - 1, int(self.cursors.position[slot])
        rows = [p % self.window.shape[1] for p in range(max(position - taps, 0), position)]
        return self.window[slot, rows]


def tokens(count: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(count, CHANNELS, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("kernel", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("bias", [False, True])
def test_outputs_equal_the_specification(kernel: int, dtype: torch.dtype, bias: bool) -> None:
    conv, x = Conv(kernel, dtype, bias=bias), tokens(23, dtype)
    window = np.zeros((kernel, CHANNELS))
    bias_vector = None if conv.bias is None else conv.bias.double().numpy()
    want = conv_prefill(window, 0, x.double().numpy(), conv.weight.double().numpy(), bias_vector)
    got = conv.run(x, [1, 6, 2, 3, 1, 10])
    assert np.abs(got.numpy() - want).max() <= 2 * (kernel + 1) * FLOAT32_STEP * np.abs(want).max()
    assert torch.equal(conv.live(), x[23 - kernel + 1 :])


SPLITS = [[1] * 4, [2, 2], [3, 1], [1, 3], [1, 2, 1]]


@pytest.mark.parametrize("split", SPLITS, ids=lambda s: "+".join(map(str, s)))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a15_a_step_and_its_splits_have_the_same_bits(split: list[int], dtype: torch.dtype) -> None:
    """A15: four tokens in one call or several; outputs and window, after prompts that end anywhere in the ring."""
    for before in range(12):
        whole, parts = Conv(dtype=dtype), Conv(dtype=dtype)
        for conv in (whole, parts):
            conv.run(tokens(before, dtype, seed=1), [before])
        x = tokens(4, dtype)
        assert torch.equal(parts.run(x, split), whole.run(x, [4]))
        assert torch.equal(parts.live(), whole.live())


def test_long_chunks_have_the_bits_of_single_tokens() -> None:
    """B09, B11, B19: chunks shorter and longer than the window, one of them a single token."""
    x = tokens(70)
    single = Conv().run(x, [1] * 70)
    for split in ([70], [1, 69], [2, 68], [3, 3, 64], [16, 16, 16, 16, 6], [9] * 7 + [7], [33, 1, 36]):
        conv = Conv()
        assert torch.equal(conv.run(x, split), single)
        assert torch.equal(conv.live(), x[-3:])


@pytest.mark.parametrize("kernel", [2, 3, 4])
def test_a13_a22_partial_acceptance_leaves_the_accepted_taps(kernel: int) -> None:
    """A13, A22: every 0 <= a <= T from every place in the ring, rejected inputs behind the cursor; then one token."""
    for before in range(10):
        for accepted in range(WIDEST + 1):
            conv, clean = Conv(kernel), Conv(kernel)
            prompt, drafts, following = tokens(before, seed=1), tokens(WIDEST, seed=2), tokens(1, seed=3)
            for c in (conv, clean):
                c.run(prompt, [before])
            conv.step(drafts[None], [2], [WIDEST], accepted=[accepted])
            clean.run(drafts[:accepted], [accepted])
            assert torch.equal(conv.live(), clean.live())
            assert torch.equal(conv.run(following, [1]), clean.run(following, [1]))


def test_d15_rows_of_a_batch_do_not_leak_into_each_other() -> None:
    """D15: three sequences together, with a padding row and an idle row, equal each alone."""
    together = Conv()
    alone = [Conv() for _ in range(3)]
    g = torch.Generator().manual_seed(3)
    for step in range(8):
        x = torch.randn(5, 5, CHANNELS, generator=g)
        counts = [(i + step) % 6 for i in range(3)]
        out = together.step(x, [3, -1, 0, 2, 1], [counts[0], 4, counts[1], counts[2], 0])
        for i, row in enumerate((0, 2, 3)):
            solo = alone[i].step(x[row : row + 1], [1], [counts[i]])
            assert torch.equal(solo[0], out[row])
    assert together.window[1].isnan().all()


def test_nothing_before_position_0_is_read_in_a_used_slot() -> None:
    """A next tenant: the same slot, position 0 again, the window still full of someone else's inputs."""
    used, fresh, x = Conv(), Conv(), tokens(5)
    used.run(tokens(30, seed=7), [30])
    used.cursors.position[2] = 0
    assert torch.equal(used.run(x, [2, 1, 2]), fresh.run(x, [2, 1, 2]))
