"""The argmax kernel: exactly numpy's, the lowest id of the largest logit."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.native import harness
from tests.native.test_draw import registers
from trtllm_replayssm.ops.native_draw import argmax, draw, likeliest
from trtllm_replayssm.runtime.sampling.params import SamplingParams

pytestmark = [
    pytest.mark.gpu, pytest.mark.skipif(harness.unavailable() is not None, reason=str(harness.unavailable())),
    pytest.mark.usefixtures("installed_library"),
]  # fmt: skip

NAN, INF = float("nan"), float("inf")


def expected(logits: Tensor) -> list[list[int]]:
    """numpy's argmax, the first NaN where there is one."""
    found: list[list[int]] = np.argmax(logits.cpu().numpy(), axis=-1).tolist()
    return found


def check(logits: Tensor) -> None:
    tokens, finite = argmax(logits.cuda())
    assert tokens.tolist() == expected(logits)
    assert finite.bool().tolist() == torch.isfinite(logits.amax(-1)).tolist()


@pytest.mark.parametrize("grain", [None, 0.5], ids=["distinct", "ties"])
@pytest.mark.parametrize(
    ("rows", "width", "vocab"),
    [(1, 1, 1), (3, 2, 3), (5, 4, 130), (7, 1, 4095), (2, 3, 4096), (2, 3, 4097), (33, 1, 50_257), (3, 4, 131_072),
     (1, 1, 248_320), (1100, 1, 32_768), (1100, 1, 32_769)],
)  # fmt: skip
def test_it_is_that_of_numpy(rows: int, width: int, vocab: int, grain: float | None) -> None:
    """grain: logits are multiples of it. The last two give a block of the scan two turns."""
    logits = torch.randn((rows, width, vocab), generator=torch.Generator().manual_seed(vocab)) * 3
    check(logits if grain is None else (logits / grain).round() * grain)


PLACES = [0, 3, 4, 127, 1023, 1024, 4095, 4096, 8191, 8192, 32_767, 32_768, 40_000]


@pytest.mark.parametrize("vocab", [40_001, 40_004], ids=["single", "wide"])
def test_of_equals_the_lowest_id_wins_wherever_they_lie(vocab: int) -> None:
    """Pairs of places in the same word, thread, warp, piece, and in different ones."""
    pairs = [(a, b) for a in PLACES for b in PLACES if a <= b]
    logits = torch.randn((len(pairs), 1, vocab), generator=torch.Generator().manual_seed(1))
    for row, pair in zip(logits[:, 0], pairs, strict=True):
        row[list(pair)] = 9.0
    check(logits)
    assert argmax(logits.cuda())[0][:, 0].tolist() == [a for a, _ in pairs]


def test_zeros_of_both_signs_are_equal() -> None:
    logits = torch.full((2, 1, 9000), -1.0)
    logits[0, 0, 100], logits[0, 0, 8000] = -0.0, 0.0
    logits[1, 0, 100], logits[1, 0, 101] = 0.0, -0.0
    check(logits)
    assert argmax(logits.cuda())[0].tolist() == [[100], [100]]


def test_the_first_nan_wins_whatever_its_sign_and_infinities_are_told() -> None:
    logits = torch.randn((8, 1, 9001), generator=torch.Generator().manual_seed(2))
    for row, ids, value in [
        (0, [9000], NAN), (1, [4097, 5000], NAN), (2, [2], INF), (3, [8999, 17], INF), (4, range(9001), -INF),
        (5, range(9000), -INF),
    ]:  # fmt: skip
        logits[row, 0, list(ids)] = value
    logits[6, 0, 77] = INF
    logits[6, 0, 78] = torch.tensor(-4194305, dtype=torch.int32).view(torch.float32)  # a NaN with the sign bit
    assert logits[6, 0, 78].isnan()
    check(logits)
    assert argmax(logits.cuda())[1][:, 0].tolist() == [0, 0, 0, 0, 0, 1, 0, 1]


def test_slices_are_read_where_they_lie() -> None:
    """Rows and positions apart, at addresses of every alignment of a float."""
    wide = torch.randn((3, 5, 5004), generator=torch.Generator().manual_seed(3)).cuda()
    for offset in range(4):
        part = wide[:, 1:4, offset : offset + 5000]
        assert argmax(part)[0].tolist() == expected(part)


def test_a_draw_without_temperature_is_the_argmax_in_any_batch() -> None:
    logits = torch.randn((300, 1, 40_001), generator=torch.Generator().manual_seed(4)).round().cuda()
    tokens, finite = argmax(logits)
    made, rows = registers([SamplingParams()] * 300, [1] * 300, 2), torch.arange(300, device="cuda")
    drawn, told = draw(logits, rows, made.settings())
    assert torch.equal(tokens, drawn) and torch.equal(finite, told)
    for row in (0, 7, 299):
        assert torch.equal(argmax(logits[row : row + 1])[0][0], tokens[row])


def test_a_recorded_argmax_reads_what_is_there_at_replay() -> None:
    logits = torch.zeros((5, 2, 9000), device="cuda")
    argmax(logits)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tokens, finite = argmax(logits)
    for seed in range(3):
        logits.copy_(torch.randn(logits.shape, generator=torch.Generator().manual_seed(seed)))
        graph.replay()
        assert tokens.tolist() == expected(logits) and finite.all()


def test_the_likeliest_tokens_are_these_or_torch_s() -> None:
    logits = torch.randn((3, 2, 5000), generator=torch.Generator().manual_seed(5)).round()
    assert likeliest(logits).tolist() == likeliest(logits.cuda()).tolist() == expected(logits)


def test_no_positions_have_no_tokens() -> None:
    tokens, finite = argmax(torch.zeros((0, 3, 100), device="cuda"))
    assert tokens.shape == finite.shape == (0, 3)
