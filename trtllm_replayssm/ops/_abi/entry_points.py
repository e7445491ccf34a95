"""The handle of the loaded native library: one method per public function, failures as the package's errors."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

from trtllm_replayssm.errors import (
    CapacityError,
    ConfigError,
    ContractError,
    DeviceError,
    EngineMismatchError,
    InvariantError,
    ReplaySSMError,
    UnsupportedError,
)
from trtllm_replayssm.launches import LaunchPlan
from trtllm_replayssm.ops._abi.conventional import ConventionalArgs, ConventionalCommitArgs, RecoveryArgs
from trtllm_replayssm.ops._abi.experts import ExpertsArgs, PackedLinearArgs, RouteArgs
from trtllm_replayssm.ops._abi.inputs import Conv1dArgs, GatedRmsNormArgs, SsmInputsArgs
from trtllm_replayssm.ops._abi.layers import ActivationArgs, AttentionArgs, AttentionInputsArgs, RmsNormArgs
from trtllm_replayssm.ops._abi.prefill import PrefillArgs, PrefillCommitArgs
from trtllm_replayssm.ops._abi.ranks import SumRanksArgs
from trtllm_replayssm.ops._abi.records import ABI_VERSION, Args, ErrorRecord, Status
from trtllm_replayssm.ops._abi.slots import ClearStateArgs, ResetSlotsArgs, StateExportArgs, StateImportArgs
from trtllm_replayssm.ops._abi.tokens import DrawArgs, PromptLookupArgs, StepInputsArgs, StepOutcomeArgs
from trtllm_replayssm.ops._abi.update import CommitArgs, DecaySkipArgs, LaunchRecord, UpdateArgs

TEXT_CHARS = 512  # of a launch in words
_ERRORS: dict[Status, type[ReplaySSMError]] = {
    Status.INVALID_ARGUMENT: ContractError,
    Status.UNSUPPORTED: UnsupportedError,
    Status.WORKSPACE_TOO_SMALL: CapacityError,
    Status.ABI_MISMATCH: EngineMismatchError,
    Status.CUDA_ERROR: DeviceError,
    Status.INTERNAL: InvariantError,
}


class Library:
    """The loaded native library. Calls raise the package's errors; nothing is kept between calls."""

    def __init__(self, path: Path) -> None:
        """path: the shared library. Raises EngineMismatchError when its ABI version is not this module's, ConfigError
        for another library, OSError for no library.
        """
        self._handle = ctypes.CDLL(str(path))
        # The version first: another version may have other functions.
        if not hasattr(self._handle, "rssm_abi_version"):
            raise ConfigError(
                "load native library", str(path), expected="a function rssm_abi_version", got="another library"
            )
        self._handle.rssm_abi_version.restype = ctypes.c_uint32
        version = self._handle.rssm_abi_version()
        if version != ABI_VERSION:
            raise EngineMismatchError(
                "load native library", f"abi_version of {path}", expected=ABI_VERSION, got=version,
                hint="Build it again from this package's sources (make native in a checkout)",
            )  # fmt: skip

    def update_workspace(self, args: UpdateArgs) -> int:
        """Device bytes `update` needs beside the tensors of `args`."""
        return self._workspace("rssm_update_workspace", args)

    def update(self, args: UpdateArgs, workspace: int, workspace_bytes: int, stream: int) -> None:
        """Enqueue one step on `stream` (a cudaStream_t as an integer)."""
        self._run_over("rssm_update", args, workspace, workspace_bytes, stream)

    def update_launch_plan(self, args: UpdateArgs, multiprocessors: int) -> LaunchPlan:
        """The launch of such a step on a device of that many multiprocessors, in numbers. Looks at no device."""
        record = LaunchRecord()
        self._call("rssm_update_launch_plan", _sized(args), ctypes.c_int32(multiprocessors), ctypes.byref(record))
        return LaunchPlan(**{field[0]: getattr(record, field[0]) for field in LaunchRecord._fields_})

    def update_launch_text(self, args: UpdateArgs, multiprocessors: int) -> str:
        """The same in words."""
        return self._text("rssm_update_launch_text", args, multiprocessors)

    def decay_skip_update(self, args: DecaySkipArgs, workspace: int, workspace_bytes: int, stream: int) -> None:
        """Enqueue one step that reads no checkpoint of a faded head on `stream`; workspace as for `update`."""
        _sized(args.update)
        self._run_over("rssm_decay_skip_update", args, workspace, workspace_bytes, stream)

    def commit(self, args: CommitArgs, stream: int) -> None:
        """Enqueue the cursor commit on `stream`."""
        self._call("rssm_commit", _sized(args), ctypes.c_void_p(stream))

    def prefill_workspace(self, args: PrefillArgs) -> int:
        """Device bytes `prefill` needs beside the tensors of `args`."""
        return self._workspace("rssm_prefill_workspace", args)

    def prefill(self, args: PrefillArgs, workspace: int, workspace_bytes: int, stream: int) -> None:
        """Enqueue the scan of a prompt chunk on `stream`."""
        self._run_over("rssm_prefill", args, workspace, workspace_bytes, stream)

    def prefill_commit(self, args: PrefillCommitArgs, stream: int) -> None:
        """Enqueue the cursor commit after a prompt chunk on `stream`."""
        self._call("rssm_prefill_commit", _sized(args), ctypes.c_void_p(stream))

    def conventional_update(self, args: ConventionalArgs, stream: int) -> None:
        """Enqueue one step of the baseline on `stream`."""
        self._call("rssm_conventional_update", _sized(args), ctypes.c_void_p(stream))

    def conventional_commit(self, args: ConventionalCommitArgs, stream: int) -> None:
        """Enqueue the cursor commit of the baseline on `stream`."""
        self._call("rssm_conventional_commit", _sized(args), ctypes.c_void_p(stream))

    def conventional_launch_text(self, args: ConventionalArgs, multiprocessors: int) -> str:
        """The launch of such a step on a device of that many multiprocessors, in words. Looks at no device."""
        return self._text("rssm_conventional_launch_text", args, multiprocessors)

    def recovery_step(self, args: RecoveryArgs, stream: int) -> None:
        """Enqueue one step of a recovery scheme on `stream`."""
        self._call("rssm_recovery_step", _sized(args), ctypes.c_void_p(stream))

    def conv1d_update(self, args: Conv1dArgs, stream: int) -> None:
        """Enqueue the convolution of a decode or verify step on `stream`."""
        self._call("rssm_conv1d_update", _sized(args), ctypes.c_void_p(stream))

    def conv1d_prefill(self, args: Conv1dArgs, stream: int) -> None:
        """Enqueue the convolution of a prompt chunk on `stream`."""
        self._call("rssm_conv1d_prefill", _sized(args), ctypes.c_void_p(stream))

    def ssm_inputs_update(self, args: SsmInputsArgs, stream: int) -> None:
        """Enqueue the convolution and the decay inputs of a decode or verify step on `stream`."""
        _sized(args.conv)
        self._call("rssm_ssm_inputs_update", _sized(args), ctypes.c_void_p(stream))

    def ssm_inputs_prefill(self, args: SsmInputsArgs, stream: int) -> None:
        """Enqueue the convolution and the decay inputs of a prompt chunk on `stream`."""
        _sized(args.conv)
        self._call("rssm_ssm_inputs_prefill", _sized(args), ctypes.c_void_p(stream))

    def gated_rms_norm(self, args: GatedRmsNormArgs, stream: int) -> None:
        """Enqueue the gated group norm on `stream`."""
        self._call("rssm_gated_rms_norm", _sized(args), ctypes.c_void_p(stream))

    def rms_norm(self, args: RmsNormArgs, stream: int) -> None:
        """Enqueue the norm, with its residual sum, on `stream`."""
        self._call("rssm_rms_norm", _sized(args), ctypes.c_void_p(stream))

    def sum_ranks(self, args: SumRanksArgs, stream: int) -> None:
        """Enqueue the sum over ranks, with its residual sum and norm, on `stream`."""
        self._call("rssm_sum_ranks", _sized(args), ctypes.c_void_p(stream))

    def activation(self, args: ActivationArgs, stream: int) -> None:
        """Enqueue the activation and its product on `stream`."""
        self._call("rssm_activation", _sized(args), ctypes.c_void_p(stream))

    def attention_inputs(self, args: AttentionInputsArgs, stream: int) -> None:
        """Enqueue head norms, rotation and the write into the KV slots on `stream`."""
        self._call("rssm_attention_inputs", _sized(args), ctypes.c_void_p(stream))

    def attention_workspace(self, args: AttentionArgs, multiprocessors: int) -> int:
        """Device bytes `attention` needs beside the tensors of `args`. Looks at no device."""
        return self._workspace("rssm_attention_workspace", args, multiprocessors)

    def attention(
        self, args: AttentionArgs, multiprocessors: int, workspace: int, workspace_bytes: int, stream: int
    ) -> None:
        """Enqueue the attention of a step over the KV slots on `stream`."""
        self._run_over("rssm_attention", args, workspace, workspace_bytes, stream, multiprocessors)

    def draw_workspace(self, args: DrawArgs) -> int:
        """Device bytes `draw` needs beside the tensors of `args`."""
        size = ctypes.c_size_t(0)
        self._call("rssm_draw_workspace", _sized(args), ctypes.byref(size))
        return size.value

    def draw(self, args: DrawArgs, workspace: int, workspace_bytes: int, stream: int) -> None:
        """Enqueue the choice of a token for each position on `stream`."""
        self._call(
            "rssm_draw",
            _sized(args),
            ctypes.c_void_p(workspace),
            ctypes.c_size_t(workspace_bytes),
            ctypes.c_void_p(stream),
        )

    def route(self, args: RouteArgs, stream: int) -> None:
        """Enqueue the choice of experts on `stream`."""
        self._call("rssm_route", _sized(args), ctypes.c_void_p(stream))

    def experts_workspace(self, args: ExpertsArgs) -> int:
        """Device bytes `experts` needs beside the tensors of `args`."""
        return self._workspace("rssm_experts_workspace", args)

    def experts(self, args: ExpertsArgs, workspace: int, workspace_bytes: int, stream: int) -> None:
        """Enqueue the routed experts of one layer on `stream`."""
        self._run_over("rssm_experts", args, workspace, workspace_bytes, stream)

    def packed_linear(self, args: PackedLinearArgs, stream: int) -> None:
        """Enqueue a dense product with packed weights on `stream`."""
        self._call("rssm_packed_linear", _sized(args), ctypes.c_void_p(stream))

    def step_inputs(self, args: StepInputsArgs, stream: int) -> None:
        """Enqueue a step's inputs on `stream`."""
        self._call("rssm_step_inputs", _sized(args), ctypes.c_void_p(stream))

    def step_outcome(self, args: StepOutcomeArgs, stream: int) -> None:
        """Enqueue what follows from a step's tokens on `stream`."""
        self._call("rssm_step_outcome", _sized(args), ctypes.c_void_p(stream))

    def prompt_lookup(self, args: PromptLookupArgs, stream: int) -> None:
        """Enqueue drafts by prompt lookup on `stream`."""
        self._call("rssm_prompt_lookup", _sized(args), ctypes.c_void_p(stream))

    def reset_slots(self, args: ResetSlotsArgs, stream: int) -> None:
        """Enqueue the reset of the cursors of some slots on `stream`."""
        self._call("rssm_reset_slots", _sized(args), ctypes.c_void_p(stream))

    def clear_state(self, args: ClearStateArgs, stream: int) -> None:
        """Enqueue the zeroing of one layer's states of some slots on `stream`."""
        self._call("rssm_clear_state", _sized(args), ctypes.c_void_p(stream))

    def state_export(self, args: StateExportArgs, stream: int) -> None:
        """Enqueue the copy of whole states of one layer out of the pool on `stream`."""
        self._call("rssm_state_export", _sized(args), ctypes.c_void_p(stream))

    def state_import(self, args: StateImportArgs, stream: int) -> None:
        """Enqueue the copy of whole states into one layer of the pool on `stream`."""
        self._call("rssm_state_import", _sized(args), ctypes.c_void_p(stream))

    def _workspace(self, name: str, args: Args, *sizes: int) -> int:
        """Device bytes that a call needs; sizes: int32 arguments behind its struct."""
        size = ctypes.c_size_t(0)
        self._call(name, _sized(args), *map(ctypes.c_int32, sizes), ctypes.byref(size))
        return size.value

    def _run_over(
        self, name: str, args: Args, workspace: int, workspace_bytes: int, stream: int, *sizes: int
    ) -> None:
        """Enqueue a call over device memory at the address `workspace`; sizes: as `_workspace`."""
        memory = ctypes.c_void_p(workspace), ctypes.c_size_t(workspace_bytes)
        self._call(name, _sized(args), *map(ctypes.c_int32, sizes), *memory, ctypes.c_void_p(stream))

    def _text(self, name: str, args: Args, multiprocessors: int) -> str:
        text = ctypes.create_string_buffer(TEXT_CHARS)
        self._call(name, _sized(args), ctypes.c_int32(multiprocessors), text, ctypes.c_size_t(TEXT_CHARS))
        return text.value.decode()

    def _call(self, name: str, *arguments: Any) -> None:
        record = ErrorRecord()
        status = Status(getattr(self._handle, name)(*arguments, ctypes.byref(record)))
        if status is not Status.OK:
            raise _error(status, name, record.message.decode(errors="replace"))


def _sized(args: Args) -> Any:
    args.struct_size = ctypes.sizeof(args)
    args.abi_version = ABI_VERSION
    return ctypes.byref(args)


def _error(status: Status, name: str, message: str) -> ReplaySSMError:
    """The package's error for a native message `operation: argument: expected ..., got ...`."""
    operation, _, rest = message.partition(": ")
    argument, plain, detail = rest.partition(": expected ")  # an argument may name its axis: `x: T`
    if not plain:
        argument, _, detail = rest.partition(": ")
    expected, found, got = detail.rpartition(", got ")
    return _ERRORS[status](
        operation or name, argument or "call", expected=expected if found else "success", got=got if found else detail
    )
