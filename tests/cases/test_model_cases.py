"""Configuration, norms and experts on the torch interpreter (D01, D12, F12, F15)."""

from __future__ import annotations

import json
import logging

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.session.sessions import CHECKPOINTS, CPU, checkpoint, weights
from tests.tolerance import FLOAT32_STEP
from trtllm_replayssm.config import ReplayConfig
from trtllm_replayssm.dtypes import ActivationDtype, StateFormat
from trtllm_replayssm.graph import MoeNames
from trtllm_replayssm.models import model_of
from trtllm_replayssm.ops.reference.rows import step_rows
from trtllm_replayssm.params import ParamRole
from trtllm_replayssm.runtime.session.step_context import Phase, StepContext
from trtllm_replayssm.runtime.session.torch_graph import TorchGraph
from trtllm_replayssm.runtime.session.torch_moe import route
from trtllm_replayssm.runtime.session.torch_state_ops import StateOps
from trtllm_replayssm.runtime.session.torch_weights import TorchWeights
from trtllm_replayssm.shapes import LayerKind, MoeShape, Router
from trtllm_replayssm.spec import layers
from trtllm_replayssm.weights.hf_config import parse_config


@pytest.mark.parametrize("named", [None, "float32", "float16"])
def test_d01_the_state_is_float32_unless_the_configuration_names_another_type(
    named: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    """D01: no field means float32; a field is honoured; the choice is logged; a pool's default is float32 as well."""
    config = json.loads((CHECKPOINTS / "nemotron-dense" / "config.json").read_text())
    config.pop("mamba_ssm_cache_dtype")
    if named is not None:
        config["mamba_ssm_cache_dtype"] = named
    with caplog.at_level(logging.INFO):
        geometry = parse_config(config)
    assert geometry.state_dtype == (named or "float32")
    assert any((named or "float32") in record.getMessage() for record in caplog.records)
    assert ReplayConfig().recurrence is StateFormat.FLOAT32


class OneVector:
    """Weights of which only one vector is ever asked."""

    def __init__(self, vector: Tensor) -> None:
        self._vector = vector

    def vector(self, name: str) -> Tensor:
        return self._vector


def context(num_tokens: list[int], width: int, slots: list[int] | None = None) -> StepContext:
    slot = torch.arange(len(num_tokens)) if slots is None else torch.tensor(slots)
    rows = step_rows("test", slot, torch.tensor(num_tokens), 8, width)
    return StepContext(Phase.DECODE, rows, torch.zeros_like(slot), width, torch.zeros(len(slot), dtype=torch.bool))


def norm(x: Tensor, gate: Tensor, weight: Tensor, groups: int, *, gate_first: bool) -> Tensor:
    graph = TorchGraph(OneVector(weight), StateOps(None), context([1], 1))  # type: ignore[arg-type]
    return graph.gated_rms_norm(x, gate, "w", 1e-5, groups=groups, gate_first=gate_first)


@pytest.mark.parametrize("shards", [1, 2, 4])
def test_d12_a_norm_group_is_the_same_whole_or_split_over_ranks(shards: int) -> None:
    """D12: n_groups = 8 over 64 channels. A rank with 8 / n groups and 64 / n channels gets its part of the whole."""
    g = torch.Generator().manual_seed(0)
    x, gate = torch.randn(3, 5, 64, generator=g) * 3, torch.randn(3, 5, 64, generator=g)
    weight = torch.randn(64, generator=g)
    whole = norm(x, gate, weight, 8, gate_first=True)
    parts = [
        norm(x_part, gate_part, weight_part, 8 // shards, gate_first=True)
        for x_part, gate_part, weight_part in zip(
            x.chunk(shards, -1), gate.chunk(shards, -1), weight.chunk(shards, -1), strict=True
        )
    ]
    torch.testing.assert_close(torch.cat(parts, -1), whole, rtol=1e-6, atol=0)
    wide = x.double().numpy(), gate.double().numpy(), weight.double().numpy()
    want = layers.gated_rms_norm(*wide, 1e-5, groups=8, gate_first=True)
    assert np.abs(whole.numpy() - want).max() <= 8 * FLOAT32_STEP * np.abs(want).max()
    assert (
        np.abs(norm(x, gate, weight, 1, gate_first=True).numpy() - want).max() > 0.1
    )  # the full width is another norm


def test_d12_the_gdn_norm_shares_its_weight_over_heads_and_gates_after_it() -> None:
    g = torch.Generator().manual_seed(1)
    x, gate, weight = (torch.randn(*s, generator=g) for s in ((2, 3, 64), (2, 3, 64), (16,)))
    got = norm(x, gate, weight, 4, gate_first=False).numpy()
    wide = x.double().numpy(), gate.double().numpy(), weight.double().numpy()
    want = layers.gated_rms_norm(*wide, 1e-5, groups=4, gate_first=False)
    assert np.abs(got - want).max() <= 8 * FLOAT32_STEP * np.abs(want).max()


GROUPED = MoeShape(
    experts=32, top_k=4, intermediate=8, latent=None, shared_intermediate=8, gated=False, shared_gated=False,
    router=Router.SIGMOID_BIAS, n_group=4, topk_group=2, scaling=2.5,
)  # fmt: skip
SOFTMAX = MoeShape(
    experts=32, top_k=4, intermediate=8, latent=None, shared_intermediate=8, gated=True, shared_gated=True,
    router=Router.SOFTMAX,
)  # fmt: skip


@pytest.mark.parametrize("shape", [GROUPED, SOFTMAX], ids=["sigmoid", "softmax"])
def test_f12_near_ties_choose_the_experts_of_the_float32_bias(shape: MoeShape) -> None:
    """F12: scores a thousandth apart, decided by a bias that bfloat16 cannot hold; ids as the specification's."""
    g = torch.Generator().manual_seed(2)
    logits = 1e-3 * torch.randn(400, 32, generator=g)
    bias = 1.0 + 1e-3 * torch.randn(32, generator=g) if shape.router is Router.SIGMOID_BIAS else None
    ids, chosen = route(logits, bias, shape)
    wide = None if bias is None else bias.double().numpy()
    want_ids, want = layers.route(logits.double().numpy(), wide, shape)
    agree = (ids.numpy() == want_ids).all(-1)
    assert agree.mean() > 0.99  # scores equal to the last float32 bit may fall either way
    assert np.abs(chosen.numpy()[agree] - want[agree]).max() <= 8 * FLOAT32_STEP * np.abs(want).max()
    if bias is not None:
        rounded = route(logits, bias.bfloat16().float(), shape)[0]
        assert (rounded.numpy() != want_ids).any(-1).mean() > 0.5  # so these really are ties that bfloat16 breaks


@pytest.mark.parametrize("name", ["nemotron-moe", "nemotron-moe-groups", "qwen-moe"])
def test_f12_exact_ties_go_to_the_lower_expert_and_router_parameters_stay_float32(name: str) -> None:
    shape = checkpoint(name).geometry.moe
    assert shape is not None
    ids, _ = route(torch.zeros(2, shape.experts), None, shape)
    assert ids.tolist() == [list(range(shape.top_k))] * 2
    held = weights(name, ActivationDtype.BFLOAT16)
    geometry = checkpoint(name).geometry
    routers = [p.name for p in model_of(geometry).parameters(geometry) if p.role is ParamRole.ROUTER]
    assert routers
    for router in routers:
        stored = checkpoint(name).matrix(router).dequantize(np.float32)
        assert np.array_equal(held.matrix_float32(router).numpy(), stored)
        if name.startswith("nemotron"):
            bias = held.vector(router.replace("gate.weight", "gate.e_score_correction_bias"))
            assert bias.dtype is torch.float32


class Spy(TorchWeights):
    """Counts the experts that are fetched."""

    fetched: list[int]

    def expert(self, name: str, expert: int) -> Tensor:
        self.fetched.append(expert)
        return super().expert(name, expert)


def moe(spy: Spy, x: Tensor, ctx: StepContext) -> Tensor:
    geometry = checkpoint("nemotron-moe").geometry
    block = f"backbone.layers.{geometry.layers_of(LayerKind.MOE)[0]}.mixer."
    assert geometry.moe is not None and geometry.moe.latent is not None
    names = MoeNames(
        router=block + "gate.weight", router_bias=block + "gate.e_score_correction_bias", experts=block + "experts",
        latent_in=block + "fc1_latent_proj.weight", latent_out=block + "fc2_latent_proj.weight",
        shared=block + "shared_experts", shared_gate=None,
    )  # fmt: skip
    spy.fetched = []
    return TorchGraph(spy, StateOps(None), ctx).moe(x, names, geometry.moe)  # type: ignore[arg-type]


def test_f15_padded_rows_choose_no_expert_and_output_zero() -> None:
    """F15: NaN in padding rows and beyond a row's tokens; real rows have the bits they have alone."""
    spy = Spy(checkpoint("nemotron-moe"), torch.float32, CPU)
    x = torch.randn(4, 3, checkpoint("nemotron-moe").geometry.hidden, generator=torch.Generator().manual_seed(0))
    real = moe(spy, x[[0, 2]], context([2, 3], 3))
    wanted = sorted(set(spy.fetched))
    padded = x.clone()
    padded[0, 2], padded[1], padded[3] = float("nan"), float("nan"), float("nan")
    out = moe(spy, padded, context([2, 3, 3, 0], 3, [0, -1, 2, 3]))
    assert torch.equal(out[[0, 2]], real) and sorted(set(spy.fetched)) == wanted
    assert (out[1] == 0).all() and (out[3] == 0).all() and (out[0, 2] == 0).all()
    nothing = moe(spy, padded, context([1, 0, 2, 3], 3, [-1, 1, -1, -1]))
    assert (nothing == 0).all() and spy.fetched == []
