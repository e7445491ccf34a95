"""Writes what native operations read beside the engines: vectors in float32, and the experts.

`weights/vectors.safetensors` has every vector by its canonical name; `weights/<block>.safetensors` one block of
experts: between engines as checkpoints have them, `<block>.<e>.<projection>.weight` with `.weight_scale` and
`.weight_scale_2`; for plugins packed, the tensors of `weights.expert_tensors`, which a session uploads as they are.
Experts are packed a few at a time and written in order, so that memory does not grow with their number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trtllm_replayssm.bindings import OpStep, Program
from trtllm_replayssm.builders.parameters import Parameters, parameter_specs
from trtllm_replayssm.builders.quantize_writer import Entry, SafetensorsWriter
from trtllm_replayssm.errors import UnsupportedError
from trtllm_replayssm.params import ParamRole, ParamSpec
from trtllm_replayssm.weights.expert_tensors import expert_tensors
from trtllm_replayssm.weights.matrix import DenseMatrix, Fp8Matrix, Matrix, MatrixFormat
from trtllm_replayssm.weights.names import expert_weight, split_expert_stack
from trtllm_replayssm.weights.packing import pack
from trtllm_replayssm.weights.threads import in_order

VECTORS = "weights/vectors.safetensors"
_NAMES = {MatrixFormat.BF16: "BF16", MatrixFormat.F16: "F16", MatrixFormat.F32: "F32"}


def write_native_weights(
    directory: Path, programs: Iterable[Program], parameters: Parameters, tick: Callable[[str], None], *, packed: bool
) -> list[str]:
    """Write what native operations or plugins read -> file names in the bundle. tick(what) is called as it goes.

    packed: the experts for plugins. Raises UnsupportedError where those of a block then differ in format.
    """
    steps = [step for program in programs for step in program.steps if isinstance(step, OpStep)]
    specs = parameter_specs(parameters.geometry)
    (directory / "weights").mkdir(parents=True, exist_ok=True)
    written = []
    names = {name for step in steps for name in step.weights.values()}
    vectors = sorted(name for name in names if specs[name].role is not ParamRole.EXPERTS)
    if vectors:
        entries = [Entry(name, "F32", specs[name].shape) for name in vectors]
        _write(directory / VECTORS, entries, ((name, parameters.vector(name)) for name in vectors))
        written.append(VECTORS)
    blocks: dict[str, list[ParamSpec]] = {}
    for spec in specs.values():
        if spec.role is ParamRole.EXPERTS:
            blocks.setdefault(split_expert_stack(spec.name)[0], []).append(spec)
    write = _write_packed if packed else _write_experts
    written += [write(directory, stacks, parameters, tick) for stacks in blocks.values()]
    return written


def _write_packed(directory: Path, stacks: list[ParamSpec], parameters: Parameters, tick: Callable[[str], None]) -> str:
    block, _ = split_expert_stack(stacks[0].name)
    file = f"weights/{block}.safetensors"
    opened = {split_expert_stack(spec.name)[1]: parameters.experts(spec.name) for spec in stacks}
    experts, inner, width = opened["up_proj"].shape
    gated, fmt = "gate_proj" in opened, parameters.format_of(f"{block}.up_proj")
    specs = expert_tensors(block, fmt, experts, width, inner, gated=gated)
    types = {"int8": "I8", "float32": "F32"}
    entries = [Entry(s.name, types[s.dtype], tuple(d for d in s.dims if isinstance(d, int))) for s in specs]
    parts = {"up": ("gate_proj", "up_proj") if gated else ("up_proj",), "down": ("down_proj",)}

    def matrices() -> Iterator[tuple[Matrix, ...]]:
        for expert in range(experts):
            for projections in parts.values():
                found = tuple(opened[projection].matrix(expert) for projection in projections)
                for matrix in found:
                    if matrix.format is not fmt:
                        raise UnsupportedError(
                            "build", f"{block}.{expert}", expected=f"{fmt.value}, as the block's first expert",
                            got=matrix.format.value, hint="--weights bf16 makes all of them one format",
                        )  # fmt: skip
                yield found

    with _writer(directory / file, entries) as writer:
        for number, packed in enumerate(in_order(pack, matrices())):
            expert, place = divmod(number, len(parts))
            part = tuple(parts)[place]
            writer.write_slice(f"{block}.{part}", expert, packed.data.view(np.int8))
            if packed.block_scale is not None:
                writer.write_slice(f"{block}.{part}_scale", expert, packed.block_scale.view(np.int8))
            writer.write_slice(f"{block}.{part}_factor", expert, packed.factor)
            if place == len(parts) - 1:
                tick(block)
    return file


def _write_experts(
    directory: Path, stacks: list[ParamSpec], parameters: Parameters, tick: Callable[[str], None]
) -> str:
    block, _ = split_expert_stack(stacks[0].name)
    file = f"weights/{block}.safetensors"
    opened = {spec.name: parameters.experts(spec.name) for spec in stacks}
    own = len(opened[stacks[0].name])  # a rank's are fewer than the layer's
    matrices = [(spec, e) for e in range(own) for spec in stacks]

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
    with _writer(path, entries) as writer:
        for name, array in tensors:
            writer.write(name, array)


@contextmanager
def _writer(path: Path, entries: list[Entry]) -> Iterator[SafetensorsWriter]:
    """Closed at the end, and checked for completeness unless something else went wrong."""
    writer, complete = SafetensorsWriter(path, entries, {"format": "pt"}), False
    try:
        yield writer
        complete = True
    finally:
        writer.close(complete=complete)
