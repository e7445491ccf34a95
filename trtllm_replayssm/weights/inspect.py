"""What a geometry or a checkpoint holds, as a JSON-able dict: parameters, bytes by format, layers, unused tensors."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from trtllm_replayssm.models import model_of
from trtllm_replayssm.params import ParamRole, ParamSpec
from trtllm_replayssm.shapes import LayerKind, ModelGeometry
from trtllm_replayssm.weights.checkpoint import Checkpoint
from trtllm_replayssm.weights.matrix import MatrixFormat

_LETTERS = {LayerKind.SSM: "M", LayerKind.ATTENTION: "*", LayerKind.MLP: "-", LayerKind.MOE: "E"}


def summarise(subject: ModelGeometry | Checkpoint) -> dict[str, Any]:
    """Keys: name, family, layer_pattern and mtp_pattern (M recurrent, * attention, - MLP, E experts), layers (count by
    kind), parameters (main, mtp, total), state_dtype, eos_ids; of a checkpoint also bytes and matrices (by format),
    tensors (stored), unused (pattern -> count), quantisation and notes. Bytes are of tensor data, scales included.
    """
    geometry = subject.geometry if isinstance(subject, Checkpoint) else subject
    specs = model_of(geometry).parameters(geometry)
    mtp = [spec for spec in specs if spec.name.startswith("mtp.")]
    total, in_mtp = count_parameters(specs), count_parameters(mtp)
    summary: dict[str, Any] = {
        "name": geometry.name,
        "family": geometry.family.value,
        "layer_pattern": pattern_letters(geometry.layers),
        "mtp_pattern": pattern_letters(geometry.mtp_pattern),
        "layers": {kind.value: len(geometry.layers_of(kind)) for kind in LayerKind if geometry.layers_of(kind)},
        "parameters": {"main": total - in_mtp, "mtp": in_mtp, "total": total},
        "state_dtype": geometry.state_dtype,
        "eos_ids": list(geometry.eos_ids),
    }
    if isinstance(subject, Checkpoint):
        summary.update(_stored(subject))
    return summary


def count_parameters(specs: Iterable[ParamSpec]) -> int:
    """Elements of all parameters; a tied table counts once."""
    return sum(math.prod(spec.shape) for spec in specs)


def count_tensors(specs: Iterable[ParamSpec]) -> int:
    """Tensors of an unquantised checkpoint that stores experts one by one."""
    return sum(spec.shape[0] if spec.role is ParamRole.EXPERTS else 1 for spec in specs)


def pattern_letters(layers: Sequence[LayerKind]) -> str:
    """One letter per layer, as hybrid_override_pattern has them."""
    return "".join(_LETTERS[kind] for kind in layers)


def _stored(checkpoint: Checkpoint) -> dict[str, Any]:
    sizes: Counter[str] = Counter()
    matrices: Counter[str] = Counter()
    served = set(checkpoint.matrix_names())
    for name in checkpoint.names():
        if name in served:
            for storage in checkpoint.storage(name):
                sizes[storage.format.value] += storage.nbytes
                matrices[storage.format.value] += 1
        else:
            tensor = checkpoint.vector_storage(name)
            sizes[MatrixFormat(tensor.dtype.lower()).value] += tensor.nbytes
    unused = checkpoint.unused()
    tensors = checkpoint.stored_tensors()
    return {
        "bytes": {**dict(sorted(sizes.items())), "total": sum(tensor.nbytes for tensor in tensors)},
        "matrices": dict(sorted(matrices.items())),
        "tensors": len(tensors),
        "unused": dict(sorted(Counter(re.sub(r"\.\d+(?=\.)", ".*", name) for name in unused).items())),
        "quantisation": checkpoint.quantization.algorithm if checkpoint.quantization else None,
        "notes": checkpoint.notes(),
    }
