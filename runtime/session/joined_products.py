"""Matrices that read the same activations lie side by side in memory, so that one product serves them all.

A decode step reads every weight once whatever the number of products, but a product with few outputs costs as much as
one with many: the two small projections of a GDN layer alone would cost as much as its large one.
"""

from __future__ import annotations

import torch
from torch import Tensor

_FOLLOWERS = {
    "q_proj": ("k_proj", "v_proj"),
    "in_proj_qkv": ("in_proj_z", "in_proj_a", "in_proj_b"),
    "gate_proj": ("up_proj",),
}


def followers(weight: str) -> list[str]:
    """Names of the matrices that read what `weight` reads, by the vocabulary of the models; empty for most."""
    stem, _, rest = weight.rpartition(".weight")
    prefix, dot, last = stem.rpartition(".")
    return [f"{prefix}{dot}{name}.weight{rest}" for name in _FOLLOWERS.get(last, ())]


_LAST = ("o_proj", "out_proj", "down_proj")


def ends_block(weight: str) -> bool:
    """Whether the product with `weight` goes into the residual sum and its norm, and nowhere else."""
    return weight.rpartition(".weight")[0].rpartition(".")[2] in _LAST


def join(matrices: list[Tensor]) -> Tensor:
    """The matrices [out_i, in] as one [sum of out_i, in]; afterwards they are its parts, not copies."""
    first, rows = matrices[0], sum(len(matrix) for matrix in matrices)
    end = first.data_ptr()
    adjacent = all(matrix.is_contiguous() for matrix in matrices)
    for matrix in matrices:
        adjacent = adjacent and matrix.data_ptr() == end
        end = matrix.data_ptr() + matrix.numel() * matrix.element_size()
    shared = {matrix.untyped_storage().data_ptr() for matrix in matrices}
    if adjacent and len(shared) == 1:  # another session over the same weights has joined them
        return first.as_strided((rows, first.shape[1]), (first.shape[1], 1))
    joined = torch.cat(matrices)
    for matrix, part in zip(matrices, joined.split([len(matrix) for matrix in matrices]), strict=True):
        matrix.set_(part)
    return joined
