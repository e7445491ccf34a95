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
from trtllm_replayssm.weights.expert_tensors import EXPERT_PARTS
from trtllm_replayssm.weights.matrix import ExpertStack, Matrix
from trtllm_replayssm.weights.names import expert_weight, split_expert_stack
from trtllm_replayssm.weights.safetensors_file import SafetensorsFile, Tensor
from trtllm_replayssm.weights.storage import find_matrix
from trtllm_replayssm.weights.tensor_parallel import ALONE, TensorParallel

FOLDER = "weights"


class BundleWeights:
    """Serves the names of `weights.checkpoint.Checkpoint` that native operations ask for."""

    def __init__(self, directory: Path, geometry: ModelGeometry, parallel: TensorParallel = ALONE) -> None:
        """parallel: `geometry` is of this rank, and the stacks hold its experts only, counted from 0."""
        files = sorted((directory / FOLDER).glob("*.safetensors"))
        self._tensors: dict[str, Tensor] = {}
        for path in files:
            self._tensors.update(SafetensorsFile(path).tensors)
        self._specs = {spec.name: spec for spec in model_of(geometry).parameters(geometry)}
        self._directory = directory
        self._parallel = parallel

    def vector(self, name: str) -> NDArray[np.float32]:
        """A vector or convolution, float32."""
        return self._array(name).astype(np.float32)

    def experts(self, name: str) -> ExpertStack:
        """A stack of experts; nothing is read before its `matrix(e)`."""
        experts, rows, columns = self._specs[name].shape

        def read(expert: int) -> Matrix:
            return find_matrix(self._tensors, expert_weight(name, expert), (rows, columns), quantised=True).read()

        return ExpertStack((len(self._parallel.units(experts)), rows, columns), read)

    def packed_experts(self, programs: Iterable[Program]) -> dict[str, NDArray[Any]]:
        """The tensors of `weights.expert_tensors` that engines read, by binding name: views of the mapped files."""
        blocks = {split_expert_stack(n)[0] for n, spec in self._specs.items() if spec.role is ParamRole.EXPERTS}
        names = {f"{block}.{part}" for block in blocks for part in EXPERT_PARTS}
        wanted = names & {name for program in programs for name in program.tensors}
        return {name: self._array(name) for name in sorted(wanted)}

    def _array(self, name: str) -> NDArray[Any]:
        if name not in self._tensors:
            raise EngineMismatchError(
                "read bundle", name, expected=f"a tensor in {self._directory / FOLDER}", got="none",
                hint="Build the bundle again, with its weights",
            )  # fmt: skip
        return self._tensors[name].array()
