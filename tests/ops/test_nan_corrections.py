"""A correction of the gated delta rule that is NaN stays NaN in the reference's ring: only what is large saturates."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.layer_shapes import ssm_shape
from tests.ops.layers import Layer, random_tokens
from trtllm_replayssm.config import ReplayConfig
from trtllm_replayssm.dtypes import StateFormat
from trtllm_replayssm.shapes import SsmKind
from trtllm_replayssm.spec.replay import round_correction

TOKENS, FIRST, HEAD, ELEMENT = 3, 1, 2, 5  # the token whose value is NaN in one element of a head


def test_the_specification_keeps_nan_where_it_saturates() -> None:
    rounded = round_correction(np.array([np.nan, np.inf, -1e6]))
    assert np.isnan(rounded[0]) and list(rounded[1:]) == [65504.0, -65504.0]


@pytest.mark.parametrize("read", [None, StateFormat.FP8])
def test_the_reference_keeps_nan_from_its_token_on_in_its_row_alone(read: StateFormat | None) -> None:
    shape = ssm_shape(SsmKind.GDN)
    config = ReplayConfig(window=4, max_step_tokens=TOKENS, read=read)
    tokens = random_tokens(shape, rows=1, width=TOKENS)
    clean = Layer(shape, config, poisoned=False)
    expected = clean.update(tokens, [0], [TOKENS])
    tokens.value[0, FIRST, HEAD, ELEMENT] = float("nan")
    layer = Layer(shape, config, poisoned=False)
    out = layer.update(tokens, [0], [TOKENS])
    later = range(FIRST, TOKENS)
    assert out.isnan().nonzero().tolist() == [[0, t, HEAD, ELEMENT] for t in later]
    assert layer.state.ring_value.isnan().nonzero().tolist() == [[0, HEAD, t, ELEMENT] for t in later]
    assert torch.equal(out[~out.isnan()], expected[~out.isnan()])
