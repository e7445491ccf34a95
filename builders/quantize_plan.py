"""What a quantisation will write: each tensor of the source is copied, or replaced by its quantised form."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trtllm_replayssm.builders.quantize_encode import (
    absolute_maximum,
    encode_fp8,
    encode_nvfp4,
    fp8_scale,
    nvfp4_scale_2,
)
from trtllm_replayssm.builders.quantize_writer import Entry
from trtllm_replayssm.dtypes import FP4_BLOCK
from trtllm_replayssm.errors import CheckpointError, ConfigError, ContractError
from trtllm_replayssm.params import ParamRole, ParamSpec
from trtllm_replayssm.weights.checkpoint import Checkpoint
from trtllm_replayssm.weights.matrix import DenseMatrix, MatrixFormat
from trtllm_replayssm.weights.names import split_expert_stack
from trtllm_replayssm.weights.safetensors_file import Tensor
from trtllm_replayssm.weights.storage import MatrixStorage

RECIPES = {"experts": ("experts",), "dense": ("experts", "dense")}  # recipe -> ParamSpec.recipe values it touches


@dataclass(frozen=True, slots=True)
class Module:
    """One matrix to quantise: its name in the written files without `.weight`, where it lies, its new format."""

    name: str
    storage: MatrixStorage
    format: MatrixFormat
    shape: tuple[int, int]

    def entries(self) -> list[Entry]:
        """The tensors of the quantised form."""
        rows, columns = self.shape
        if self.format is MatrixFormat.FP8:
            return [Entry(f"{self.name}.weight", "F8_E4M3", self.shape), Entry(f"{self.name}.weight_scale", "F32", ())]
        return [
            Entry(f"{self.name}.weight", "U8", (rows, columns // 2)),
            Entry(f"{self.name}.weight_scale", "F8_E4M3", (rows, columns // FP4_BLOCK)),
            Entry(f"{self.name}.weight_scale_2", "F32", ()),
        ]

    def values(self) -> NDArray[Any]:
        """The source's elements, mapped."""
        matrix = self.storage.read()
        assert isinstance(matrix, DenseMatrix)
        return matrix.data


@dataclass(frozen=True, slots=True)
class Job:
    """A unit of work: a tensor to copy, or modules whose NVFP4 forms share one weight_scale_2."""

    copy: Tensor | None = None
    modules: tuple[Module, ...] = ()

    def entries(self) -> list[Entry]:
        """The tensors that it writes."""
        if self.copy is not None:
            return [Entry(self.copy.name, self.copy.dtype, self.copy.shape)]
        return [entry for module in self.modules for entry in module.entries()]

    def run(self, write: Callable[[str, NDArray[Any]], None]) -> None:
        """Compute and write them; CheckpointError names a matrix with values that cannot be quantised."""
        if self.copy is not None:
            write(self.copy.name, self.copy.array())
            return
        amax = np.float32(0)
        for module in self.modules:
            try:
                amax = max(amax, absolute_maximum(module.values()))
            except ContractError as error:
                weight = module.storage.weight.name
                raise CheckpointError("quantize", weight, expected=error.expected, got=error.got) from error
        for module in self.modules:
            if module.format is MatrixFormat.FP8:
                scale = fp8_scale(amax)
                write(f"{module.name}.weight", encode_fp8(module.values(), scale))
                write(f"{module.name}.weight_scale", np.asarray(scale))
            else:
                scale_2 = nvfp4_scale_2(amax)
                packed, block_scale = encode_nvfp4(module.values(), scale_2)
                write(f"{module.name}.weight", packed)
                write(f"{module.name}.weight_scale", block_scale)
                write(f"{module.name}.weight_scale_2", np.asarray(scale_2))


@dataclass(frozen=True, slots=True)
class Plan:
    """jobs: in the order of the source; left: name -> why a matrix that the recipe asks for stays as it is."""

    jobs: tuple[Job, ...]
    left: dict[str, str]

    def modules(self) -> list[Module]:
        """Every matrix that will be quantised."""
        return [module for job in self.jobs for module in job.modules]


def make_plan(source: Checkpoint, recipe: str, fp8: Sequence[str]) -> Plan:
    """fp8: glob patterns of module names (in the files, or canonical) that become FP8 instead; each must match one."""
    chosen: dict[str, list[Module]] = {}  # source tensor -> modules made of it
    left: dict[str, str] = {}
    matched: set[str] = set()
    for name in source.names():
        spec = source.spec(name)
        if spec.recipe is None:
            continue
        for index, storage in enumerate(source.storage(name)):
            module_name = _module_name(spec, storage, index)
            patterns = [p for p in fp8 if _matches(p, module_name, spec, index)]
            matched.update(patterns)
            if not patterns and spec.recipe not in RECIPES[recipe]:
                continue
            rows, columns = spec.shape[-2:]
            if not patterns and columns % FP4_BLOCK:
                left[module_name] = f"{columns} columns are no multiple of {FP4_BLOCK}"
                continue
            kind = MatrixFormat.FP8 if patterns else MatrixFormat.NVFP4
            chosen.setdefault(storage.weight.name, []).append(Module(module_name, storage, kind, (rows, columns)))
    for pattern in fp8:
        if pattern not in matched:
            raise ConfigError("quantize", "fp8", expected="patterns that match a linear layer", got=repr(pattern))
    return Plan(tuple(_jobs(source, chosen)), left)


def _module_name(spec: ParamSpec, storage: MatrixStorage, index: int) -> str:
    """Experts of a packed tensor are written one by one, as public NVFP4 exports have them."""
    if storage.part is None:
        return storage.weight.name.removesuffix(".weight")
    block, _ = split_expert_stack(storage.weight.name)
    return f"{block}.{index}.{split_expert_stack(spec.name)[1]}"


def _matches(pattern: str, module_name: str, spec: ParamSpec, index: int) -> bool:
    canonical = spec.name.removesuffix(".weight")
    if spec.role is ParamRole.EXPERTS:
        block, projection = split_expert_stack(spec.name)
        canonical = f"{block}.{index}.{projection}"
    return fnmatchcase(module_name, pattern) or fnmatchcase(canonical, pattern)


def _jobs(source: Checkpoint, chosen: dict[str, list[Module]]) -> list[Job]:
    jobs: list[Job] = []
    partners: dict[str, list[Module]] = {}
    for tensor in source.stored_tensors():
        if tensor.name not in chosen:
            jobs.append(Job(copy=tensor))
            continue
        if chosen[tensor.name][0].storage.part is not None:
            _check_whole(tensor, chosen[tensor.name])
        for module in chosen[tensor.name]:
            partners.setdefault(_partner_key(module), []).append(module)
    jobs += [Job(modules=tuple(modules)) for modules in partners.values()]
    return jobs


def _check_whole(tensor: Tensor, modules: list[Module]) -> None:
    """A packed tensor is replaced as a whole: none of its matrices may stay behind."""
    rows = sum(module.shape[0] for module in modules)
    if rows != tensor.shape[0] * tensor.shape[1]:
        raise ConfigError(
            "quantize", "fp8", expected=f"patterns that cover all of the packed {tensor.name} or none of it",
            got=f"{rows} of {tensor.shape[0] * tensor.shape[1]} rows",
        )  # fmt: skip


def _partner_key(module: Module) -> str:
    """The gate and up projections of one expert share a key, and so their weight_scale_2."""
    block, _, projection = module.name.rpartition(".")
    if module.format is MatrixFormat.NVFP4 and ".experts." in block and projection in ("gate_proj", "up_proj"):
        return f"{block}.gate_up"
    return module.name
