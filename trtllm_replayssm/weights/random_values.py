"""How large random parameters must be for activations to stay finite through a whole model; for engines and sessions.

Inputs of a matrix have unit size behind a norm, so elements of size 1 / sqrt(columns) keep its outputs at unit size.
Routers of trained models spread tokens over all experts; random ones do so when no expert is preferred by a bias and
when what tokens have of their own outweighs what all have in common, which an embedding much larger than the outputs of
layers gives them.
"""

from __future__ import annotations

import math

from trtllm_replayssm.params import ParamRole, ParamSpec

_VECTOR_NOISE = 0.05
_EMBEDDING_SIZE = 16.0
FP4_MEAN_SQUARE = 7.0  # of E2M1 values with uniform codes: the mean of (0, .25, 1, 2.25, 4, 9, 16, 36) / 8 is 8.6


def unit_scale(columns: int, mean_square: float = 1.0) -> float:
    """What elements of a mean square must be multiplied by so that a product of unit inputs has unit size."""
    return 1.0 / math.sqrt(mean_square * columns)


def vector_centre(spec: ParamSpec) -> float:
    """What the elements of a vector lie around: 1 for the weights of norms, 0 for everything else."""
    norm = spec.role is ParamRole.VECTOR and spec.name.endswith(("norm.weight", "norm_f.weight", "layernorm.weight"))
    return 1.0 if norm else 0.0


def vector_noise(spec: ParamSpec) -> float:
    """Standard deviation of the elements of a vector or convolution; 0 for the bias of a router."""
    return 0.0 if spec.name.endswith("e_score_correction_bias") else _VECTOR_NOISE


def matrix_size(spec: ParamSpec, *, tied: bool) -> float:
    """Standard deviation of the elements of a matrix; tied: whether the embedding is the output head as well."""
    embedding = spec.role is ParamRole.EMBEDDING and "embed" in spec.name
    return _EMBEDDING_SIZE if embedding and not tied else unit_scale(spec.shape[-1])
