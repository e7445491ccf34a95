"""The sums of magnitudes that bound a twin's outputs are those of the specification's own terms. O1, on a CPU."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.layer_shapes import ssm_shape
from tests.native.twin import FollowingLayer, read_size
from trtllm_replayssm.config import ReplayConfig
from trtllm_replayssm.shapes import SsmKind
from trtllm_replayssm.spec.replay import Record, ReplayLayer, read_out


@pytest.mark.parametrize("count", [0, 5])
@pytest.mark.parametrize("kind", list(SsmKind))
def test_sizes_are_the_read_of_magnitudes(kind: SsmKind, count: int) -> None:
    """A read of the magnitudes of state, records and vector has every term positive."""
    rng, shape = np.random.default_rng(count), ssm_shape(kind, 4, 2, 6, 8)
    source, vectors = rng.standard_normal((4, 6, 8)), rng.standard_normal((4, 8))
    records = [
        Record(
            rng.standard_normal((2, 8)), rng.uniform(0.5, 2, 2), -rng.uniform(0, 1, 4), rng.standard_normal((4, 6)),
            weight=None if kind is SsmKind.GDN else rng.uniform(0, 1, 4),
        )
        for _ in range(count)
    ]  # fmt: skip
    positive = [replace(r, key=np.abs(r.key), value=np.abs(r.value)) for r in records]
    wanted = read_out(shape, np.abs(source), positive, np.abs(vectors), np.zeros(4))
    got = read_size(shape, source, records, vectors)
    np.testing.assert_allclose(got, wanted, rtol=1e-13)
    assert (got >= np.abs(read_out(shape, source, records, vectors, np.zeros(4)))).all()


@pytest.mark.parametrize("kind", list(SsmKind))
def test_a_following_layer_keeps_the_size_of_each_output(kind: SsmKind) -> None:
    rng, shape = np.random.default_rng(3), ssm_shape(kind, 4, 2, 6, 8)
    layer, q = FollowingLayer(shape, ReplayConfig(window=4), layer=0), rng.standard_normal((2, 8))
    source = rng.standard_normal((4, 6, 8))
    out = layer._output(source, [], q)
    assert (out == ReplayLayer._output(layer, source, [], q)).all()
    wanted = ReplayLayer._output(layer, np.abs(source), [], np.abs(q))
    np.testing.assert_allclose(layer.magnitudes[0], wanted, rtol=1e-13)
