"""ctypes mirror of the native library's public headers (plugins/include/replayssm), and the library handle.

Structs are filled by field name only. `tests/native/test_abi_mirror.py` compares sizes and offsets with the headers.
"""

from trtllm_replayssm.ops._abi.conventional import (
    CONVENTIONAL_PROGRAMMATIC_LAUNCH,
    CONVENTIONAL_SETTLED_STATE,
    ConventionalArgs,
    ConventionalCommitArgs,
    RecoveryArgs,
)
from trtllm_replayssm.ops._abi.entry_points import Library
from trtllm_replayssm.ops._abi.experts import (
    EXPERTS_PROGRAMMATIC_LAUNCH,
    ROUTE_PROGRAMMATIC_LAUNCH,
    ExpertsArgs,
    PackedLinearArgs,
    PackedWeights,
    RouteArgs,
    RouterKind,
)
from trtllm_replayssm.ops._abi.inputs import (
    CONV1D_PROGRAMMATIC_LAUNCH,
    NORM_PROGRAMMATIC_LAUNCH,
    Conv1dArgs,
    GatedRmsNormArgs,
    SsmInputsArgs,
)
from trtllm_replayssm.ops._abi.layers import (
    ATTENTION_PROGRAMMATIC_LAUNCH,
    ELEMENTWISE_PROGRAMMATIC_LAUNCH,
    ActivationArgs,
    AttentionArgs,
    AttentionInputsArgs,
    Function,
    RmsNormArgs,
)
from trtllm_replayssm.ops._abi.prefill import PrefillArgs, PrefillCommitArgs, PrefillFlag
from trtllm_replayssm.ops._abi.ranks import MAX_RANKS, SUM_RANKS_PROGRAMMATIC_LAUNCH, SumRanksArgs
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
from trtllm_replayssm.ops._abi.slots import ClearStateArgs, ResetSlotsArgs, StateExportArgs, StateImportArgs
from trtllm_replayssm.ops._abi.tokens import DrawArgs, PromptLookupArgs, StepInputsArgs, StepOutcomeArgs
from trtllm_replayssm.ops._abi.update import (
    UPDATE_PROGRAMMATIC_LAUNCH,
    UPDATE_SETTLED_STATE,
    CommitArgs,
    DecaySkipArgs,
    Kind,
    LaunchConstants,
    LaunchRecord,
    UpdateArgs,
)

__all__ = [
    "ABI_VERSION",
    "ATTENTION_PROGRAMMATIC_LAUNCH",
    "CONV1D_PROGRAMMATIC_LAUNCH",
    "CONVENTIONAL_PROGRAMMATIC_LAUNCH",
    "CONVENTIONAL_SETTLED_STATE",
    "ELEMENTWISE_PROGRAMMATIC_LAUNCH",
    "ERROR_CHARS",
    "EXPERTS_PROGRAMMATIC_LAUNCH",
    "MAX_RANK",
    "MAX_RANKS",
    "NORM_PROGRAMMATIC_LAUNCH",
    "ROUTE_PROGRAMMATIC_LAUNCH",
    "SUM_RANKS_PROGRAMMATIC_LAUNCH",
    "UPDATE_PROGRAMMATIC_LAUNCH",
    "UPDATE_SETTLED_STATE",
    "ActivationArgs",
    "Args",
    "AttentionArgs",
    "AttentionInputsArgs",
    "ClearStateArgs",
    "CommitArgs",
    "Conv1dArgs",
    "ConventionalArgs",
    "ConventionalCommitArgs",
    "DecaySkipArgs",
    "DrawArgs",
    "Dtype",
    "ErrorRecord",
    "ExpertsArgs",
    "Function",
    "GatedRmsNormArgs",
    "Kind",
    "LaunchConstants",
    "LaunchRecord",
    "Library",
    "PackedLinearArgs",
    "PackedWeights",
    "PrefillArgs",
    "PrefillCommitArgs",
    "PrefillFlag",
    "PromptLookupArgs",
    "RecoveryArgs",
    "ResetSlotsArgs",
    "RmsNormArgs",
    "RouteArgs",
    "RouterKind",
    "SsmInputsArgs",
    "StateExportArgs",
    "StateImportArgs",
    "Status",
    "StepInputsArgs",
    "StepOutcomeArgs",
    "SumRanksArgs",
    "Tensor",
    "UpdateArgs",
    "tensor",
]
