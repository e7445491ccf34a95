"""Matrices joined side by side: the parts are views of the whole, and a second session finds them joined."""

from __future__ import annotations

import pytest
import torch

from tests.session.sessions import CPU, NAMES, checkpoint
from trtllm_replayssm.models import model_of
from trtllm_replayssm.runtime.session.derived import DerivedTensors
from trtllm_replayssm.runtime.session.joined_products import followers
from trtllm_replayssm.runtime.session.torch_weights import TorchWeights


@pytest.mark.parametrize("name", NAMES)
def test_followers_are_matrices_of_the_same_width(name: str) -> None:
    geometry = checkpoint(name).geometry
    specs = {spec.name: spec for spec in model_of(geometry).parameters(geometry)}
    groups = {first: followers(first) for first in specs if followers(first)}
    assert groups
    for first, others in groups.items():
        assert {specs[other].shape[-1] for other in others} == {specs[first].shape[-1]}


@torch.inference_mode()
def test_joined_matrices_keep_their_values_in_one_memory() -> None:
    weights = TorchWeights(checkpoint("qwen-dense"), torch.bfloat16, CPU)
    first = "model.layers.0.linear_attn.in_proj_qkv.weight"
    names = [first, *followers(first)]
    before = [weights.matrix(name).clone() for name in names]
    joined = DerivedTensors().joined(weights, names)
    assert torch.equal(joined, torch.cat(before))
    again = DerivedTensors().joined(weights, names)
    assert again.data_ptr() == joined.data_ptr() and torch.equal(again, joined)
    joined.zero_()
    assert all((weights.matrix(name) == 0).all() for name in names)
    assert [weights.matrix(name).shape for name in names] == [matrix.shape for matrix in before]
