"""Identities of the update operations: replay is the recurrence, splits, rollback, batches and read precisions.

Bit-identical where the contract says so. Elsewhere the oracle is the conventional operation, whose own error against
the specification is tested in `test_conventional.py`.
"""

from __future__ import annotations

import pytest
import torch

from tests.layer_shapes import ssm_shape
from tests.ops.layers import KINDS, Layer, Tokens, noise, random_tokens, same
from tests.spec.helpers import even_split
from trtllm_replayssm.config import ReplayConfig
from trtllm_replayssm.dtypes import StateFormat
from trtllm_replayssm.shapes import SsmKind

WINDOWS = [1, 2, 3, 8, 16, 32]
F32, F16, FP8, NVFP4 = StateFormat.FLOAT32, StateFormat.FLOAT16, StateFormat.FP8, StateFormat.NVFP4


def assert_close(got: torch.Tensor, want: torch.Tensor, relative: float) -> None:
    assert float((got - want).abs().max()) <= relative * float(want.abs().max())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("window", WINDOWS)
def test_replay_is_the_conventional_recurrence_for_every_step_size(kind: SsmKind, window: int) -> None:
    shape = ssm_shape(kind)
    tokens = random_tokens(shape, 1, 2 * window + 9)
    plain = Layer(shape, ReplayConfig(), conventional=True)
    want = plain.run(tokens, [1] * tokens.width)
    for size in sorted({1, 2, 3, min(window, 8), window} & set(range(1, min(window, 16) + 1))):
        layer = Layer(shape, ReplayConfig(window=window, max_step_tokens=size))
        got = layer.run(tokens, even_split(tokens.width, size))
        assert_close(got, want, noise(kind))
        assert_close(layer.fold(0), plain.fold(0), noise(kind))


def ready(kind: SsmKind, committed: int, **settings: object) -> Layer:
    """A layer with a non-zero checkpoint, an origin that is not 0 and `committed` records."""
    config = ReplayConfig(window=8, max_step_tokens=6, **settings)  # type: ignore[arg-type]
    layer = Layer(ssm_shape(kind), config)
    tokens = random_tokens(layer.shape, 1, 11 + committed, seed=5)
    layer.run(tokens.span(0, 8), [6, 2])
    layer.step(tokens.span(8, 11), accepted=[0])  # flushes, commits nothing
    if committed:
        layer.run(tokens.span(11, 11 + committed), [1] * committed)
    assert layer.cursor(0) == (8, committed, 8 + committed)
    return layer


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("committed", [0, 1, 2])
def test_any_split_of_a_step_stores_and_outputs_the_same_bits(kind: SsmKind, committed: int) -> None:
    tokens = random_tokens(ssm_shape(kind), 1, 6)
    for settings in ({}, {"recurrence": FP8, "read": NVFP4}):
        whole = ready(kind, committed, **settings)
        expected = whole.run(tokens, [6])
        for split in ([1] * 6, [2, 4], [4, 2], [1, 2, 3], [3, 3], [5, 1]):
            parts = ready(kind, committed, **settings)
            assert torch.equal(parts.run(tokens, split), expected), split
            assert same(parts.committed(0), whole.committed(0)), split
            assert parts.cursor(0) == whole.cursor(0)


@pytest.mark.parametrize("kind", KINDS)
def test_any_split_across_flushes_stays_within_float32(kind: SsmKind) -> None:
    tokens = random_tokens(ssm_shape(kind), 1, 60)
    outputs, states = [], []
    for size in range(1, 7):
        layer = ready(kind, 0)
        outputs.append(layer.run(tokens, even_split(60, size)))
        states.append(layer.fold(0))
    for out, state in zip(outputs[1:], states[1:], strict=True):
        assert_close(out, outputs[0], noise(kind))
        assert_close(state, states[0], noise(kind))


def joined(first: Tokens, second: Tokens) -> Tokens:
    beta = None if first.beta is None or second.beta is None else torch.cat([first.beta, second.beta], 1)
    return Tokens(
        torch.cat([first.k, second.k], 1), torch.cat([first.q, second.q], 1), torch.cat([first.value, second.value], 1),
        torch.cat([first.decay, second.decay], 1), beta,
    )  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("committed", [0, 2, 3, 7])
