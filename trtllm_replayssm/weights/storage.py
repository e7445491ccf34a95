"""Where a matrix lies in the files: shapes and types checked from headers, scale values checked when it is read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trtllm_replayssm.dtypes import E2M1_VALUES, FP4_BLOCK
from trtllm_replayssm.errors import CheckpointError
from trtllm_replayssm.weights.matrix import DenseMatrix, Fp8Matrix, Matrix, MatrixFormat, Nvfp4Matrix
from trtllm_replayssm.weights.safetensors_file import Tensor

FLOATS = ("BF16", "F16", "F32")
_DENSE = {"BF16": MatrixFormat.BF16, "F16": MatrixFormat.F16, "F32": MatrixFormat.F32}
_E4M3_NAN = 0x7F
_E4M3_MAX = 448.0


def checkpoint_error(argument: str, expected: object, got: object, hint: str | None = None) -> CheckpointError:
    """A CheckpointError of opening a checkpoint; `argument` names the tensor."""
    return CheckpointError("open checkpoint", argument, expected=expected, got=got, hint=hint)


@dataclass(frozen=True, slots=True)
class MatrixStorage:
    """The tensors of one matrix.

    part: (expert, first row, end row) inside a packed 3-D `weight`, None for a tensor of its own.
    """

    format: MatrixFormat
    weight: Tensor
    scale: Tensor | None = None
    scale_2: Tensor | None = None
    input_scale: Tensor | None = None
    part: tuple[int, int, int] | None = None

    def tensors(self) -> list[Tensor]:
        """The tensors that this matrix claims."""
        return [t for t in (self.weight, self.scale, self.scale_2, self.input_scale) if t is not None]

    @property
    def nbytes(self) -> int:
        """Bytes of this matrix alone, scales included."""
        if self.part is not None:
            _, begin, end = self.part
            return self.weight.nbytes // (self.weight.shape[0] * self.weight.shape[1]) * (end - begin)
        return sum(tensor.nbytes for tensor in self.tensors())

    def read(self) -> Matrix:
        """The matrix, its elements mapped; CheckpointError for a scale that is no positive number or too large."""
        if self.part is not None:
            expert, begin, end = self.part
            return DenseMatrix(self.weight.array()[expert, begin:end])
        weight = self.weight.array()
        input_scale = None if self.input_scale is None else read_scalar(self.input_scale)
        if self.format is MatrixFormat.FP8:
            assert self.scale is not None
            return Fp8Matrix(weight, _fp8_scale(self.scale), input_scale)
        if self.format is MatrixFormat.NVFP4:
            assert self.scale is not None and self.scale_2 is not None
            block_scale = self.scale.array()
            _check_block_scale(self.scale.name, block_scale, weight)
            scale_2 = read_scalar(self.scale_2)
            largest = block_scale.view(np.uint8).max(initial=0).view(block_scale.dtype)  # codes ascend with values
            _check_range(self.scale_2.name, scale_2, max(E2M1_VALUES) * float(largest))
            return Nvfp4Matrix(weight, block_scale, scale_2, input_scale)
        return DenseMatrix(weight)


def find_matrix(tensors: Mapping[str, Tensor], name: str, shape: tuple[int, ...], *, quantised: bool) -> MatrixStorage:
    """The storage of the matrix `name` (canonical, ends in `.weight`) of `shape`, its format by the tensors present.

    quantised: whether FP8 and NVFP4 are legal for it.
    """
    weight = require(tensors, name)
    legal = (*FLOATS, "F8_E4M3 (FP8)", "U8 (NVFP4)") if quantised else FLOATS
    if weight.dtype in FLOATS:
        check_shape(weight, shape)
        return MatrixStorage(_DENSE[weight.dtype], weight)
    base = name.removesuffix("weight")
    input_scale = tensors.get(base + "input_scale")
    if input_scale is not None:
        check_scalar(input_scale)
    if quantised and weight.dtype == "F8_E4M3":
        check_shape(weight, shape)
        scale = require(tensors, base + "weight_scale", "FP8 needs one scale for the matrix or one per row")
        check_type(scale, ("F32", "BF16"))
        if scale.shape not in ((), (1,), (shape[0],), (shape[0], 1)):
            raise checkpoint_error(scale.name, f"shape [], [1], [{shape[0]}] or [{shape[0]}, 1]", list(scale.shape))
        return MatrixStorage(MatrixFormat.FP8, weight, scale, None, input_scale)
    if quantised and weight.dtype == "U8":
        rows, columns = shape
        if columns % FP4_BLOCK:
            raise checkpoint_error(weight.name, f"no NVFP4: {columns} columns are no multiple of {FP4_BLOCK}", "U8")
        check_shape(weight, (rows, columns // 2))
        scale = require(tensors, base + "weight_scale")
        check_type(scale, ("F8_E4M3",))
        check_shape(scale, (rows, columns // FP4_BLOCK))
        scale_2 = require(tensors, base + "weight_scale_2")
        check_scalar(scale_2)
        return MatrixStorage(MatrixFormat.NVFP4, weight, scale, scale_2, input_scale)
    raise checkpoint_error(weight.name, f"dtype {' or '.join(legal)}", weight.dtype)


def require(tensors: Mapping[str, Tensor], name: str, hint: str | None = None) -> Tensor:
    """The tensor of a canonical name, or CheckpointError."""
    if name not in tensors:
        raise checkpoint_error(name, "a tensor of this name", "no such tensor", hint)
    return tensors[name]


def check_type(tensor: Tensor, legal: tuple[str, ...]) -> None:
    """CheckpointError unless the stored type is one of `legal`."""
    if tensor.dtype not in legal:
        raise checkpoint_error(tensor.name, f"dtype {' or '.join(legal)}", tensor.dtype)


def check_shape(tensor: Tensor, shape: tuple[int, ...]) -> None:
    """CheckpointError unless the stored shape is `shape`."""
    if tensor.shape != shape:
        raise checkpoint_error(tensor.name, f"shape {list(shape)}", list(tensor.shape))


def check_scalar(tensor: Tensor) -> None:
    """CheckpointError unless a float32 scalar, stored as [] or [1]."""
    check_type(tensor, ("F32",))
    if tensor.shape not in ((), (1,)):
        raise checkpoint_error(tensor.name, "a scalar, shape [] or [1]", list(tensor.shape))


def read_scalar(tensor: Tensor) -> float:
    """A positive, finite scale."""
    value = float(tensor.array().reshape(()))
    if not (np.isfinite(value) and value > 0):
        raise checkpoint_error(tensor.name, "a positive, finite scale", value)
    return value


def _fp8_scale(tensor: Tensor) -> NDArray[np.float32]:
    """float32, [] or [N, 1]."""
    values = tensor.array().astype(np.float32)
    bad = ~(np.isfinite(values) & (values > 0))
    if bad.any():
        raise checkpoint_error(tensor.name, "positive, finite scales", float(values[bad].flat[0]))
    _check_range(tensor.name, float(values.max(initial=0)), _E4M3_MAX)
    return values.reshape(()) if values.size == 1 else values.reshape(-1, 1)


def _check_range(name: str, scale: float, largest: float) -> None:
    """CheckpointError when an element of the magnitude `largest`, times `scale`, is no float32."""
    with np.errstate(over="ignore"):
        product = np.float64(scale * largest).astype(np.float32)
    if not np.isfinite(product):
        raise checkpoint_error(
            name, f"a scale that leaves elements of up to {largest:g} finite in float32", scale,
            "The checkpoint's export is damaged",
        )  # fmt: skip


def _check_block_scale(name: str, scale: NDArray[Any], packed: NDArray[np.uint8]) -> None:
    """Scales are positive and finite; zero is legal only for a block of zeros, whose value it does not change."""
    codes = scale.view(np.uint8)
    if int(codes.max(initial=0)) < _E4M3_NAN and int(codes.min(initial=1)) > 0:
        return
    magnitudes = packed.reshape(*scale.shape, FP4_BLOCK // 2) & 0x77  # without the two sign bits
    bad = (codes >= _E4M3_NAN) | ((codes == 0) & magnitudes.any(axis=-1))
    if bad.any():
        row, block = (int(i) for i in np.argwhere(bad)[0])
        value = float(scale[row, block].astype(np.float32))
        expected = "positive, finite block scales"
        raise checkpoint_error(f"{name}[{row}, {block}]", expected, value, "The checkpoint's export is damaged")
