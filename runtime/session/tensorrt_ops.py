"""The native operations of a program's steps over the pools: views of program tensors in, one program tensor out."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from trtllm_replayssm.bindings import CONV1D, GDN, MAMBA2, MOE, RANK_JOIN, RANK_SUM, OpStep, View
from trtllm_replayssm.errors import EngineMismatchError
from trtllm_replayssm.ops import native_experts
from trtllm_replayssm.runtime.pools.state_pools import StatePools
from trtllm_replayssm.runtime.session.ranks import Sharing
from trtllm_replayssm.runtime.session.step_context import Phase, StepContext
from trtllm_replayssm.runtime.session.torch_moe import route, routed_experts
from trtllm_replayssm.runtime.session.torch_state_ops import StateOps
from trtllm_replayssm.runtime.session.torch_weights import TorchWeights
from trtllm_replayssm.shapes import MoeShape
from trtllm_replayssm.weights.names import split_expert_stack


class NativeStepOps:
    """state_ops: the recurrences and the convolution; weights: vectors and experts by canonical name.

    Where they are one of several ranks', sums and joins over the ranks run here as well.
    """

    def __init__(self, pools: StatePools, state_ops: StateOps, weights: TorchWeights) -> None:
        self._geometry = pools.geometry
        self._pools = pools
        self._state_ops = state_ops
        self._weights = weights
        self._sharing = None if weights.ranks is None else Sharing.of(pools.geometry, weights.ranks)
        self._run = {CONV1D: self._conv1d, MAMBA2: self._mamba2, GDN: self._gdn, MOE: self._moe}
        if weights.ranks is not None:
            self._run |= {RANK_SUM: self._rank_sum, RANK_JOIN: self._rank_join}

    def run(self, step: OpStep, context: StepContext, memory: Mapping[str, Tensor]) -> None:
        """Run one operation; its output tensor in `memory` is written. Projections are read in place."""
        if step.op not in self._run:
            raise EngineMismatchError("run bundle", "op", expected=f"one of {sorted(self._run)}", got=step.op)
        inputs = {name: _view(memory, view) for name, view in step.inputs.items()}
        memory[step.outputs["out"]].copy_(self._run[step.op](step, context, inputs))

    def _conv1d(self, step: OpStep, context: StepContext, inputs: Mapping[str, Tensor]) -> Tensor:
        """Where the kernels serve the pools, the convolution alone: `StateOps.conv1d` would wait for the decay inputs
        of the layer, which engines make.
        """
        bias = self._weights.vector(step.weights["bias"]) if "bias" in step.weights else None
        weight = self._weights.vector(step.weights["weight"])
        if self._state_ops.native is None:
            return self._state_ops.conv1d(context, step.layer, inputs["x"], weight, bias)
        prompt = context.phase is Phase.PREFILL
        operation = torch.ops.replayssm.conv1d_prefill if prompt else torch.ops.replayssm.conv1d_update
        out: Tensor = operation(
            flags=0, slot=context.rows.slot_int32, num_tokens=context.rows.num_tokens_int32,
            position=self._pools.cursors.position, x=inputs["x"], weight=weight[:, 0], bias=bias,
            window=self._pools.windows[step.layer],
        )  # fmt: skip
        return out

    def _mamba2(self, step: OpStep, context: StepContext, inputs: Mapping[str, Tensor]) -> Tensor:
        shape = self._geometry.ssm
        rates = self._state_ops.rates(step.layer, self._weights.vector(step.weights["a_log"]))
        out = self._state_ops.mamba2(
            context, step.layer, _heads(inputs["x"], shape.heads), _heads(inputs["k"], shape.groups),
            _heads(inputs["q"], shape.groups), inputs["dt"], rates,
            self._weights.vector(step.weights["skip"]),
        )  # fmt: skip
        return out.flatten(-2)

    def _gdn(self, step: OpStep, context: StepContext, inputs: Mapping[str, Tensor]) -> Tensor:
        shape = self._geometry.ssm
        out = self._state_ops.gdn(
            context, step.layer, _heads(inputs["q"], shape.groups), _heads(inputs["k"], shape.groups),
            _heads(inputs["v"], shape.heads), inputs["log_decay"], inputs["beta"],
        )  # fmt: skip
        return out.flatten(-2)

    def _moe(self, step: OpStep, context: StepContext, inputs: Mapping[str, Tensor]) -> Tensor:
        """As `TorchGraph.moe`: by the kernels where they serve the pools and the shape."""
        shape, x, logits = self._geometry.moe, inputs["x"], inputs["logits"]
        assert shape is not None
        bias = self._weights.vector(step.weights["router_bias"]) if "router_bias" in step.weights else None
        if self._state_ops.native is not None and native_experts.serves(shape, x.shape[-1], x.dtype):
            stacks = self._weights.expert_stacks(split_expert_stack(step.weights["up_proj"])[0], gated=shape.gated)
            ids, scores = native_experts.route(logits, bias, shape, context.rows)
            return native_experts.experts(x.flatten(0, 1), self._own(ids, shape), scores, stacks).view_as(x)
        valid = context.valid()
        out: Tensor = torch.zeros_like(x)
        ids, scores = route(logits[valid], bias, shape)
        out[valid] = routed_experts(
            x[valid], self._own(ids, shape), scores, shape,
            lambda projection, expert: self._weights.expert(step.weights[projection], expert),
        )  # fmt: skip
        return out

    def _own(self, ids: Tensor, shape: MoeShape) -> Tensor:
        """Chosen experts as this session's stacks count them."""
        return ids if self._sharing is None else self._sharing.own_experts(ids, shape.experts)

    def _rank_sum(self, step: OpStep, context: StepContext, inputs: Mapping[str, Tensor]) -> Tensor:
        """HAZARD: the input is overwritten; nothing else reads an addend."""
        assert self._sharing is not None
        return self._sharing.ranks.add_up(inputs["x"])

    def _rank_join(self, step: OpStep, context: StepContext, inputs: Mapping[str, Tensor]) -> Tensor:
        assert self._sharing is not None
        return self._sharing.ranks.join(inputs["x"])


def _view(memory: Mapping[str, Tensor], view: View) -> Tensor:
    return memory[view.tensor][..., view.start : view.start + view.width]


def _heads(x: Tensor, heads: int) -> Tensor:
    """[..., heads * d] -> [..., heads, d]."""
    return x.reshape(*x.shape[:-1], heads, -1)
