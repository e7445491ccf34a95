"""Our element types as torch types."""

from __future__ import annotations

import torch

from trtllm_replayssm.dtypes import ActivationDtype

_TORCH = {
    ActivationDtype.FLOAT32: torch.float32,
    ActivationDtype.BFLOAT16: torch.bfloat16,
    ActivationDtype.FLOAT16: torch.float16,
}


def torch_dtype(dtype: ActivationDtype) -> torch.dtype:
    """The torch type of an activation type."""
    return _TORCH[dtype]
