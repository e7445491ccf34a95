"""Prompt scans against the step recurrence, for chunk splits on both sides of the scan's own chunk.

Oracle O1; the bound is `tolerance.FACTOR` times what the conventional float32 recurrence loses on the same prompt.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.layer_shapes import ssm_shape
from tests.ops.layers import KINDS, Layer, Tokens, random_tokens, rates
from tests.ops.test_conventional import recurrence
from tests.tolerance import FACTOR, FLOAT32_STEP
from trtllm_replayssm.config import ReplayConfig
from trtllm_replayssm.ops.reference.prefill import CHUNK, gdn_scan, mamba2_scan
from trtllm_replayssm.shapes import SsmKind, SsmShape

PROMPT = 300
FIRST = [1, 3, 16, 63, 64, 65, 100, 127, 128, 129]


def scan(shape: SsmShape, tokens: Tokens, cuts: list[int], a: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(outputs without skip [n, H, P], final state) of one prompt in chunks that end at `cuts`."""
    state = torch.zeros(shape.heads, shape.head_dim, shape.state_dim)
    a = rates(shape) if a is None else a
    outputs = []
    for start, stop in pairwise([0, *cuts]):
        part = tokens.span(start, stop).map(lambda t: t[0])
        if shape.kind is SsmKind.MAMBA2:
            out, state = mamba2_scan(shape, state, part.value, part.k, part.q, part.decay, a)
        else:
            assert part.beta is not None
            out, state = gdn_scan(shape, state, part.q, part.k, part.value, part.decay, part.beta)
        outputs.append(out)
    return torch.cat(outputs), state


class Prompt:
    """A prompt with its float64 answer and what plain float32 loses on it."""

    def __init__(self, kind: SsmKind, dtype: torch.dtype = torch.float32) -> None:
        self.shape = ssm_shape(kind, head_dim=8, state_dim=16)
        self.tokens = random_tokens(self.shape, 1, PROMPT, dtype=dtype, slowest=0.002)
        plain = Layer(self.shape, ReplayConfig(), conventional=True)
        plain.a = rates(self.shape)
        plain.d_skip.zero_()
        self.want, self.states = recurrence(self.shape, plain, self.tokens)
        lost = plain.run(self.tokens, [1] * PROMPT)[0].numpy()
        self.bounds = [self.bound(lost, self.want), self.bound(plain.fold(0).numpy(), self.states[-1])]

    @staticmethod
    def bound(plain: np.ndarray, want: np.ndarray) -> float:
        return FACTOR * float(np.abs(plain - want).max()) + FLOAT32_STEP / 2 * float(np.abs(want).max())

    def check(self, out: Tensor, state: Tensor) -> None:
        assert np.abs(out.double().numpy() - self.want).max() <= self.bounds[0]
        assert np.abs(state.double().numpy() - self.states[-1]).max() <= self.bounds[1]


PROMPTS = {kind: Prompt(kind) for kind in KINDS}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("first", FIRST)
def test_b09_b11_a_prompt_in_chunks_equals_one_shot_and_the_recurrence(kind: SsmKind, first: int) -> None:
    """B09, B11: two and three chunks of one sequence; the second chunk starts from the first one's state."""
    prompt = PROMPTS[kind]
    for cuts in ([first, PROMPT], [first, min(2 * first, PROMPT - 1), PROMPT]):
        prompt.check(*scan(prompt.shape, prompt.tokens, cuts))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [1, 3, 16])
def test_b19_tiny_chunks_end_to_end_equal_the_recurrence(kind: SsmKind, size: int) -> None:
    prompt = PROMPTS[kind]
    prompt.check(*scan(prompt.shape, prompt.tokens, [*range(size, PROMPT, size), PROMPT]))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [1, 2, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, PROMPT])
def test_i10_every_length_around_a_chunk_equals_the_recurrence(kind: SsmKind, length: int) -> None:
    """I10: one, one less than a chunk, a chunk, one more."""
    prompt = PROMPTS[kind]
    out, state = scan(prompt.shape, prompt.tokens, [length])
    assert np.abs(out.double().numpy() - prompt.want[:length]).max() <= prompt.bounds[0]
    assert np.abs(state.double().numpy() - prompt.states[length]).max() <= prompt.bounds[1]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_width_activations_are_scanned_in_float32(kind: SsmKind, dtype: torch.dtype) -> None:
    prompt = Prompt(kind, dtype)
    prompt.check(*scan(prompt.shape, prompt.tokens, [129, PROMPT]))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("log_decay", [-np.inf, np.log(1e-12), -700.0])
def test_d08_vanishing_decay_stays_finite_in_a_scan(kind: SsmKind, log_decay: float) -> None:
    """D08: a head that forgets everything at each token, a run of such tokens, and one in all heads at once.

    Mamba-2 forgets everything through an infinite rate, GDN through its gate.
    """
    shape = ssm_shape(kind, head_dim=8, state_dim=16)
    tokens = random_tokens(shape, 1, 150)
    plain = Layer(shape, ReplayConfig(), conventional=True)
    plain.d_skip.zero_()
    if kind is SsmKind.MAMBA2:
        plain.a[0] = log_decay
    else:
        tokens.decay[0, :, 0] = log_decay
    if np.isfinite(log_decay):
        rate = plain.a if kind is SsmKind.MAMBA2 else torch.ones(shape.heads)
        tokens.decay[0, 60:70, 1] = log_decay / rate[1]
        tokens.decay[0, 100] = log_decay / rate
    want, states = recurrence(shape, plain, tokens)
    for cuts in ([150], [64, 65, 150]):
        out, state = scan(shape, tokens, cuts, plain.a)
        assert np.abs(out.double().numpy() - want).max() <= 8 * FLOAT32_STEP * np.abs(want).max()
        assert np.abs(state.double().numpy() - states[-1]).max() <= 8 * FLOAT32_STEP * np.abs(states[-1]).max()
