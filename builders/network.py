"""A TensorRT network under construction: constants with their bytes kept, and the small layers that models are made of.

HAZARD: TensorRT reads the bytes of constants while it builds; `constants` keeps them alive and is also the only way to
read BF16, FP8 and FP4 constants back (the library's own accessor cannot).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from trtllm_replayssm.bindings import TensorSpec
from trtllm_replayssm.errors import InvariantError

_TRT_NAMES = {
    "float32": "FLOAT", "float16": "HALF", "bfloat16": "BF16", "int32": "INT32", "int64": "INT64", "int8": "INT8",
    "bool": "BOOL", "float8_e4m3": "FP8", "float4_e2m1": "FP4",
}  # fmt: skip
_NUMPY_NAMES = {
    np.dtype(np.float32): "float32", np.dtype(np.float16): "float16", np.dtype(ml_dtypes.bfloat16): "bfloat16",
    np.dtype(np.int32): "int32", np.dtype(ml_dtypes.float8_e4m3fn): "float8_e4m3",
}  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class Constant:
    """The bytes of a constant layer: `array` as stored, `dtype` and `shape` as TensorRT sees them (FP4: two a byte)."""

    array: NDArray[Any]
    dtype: str
    shape: tuple[int, ...]


class Network:
    """Wraps one INetworkDefinition. Methods return tensors of the library."""

    def __init__(self, trt: Any, definition: Any, activation: str) -> None:
        self.trt = trt
        self.definition = definition
        self.activation = activation
        self.constants: dict[str, Constant] = {}
        self._made: dict[str, Any] = {}  # constants by content name: one layer each
        self._names: dict[str, int] = {}

    def dtype(self, name: str) -> Any:
        """The library's name of a type."""
        return getattr(self.trt.DataType, _TRT_NAMES[name])

    def input(self, spec: TensorSpec) -> Any:
        """A network input with named dynamic dimensions."""
        dims = tuple(-1 if isinstance(dim, str) else dim for dim in spec.dims)
        tensor = self.definition.add_input(spec.name, self.dtype(spec.dtype), dims)
        for axis, dim in enumerate(spec.dims):
            if isinstance(dim, str):
                tensor.set_dimension_name(axis, dim)
        return tensor

    def output(self, tensor: Any, name: str) -> None:
        """Mark a tensor as the output `name`."""
        tensor.name = name
        self.definition.mark_output(tensor)

    def constant(self, name: str, array: NDArray[Any], *, shape: tuple[int, ...], fp4: bool = False) -> Any:
        """A constant by the name of what it holds. The same name is the same layer, seen in another shape where that is
        asked for: tied embeddings are stored once. No copy of contiguous arrays.
        """
        if name in self._made:
            made = self._made[name]
            return made if tuple(made.shape) == shape else self.reshape(made, shape, f"{name} as {list(shape)}")
        array = np.ascontiguousarray(array)
        dtype = "float4_e2m1" if fp4 else _NUMPY_NAMES[array.dtype]
        count = math.prod(shape)
        if array.size * (2 if fp4 else 1) != count:
            raise InvariantError("build network", name, expected=f"{count} elements", got=list(array.shape))
        weights = self.trt.Weights(self.dtype(dtype), array.ctypes.data, count)
        layer = self.definition.add_constant(shape, weights)
        layer.name = name
        self.constants[name] = Constant(array, dtype, shape)
        self._made[name] = layer.get_output(0)
        return self._made[name]

    def scalar(self, value: float, rank: int = 3) -> Any:
        """A float32 constant of `rank` axes of extent 1 (0: a true scalar)."""
        number = np.float32(value)
        return self.constant(f"float32 {number!s} rank {rank}", np.full((1,) * rank, number), shape=(1,) * rank)

    def named(self, layer: Any, name: str) -> Any:
        """Name a layer, made unique in the network -> its first output."""
        if layer is None:
            raise InvariantError("build network", name, expected="a layer", got="none")
        count = self._names[name] = self._names.get(name, 0) + 1
        layer.name = name if count == 1 else f"{name}#{count}"
        return layer.get_output(0)

    def cast(self, x: Any, dtype: str) -> Any:
        """x in another type; x itself where it has it."""
        wanted = self.dtype(dtype)
        return x if x.dtype == wanted else self.named(self.definition.add_cast(x, wanted), f"cast {x.name}")

    def wide(self, x: Any) -> Any:
        """x as float32."""
        return self.cast(x, "float32")

    def narrow(self, x: Any) -> Any:
        """x in the activation type."""
        return self.cast(x, self.activation)

    def binary(self, a: Any, b: Any, operation: str, name: str) -> Any:
        """Elementwise; operation: SUM, PROD, SUB, DIV, MAX, GREATER, ..."""
        kind = getattr(self.trt.ElementWiseOperation, operation)
        return self.named(self.definition.add_elementwise(a, b, kind), name)

    def unary(self, x: Any, operation: str, name: str) -> Any:
        """Elementwise; operation: EXP, SQRT, RECIP, NEG, NOT, ..."""
        return self.named(self.definition.add_unary(x, getattr(self.trt.UnaryOperation, operation)), name)

    def activate(self, x: Any, operation: str, name: str) -> Any:
        """Elementwise; operation: SIGMOID, RELU, SOFTPLUS, ..."""
        return self.named(self.definition.add_activation(x, getattr(self.trt.ActivationType, operation)), name)

    def reduce_last(self, x: Any, operation: str, name: str) -> Any:
        """Over the last axis, which stays with extent 1; operation: AVG, SUM, MAX."""
        axes = 1 << (len(x.shape) - 1)
        kind = getattr(self.trt.ReduceOperation, operation)
        return self.named(self.definition.add_reduce(x, kind, axes, True), name)

    def slice_last(self, x: Any, start: int, width: int, name: str) -> Any:
        """Channels [start, start + width) of the last axis."""
        layer = self.definition.add_slice(x, (start,), (width,), (1,))
        layer.axes = (len(x.shape) - 1,)
        return self.named(layer, name)

    def concat_last(self, parts: Sequence[Any], name: str) -> Any:
        """Along the last axis."""
        layer = self.definition.add_concatenation(list(parts))
        layer.axis = len(parts[0].shape) - 1
        return self.named(layer, name)

    def reshape(self, x: Any, dims: tuple[int, ...], name: str, *, then: tuple[int, ...] | None = None) -> Any:
        """New extents (0 keeps an axis, -1 is what is left), then a permutation."""
        layer = self.definition.add_shuffle(x)
        layer.reshape_dims = dims
        if then is not None:
            layer.second_transpose = then
        return self.named(layer, name)

    def transpose(self, x: Any, order: tuple[int, ...], name: str) -> Any:
        """Axes in another order."""
        layer = self.definition.add_shuffle(x)
        layer.first_transpose = order
        return self.named(layer, name)

    def matmul_transposed(self, x: Any, weight: Any, name: str) -> Any:
        """x [B, T, K] times the transpose of weight [1, N, K]."""
        none, transposed = self.trt.MatrixOperation.NONE, self.trt.MatrixOperation.TRANSPOSE
        layer = self.definition.add_matrix_multiply(x, none, weight, transposed)
        layer.metadata = name  # survives where the compiler fuses layers and drops their names
        return self.named(layer, name)
