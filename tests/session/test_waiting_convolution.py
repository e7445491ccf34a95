"""With kernels a convolution waits for the decay inputs of its layer; no result may be read before it has run.

The kernels are stood in for by the reference operations, so that the session on a CPU takes the path of CUDA; memory
that is allocated without values is NaN. The logits then have the bits of the session without kernels.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from tests.session.sessions import FAMILIES, force, open_session, sequence, start, states
from trtllm_replayssm.ops.layer_state import CursorTensors, StepRows
from trtllm_replayssm.ops.native import Convolution
from trtllm_replayssm.ops.reference import commit, conv1d, gdn, mamba2
from trtllm_replayssm.runtime.session import torch_session
from trtllm_replayssm.runtime.session.base import DecodeRow
from trtllm_replayssm.shapes import SsmShape


class ReferenceKernels:
    """The methods of `NativeOps`, by the reference operations; counts the launches of a layer's inputs."""

    commit = staticmethod(commit.commit)

    def __init__(self) -> None:
        self.launches: list[int] = []

    def mamba2_update(self, *tensors: Any, settled: bool, **more: Any) -> Tensor:
        assert settled, "a session's steps keep the promise"
        return mamba2.mamba2_update(*tensors, **more)

    def gdn_update(self, *tensors: Any, settled: bool) -> Tensor:
        assert settled, "a session's steps keep the promise"
        return gdn.gdn_update(*tensors)

    def ssm_inputs(
        self, shape: SsmShape, conv: Convolution, cursors: CursorTensors, rows: StepRows, decay: Tensor,
        beta: Tensor | None, dt_bias: Tensor, *, a_log: Tensor | None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        assert conv.out.isnan().all(), "nothing has run yet"
        self.launches.append(conv.layer)
        conv.out.copy_(conv1d.conv1d_update(conv.window, cursors, rows, conv.x, conv.weight[:, None], conv.bias))
        if beta is None or a_log is None:
            dt = mamba2.discretise(decay, dt_bias)
            return dt, dt
        return gdn.gates(decay, beta, a_log, dt_bias)

    def gated_rms_norm(
        self, x: Tensor, gate: Tensor, weight: Tensor, eps: float, *, groups: int, gate_first: bool
    ) -> Tensor:
        opening = functional.silu(gate)
        wide = (x * opening if gate_first else x).unflatten(-1, (groups, -1))
        normalised = wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt()
        return normalised.flatten(-2) * weight if gate_first else (normalised * weight).flatten(-2) * opening


@pytest.mark.parametrize("name", FAMILIES)
def test_the_session_with_kernels_gives_the_bits_of_the_one_without(
    name: str, monkeypatch: pytest.MonkeyPatch, unwritten_memory_is_nan: None
) -> None:
    tokens = sequence(name)
    plain, kernels = open_session(name), ReferenceKernels()
    monkeypatch.setattr(torch_session, "native_ops", lambda pools: kernels)
    fused = open_session(name)
    results: list[tuple[Any, Any]] = []
    for session in (plain, fused):
        slot, first = start(session, tokens[:20])
        after = force(session, slot, tokens[20:30])
        verified = session.decode([DecodeRow(slot, tokens[30:34])])[0]
        session.commit([2])
        results.append((np.concatenate([first[None], after, verified]), states(session, slot)))
    (want, want_states), (got, got_states) = results
    assert np.isfinite(got).all() and (got == want).all()
    assert all(torch.equal(a, b) for a, b in zip(got_states, want_states, strict=True)) and got_states
    layers = sorted(fused.pools.ssm)
    assert kernels.launches == layers * 12, "one launch for each layer and call"
