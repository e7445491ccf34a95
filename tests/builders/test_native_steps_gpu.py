"""The native operations of a program's steps, by the CUDA kernels and by the reference operations on a CPU.

Oracle O4 in bfloat16: the same steps over equal pools, outputs and convolution windows compared; projections are wider
than the operations' inputs, as in an engine's program, so that views are read in place.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
import torch

from tests.layer_shapes import ssm_shape
from tests.native import harness
from tests.native.experts_cases import random_matrix
from trtllm_replayssm.bindings import CONV1D, GDN, MAMBA2, MOE, OpStep, View
from trtllm_replayssm.config import PoolConfig, ReplayConfig
from trtllm_replayssm.dtypes import ActivationDtype
from trtllm_replayssm.ops.layer_state import StepRows
from trtllm_replayssm.ops.reference import commit
from trtllm_replayssm.ops.reference.rows import step_rows
from trtllm_replayssm.runtime.pools.state_pools import StatePools
from trtllm_replayssm.runtime.session.native_ops import native_ops, native_prefill
from trtllm_replayssm.runtime.session.step_context import Phase, StepContext
from trtllm_replayssm.runtime.session.tensorrt_ops import NativeStepOps
from trtllm_replayssm.runtime.session.torch_state_ops import StateOps
from trtllm_replayssm.runtime.session.torch_weights import TorchWeights
from trtllm_replayssm.shapes import LayerKind, ModelGeometry, MoeShape, Router, SsmKind
from trtllm_replayssm.weights.checkpoint import Checkpoint
from trtllm_replayssm.weights.matrix import ExpertStack
from trtllm_replayssm.weights.presets import preset_geometry

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(harness.unavailable() is not None, reason=str(harness.unavailable()))]

PAD = 16  # channels of a projection before what the operations read: 16-byte steps of bfloat16
REPLAY = ReplayConfig(window=4, max_step_tokens=3)
# Outputs and windows relative to their largest value. Accepts a bfloat16 result one step off (2^-8) after sums in
# another order; rejects a tap, record or token that is missing or belongs to another row (1e-1 and more).
STEP_NOISE = 2.0**-6


def geometry(kind: SsmKind) -> ModelGeometry:
    """One recurrent layer in a shape that the kernels hold."""
    mamba = kind is SsmKind.MAMBA2
    shape = ssm_shape(kind, 8, 2 if mamba else 4, 64 if mamba else 128, 128)
    base = preset_geometry("nemotron-3-nano-4b" if mamba else "qwen3.5-4b")
    return replace(base, layers=(LayerKind.SSM,), ssm=shape, mtp_pattern=())


class Vectors:
    """The parameters of the layer, by name, equal for equal names."""

    def __init__(self, geometry: ModelGeometry) -> None:
        ssm = geometry.ssm
        channels = (ssm.conv_channels,)
        self._shapes = {"weight": (*channels, 1, ssm.conv_kernel), "bias": channels}
        self._heads = (ssm.heads,)

    def vector(self, name: str) -> np.ndarray[Any, Any]:
        seed = sum(name.encode())
        return np.random.default_rng(seed).standard_normal(self._shapes.get(name, self._heads)).astype(np.float32) / 2


def run(kind: SsmKind, device: str) -> Iterator[torch.Tensor]:
    """A prompt in two chunks, then steps with drafts, a padding row and flushes: every output, at last the window."""
    made = geometry(kind)
    pool = PoolConfig(slots=3, max_seq_len=128, activation=ActivationDtype.BFLOAT16)
    pools = StatePools.allocate(made, REPLAY, pool, conventional=False, device=torch.device(device))
    native = native_ops(pools)
    assert (native is not None) == (device == "cuda")
    state_ops = StateOps(pools, native, native_prefill(pools, native))
    weights = TorchWeights(cast(Checkpoint, Vectors(made)), torch.bfloat16, torch.device(device))
    ops = NativeStepOps(pools, state_ops, weights)
    generator = torch.Generator().manual_seed(3)
    slots = [pools.acquire(i) for i in range(3)]
    for slot in slots[:2]:
        for count, last in ((5, False), (4, True)):
            rows = step_rows("prefill", torch.tensor([slot]), torch.tensor([count]), 3, count)
            yield layer_output(ops, made, pools, Phase.PREFILL, rows, count, generator, last)
            commit.finish_chunk(pools.cursors, rows.slot.to(device), rows.num_tokens.to(device))
            if last:
                pools.carries.pop(slot, None)
    for counts in ((3, 0, 2), (1, 0, 3), (2, 0, 2), (3, 0, 1)):
        rows = step_rows("decode", torch.tensor([slots[1], -1, slots[0]]), torch.tensor(counts), 3, 3)
        yield layer_output(ops, made, pools, Phase.DECODE, rows, 3, generator, True)
        moved = StepRows(rows.slot.to(device), rows.num_tokens.to(device))
        state_ops.commit(moved, torch.tensor([2, 0, 1], device=device))
    yield pools.windows[0]


def layer_output(
    ops: NativeStepOps, made: ModelGeometry, pools: StatePools, phase: Phase, rows: StepRows, width: int,
    generator: torch.Generator, last: bool,
) -> torch.Tensor:  # fmt: skip
    """Convolution, then the recurrence over views of its output."""
    ssm, device = made.ssm, pools.cursors.position.device
    moved = StepRows(rows.slot.to(device), rows.num_tokens.to(device))
    start = pools.cursors.position[moved.slot.clamp(min=0)].long()
    context = StepContext(phase, moved, start, width, torch.full((len(rows.slot),), last, device=device))

    def random(channels: int) -> torch.Tensor:
        return torch.randn((len(rows.slot), width, channels), generator=generator)

    memory = {"projection": random(PAD + ssm.conv_channels).bfloat16()}
    memory |= {name: random(ssm.heads) for name in ("rate", "beta")}
    mixed, out = torch.empty(len(rows.slot), width, ssm.conv_channels), torch.empty(len(rows.slot), width, ssm.inner)
    memory |= {"mixed": mixed.bfloat16(), "out": out.bfloat16()}
    memory = {name: tensor.to(device) for name, tensor in memory.items()}
    memory["rate"], memory["beta"] = memory["rate"].abs() / 4, memory["beta"].sigmoid()
    if ssm.kind is SsmKind.GDN:
        memory["rate"] = -memory["rate"]
    keys, inner = ssm.key_channels, ssm.inner
    bounds = {"x": (0, inner), "k": (inner, keys), "q": (inner + keys, keys)}
    if ssm.kind is SsmKind.GDN:
        bounds = {"q": (0, keys), "k": (keys, keys), "v": (2 * keys, inner)}
    views = {name: View(tensor="mixed", start=begin, width=size) for name, (begin, size) in bounds.items()}
    rate = {"dt": "rate"} if ssm.kind is SsmKind.MAMBA2 else {"log_decay": "rate", "beta": "beta"}
    views |= {name: View(tensor=tensor, start=0, width=ssm.heads) for name, tensor in rate.items()}
    projection = View(tensor="projection", start=PAD, width=ssm.conv_channels)
    taps = {"weight": "weight", "bias": "bias"}
    conv = OpStep(op=CONV1D, layer=0, inputs={"x": projection}, outputs={"out": "mixed"}, weights=taps)
    ops.run(conv, context, memory)
    op, vectors = (MAMBA2, {"a_log": "a_log", "skip": "skip"}) if ssm.kind is SsmKind.MAMBA2 else (GDN, {})
    ops.run(OpStep(op=op, layer=0, inputs=views, outputs={"out": "out"}, weights=vectors), context, memory)
    return memory["out"]


@pytest.mark.parametrize("kind", SsmKind)
def test_steps_on_the_device_are_the_steps_of_the_reference(kind: SsmKind) -> None:
    for step, (got, expected) in enumerate(zip(run(kind, "cuda"), run(kind, "cpu"), strict=True)):
        difference = (got.cpu().float() - expected.float()).abs().max()
        assert float(difference) <= STEP_NOISE * float(expected.float().abs().max()), step


WIDTH, INNER, EXPERTS = 128, 64, 16


class Experts(Vectors):
    """Stacks of NVFP4 experts by projection, and the router's bias."""

    def vector(self, name: str) -> np.ndarray[Any, Any]:
        return np.random.default_rng(5).standard_normal(EXPERTS).astype(np.float32) / 8

    def experts(self, name: str) -> ExpertStack:
        size = (WIDTH, INNER) if name.endswith("down_proj") else (INNER, WIDTH)
        random = np.random.default_rng(sum(name.encode()))
        matrices = [random_matrix(random, "nvfp4", *size) for _ in range(EXPERTS)]
        return ExpertStack((EXPERTS, *size), lambda e: matrices[e])


