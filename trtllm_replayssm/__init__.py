"""ReplaySSM inference for hybrid SSM language models: the public names, imported on first use.

`import trtllm_replayssm` loads neither torch nor TensorRT, so that the command line and tools start at once; a name
below is imported from its module when it is first asked for (PEP 562).
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from trtllm_replayssm._version import __version__

if TYPE_CHECKING:
    from trtllm_replayssm.config import ReplayConfig
    from trtllm_replayssm.dtypes import Rounding, StateFormat

_LAZY = {
    "LLM": "trtllm_replayssm.runtime.llm",
    "RequestOutput": "trtllm_replayssm.runtime.llm",
    "CompletionOutput": "trtllm_replayssm.runtime.llm",
    "SamplingParams": "trtllm_replayssm.runtime.sampling.params",
    "CudaGraphConfig": "trtllm_replayssm.config",
    "KvCacheConfig": "trtllm_replayssm.runtime.llm",
    "MTPDecodingConfig": "trtllm_replayssm.runtime.llm",
    "NGramDecodingConfig": "trtllm_replayssm.runtime.llm",
    "ReplayConfig": "trtllm_replayssm.config",
    "Rounding": "trtllm_replayssm.dtypes",
    "StateFormat": "trtllm_replayssm.dtypes",
}

__all__ = [
    "LLM",
    "CompletionOutput",
    "CudaGraphConfig",
    "KvCacheConfig",
    "MTPDecodingConfig",
    "NGramDecodingConfig",
    "ReplayConfig",
    "RequestOutput",
    "Rounding",
    "SamplingParams",
    "StateFormat",
    "__version__",
]


def __getattr__(name: str) -> object:
    """The public `name`, imported on first use and remembered; AttributeError for any other."""
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        module = import_module(_LAZY[name])
    except ModuleNotFoundError as error:
        if error.name != f"{__name__}.runtime":
            raise
        hint = "In a source checkout the rooms are found after `pip install -e .`"
        raise ImportError(f"import: {error.name}: expected an installed package, got none. {hint}") from error
    value = getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
