"""State formats and element types: one table, used by the specification, the operations and the planner.

Formats of a recurrent-state copy (paper, Appendix E.4.1):

    float32   no scale
    float16   no scale
    fp8       E4M3 elements, one float32 scale per block of at most 128 elements along d_k
    nvfp4     E2M1 elements (two per byte), one E4M3 scale per 16 elements along d_k, one float32 scale per head
"""

from __future__ import annotations

from enum import Enum

FP8_BLOCK = 128  # elements along d_k that share one float32 scale
FP8_MAX = 448.0  # largest finite E4M3 magnitude
FP4_BLOCK = 16  # elements along d_k that share one E4M3 scale
FP4_MAX = 6.0  # largest E2M1 magnitude
FP16_MAX = 65504.0
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # magnitudes by the three low bits of a code


class StateFormat(str, Enum):
    """Storage format of one checkpoint copy."""

    FLOAT32 = "float32"
    FLOAT16 = "float16"
    FP8 = "fp8"
    NVFP4 = "nvfp4"

    def bytes_per_head(self, head_dim: int, state_dim: int) -> int:
        """Bytes of one head's [head_dim, state_dim] state with its scales."""
        elems = head_dim * state_dim
        if self is StateFormat.FLOAT32:
            return 4 * elems
        if self is StateFormat.FLOAT16:
            return 2 * elems
        if self is StateFormat.FP8:
            return elems + 4 * head_dim * num_blocks(state_dim, FP8_BLOCK)
        return elems // 2 + head_dim * num_blocks(state_dim, FP4_BLOCK) + 4


class Rounding(str, Enum):
    """How a float32 value becomes a stored one."""

    NEAREST = "nearest"
    STOCHASTIC = "stochastic"


class ActivationDtype(str, Enum):
    """Element type of activations, convolution windows, keys and values."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return 4 if self is ActivationDtype.FLOAT32 else 2


def num_blocks(elems: int, block: int) -> int:
    """Blocks of at most `block` elements that cover `elems`."""
    return -(-elems // block)
