"""The memory of the tensors that cross a program's steps."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

import torch
from torch import Tensor

from trtllm_replayssm.bindings import ALIAS_SUFFIX, Program

_TORCH_TYPES = {
    "float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16, "int32": torch.int32,
}  # fmt: skip


class ProgramBuffers:
    """Tensors of programs at every shape that is asked for, those of one name in one piece of memory.

    Steps run one after another on one stream and their results are copied, so that a smaller shape may be the beginning
    of a larger one's memory. HAZARD: a shape larger than all before it gets memory of its own; the earlier tensors keep
    theirs, which recorded work knows by address. Ask for the largest shape first.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._memory: dict[tuple[str, str], Tensor] = {}

    def lasting(self, program: Program, extents: Mapping[str, int], bound: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Every tensor that is not among `bound`, which have memory elsewhere; the same memory at every call."""
        tensors = {}
        for name, (sizes, dtype) in _shapes(program, extents, bound).items():
            count = prod(sizes)
            memory = self._memory.get((program.name, name))
            if memory is None or len(memory) < count:
                memory = self._memory[program.name, name] = torch.zeros(count, dtype=dtype, device=self._device)
            tensors[name] = memory[:count].view(sizes)
        return tensors

    def passing(self, program: Program, extents: Mapping[str, int], bound: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The same for one run: prompt chunks have any length, and the memory of the longest would be held for ever."""
        shapes = _shapes(program, extents, bound)
        return {name: torch.zeros(sizes, dtype=dtype, device=self._device) for name, (sizes, dtype) in shapes.items()}


def _shapes(
    program: Program, extents: Mapping[str, int], bound: Mapping[str, Tensor]
) -> dict[str, tuple[list[int], torch.dtype]]:
    return {
        name: ([extents[d] if isinstance(d, str) else d for d in spec.dims], _TORCH_TYPES[spec.dtype])
        for name, spec in program.tensors.items()
        if name.removesuffix(ALIAS_SUFFIX) not in bound
    }
