"""The update operations against the specification, one step at a time, on mixed batches over poisoned memory.

Outputs, corrections and folded states: within the bound of `tolerance.FACTOR`. Stored records: the inputs bit for bit,
a correction the nearest float16. Checkpoints after a flush: bit for bit the specification's encoding of the float32
state, stochastic rounding included. Everything a step has no business with: unchanged bytes.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from tests.layer_shapes import ssm_shape
from tests.ops.judge import Errors, compute, records_of, situation
from tests.ops.layers import KINDS, LAYER, Layer, Tokens, as_bytes, random_tokens, same
from tests.tolerance import FLOAT16_STEP, FLOAT32_STEP
from trtllm_replayssm.config import ReplayConfig
from trtllm_replayssm.dtypes import FP16_MAX, Rounding, StateFormat
from trtllm_replayssm.shapes import SsmKind
from trtllm_replayssm.spec.cursors import Cursors, commit
from trtllm_replayssm.spec.formats import encode
from trtllm_replayssm.spec.philox import state_words
from trtllm_replayssm.spec.ssm import l2_norm_factor

SLOTS, STEPS = 6, 12
F32, F16, FP8, NVFP4 = StateFormat.FLOAT32, StateFormat.FLOAT16, StateFormat.FP8, StateFormat.NVFP4
SR, RTN = Rounding.STOCHASTIC, Rounding.NEAREST

POOLS = [
    (F32, SR, None), (F16, SR, None), (FP8, SR, None), (NVFP4, SR, None), (F16, RTN, None), (FP8, RTN, None),
    (NVFP4, RTN, None), (F32, SR, FP8), (F32, SR, NVFP4), (F32, SR, F16), (F16, SR, FP8), (F16, SR, NVFP4),
    (FP8, SR, NVFP4), (F32, SR, F32),
]  # fmt: skip


def name_of(pool: tuple[StateFormat, Rounding, StateFormat | None]) -> str:
    recurrence, rounding, read = pool
    return f"{recurrence.value}-{rounding.value}-{read.value if read else 'shared'}"


def config_of(pool: tuple[StateFormat, Rounding, StateFormat | None], window: int, widest: int) -> ReplayConfig:
    recurrence, rounding, read = pool
    return ReplayConfig(
        window=window, max_step_tokens=widest, recurrence=recurrence, recurrence_rounding=rounding, read=read
    )


def as_stored(layer: Layer, slot: int, state: np.ndarray, position: int) -> list[np.ndarray]:
    """The specification's decoded copies of a float32 state for this slot."""
    config, shape = layer.config, layer.shape
    words = None
    if config.recurrence_rounding is SR and config.recurrence is not F32:
        elems = shape.head_dim * shape.state_dim
        words = state_words(int(layer.cursors.seed[slot]), LAYER, shape.heads, elems, position)
    copies = [encode(state, config.recurrence, config.recurrence_rounding, words)]
    if config.read is not None:
        copies.append(encode(state, config.read))
    return [copy.decode() for copy in copies]


def check_step(layer: Layer, errors: Errors, tokens: Tokens, slots: Sequence[int], counts: Sequence[int]) -> None:
    """One update, compared in every respect; not committed."""
    layer.poison()
    rows = [(r, s, n) for r, (s, n) in enumerate(zip(slots, counts, strict=True)) if s >= 0 and n > 0]
    before = {s: (situation(layer, s, n, np.float64), situation(layer, s, n, np.float32)) for _, s, n in rows}
    folds = {s: layer.fold(s) for _, s, n in rows}
    untouched = {s: layer.everything(s) for s in range(SLOTS) if s not in before}
    committed = {s: layer.committed(s) for s in before}
    kept = {s: layer.checkpoints(s) for s in before}
    out = layer.update(tokens, slots, counts)
    assert all(same(layer.everything(s), bytes_) for s, bytes_ in untouched.items())
    for row, slot, count in rows:
        assert same(layer.committed(slot), committed[slot])
        check_records(layer, tokens, row, slot, count)
        flushed = int(layer.cursors.h[slot]) + count > layer.config.window
        wide, plain = (values(layer, tokens, row, slot, count, b) for b in before[slot])
        errors.add("output", out[row, :count].numpy(), wide[0], plain[0])
        if layer.shape.kind is SsmKind.GDN:
            check_corrections(layer, slot, count, wide[1], plain[1])
        if not flushed:
            assert same(layer.checkpoints(slot), kept[slot])
            continue
        errors.add("fold", folds[slot].numpy(), wide[2], plain[2])
        want = as_stored(layer, slot, folds[slot].numpy(), int(layer.cursors.position[slot]))
        stores = [layer.state.checkpoint, *([layer.state.read_copy] if layer.state.read_copy else [])]
        for store, expected in zip(stores, want, strict=True):
            assert np.array_equal(store.load(torch.tensor([slot]))[0].numpy(), expected), store.format
    beyond = torch.ones(out.shape[:2], dtype=torch.bool)
    for row, _, count in rows:
        beyond[row, :count] = False
    assert (out[beyond] == 0).all()