def test_appending_k_and_rolling_back_j_is_appending_k_minus_j(kind: SsmKind, committed: int) -> None:
    """Rejected drafts leave no trace: not in the records, not in the checkpoint of this flush or the next."""
    tokens, others = random_tokens(ssm_shape(kind), 1, 12), random_tokens(ssm_shape(kind), 1, 12, seed=9)
    k = 5
    for settings in ({}, {"recurrence": F16}, {"recurrence": FP8, "read": NVFP4}):
        for kept in range(k + 1):
            rolled, plain = ready(kind, committed, **settings), ready(kind, committed, **settings)
            drafted = joined(tokens.span(0, kept), others.span(0, k - kept))
            rolled.step(drafted, accepted=[kept])
            if committed + k > 8 or kept == 0:  # another tail, so that both flush alike
                plain.step(joined(tokens.span(0, kept), others.span(k, 2 * k - kept)), accepted=[kept])
            else:
                plain.step(tokens.span(0, kept))
            assert rolled.cursor(0) == plain.cursor(0)
            assert same(rolled.committed(0), plain.committed(0))
            rest = tokens.span(kept, 12)
            split = even_split(12 - kept, 3)
            assert torch.equal(rolled.run(rest, split), plain.run(rest, split))
            assert same(rolled.committed(0), plain.committed(0))
            assert same(rolled.checkpoints(0), plain.checkpoints(0))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("read", [None, NVFP4])
def test_a_row_has_the_same_bits_alone_in_a_batch_and_in_another_slot(
    kind: SsmKind, groups: int, read: StateFormat | None
) -> None:
    """Five sequences at different h, so that each call mixes rows that flush with rows that do not."""
    shape = ssm_shape(kind, groups=groups)
    recurrence = F32 if read is None else FP8
    config = ReplayConfig(window=5, max_step_tokens=4, recurrence=recurrence, read=read)
    together, moved = Layer(shape, config, 5), Layer(shape, config, 7)
    alone = [Layer(shape, config, 1) for _ in range(5)]
    home = [6, 0, 3, 5, 1]  # slots in `moved`
    for i in range(5):
        moved.cursors.seed[home[i]] = alone[i].cursors.seed[0] = together.cursors.seed[i]
    for step in range(9):
        tokens = random_tokens(shape, 5, 4, seed=step)
        counts = [(i + step) % 5 for i in range(5)]
        accepted = [max(n - (i + step) % 3, 0) for i, n in enumerate(counts)]
        out = together.step(tokens, range(5), counts, accepted)
        order = [(2 * i + step) % 5 for i in range(5)]
        slots, rows = [home[i] for i in order], [*order, 0]
        shuffled = moved.step(
            tokens.rows(rows), [*slots, -1], [*(counts[i] for i in order), 3], [*(accepted[i] for i in order), 1]
        )
        assert torch.equal(shuffled[:5], out[order]) and (shuffled[5] == 0).all()
        for i in range(5):
            solo = alone[i].step(tokens.rows([i]), [0], [counts[i]], [accepted[i]])
            assert torch.equal(solo[0], out[i])
            for other, slot in ((alone[i], 0), (moved, home[i])):
                assert other.cursor(slot) == together.cursor(i)
                assert same(other.committed(slot), together.committed(i))
                assert same(other.checkpoints(slot), together.checkpoints(i))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("recurrence", [F32, F16, FP8])
def test_the_read_format_never_reaches_the_high_precision_checkpoint(kind: SsmKind, recurrence: StateFormat) -> None:
    """Same inputs, different read copies: the checkpoints stay bit-identical, and the outputs show that they differ."""
    shape = ssm_shape(kind)
    formats = [recurrence, FP8, NVFP4, F16]
    layers = [
        Layer(shape, ReplayConfig(window=6, max_step_tokens=4, recurrence=recurrence, read=read)) for read in formats
    ]
    if kind is SsmKind.MAMBA2 or recurrence is not F32:  # a shared pool that folds the same values
        layers.append(Layer(shape, ReplayConfig(window=6, max_step_tokens=4, recurrence=recurrence)))
    tokens = random_tokens(shape, 1, 72)
    outputs = [layer.run(tokens, [1, 2, 3, 4, 4, 4] * 4) for layer in layers]
    for layer in layers[1:]:
        for ours, first in zip(layer.state.checkpoint.tensors(), layers[0].state.checkpoint.tensors(), strict=True):
            assert torch.equal(ours.view(torch.uint8), first.view(torch.uint8))
    assert not torch.equal(outputs[2], outputs[0])
    assert_close(outputs[2], outputs[0], 0.5)


@pytest.mark.parametrize("kind", KINDS)
def test_two_runs_are_bit_identical(kind: SsmKind) -> None:
    tokens = random_tokens(ssm_shape(kind), 1, 24)
    config = ReplayConfig(window=4, max_step_tokens=3, recurrence=FP8, read=NVFP4)
    first, second = Layer(ssm_shape(kind), config), Layer(ssm_shape(kind), config)
    assert torch.equal(first.run(tokens, [3] * 8), second.run(tokens, [3] * 8))
    first.poison()
    second.poison()
    assert same(first.everything(0), second.everything(0))
