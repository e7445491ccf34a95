"""Random parameters: reproducible, in the right types, and of sizes that keep a whole model finite."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.session.sessions import CPU, NAMES, checkpoint, weights
from trtllm_replayssm.config import PoolConfig, ReplayConfig
from trtllm_replayssm.dtypes import ActivationDtype
from trtllm_replayssm.models import model_of
from trtllm_replayssm.params import ParamRole
from trtllm_replayssm.runtime.pools.state_pools import StatePools
from trtllm_replayssm.runtime.session.random_weights import RandomWeights
from trtllm_replayssm.runtime.session.torch_session import TorchSession
from trtllm_replayssm.shapes import ModelGeometry
from trtllm_replayssm.weights.matrix import MatrixFormat
from trtllm_replayssm.weights.presets import preset_geometry, slice_geometry


def made(geometry: ModelGeometry, seed: int = 0, first_layer: int = 0) -> RandomWeights:
    return RandomWeights(geometry, torch.bfloat16, CPU, first_layer=first_layer, seed=seed)


def test_values_depend_on_seed_and_name_but_not_on_order() -> None:
    geometry = checkpoint("qwen-dense").geometry
    names = [s.name for s in model_of(geometry).parameters(geometry) if s.role is ParamRole.LINEAR][:3]
    first, second, other = made(geometry), made(geometry), made(geometry, seed=1)
    forward = {name: first.matrix(name) for name in names}
    backward = {name: second.matrix(name) for name in reversed(names)}
    assert all(torch.equal(forward[name], backward[name]) for name in names)
    assert not torch.equal(forward[names[0]], other.matrix(names[0]))
    assert first.matrix(names[0]) is forward[names[0]]


def test_shapes_types_and_sizes() -> None:
    geometry = checkpoint("nemotron-moe").geometry
    parameters = made(geometry)
    for spec in model_of(geometry).parameters(geometry):
        if spec.role is ParamRole.EXPERTS:
            tensor = parameters.expert(spec.name, spec.shape[0] - 1)
            assert tensor.shape == spec.shape[1:] and tensor.dtype is torch.bfloat16
        elif spec.role in (ParamRole.LINEAR, ParamRole.EMBEDDING):
            tensor = parameters.matrix(spec.name)
            assert tensor.shape == spec.shape and tensor.dtype is torch.bfloat16
            size = 16.0 if "embed" in spec.name else spec.shape[-1] ** -0.5
            assert 0.6 < float(tensor.float().square().mean().sqrt()) / size < 1.4
        elif spec.role is ParamRole.ROUTER:
            assert parameters.matrix_float32(spec.name).dtype is torch.float32
        else:
            tensor = parameters.vector(spec.name)
            norm = spec.name.endswith("norm.weight") or spec.name.endswith("norm_f.weight")
            assert tensor.dtype is torch.float32 and abs(float(tensor.mean()) - norm) < 0.1


def test_a_slice_keeps_the_formats_of_its_layers() -> None:
    name = "nemotron-3-super-120b-a12b-nvfp4"
    parameters = made(slice_geometry(preset_geometry(name), (9, 17), mtp=False), first_layer=9)
    assert parameters.format_of("backbone.layers.0.mixer.in_proj.weight") is MatrixFormat.FP8
    assert parameters.format_of("backbone.layers.1.mixer.experts.up_proj") is MatrixFormat.NVFP4
    assert parameters.format_of("backbone.layers.7.mixer.q_proj.weight") is MatrixFormat.BF16


@pytest.mark.parametrize("name", ["nemotron-moe", "qwen-moe"])
def test_packed_experts_have_the_shapes_of_a_checkpoints(name: str) -> None:
    geometry = checkpoint(name).geometry
    assert geometry.moe is not None
    prefix = next(n for n in checkpoint(name).names() if ".experts." in n).rpartition(".")[0]
    random = made(geometry).expert_stacks(prefix, gated=geometry.moe.gated)
    stored = weights(name, ActivationDtype.BFLOAT16).expert_stacks(prefix, gated=geometry.moe.gated)
    for got, expected in ((random.up, stored.up), (random.down, stored.down)):
        assert (got.rows, got.columns, got.parts) == (expected.rows, expected.columns, expected.parts)
        assert got.factor.shape == expected.factor.shape
        assert got.data.shape[:3] == expected.data.shape[:3]


@pytest.mark.parametrize("name", NAMES)
def test_logits_of_many_steps_stay_finite(name: str) -> None:
    geometry = replace(checkpoint(name).geometry, mtp_pattern=())
    replay = ReplayConfig(window=8, max_step_tokens=2)
    pool = PoolConfig(slots=2, max_seq_len=64, activation=ActivationDtype.BFLOAT16)
    pools = StatePools.allocate(geometry, replay, pool, conventional=False, device=CPU)
    session = TorchSession(made(geometry), pools)
    step = session.static_step(batch=2, width=2)
    step.slot.copy_(torch.tensor([session.allocate(0), session.allocate(1)]))
    step.num_tokens.fill_(2)
    for _ in range(12):
        logits = step.forward().logits
        assert torch.isfinite(logits).all() and 0.1 < float(logits.std()) < 10.0
        step.commit(torch.tensor([2, 1]))
        step.ids.copy_(logits.argmax(-1))


def test_routers_spread_tokens_over_the_experts() -> None:
    """Load as of independent choices: every expert is used, none by more than a few times its share."""
    name = next(n for n in NAMES if checkpoint(n).geometry.moe is not None)
    geometry = replace(checkpoint(name).geometry, mtp_pattern=())
    assert geometry.moe is not None and not geometry.tie_embeddings
    weights, rows = made(geometry), 64
    router = next(s.name for s in model_of(geometry).parameters(geometry) if s.role is ParamRole.ROUTER)
    table = weights.matrix(next(s.name for s in model_of(geometry).parameters(geometry) if "embed" in s.name))
    hidden = table[:rows].float() + torch.randn(table.shape[1])  # tokens, and what layers add to all of them
    scores = (hidden / hidden.square().mean(-1, keepdim=True).sqrt()) @ weights.matrix_float32(router).T
    load = torch.bincount(scores.topk(geometry.moe.top_k).indices.flatten(), minlength=geometry.moe.experts)
    share = rows * geometry.moe.top_k / geometry.moe.experts
    assert load.min() > 0 and load.max() < 3 * share