def values(
    layer: Layer, tokens: Tokens, row: int, slot: int, count: int, before: object
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(outputs with the skip, corrections, fold) by the judge, in the precision of `before`."""
    dtype = before.source.dtype.type  # type: ignore[attr-defined]
    h = int(layer.cursors.h[slot])
    drafts = records_of(layer, slot, h, h + count, dtype)

    def own(t: torch.Tensor) -> np.ndarray:
        return t[row, :count].double().numpy().astype(dtype)

    beta = None if tokens.beta is None else own(tokens.beta)
    found = compute(layer.shape, before, drafts, own(tokens.value), beta, own(tokens.q))  # type: ignore[arg-type]
    outputs = found.outputs
    if layer.shape.kind is SsmKind.MAMBA2:
        outputs = outputs + layer.d_skip.double().numpy().astype(dtype)[:, None] * own(tokens.value)
    return outputs, found.corrections, found.fold


def check_records(layer: Layer, tokens: Tokens, row: int, slot: int, count: int) -> None:
    """What the ring keeps of each token is the input's bytes, and the float32 key factor."""
    state, h = layer.state, int(layer.cursors.h[slot])
    places = layer.places(slot, h, h + count)
    pairs = [(state.ring_key, tokens.k), (state.ring_decay, tokens.decay)]
    if layer.shape.kind is SsmKind.MAMBA2:
        pairs.append((state.ring_value, tokens.value))
    elif layer.config.rederives:
        assert state.ring_v is not None and state.ring_beta is not None and tokens.beta is not None
        pairs += [(state.ring_v, tokens.value), (state.ring_beta, tokens.beta)]
    for ring, given in pairs:
        stored = ring[slot, :, places].transpose(0, 1)
        assert torch.equal(as_bytes(stored), as_bytes(given[row, :count]))
    if state.ring_key_factor is not None:
        factor = state.ring_key_factor[slot, :, places].T.double().numpy()
        want = l2_norm_factor(tokens.k[row, :count].double().numpy())
        assert np.abs(factor / want - 1).max() <= 2 * FLOAT32_STEP


def check_corrections(layer: Layer, slot: int, count: int, want: np.ndarray, plain: np.ndarray) -> None:
    """The nearest float16 of the float64 correction, or its neighbour where float32 cannot tell."""
    h = int(layer.cursors.h[slot])
    got = layer.state.ring_value[slot, :, layer.places(slot, h, h + count)].transpose(0, 1).double().numpy()
    want = np.clip(want, -FP16_MAX, FP16_MAX)
    half_step = FLOAT16_STEP / 2 * np.maximum(np.abs(want), 2.0**-14)
    noise = 2 * np.abs(plain - want).max() + FLOAT32_STEP * np.abs(want).max()
    assert (np.abs(got - want) <= half_step + noise).all()


def random_run(layer: Layer, dtype: torch.dtype, seed: int = 0) -> None:
    """Steps of 4 rows over 6 slots: any counts, padding, any acceptance; every step compared, every cursor too."""
    rng, errors = np.random.default_rng(seed), Errors()
    widest = layer.config.max_step_tokens
    cursors = [Cursors(seed=int(s)) for s in layer.cursors.seed]
    for step in range(STEPS):
        slots = [int(s) for s in rng.permutation(SLOTS)[:4]]
        slots[step % 4] = -1 if step % 3 == 0 else slots[step % 4]
        counts = [int(n) for n in rng.integers(0, widest + 1, size=4)]
        counts[(step + 1) % 4] = widest
        tokens = random_tokens(layer.shape, 4, widest, seed=1000 * seed + step, dtype=dtype)
        check_step(layer, errors, tokens, slots, counts)
        accepted = [int(rng.integers(0, n + 1)) for n in counts]
        layer.commit(slots, counts, accepted, widest)
        for slot, count, taken in zip(slots, counts, accepted, strict=True):
            if slot >= 0:
                commit(layer.config, cursors[slot], count, taken)
        assert [(c.origin, c.h, c.position) for c in cursors] == [layer.cursor(s) for s in range(SLOTS)]
    errors.check()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("pool", POOLS, ids=name_of)
def test_a_random_run_equals_the_specification_in_every_pool(kind: SsmKind, pool: tuple) -> None:  # type: ignore[type-arg]
    random_run(Layer(ssm_shape(kind), config_of(pool, 5, 4), SLOTS), torch.float32)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("window,widest", [(1, 1), (2, 2), (3, 2), (8, 6), (16, 4)])
def test_a_random_run_equals_the_specification_for_every_window(kind: SsmKind, window: int, widest: int) -> None:
    for pool in ((F32, SR, None), (FP8, SR, NVFP4)):
        random_run(Layer(ssm_shape(kind), config_of(pool, window, widest), SLOTS), torch.float32, seed=window)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_random_run_equals_the_specification_for_half_width_activations(kind: SsmKind, dtype: torch.dtype) -> None:
    """Activations are rounded before the step; nothing after that depends on their type."""
    for pool in ((F32, SR, None), (F16, SR, NVFP4)):
        random_run(Layer(ssm_shape(kind), config_of(pool, 5, 4), SLOTS, dtype=dtype), dtype)


SIZES = [*itertools.product([56, 64, 80, 96, 128], [64]), (64, 96), (64, 128), (64, 256), (80, 128), (7, 5)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("head_dim,state_dim", SIZES)
def test_d10_any_head_size_and_odd_head_counts_are_right(kind: SsmKind, head_dim: int, state_dim: int) -> None:
    """D10: sizes that are no multiple of a tile, three heads per group or three groups."""
    heads, groups = (3, 1) if head_dim % 3 else (3, 3)
    shape = ssm_shape(kind, heads=heads, groups=groups, head_dim=head_dim, state_dim=state_dim)
    pool = (FP8, SR, None) if state_dim % 16 else (FP8, SR, NVFP4)
    random_run(Layer(shape, config_of(pool, 3, 3), SLOTS), torch.float32)
