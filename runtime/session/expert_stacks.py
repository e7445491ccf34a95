"""Expert stacks of a checkpoint on the device, in the order in which the native kernels read them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import torch

from trtllm_replayssm.ops.native_experts import PackedStack
from trtllm_replayssm.weights.matrix import DenseMatrix, Matrix, MatrixFormat
from trtllm_replayssm.weights.packing import PackedMatrix, pack
from trtllm_replayssm.weights.threads import in_order


def stack(matrices: Iterable[Sequence[Matrix]], experts: int, device: torch.device) -> PackedStack:
    """Pack expert by expert onto `device`; matrices: of each expert one matrix, or gate and up.

    Experts of different formats are all decoded to bfloat16, rounded to nearest.
    """
    kept = [tuple(parts) for parts in matrices]
    formats = {part.format for parts in kept for part in parts}
    if len(formats) > 1:
        kept = [tuple(DenseMatrix(part.dequantize(np.float32)) for part in parts) for parts in kept]
    packed = in_order(pack, kept)
    first = next(packed)
    data = torch.empty((experts, *first.data.shape), dtype=torch.uint8, device=device)
    factor = torch.empty((experts, *first.factor.shape), device=device)
    scale = None
    if first.block_scale is not None:
        scale = torch.empty((experts, *first.block_scale.shape), dtype=torch.uint8, device=device)
    for expert, matrix in enumerate(_with_first(first, packed)):
        data[expert].copy_(torch.from_numpy(matrix.data))
        factor[expert].copy_(torch.from_numpy(matrix.factor))
        if scale is not None and matrix.block_scale is not None:
            scale[expert].copy_(torch.from_numpy(matrix.block_scale))
    return PackedStack(
        rows=first.rows, columns=first.columns, parts=first.factor.shape[0], data=data.view(_ELEMENT[first.format]),
        block_scale=None if scale is None else scale.view(torch.float8_e4m3fn), factor=factor,
    )  # fmt: skip


_ELEMENT = {
    MatrixFormat.NVFP4: torch.uint8,
    MatrixFormat.FP8: torch.float8_e4m3fn,
    MatrixFormat.BF16: torch.bfloat16,
}


def _with_first(first: PackedMatrix, rest: Iterator[PackedMatrix]) -> Iterator[PackedMatrix]:
    yield first
    yield from rest
