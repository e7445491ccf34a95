"""Writes what native operations read beside the engines: vectors in float32, experts in the bytes of the checkpoint.

`weights/vectors.safetensors` has every vector by its canonical name; `weights/<block>.safetensors` one block of
experts, `<block>.<e>.<projection>.weight` with `.weight_scale` and `.weight_scale_2` as quantised checkpoints have
them. Experts are written one at a time, so that memory does not grow with their number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trtllm_replayssm.bindings import MOE, OpStep, Program
from trtllm_replayssm.builders.parameters import Parameters, parameter_specs
from trtllm_replayssm.builders.quantize_writer import Entry, SafetensorsWriter
from trtllm_replayssm.params import ParamRole, ParamSpec
from trtllm_replayssm.weights.matrix import DenseMatrix, Fp8Matrix, Matrix, MatrixFormat
from trtllm_replayssm.weights.names import expert_weight, split_expert_stack

VECTORS = "weights/vectors.safetensors"
_NAMES = {MatrixFormat.BF16: "BF16", MatrixFormat.F16: "F16", MatrixFormat.F32: "F32"}


def write_native_weights(
    directory: Path, programs: Iterable[Program], parameters: Parameters, tick: Callable[[str], None]
) -> list[str]:
    """Write what native operations or plugins read -> file names in the bundle. tick(what) is called as it goes."""
    steps = [step for program in programs for step in program.steps if isinstance(step, OpStep)]
    specs = parameter_specs(parameters.geometry)
    (directory / "weights").mkdir(parents=True, exist_ok=True)
    written = []
    vectors = sorted({name for step in steps if step.op != MOE for name in step.weights.values()})
    if vectors:
        entries = [Entry(name, "F32", specs[name].shape) for name in vectors]
        _write(directory / VECTORS, entries, ((name, parameters.vector(name)) for name in vectors))
        written.append(VECTORS)
    blocks: dict[str, list[ParamSpec]] = {}
    for spec in specs.values():
        if spec.role is ParamRole.EXPERTS:
            blocks.setdefault(split_expert_stack(spec.name)[0], []).append(spec)
    written += [_write_experts(directory, stacks, parameters, tick) for stacks in blocks.values()]
    return written


def _write_experts(
    directory: Path, stacks: list[ParamSpec], parameters: Parameters, tick: Callable[[str], None]
) -> str:
    block, _ = split_expert_stack(stacks[0].name)
    file = f"weights/{block}.safetensors"
    matrices = [(spec, e) for e in range(stacks[0].shape[0]) for spec in stacks]
    opened = {spec.name: parameters.experts(spec.name) for spec in stacks}

    def base(spec: ParamSpec, expert: int) -> str:
        return expert_weight(spec.name, expert).removesuffix(".weight")

    # every expert's own layout: a checkpoint may mix formats, and FP8 scales per matrix and per row
    entries = [
        Entry(f"{base(spec, e)}.{suffix}", dtype, array.shape)
        for spec, e in matrices
        for suffix, dtype, array in _parts(opened[spec.name].matrix(e))
    ]

    def tensors() -> Iterable[tuple[str, NDArray[Any]]]:
        for spec, e in matrices:
            for suffix, _, array in _parts(opened[spec.name].matrix(e)):
                yield f"{base(spec, e)}.{suffix}", array
            tick(block)

    _write(directory / file, entries, tensors())
    return file


def _parts(matrix: Matrix) -> list[tuple[str, str, NDArray[Any]]]:
    """(suffix, safetensors type, elements) of a matrix's tensors; nothing is copied."""
    if isinstance(matrix, DenseMatrix):
        return [("weight", _NAMES[matrix.format], matrix.data)]
    if isinstance(matrix, Fp8Matrix):
        return [("weight", "F8_E4M3", matrix.weight), ("weight_scale", "F32", matrix.scale)]
    scale_2 = np.asarray(matrix.scale_2, dtype=np.float32)
    return [
        ("weight", "U8", matrix.packed),
        ("weight_scale", "F8_E4M3", matrix.block_scale),
        ("weight_scale_2", "F32", scale_2),
    ]


def _write(path: Path, entries: list[Entry], tensors: Iterable[tuple[str, NDArray[Any]]]) -> None:
    writer, complete = SafetensorsWriter(path, entries, {"format": "pt"}), False
    try:
        for name, array in tensors:
            writer.write(name, array)
        complete = True
    finally:
        writer.close(complete=complete)
