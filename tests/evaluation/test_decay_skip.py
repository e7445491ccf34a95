"""Skipping the checkpoint of heads that have forgotten it: the bound over adversarial decays, no reads, traffic.

Oracle O1: the specification in exact arithmetic, with skipping against without. The torch operation is compared with
the specification, and run on a checkpoint of NaN, which any use of it would show.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.layer_shapes import ssm_shape
from tests.ops.layers import Layer, Tokens, random_tokens
from tests.spec.helpers import part, random_inputs, small_shape
from trtllm_replayssm.config import ReplayConfig
from trtllm_replayssm.dtypes import StateFormat
from trtllm_replayssm.errors import ContractError
from trtllm_replayssm.ops.reference import gdn, mamba2
from trtllm_replayssm.shapes import SsmKind
from trtllm_replayssm.spec import decay_skip
from trtllm_replayssm.spec.cursors import Cursors, commit
from trtllm_replayssm.spec.replay import ReplayLayer, StepInputs
from trtllm_replayssm.spec.ssm import l2_norm_factor
from trtllm_replayssm.spec.traffic import step_bytes

KINDS = [SsmKind.MAMBA2, SsmKind.GDN]
EPS = 2.0**-9
FLOAT64_NOISE = 1e-12  # relative; accepts sums of some tens of float64 terms, rejects anything the rule could drop
EDGE = math.log(EPS)
DECAYS = st.sampled_from(
    [0.0, -1e-9, -0.02, -0.7, EDGE / 16, EDGE / 3, EDGE * 0.999, EDGE, EDGE * 1.001, -40.0, -np.inf]
)


def largest_row(state: np.ndarray) -> float:
    return float(np.linalg.norm(state, axis=-1).max())


def query_norms(layer: ReplayLayer, q: np.ndarray) -> np.ndarray:
    """|q| as it meets the state, [T, H]."""
    if layer.shape.kind is SsmKind.GDN:
        q = q * l2_norm_factor(q)[..., None] / np.sqrt(layer.shape.state_dim)
    return np.repeat(np.linalg.norm(q, axis=-1), layer.shape.heads_per_group, axis=-1)


def with_decays(inputs: StepInputs, decays: np.ndarray) -> StepInputs:
    """The inputs with other log-decays; Mamba-2's dt stays, as the rate is free."""
    inputs.log_decay = decays
    return inputs


@pytest.mark.parametrize("kind", KINDS, ids=lambda k: k.value)
@settings(max_examples=60, deadline=None)
@given(data=st.data(), window=st.sampled_from([2, 4, 8]), step=st.sampled_from([1, 2]), read=st.booleans())
def test_outputs_and_states_stay_within_the_bound_for_any_decays(
    kind: SsmKind, data: st.DataObject, window: int, step: int, read: bool
) -> None:
    shape, total = small_shape(kind), 4 * window
    inputs = random_inputs(shape, total, seed=data.draw(st.integers(0, 99)))
    flat = data.draw(st.lists(DECAYS, min_size=total * shape.heads, max_size=total * shape.heads))
    inputs = with_decays(inputs, np.array(flat).reshape(total, shape.heads))
    inputs.value *= np.exp(-np.arange(total))[:, None, None]  # the checkpoint outweighs what follows
    config = ReplayConfig(window=window, max_step_tokens=step, read=StateFormat.FLOAT32 if read else None)
    exact, skipping = (ReplayLayer(shape, config, 0, exact=True) for _ in range(2))
    cursors, largest = Cursors(), 0.0
    for start in range(0, total, step):
        now = part(inputs, start, start + step)
        before = exact.checkpoint.copy()
        want = exact.step(cursors, now)
        largest = max(largest, largest_row(before))
        got = skipping.step(cursors, now, skip_below=EPS)
        bound = decay_skip.skip_bound(EPS, largest)
        slack = FLOAT64_NOISE * (1.0 + np.abs(want).max())
        assert (np.abs(got - want) <= bound * query_norms(exact, now.q)[..., None] + slack).all()
        commit(config, cursors, step, step)
        largest = max(largest, largest_row(exact.checkpoint))
        difference = largest_row(skipping.checkpoint - exact.checkpoint)
        assert difference <= decay_skip.skip_bound(EPS, largest) + FLOAT64_NOISE * (1.0 + largest)


@pytest.mark.parametrize("kind", KINDS, ids=lambda k: k.value)
def test_the_bound_is_reached_within_a_factor_of_four(kind: SsmKind) -> None:
    """One head, a checkpoint along the query, a decay at the threshold: a rule that skipped earlier would break it."""
    shape = small_shape(kind, heads=1, groups=1, head_dim=1)
    layer = ReplayLayer(shape, ReplayConfig(window=8), 0, exact=True)
    layer.checkpoint = np.zeros((1, 1, shape.state_dim))
    layer.checkpoint[..., 0] = 1000.0
    inputs = part(random_inputs(shape, 1), 0, 1)
    inputs.q[...], inputs.value[...], inputs.log_decay[...] = 0.0, 0.0, EDGE
    inputs.q[..., 0] = 1.0
    inputs.k[..., 0] = 0.0  # so that the delta rule takes nothing back
    want = layer.step(Cursors(), inputs)
    got = layer.step(Cursors(), inputs, skip_below=EPS)
    error = float(np.abs(got - want).max() / query_norms(layer, inputs.q).max())
    assert decay_skip.skip_bound(EPS, 1000.0) / 4 < error <= decay_skip.skip_bound(EPS, 1000.0)


