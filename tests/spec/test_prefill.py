"""Prompts: chunks of any size equal the one-token recurrence, fold what is pending, and round once, at the end."""

from __future__ import annotations

import numpy as np
import pytest

from tests.spec.helpers import KINDS, LAYER, SEED, Sequence, conventional, part, random_inputs, small_shape
from trtllm_replayssm.config import ReplayConfig
from trtllm_replayssm.dtypes import Rounding, StateFormat
from trtllm_replayssm.shapes import SsmKind
from trtllm_replayssm.spec.cursors import finish_prefill
from trtllm_replayssm.spec.formats import encode
from trtllm_replayssm.spec.philox import state_words
from trtllm_replayssm.spec.replay import StepInputs

TOKENS = 19


def prefill(sequence: Sequence, inputs: StepInputs, chunks: list[int]) -> np.ndarray:
    outputs, start = [], 0
    for index, size in enumerate(chunks):
        last = index == len(chunks) - 1
        outputs.append(sequence.layer.prefill(sequence.cursors, part(inputs, start, start + size), last=last))
        finish_prefill(sequence.cursors, size)
        start += size
    assert start == len(inputs.k)
    return np.concatenate(outputs)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("chunks", [[19], [1, 18], [3, 16], [18, 1], [7, 1, 1, 10]], ids=str)
def test_chunks_then_decoding_equal_the_recurrence(kind: SsmKind, chunks: list[int]) -> None:
    shape = small_shape(kind)
    inputs = random_inputs(shape, TOKENS + 12)
    want, states = conventional(shape, inputs)
    sequence = Sequence.new(shape, ReplayConfig(window=4, max_step_tokens=3), exact=True)
    out = prefill(sequence, part(inputs, 0, TOKENS), chunks)
    np.testing.assert_allclose(out, want[:TOKENS], rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(sequence.layer.checkpoint, states[TOKENS], rtol=1e-12, atol=1e-12)
    assert (sequence.cursors.origin, sequence.cursors.h, sequence.cursors.position) == (0, 0, TOKENS)
    rest = sequence.run(part(inputs, TOKENS, TOKENS + 12), [3, 1, 2, 3, 3])
    np.testing.assert_allclose(rest, want[TOKENS:], rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(sequence.state(), states[-1], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("pending", [1, 3, 4])
def test_a_prompt_that_follows_decoding_folds_the_pending_records_first(kind: SsmKind, pending: int) -> None:
    shape = small_shape(kind)
    inputs = random_inputs(shape, 30)
    want, states = conventional(shape, inputs)
    sequence = Sequence.new(shape, ReplayConfig(window=4, max_step_tokens=2), exact=True)
    sequence.run(part(inputs, 0, 4 + pending), [1] * (4 + pending))
    assert sequence.cursors.h == pending
    out = prefill(sequence, part(inputs, 4 + pending, 24), [5, 15 - pending])
    np.testing.assert_allclose(out, want[4 + pending : 24], rtol=1e-12, atol=1e-12)
    assert (sequence.cursors.origin, sequence.cursors.h) == (0, 0)
    np.testing.assert_allclose(sequence.run(part(inputs, 24, 30), [2, 2, 2]), want[24:], rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(sequence.state(), states[-1], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_only_the_last_chunk_rounds_the_state(kind: SsmKind) -> None:
    """Prompts run at full precision (paper, Appendix E.4.1): one stochastic rounding, keyed by the prompt's end."""
    shape = small_shape(kind, state_dim=16)
    inputs = random_inputs(shape, TOKENS)
    want, states = conventional(shape, inputs)
    config = ReplayConfig(window=4, recurrence=StateFormat.FP8, read=StateFormat.NVFP4)
    words = state_words(SEED, LAYER, shape.heads, shape.head_dim * shape.state_dim, TOKENS)
    rounded = encode(states[-1], StateFormat.FP8, Rounding.STOCHASTIC, words)
    for chunks in ([TOKENS], [4, 4, 11]):
        sequence = Sequence.new(shape, config)
        out = prefill(sequence, inputs, chunks)
        np.testing.assert_allclose(out, want, rtol=1e-5, atol=1e-6)
        stored, read = sequence.layer.stored, sequence.layer.stored_read
        assert stored is not None and read is not None
        assert (stored.values == rounded.values).mean() > 0.99
        np.testing.assert_allclose(read.decode(), encode(states[-1], StateFormat.NVFP4).decode(), rtol=1e-5, atol=1e-6)


def test_a_decode_step_inside_an_unfinished_prompt_is_a_bug() -> None:
    shape = small_shape(SsmKind.MAMBA2)
    sequence = Sequence.new(shape, ReplayConfig(window=4))
    inputs = random_inputs(shape, 4)
    sequence.layer.prefill(sequence.cursors, part(inputs, 0, 3), last=False)
    with pytest.raises(AssertionError, match="unfinished prompt"):
        sequence.step(part(inputs, 3, 4))


def test_an_empty_last_chunk_writes_what_the_earlier_ones_left() -> None:
    shape = small_shape(SsmKind.GDN)
    inputs = random_inputs(shape, 5)
    sequence = Sequence.new(shape, ReplayConfig(window=4), exact=True)
    prefill(sequence, inputs, [5, 0])
    np.testing.assert_allclose(sequence.layer.checkpoint, conventional(shape, inputs)[1][-1], rtol=1e-12)
    assert sequence.layer.carry is None
