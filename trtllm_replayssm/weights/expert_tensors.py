"""The packed experts of a block as inputs of an engine: names, types and sizes, for the builder and the session."""

from __future__ import annotations

from trtllm_replayssm.bindings import TensorSpec
from trtllm_replayssm.weights.matrix import MatrixFormat
from trtllm_replayssm.weights.packing import packed_sizes

EXPERT_PARTS = ("up", "up_scale", "up_factor", "down", "down_scale", "down_factor")


def expert_tensors(
    prefix: str, fmt: MatrixFormat, experts: int, width: int, inner: int, *, gated: bool
) -> list[TensorSpec]:
    """The packed experts of one block, in the order a plugin takes them: bytes of the elements, of NVFP4 also of the
    block scales, and the rows' factors; `packing` says what they hold. Gate and up are packed as one.
    """
    specs = []
    for part, rows, columns, matrices in (("up", inner, width, 1 + gated), ("down", width, inner, 1)):
        data, scale, factor = packed_sizes(fmt, rows, columns, matrices)
        specs.append(TensorSpec(name=f"{prefix}.{part}", dtype="int8", dims=(experts, *data)))
        if scale is not None:
            specs.append(TensorSpec(name=f"{prefix}.{part}_scale", dtype="int8", dims=(experts, *scale)))
        specs.append(TensorSpec(name=f"{prefix}.{part}_factor", dtype="float32", dims=(experts, *factor)))
    return specs