def update(layer: Layer, tokens: Tokens, skip_below: float | None) -> torch.Tensor:
    """One row's step, not committed."""
    rows = layer.rows([0], [tokens.width], tokens.width)
    if layer.shape.kind is SsmKind.MAMBA2:
        return mamba2.mamba2_update(
            layer.state, layer.cursors, rows, tokens.value, tokens.k, tokens.q, tokens.decay, layer.a,
            d_skip=layer.d_skip, skip_below=skip_below,
        )  # fmt: skip
    assert tokens.beta is not None
    return gdn.gdn_update(
        layer.state, layer.cursors, rows, tokens.q, tokens.k, tokens.value, tokens.decay, tokens.beta,
        skip_below=skip_below,
    )  # fmt: skip


@pytest.mark.parametrize("read", [None, StateFormat.FLOAT32], ids=["shared", "separate"])
@pytest.mark.parametrize("kind", KINDS, ids=lambda k: k.value)
def test_a_faded_head_reads_no_checkpoint_and_its_flush_is_a_pure_write(
    kind: SsmKind, read: StateFormat | None
) -> None:
    shape = ssm_shape(kind)
    layer = Layer(shape, ReplayConfig(window=4, read=read))
    tokens = random_tokens(shape, 1, 9, seed=5)
    tokens.decay[...] = 1.0
    layer.a = torch.tensor([-3.0, -3.0, -0.01, -0.01])
    if kind is SsmKind.GDN:
        tokens.decay[...] = layer.a
    for t in range(2):  # decays of two tokens: exp(-6) for the first two heads
        layer.step(tokens.span(t, t + 1))
    for copy in [layer.state.checkpoint, *([layer.state.read_copy] if layer.state.read_copy else [])]:
        copy.data[:, :2] = float("nan")
    third = update(layer, tokens.span(2, 3), skip_below=math.exp(-8.5))
    assert torch.isfinite(third).all(), "exp(-9) is below the threshold"
    assert torch.isnan(update(layer, tokens.span(2, 3), skip_below=math.exp(-9.5))[0, 0, :2]).all()
    for t in range(2, 5):
        update(layer, tokens.span(t, t + 1), skip_below=math.exp(-8.5))
        layer.commit([0], [1], [1], 1)
    assert layer.cursor(0)[1] == 1, "the last step flushed"
    assert torch.isfinite(layer.fold(0)).all(), "the checkpoint of NaN did not enter the new one"


@pytest.mark.parametrize("kind", KINDS, ids=lambda k: k.value)
def test_the_operation_skips_where_the_specification_does(kind: SsmKind) -> None:
    shape = ssm_shape(kind)
    spec_layer = ReplayLayer(shape, ReplayConfig(window=4, max_step_tokens=2), 3, exact=True)
    layer, reading = (Layer(shape, ReplayConfig(window=4, max_step_tokens=2), poisoned=False) for _ in range(2))
    tokens = random_tokens(shape, 1, 16, seed=2, slowest=0.05)
    cursors, skip = Cursors(), 0.2
    differ = 0
    for start in range(0, 16, 2):
        now = tokens.span(start, start + 2)
        decay = (now.decay * layer.a if kind is SsmKind.MAMBA2 else now.decay)[0].double().numpy()
        inputs = StepInputs(
            now.k[0].double().numpy(), now.q[0].double().numpy(), now.value[0].double().numpy(), decay,
            dt=now.decay[0].double().numpy() if kind is SsmKind.MAMBA2 else None,
            beta=None if now.beta is None else now.beta[0].double().numpy(),
        )  # fmt: skip
        want = spec_layer.step(cursors, inputs, skip_below=skip)
        got = update(layer, now, skip)[0].double().numpy()
        if kind is SsmKind.MAMBA2:
            got -= (layer.d_skip[:, None] * now.value[0]).double().numpy()
        # float16 corrections differ by 2^-11 of values of a few; a head skipped on one side only by its whole share
        assert np.abs(got - want).max() < 1e-2 * max(1.0, np.abs(want).max())
        if kind is SsmKind.MAMBA2:
            got += (layer.d_skip[:, None] * now.value[0]).double().numpy()
        differ += int(np.abs(got - update(reading, now, None)[0].double().numpy()).max() > 1e-3)
        for each in (layer, reading):
            each.commit([0], [2], [2], 2)
        commit(spec_layer.config, cursors, 2, 2)
    assert differ > 2, "heads were skipped"


def test_live_shares_count_the_heads_that_still_need_their_checkpoint() -> None:
    decays = np.log(np.array([[0.5, 1.0], [0.5, 1.0], [0.5, 0.1], [0.5, 1.0]]))
    shares = decay_skip.live_shares(decays, 0.25, 2)
    assert shares.tolist() == [1.0, 5 / 6, 1 / 6]
    with pytest.raises(ContractError, match="at least 5 tokens"):
        decay_skip.live_shares(decays, 0.25, 5)
    with pytest.raises(ContractError, match=r"in \(0, 1/4\]"):
        decay_skip.faded([decays[0]], 0.5)


def test_skipped_bytes_are_the_reads_of_faded_heads_and_nothing_else() -> None:
    shape, config = ssm_shape(SsmKind.MAMBA2), ReplayConfig(window=4)
    steps = [step_bytes(shape, config, h, 1, 2) for h in (1, 2, 3, 4)]
    plain, none = decay_skip.skipping_bytes_per_token(shape, config, [1.0] * 5, 1, 1)
    assert plain == none == sum(s.total for s in steps) / 4
    _, everything = decay_skip.skipping_bytes_per_token(shape, config, [1.0, 0.0, 0.0, 0.0, 0.0], 1, 1)
    assert everything == sum(s.total - s.state_read for s in steps) / 4
    _, late = decay_skip.skipping_bytes_per_token(shape, config, [1.0, 1.0, 1.0, 1.0, 0.25], 1, 1)
    assert late == pytest.approx(plain - 0.75 * (steps[2].state_read + steps[3].state_read) / 4)
