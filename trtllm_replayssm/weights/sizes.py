"""How many bytes a model's parameters take on a device, and how many of them a step reads."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from trtllm_replayssm.dtypes import FP4_BLOCK
from trtllm_replayssm.models import model_of
from trtllm_replayssm.params import ParamRole, ParamSpec
from trtllm_replayssm.shapes import ModelGeometry, MoeShape
from trtllm_replayssm.weights.checkpoint import Checkpoint
from trtllm_replayssm.weights.matrix import MatrixFormat

FormatOf = Callable[[str], MatrixFormat]
_ITEMSIZE = {MatrixFormat.BF16: 2, MatrixFormat.F16: 2, MatrixFormat.F32: 4, MatrixFormat.FP8: 1}


def stored_bytes(shape: tuple[int, ...], fmt: MatrixFormat) -> int:
    """Elements and block scales of matrices [..., out, in]; one scale per matrix is left out."""
    elements = math.prod(shape)
    if fmt is MatrixFormat.NVFP4:
        return elements // 2 + elements // FP4_BLOCK
    return elements * _ITEMSIZE[fmt]


def parameter_bytes(spec: ParamSpec, format_of: FormatOf, activation: int) -> int:
    """A parameter as a session holds it on a GPU; activation: bytes of an element of the dense matrices.

    Experts keep the format of the checkpoint; routers, vectors and convolutions are float32.
    """
    if spec.role is ParamRole.EXPERTS:
        return stored_bytes(spec.shape, format_of(spec.name))
    dense = spec.role in (ParamRole.LINEAR, ParamRole.EMBEDDING)
    return math.prod(spec.shape) * (activation if dense else 4)


def model_bytes(geometry: ModelGeometry, format_of: FormatOf, activation: int) -> int:
    """All parameters, a drafting head's included, as a session holds them on a GPU."""
    specs = model_of(geometry).parameters(geometry)
    return sum(parameter_bytes(spec, format_of, activation) for spec in specs)


def checkpoint_bytes(checkpoint: Checkpoint, activation: int) -> int:
    """All parameters of a checkpoint, as a session holds them on a GPU."""
    return model_bytes(checkpoint.geometry, lambda name: checkpoint.storage(name)[0].format, activation)


@dataclass(frozen=True, slots=True)
class StepParameter:
    """What a pass takes of one parameter: bytes that it reads, each once, and multiplications with them."""

    spec: ParamSpec
    read: float
    multiplications: float


def step_parameters(
    geometry: ModelGeometry, format_of: FormatOf, activation: int, tokens: int
) -> list[StepParameter]:
    """Of each parameter in a pass of `tokens` tokens; the drafting head's are left out.

    Of an embedding table only the tokens' rows are read, unless it is the output head as well; of experts those that
    tokens choose (`chosen_share`), of which each token multiplies with k.
    """
    return [
        StepParameter(
            spec,
            parameter_bytes(spec, format_of, activation) * _read_share(spec, geometry, tokens),
            float(tokens * _token_products(spec, geometry)),
        )
        for spec in model_of(geometry).parameters(geometry)
        if not spec.name.startswith("mtp.")
    ]  # fmt: skip


def step_weight_bytes(geometry: ModelGeometry, format_of: FormatOf, activation: int, tokens: int) -> float:
    """Bytes of parameters that one pass of `tokens` tokens must read (`step_parameters`)."""
    return sum(parameter.read for parameter in step_parameters(geometry, format_of, activation, tokens))


def chosen_share(moe: MoeShape, tokens: int) -> float:
    """Share of the experts that `tokens` tokens choose if every choice is equally likely."""
    return float(1.0 - (1.0 - moe.top_k / moe.experts) ** tokens)


def _looked_up(spec: ParamSpec, geometry: ModelGeometry) -> bool:
    return "embed" in spec.name and not geometry.tie_embeddings


def _read_share(spec: ParamSpec, geometry: ModelGeometry, tokens: int) -> float:
    if spec.role is ParamRole.EXPERTS:
        assert geometry.moe is not None
        return chosen_share(geometry.moe, tokens)
    return min(tokens / spec.shape[0], 1.0) if _looked_up(spec, geometry) else 1.0


def _token_products(spec: ParamSpec, geometry: ModelGeometry) -> int:
    """Multiplications of one token: with every linear layer, the output head and top_k experts."""
    if spec.role is ParamRole.EXPERTS:
        assert geometry.moe is not None
        return geometry.moe.top_k * math.prod(spec.shape[1:])
    alone = spec.role in (ParamRole.VECTOR, ParamRole.CONV) or _looked_up(spec, geometry)
    return 0 if alone else math.prod(spec.shape)
