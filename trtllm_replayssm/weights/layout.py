"""Every parameter of a model matched with the tensors of its files, and every tensor accounted for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from trtllm_replayssm.models import model_of
from trtllm_replayssm.params import ParamRole, ParamSpec
from trtllm_replayssm.shapes import ModelGeometry
from trtllm_replayssm.weights.matrix import MatrixFormat
from trtllm_replayssm.weights.names import attention_prefix, expert_weight, is_known_unused, split_expert_stack
from trtllm_replayssm.weights.safetensors_file import Tensor
from trtllm_replayssm.weights.storage import (
    FLOATS,
    MatrixStorage,
    check_scalar,
    check_shape,
    check_type,
    checkpoint_error,
    find_matrix,
    require,
)

_MATRIX_ROLES = (ParamRole.LINEAR, ParamRole.EMBEDDING, ParamRole.ROUTER)
_PACKED_DENSE = {"BF16": MatrixFormat.BF16, "F16": MatrixFormat.F16, "F32": MatrixFormat.F32}


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """specs: parameters by canonical name, in the model's order; the maps tell where each lies; unused: names in the
    files of the tensors that no weight is made of.
    """

    specs: Mapping[str, ParamSpec]
    matrices: Mapping[str, MatrixStorage]
    stacks: Mapping[str, tuple[MatrixStorage, ...]]
    vectors: Mapping[str, Tensor]
    kv_scales: Mapping[int, tuple[Tensor, Tensor]]
    unused: tuple[str, ...]


def match_layout(geometry: ModelGeometry, tensors: Mapping[str, Tensor], *, extra_unused: set[str]) -> Layout:
    """tensors: by canonical name. extra_unused: canonical names known to be left alone, beside the usual ones.

    Raises CheckpointError that names a missing, extra, mis-shaped or mis-typed tensor.
    """
    specs = {spec.name: spec for spec in model_of(geometry).parameters(geometry)}
    matrices: dict[str, MatrixStorage] = {}
    stacks: dict[str, tuple[MatrixStorage, ...]] = {}
    vectors: dict[str, Tensor] = {}
    for spec in specs.values():
        if spec.role in _MATRIX_ROLES:
            matrices[spec.name] = find_matrix(
                tensors, spec.name, spec.shape, quantised=_may_be_quantised(spec, geometry)
            )
        elif spec.role is ParamRole.EXPERTS:
            stacks[spec.name] = _find_stack(tensors, spec)
        else:
            vectors[spec.name] = _find_vector(tensors, spec)
    used = {tensor.name for tensor in vectors.values()}
    for storage in (*matrices.values(), *(s for stack in stacks.values() for s in stack)):
        used.update(t.name for t in storage.tensors() if t is not storage.input_scale)
    unused = []
    for name, tensor in tensors.items():
        if tensor.name in used:
            continue
        if not (is_known_unused(name) or name in extra_unused):
            raise checkpoint_error(
                tensor.name, "only tensors of this architecture", f"{tensor.dtype} {list(tensor.shape)}"
            )
        unused.append(tensor.name)
    return Layout(
        specs=specs,
        matrices=matrices,
        stacks=stacks,
        vectors=vectors,
        kv_scales=_find_kv_scales(geometry, tensors),
        unused=tuple(sorted(unused)),
    )


def _may_be_quantised(spec: ParamSpec, geometry: ModelGeometry) -> bool:
    """Linear layers, and an embedding table only where it is the output head (too)."""
    if spec.role is ParamRole.EMBEDDING:
        return spec.name.startswith("lm_head.") or geometry.tie_embeddings
    return spec.role is ParamRole.LINEAR


def _find_vector(tensors: Mapping[str, Tensor], spec: ParamSpec) -> Tensor:
    tensor = require(tensors, spec.name)
    check_type(tensor, FLOATS)
    check_shape(tensor, spec.shape)
    return tensor


def _find_stack(tensors: Mapping[str, Tensor], spec: ParamSpec) -> tuple[MatrixStorage, ...]:
    """One tensor per expert, or one packed [experts, out, in]; gate and up may be packed together, gate rows first."""
    experts, rows, columns = spec.shape
    prefix, projection = split_expert_stack(spec.name)
    fused = f"{prefix}.gate_up_proj"
    if spec.name in tensors:
        return _packed(tensors[spec.name], spec.shape, 0, rows)
    if projection in ("gate_proj", "up_proj") and fused in tensors:
        return _packed(tensors[fused], (experts, 2 * rows, columns), rows * (projection == "up_proj"), rows)
    stack = tuple(
        find_matrix(tensors, expert_weight(spec.name, e), (rows, columns), quantised=True) for e in range(experts)
    )
    _check_input_scales(spec.name, stack)
    return stack


def _packed(tensor: Tensor, shape: tuple[int, ...], begin: int, rows: int) -> tuple[MatrixStorage, ...]:
    if tensor.dtype not in _PACKED_DENSE:
        expected = f"dtype {' or '.join(_PACKED_DENSE)} (quantised experts are stored one by one)"
        raise checkpoint_error(tensor.name, expected, tensor.dtype)
    check_shape(tensor, shape)
    kind = _PACKED_DENSE[tensor.dtype]
    return tuple(MatrixStorage(kind, tensor, part=(e, begin, begin + rows)) for e in range(shape[0]))


def _check_input_scales(name: str, stack: tuple[MatrixStorage, ...]) -> None:
    """Experts of one kind have an input_scale all or none: a single missing one would be read as a wrong default."""
    for kind in (MatrixFormat.FP8, MatrixFormat.NVFP4):
        found = [(e, s.input_scale is not None) for e, s in enumerate(stack) if s.format is kind]
        missing = [e for e, present in found if not present]
        if missing and len(missing) != len(found):
            tensor = expert_weight(name, missing[0]).removesuffix("weight") + "input_scale"
            raise checkpoint_error(tensor, "a tensor of this name, as the other experts have", "no such tensor")


def _find_kv_scales(geometry: ModelGeometry, tensors: Mapping[str, Tensor]) -> dict[int, tuple[Tensor, Tensor]]:
    scales = {}
    for layer in geometry.kv_layers:
        prefix = attention_prefix(geometry, layer)
        names = prefix + "k_proj.k_scale", prefix + "v_proj.v_scale"
        if names[0] in tensors or names[1] in tensors:
            pair = require(tensors, names[0]), require(tensors, names[1])
            for tensor in pair:
                check_scalar(tensor)
            scales[layer] = pair
    return scales
