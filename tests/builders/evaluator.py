"""Runs networks that the builder made, layer by layer, with torch on the CPU: what they compute, without TensorRT.

An independent reading of the library's layer semantics. Every kind of layer that it does not know fails. Constants come
from the builder's own map, since the library cannot give BF16, FP8 and FP4 back. No test here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import torch
from torch import Tensor

from tests.builders import evaluator_layers as layers
from tests.builders.plugin_evaluator import PluginMemory
from tests.parallel.thread_ranks import ThreadRanks
from trtllm_replayssm.builders.network import Constant
from trtllm_replayssm.weights.matrix import DenseMatrix, Nvfp4Matrix

Step = Callable[[dict[str, Tensor]], None]


class NetworkEvaluator:
    """One network, read once. Quantised tensors are held as the float32 values they stand for."""

    def __init__(
        self, trt: Any, definition: Any, constants: Mapping[str, Constant], calls: Sequence[Any] = (),
        ranks: ThreadRanks | None = None,
    ) -> None:  # fmt: skip
        """calls: the plugin layers of the network (`recorded_tensorrt.PluginCall`). ranks: what its collective layers
        exchange with.
        """
        self._calls = list(calls)
        imitated = {name for call in calls for name in call.outputs}
        names = [definition.get_input(i).name for i in range(definition.num_inputs)]
        self.inputs = [name for name in names if name not in imitated]
        self.outputs = [definition.get_output(i).name for i in range(definition.num_outputs)]
        self._constants: dict[str, Tensor] = {}
        self._steps: list[Step] = []
        known: set[str] = {*self.inputs, *imitated}
        attention: dict[str, Any] = {}
        for index in range(definition.num_layers):
            layer = definition.get_layer(index)
            names = [layer.get_output(i).name for i in range(layer.num_outputs)]
            assert not known & set(names), f"tensor names are unique: {names}"
            known |= set(names)
            kind = layer.type.name
            if kind == "CONSTANT":
                self._constants[names[0]] = constant_values(constants[layer.name])
            elif kind == "DIST_COLLECTIVE":
                assert ranks is not None
                layer.__class__ = trt.IDistCollectiveLayer
                self._steps.append(_collective(layer, ranks))
            else:
                self._steps.append(layers.step_of(trt, layer, kind, attention))

    def run(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Outputs by name; every input must be given, with its own type."""
        memory = PluginMemory({**self._constants, **{name: values[name] for name in self.inputs}}, self._calls)
        for step in self._steps:
            step(memory)
        return {name: memory[name] for name in self.outputs}


def _collective(layer: Any, ranks: ThreadRanks) -> Step:
    """What a collective layer does over all ranks, as the stand-in for the library noted it in its metadata."""
    source, target, asked = layer.get_input(0).name, layer.get_output(0).name, layer.metadata
    assert layer.num_ranks == ranks.parallel.size
    functions: dict[str, Callable[[Tensor], Tensor]] = {
        "ALL_REDUCE SUM -1 []": ranks.add_up, "ALL_GATHER NONE -1 []": lambda x: torch.cat(ranks.exchange(x)),
    }  # fmt: skip
    function = functions[asked]

    def step(memory: dict[str, Tensor]) -> None:
        memory[target] = function(memory[source])

    return step


def constant_values(constant: Constant) -> Tensor:
    """A constant as torch sees it: FP4 and FP8 as float32 values, everything else in its own type."""
    if constant.dtype == "float4_e2m1":
        packed = constant.array.reshape(-1, constant.shape[-1] // 2)
        scales = np.ones((packed.shape[0], constant.shape[-1] // 16), dtype=ml_dtypes.float8_e4m3fn)
        return torch.from_numpy(Nvfp4Matrix(packed, scales, 1.0).dequantize()).reshape(constant.shape)
    if constant.dtype in ("float8_e4m3", "bfloat16"):
        wide = torch.from_numpy(constant.array.astype(np.float32)).reshape(constant.shape)
        return wide.to(torch.bfloat16) if constant.dtype == "bfloat16" else wide
    return torch.from_numpy(np.array(constant.array)).reshape(constant.shape)


def decoded_weight(constants: Mapping[str, Constant], name: str) -> np.ndarray[Any, Any]:
    """What the network's constants of the matrix `name` stand for, [N, K] float32, from their bytes."""
    stored, module = constants[name], name.removesuffix(".weight")
    if stored.dtype == "float4_e2m1":
        rows, columns = stored.shape[-2:]
        packed = stored.array.reshape(rows, columns // 2)
        scales = constants[f"{module}.weight_scale"].array.reshape(rows, columns // 16)
        scale_2 = float(constants[f"{module}.weight_scale_2"].array.reshape(()))
        return Nvfp4Matrix(packed, scales, scale_2).dequantize()
    if stored.dtype == "float8_e4m3":
        scale = constants[f"{module}.weight_scale"].array.reshape(-1, 1)
        return stored.array.reshape(stored.shape[-2:]).astype(np.float32) * scale
    return DenseMatrix(stored.array.reshape(stored.shape[-2:])).dequantize()
