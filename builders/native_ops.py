"""What TensorRT lacks or does not do alone, as the interpreter asks for it, and the flavour where it cuts the network.

The other flavour runs them inside the network: `plugin_layers`.
"""

from __future__ import annotations

from typing import Any, Protocol

from trtllm_replayssm.bindings import RANK_JOIN, RANK_SUM, TensorSpec
from trtllm_replayssm.builders.segments import ProgramBuilder, Value

OWN_LOGITS = "own logits"  # [B, K, vocab / ranks] float32: what a rank's rows of the output head give


class NativeOps(Protocol):
    """How a flavour runs an operation that TensorRT lacks, and what ranks that share a model exchange."""

    def run(
        self, op: str, layer: int, inputs: dict[str, Value], weights: dict[str, str], width: int, shape: Any
    ) -> Value:
        """inputs and weights by argument name -> the output [B, T, width] in the activation type."""
        ...

    def add_up(self, x: Value) -> Value:
        """The sum of x [B, T, width], in the activation type, over the ranks."""
        ...

    def join(self, x: Value, name: str, width: int) -> Value:
        """The ranks' x [B, K, own] float32, rank after rank along the last axis -> the tensor `name` [B, K, width]."""
        ...


class SegmentedOps:
    """Native operations between networks (tensorrt_rtx)."""

    def __init__(self, program: ProgramBuilder, activation: str) -> None:
        self._program = program
        self._activation = activation

    def run(
        self, op: str, layer: int, inputs: dict[str, Value], weights: dict[str, str], width: int, shape: Any
    ) -> Value:
        """See `NativeOps`."""
        name = op if layer < 0 else f"layer.{layer}.{op}"
        return self._program.native(op, layer, inputs, weights, self._spec(name, width))

    def add_up(self, x: Value) -> Value:
        """See `NativeOps`."""
        return self._program.native(RANK_SUM, -1, {"x": x}, {}, self._spec(RANK_SUM, x.width))

    def join(self, x: Value, name: str, width: int) -> Value:
        """See `NativeOps`."""
        whole = TensorSpec(name=name, dtype="float32", dims=("B", "K", width))
        return self._program.native(RANK_JOIN, -1, {"x": x}, {}, whole)

    def _spec(self, name: str, width: int) -> TensorSpec:
        return TensorSpec(name=name, dtype=self._activation, dims=("B", "T", width))
