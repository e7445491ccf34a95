"""Routing by hand, and the numpy interpreter as an implementation of the graph vocabulary."""

from __future__ import annotations

import inspect
from dataclasses import replace

import numpy as np
import pytest

from tests.spec.helpers import small_shape
from trtllm_replayssm.config import ReplayConfig
from trtllm_replayssm.graph import Graph
from trtllm_replayssm.shapes import MoeShape, Router, SsmKind
from trtllm_replayssm.spec.graph import NumpyGraph, SequenceState
from trtllm_replayssm.spec.layers import route

SHAPE = MoeShape(
    experts=4, top_k=2, intermediate=8, latent=None, shared_intermediate=8, gated=False, shared_gated=False,
    router=Router.SIGMOID_BIAS, scaling=2.5,
)  # fmt: skip


def logit(p: float) -> float:
    return float(np.log(p / (1.0 - p)))


def test_the_bias_chooses_and_the_score_alone_weighs() -> None:
    """Scores 0.2, 0.6, 0.3, 0.5; the bias lifts expert 0 above expert 3: chosen 1 and 0, weights 0.6 and 0.2."""
    logits = np.array([[logit(0.2), logit(0.6), logit(0.3), logit(0.5)]])
    ids, weights = route(logits, np.array([0.35, 0.0, 0.0, 0.0]), SHAPE)
    assert ids.tolist() == [[1, 0]]
    np.testing.assert_allclose(weights, 2.5 * np.array([[0.75, 0.25]]))
    ids, weights = route(logits, None, replace(SHAPE, norm_topk=False, scaling=1.0))
    assert ids.tolist() == [[1, 3]]
    np.testing.assert_allclose(weights, [[0.6, 0.5]])


def test_softmax_routing_renormalises_over_the_chosen() -> None:
    logits = np.log(np.array([[0.1, 0.2, 0.3, 0.4]]))
    ids, weights = route(logits, None, replace(SHAPE, router=Router.SOFTMAX, scaling=1.0))
    assert ids.tolist() == [[3, 2]]
    np.testing.assert_allclose(weights, [[4 / 7, 3 / 7]])


@pytest.mark.parametrize("router", Router)
def test_ties_go_to_the_lower_expert(router: Router) -> None:
    ids, weights = route(np.zeros((1, 4)), np.zeros(4), replace(SHAPE, router=router, scaling=1.0))
    assert ids.tolist() == [[0, 1]]
    np.testing.assert_allclose(weights, [[0.5, 0.5]])


def test_only_the_groups_whose_two_best_are_highest_may_be_chosen() -> None:
    """Groups (0.9, 0.1), (0.6, 0.5), (0.3, 0.8): the two best sums are 1.1 twice and 1.0, so expert 0 is out."""
    shape = replace(SHAPE, experts=6, n_group=3, topk_group=2, scaling=1.0, norm_topk=False)
    scores = [0.9, 0.1, 0.6, 0.5, 0.3, 0.8]
    ids, weights = route(np.array([[logit(s) for s in scores]]), np.zeros(6), shape)
    assert ids.tolist() == [[5, 2]]
    np.testing.assert_allclose(weights, [[0.8, 0.6]])
    one = replace(shape, topk_group=1)
    assert set(route(np.array([[logit(s) for s in scores[:5]] + [logit(0.7)]]), np.zeros(6), one)[0][0]) == {2, 3}


class OneVector:
    """Weights in which every vector is the same."""

    def __init__(self, values: np.ndarray) -> None:
        self.values = values.astype(np.float32)

    def vector(self, name: str) -> np.ndarray:
        return self.values

    def matrix(self, name: str) -> None:
        raise KeyError(name)

    experts = matrix


def test_a_stored_mamba2_record_decays_by_its_own_float32_dt() -> None:
    shape = small_shape(SsmKind.MAMBA2)
    vector = np.linspace(-1.0, 1.0, shape.heads)
    state = SequenceState(replay=ReplayConfig(window=4))
    rng = np.random.default_rng(0)
    x, k, q, dt = (rng.normal(size=(1, n)) for n in (shape.inner, shape.key_channels, shape.key_channels, shape.heads))
    NumpyGraph(OneVector(vector), state).mamba2(
        x, k, q, dt, layer=0, shape=shape, a_log="A_log", d_skip="D", dt_bias="dt_bias"
    )
    record = state.replay_layers[0].ring[0]
    assert record is not None and record.weight is not None
    unrounded = np.log1p(np.exp(dt[0] + vector.astype(np.float32)))
    assert np.array_equal(record.weight, unrounded.astype(np.float32))
    a = -np.exp(vector.astype(np.float32).astype(np.float64))
    assert np.array_equal(record.log_decay, record.weight * a)


def test_the_interpreter_has_every_operation_of_the_vocabulary_with_its_arguments() -> None:
    operations = [name for name in vars(Graph) if not name.startswith("_")]
    assert len(operations) > 15
    for name in operations:
        wanted, own = (list(inspect.signature(getattr(owner, name)).parameters) for owner in (Graph, NumpyGraph))
        assert own == wanted, name
