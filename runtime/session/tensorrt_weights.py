"""What the native operations of a bundle read: vectors and experts from its `weights/` folder, mapped and lazy."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trtllm_replayssm.bindings import Program
from trtllm_replayssm.errors import EngineMismatchError
from trtllm_replayssm.models import model_of
from trtllm_replayssm.params import ParamRole
from trtllm_replayssm.shapes import ModelGeometry
from trtllm_replayssm.weights.matrix import DenseMatrix, ExpertStack, Fp8Matrix, Matrix
from trtllm_replayssm.weights.names import expert_weight
from trtllm_replayssm.weights.safetensors_file import SafetensorsFile, Tensor
from trtllm_replayssm.weights.storage import find_matrix

FOLDER = "weights"


class BundleWeights:
    """Serves the names of `weights.checkpoint.Checkpoint` that native operations ask for."""

    def __init__(self, directory: Path, geometry: ModelGeometry) -> None:
        files = sorted((directory / FOLDER).glob("*.safetensors"))
        self._tensors: dict[str, Tensor] = {}
        for path in files:
            self._tensors.update(SafetensorsFile(path).tensors)
        self._specs = {spec.name: spec for spec in model_of(geometry).parameters(geometry)}
        self._directory = directory

    def vector(self, name: str) -> NDArray[np.float32]:
        """A vector or convolution, float32."""
        if name not in self._tensors:
            raise EngineMismatchError(
                "read bundle", name, expected=f"a tensor in {self._directory / FOLDER}", got="none",
                hint="Build the bundle again, with its weights",
            )  # fmt: skip
        return self._tensors[name].array().astype(np.float32)

    def experts(self, name: str) -> ExpertStack:
        """A stack of experts; nothing is read before its `matrix(e)`."""
        experts, rows, columns = self._specs[name].shape

        def read(expert: int) -> Matrix:
            return find_matrix(self._tensors, expert_weight(name, expert), (rows, columns), quantised=True).read()

        return ExpertStack((experts, rows, columns), read)

    def packed_experts(self, programs: Iterable[Program]) -> dict[str, NDArray[Any]]:
        """Every stack of experts that a program's engines read, as plugins take it, by binding name.

        Elements as int8 [E, out, bytes of a row]; then scales. FP8: float32 [E, out]; NVFP4: int8 codes
        [E, out, in / 16] and float32 [E].
        """
        wanted = {name for program in programs for name in program.tensors}
        stacks = [n for n, spec in self._specs.items() if spec.role is ParamRole.EXPERTS and n in wanted]
        return {name: array for stack in stacks for name, array in self._packed_stack(stack).items()}

    def _packed_stack(self, stack: str) -> dict[str, NDArray[Any]]:
        experts = self.experts(stack)
        matrices = [experts.matrix(e) for e in range(len(experts))]
        parts: dict[str, list[NDArray[Any]]] = {}
        for matrix in matrices:
            for suffix, array in _packed(matrix):
                parts.setdefault(stack + suffix, []).append(array)
        return {name: np.stack(arrays) for name, arrays in parts.items()}


def _packed(matrix: Matrix) -> list[tuple[str, NDArray[Any]]]:
    """(suffix of the binding's name, array of one expert)."""
    rows = matrix.shape[0]
    if isinstance(matrix, DenseMatrix):
        return [("", matrix.data.reshape(rows, -1).view(np.int8))]
    if isinstance(matrix, Fp8Matrix):
        scale = np.broadcast_to(matrix.scale.reshape(-1), (rows,)).astype(np.float32)
        return [("", matrix.weight.view(np.int8)), ("_scale", scale)]
    scale_2 = np.asarray(matrix.scale_2, dtype=np.float32)
    return [("", matrix.packed.view(np.int8)), ("_scale", matrix.block_scale.view(np.int8)), ("_scale_2", scale_2)]