def experts_output(gated: bool, device: str) -> torch.Tensor:
    """Routing and experts of rows with and without tokens, read out of a wider projection."""
    shape = MoeShape(
        experts=EXPERTS, top_k=4, intermediate=INNER, latent=None, shared_intermediate=8, gated=gated,
        shared_gated=False, router=Router.SOFTMAX if gated else Router.SIGMOID_BIAS, n_group=1 if gated else 4,
        topk_group=1 if gated else 2, scaling=1.0 if gated else 2.5,
    )  # fmt: skip
    made = replace(geometry(SsmKind.MAMBA2), moe=shape)
    pool = PoolConfig(slots=3, max_seq_len=128, activation=ActivationDtype.BFLOAT16)
    pools = StatePools.allocate(made, REPLAY, pool, conventional=False, device=torch.device(device))
    native = native_ops(pools)
    assert (native is not None) == (device == "cuda")
    weights = TorchWeights(cast(Checkpoint, Experts(made)), torch.bfloat16, torch.device(device))
    ops = NativeStepOps(pools, StateOps(pools, native, native_prefill(pools, native)), weights)
    generator = torch.Generator().manual_seed(4)
    projection = torch.randn((4, 3, PAD + WIDTH), generator=generator).bfloat16()
    logits = torch.randn((4, 3, EXPERTS), generator=generator)
    rows = StepRows(torch.tensor([2, -1, 0, 1], device=device), torch.tensor([3, 3, 0, 2], device=device))
    start, every = torch.zeros_like(rows.slot), torch.ones(4, dtype=torch.bool, device=device)
    context = StepContext(Phase.DECODE, rows, start, 3, every)
    memory = {"projection": projection, "logits": logits, "out": torch.full((4, 3, WIDTH), float("nan")).bfloat16()}
    memory = {name: tensor.to(device) for name, tensor in memory.items()}
    views = {"x": View(tensor="projection", start=PAD, width=WIDTH)}
    views |= {"logits": View(tensor="logits", start=0, width=EXPERTS)}
    names = {f"{p}_proj": f"experts.{p}_proj" for p in (("gate", "up", "down") if gated else ("up", "down"))}
    bias = {} if gated else {"router_bias": "bias"}
    ops.run(OpStep(op=MOE, layer=-1, inputs=views, outputs={"out": "out"}, weights=names | bias), context, memory)
    return memory["out"]


@pytest.mark.parametrize("gated", [False, True])
def test_experts_on_the_device_are_those_of_the_reference(gated: bool) -> None:
    got, expected = experts_output(gated, "cuda").cpu().float(), experts_output(gated, "cpu").float()
    assert not got[1].any() and not got[2].any() and not got[3, 2].any(), "tokens that do not exist are zero"
    assert float((got - expected).abs().max()) <= STEP_NOISE * float(expected.abs().max())
