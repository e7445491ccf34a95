"""What a session makes once from weights and shapes and then keeps, so that no step computes it again."""

from __future__ import annotations

import torch
from torch import Tensor

from trtllm_replayssm.ops.native_layers import Rotation
from trtllm_replayssm.runtime.session.joined_products import join
from trtllm_replayssm.runtime.session.router_product import split, with_row
from trtllm_replayssm.runtime.session.torch_weights import TorchWeights


class DerivedTensors:
    """Lives as long as a session. HAZARD: what is first asked for while a graph is recorded would be part of it."""

    def __init__(self) -> None:
        self._tensors: dict[str, Tensor] = {}
        self._rotations: dict[tuple[int, float], Rotation] = {}

    def joined(self, weights: TorchWeights, names: list[str]) -> Tensor:
        """The matrices [out_i, in] `names` as one [sum of out_i, in]; afterwards they are its parts, not copies."""
        if names[0] not in self._tensors:
            self._tensors[names[0]] = join([weights.matrix(name) for name in names])
        return self._tensors[names[0]]

    def router(self, weights: TorchWeights, name: str, row: str | None) -> Tensor:
        """[parts, rows, in] bfloat16 whose sum is the router `name`, with the matrix `row` of one output behind it."""
        if name not in self._tensors:
            router = weights.matrix_float32(name)
            self._tensors[name] = split(router if row is None else with_row(router, weights.matrix(row).float()))
        return self._tensors[name]

    def rotation(self, depth: int, rotary_dim: int, theta: float, device: torch.device) -> Rotation:
        """Of the positions below `depth`, which is the same in all calls."""
        key = (rotary_dim, theta)
        if key not in self._rotations:
            self._rotations[key] = Rotation.table(depth, rotary_dim, theta, device)
        return self._rotations[key]
