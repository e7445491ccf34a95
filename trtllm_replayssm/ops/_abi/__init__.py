"""ctypes mirror of the native library's public headers (plugins/include/replayssm), and the library handle.

Structs are filled by field name only. `tests/native/test_abi_mirror.py` compares sizes and offsets with the headers.
"""

from trtllm_replayssm.ops._abi.library import Library
from trtllm_replayssm.ops._abi.records import (
    ABI_VERSION,
    ERROR_CHARS,
    MAX_RANK,
    Args,
    Dtype,
    ErrorRecord,
    Status,
    Tensor,
    tensor,
)
from trtllm_replayssm.ops._abi.update import UPDATE_PROGRAMMATIC_LAUNCH, CommitArgs, Kind, UpdateArgs

__all__ = [
    "ABI_VERSION",
    "ERROR_CHARS",
    "MAX_RANK",
    "UPDATE_PROGRAMMATIC_LAUNCH",
    "Args",
    "CommitArgs",
    "Dtype",
    "ErrorRecord",
    "Kind",
    "Library",
    "Status",
    "Tensor",
    "UpdateArgs",
    "tensor",
]
