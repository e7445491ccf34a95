"""The native operations as torch custom operations `replayssm::*`, so that torch.compile and torch.export see them.

Thin: a view per tensor, one call of the C ABI on torch's current stream. Names, shapes, dtypes and meaning of the
arguments are those of the structs in plugins/include/replayssm; states, rings, cursors and workspaces are changed in
place, an output is new. Arguments are given by name; absent tensors are None. Errors are the package's, raised before
anything is launched.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch import library as torch_library

from trtllm_replayssm.errors import ContractError
from trtllm_replayssm.ops import _abi
from trtllm_replayssm.ops.native_library import installed_library
from trtllm_replayssm.ops.views import aligned, channels_last, current_stream, view

Call = Callable[[dict[str, Any], dict[str, Any], int], None]
WIDE_INPUTS = ("value", "k", "q", "v")  # read 16 bytes at a time
CHANNEL_INPUTS = ("x", "gate", "decay_in", "beta_in", "factor", "residual")  # channels contiguous, rows anywhere
_CONTEXT = "slot num_tokens"
_TOKENS = "value k q dt? a? skip? log_decay? beta?"


@dataclass(frozen=True)
class Signature:
    """Arguments of one operation by name: numbers, tensors that are read, tensors that are written. `?`: nullable.

    numbers: integers, unless a type follows: `:float`, `:int[]`.

    like: the input whose shape and type the output has; None: the operation has no output.
    """

    name: str
    numbers: tuple[str, ...]
    inputs: tuple[str, ...]
    state: tuple[str, ...]
    like: str | None

    @staticmethod
    def of(name: str, numbers: str, inputs: str, state: str, like: str | None) -> Signature:
        """From names separated by blanks."""
        return Signature(name, tuple(numbers.split()), tuple(inputs.split()), tuple(state.split()), like)

    @property
    def number_names(self) -> list[str]:
        """The numbers without their types."""
        return [name.partition(":")[0] for name in self.numbers]

    @property
    def names(self) -> list[str]:
        """All arguments in order."""
        return [*self.number_names, *(name.rstrip("?") for name in (*self.inputs, *self.state))]

    @property
    def schema(self) -> str:
        """The operation's schema without its name."""
        parts = [f"{kind or 'int'} {name}" for name, _, kind in (number.partition(":") for number in self.numbers)]
        parts += [f"Tensor{'?' * name.endswith('?')} {name.rstrip('?')}" for name in self.inputs]
        parts += [f"Tensor(s{i}!){'?' * name.endswith('?')} {name.rstrip('?')}" for i, name in enumerate(self.state)]
        return f"({', '.join(parts)}) -> {'()' if self.like is None else 'Tensor'}"


UPDATE = Signature.of(
    "update",
    "kind window layer head_offset flags launch:int[]",
    f"{_CONTEXT} origin h position? seed? {_TOKENS}",
    "checkpoint checkpoint_scale? read? read_scale? read_head_scale? "
    "ring_value ring_k ring_dt ring_key_factor? ring_v? ring_beta? workspace",
    like="value",
)
DECAY_SKIP_UPDATE = replace(UPDATE, name="decay_skip_update", numbers=(*UPDATE.numbers[:-1], "skip_below:float"))
PREFILL = Signature.of(
    "prefill",
    "kind window layer head_offset flags",
    f"{_CONTEXT} row_flags? carry_index? origin h position? seed? {_TOKENS} "
    "ring_value ring_k ring_dt ring_key_factor? ring_v? ring_beta?",
    "checkpoint checkpoint_scale? read? read_scale? read_head_scale? carry? workspace",
    like="value",
)
COMMIT = Signature.of("commit", "window ring_rows", f"{_CONTEXT} accepted", "origin h position", like=None)
CONVENTIONAL_COMMIT = Signature.of(
    "conventional_commit", "entries", f"{_CONTEXT} accepted", "entry position", like=None
)
CONVENTIONAL = Signature.of("conventional_update", "kind flags", f"{_CONTEXT} entry? {_TOKENS}", "state", like="value")


CONV1D_UPDATE, CONV1D_PREFILL = (
    Signature.of(name, "flags", f"{_CONTEXT} position x weight bias?", "window", like="x")
    for name in ("conv1d_update", "conv1d_prefill")
)
SSM_INPUTS_UPDATE, SSM_INPUTS_PREFILL = (
    Signature.of(
        name,
        "kind flags dt_low:float dt_high:float",
        f"{_CONTEXT} position x weight bias? decay_in beta_in? dt_bias a_log?",
        "window out decay_out beta_out?",
        like=None,
    )
    for name in ("ssm_inputs_update", "ssm_inputs_prefill")
)
GATED_RMS_NORM = Signature.of("gated_rms_norm", "flags groups gate_first eps:float", "x gate weight", "", like="x")

RMS_NORM = Signature.of("rms_norm", "flags eps:float weight_offset:float", "x residual? weight", "sum?", like="x")
PARTS_RMS_NORM = replace(RMS_NORM, name="parts_rms_norm", inputs=("x", "residual", "weight"), like="residual")
SUM_RANKS = Signature.of(
    "sum_ranks",
    "flags eps:float weight_offset:float rank capacity patience_ns inbox:int[] gave_up",
    "x residual? weight?",
    "turn sum out?",
    like=None,
)
ACTIVATION = Signature.of("activation", "flags function", "x factor? opening?", "", like="x")
_STEP_ROWS = "slot start num_tokens"
ATTENTION_INPUTS = Signature.of(
    "attention_inputs",
    "flags eps:float weight_offset:float",
    f"{_STEP_ROWS} q k v q_weight? k_weight? cosine? sine?",
    "keys values",
    like="q",
)
ATTENTION = Signature.of("attention", "flags scale:float", f"{_STEP_ROWS} q keys values", "", like="q")
DRAW = Signature.of(
    "draw", "flags", "logits row? length? seed? temperature? top_k? top_p? min_p?", "tokens finite", like=None
)
STEP_INPUTS = Signature.of(
    "step_inputs", "flags", "slot last room draft draft_count", "ids num_tokens row", like=None
)
STEP_OUTCOME = Signature.of(
    "step_outcome",
    "flags",
    "slot num_tokens tokens finite count? draft stop_ids",
    "last length room history? emitted report",
    like=None,
)
PROMPT_LOOKUP = Signature.of(
    "prompt_lookup", "flags max_ngram", "row length room history", "draft draft_count", like=None
)


def fill(struct: type[Any], tensors: dict[str, Tensor | None], **numbers: Any) -> Any:
    """An args struct of the ABI with tensors and numbers (or nested structs) by the header's names."""
    return struct(**{name: view(tensor) for name, tensor in tensors.items()}, **numbers)


def _with_workspace(struct: type[Any], method: str) -> Call:
    def call(arguments: dict[str, Any], numbers: dict[str, Any], stream: int) -> None:
        workspace: Tensor = arguments.pop("workspace")
        launch = getattr(installed_library(), method)
        launch(fill(struct, arguments, **numbers), workspace.data_ptr(), workspace.numel(), stream)

    return call


def update_call(arguments: dict[str, Any], numbers: dict[str, Any], stream: int) -> None:
    """`launch`: the numbers of rssm_update_launch, or none of them."""
    workspace, launch = arguments.pop("workspace"), _abi.LaunchConstants(*numbers.pop("launch"))
    args = fill(_abi.UpdateArgs, arguments, launch=launch, **numbers)
    installed_library().update(args, workspace.data_ptr(), workspace.numel(), stream)


def decay_skip_call(arguments: dict[str, Any], numbers: dict[str, Any], stream: int) -> None:
    """The struct holds the update's as a part."""
    workspace, skip_below = arguments.pop("workspace"), numbers.pop("skip_below")
    update = fill(_abi.UpdateArgs, arguments, **numbers)
    args = _abi.DecaySkipArgs(update=update, skip_below=skip_below)
    installed_library().decay_skip_update(args, workspace.data_ptr(), workspace.numel(), stream)


def _without_workspace(struct: type[Any], method: str) -> Call:
    def call(arguments: dict[str, Any], numbers: dict[str, Any], stream: int) -> None:
        getattr(installed_library(), method)(fill(struct, arguments, **numbers), stream)

    return call


def ssm_inputs_call(method: str) -> Call:
    """The struct holds the convolution's as a part."""

    def call(arguments: dict[str, Any], numbers: dict[str, Any], stream: int) -> None:
        nested = {name: arguments.pop(name) for name in CONV1D_UPDATE.names if name in arguments} | {
            "out": arguments.pop("out")
        }
        conv = fill(_abi.Conv1dArgs, nested, flags=numbers.pop("flags"))
        getattr(installed_library(), method)(fill(_abi.SsmInputsArgs, arguments, conv=conv, **numbers), stream)

    return call


def attention_inputs_call(arguments: dict[str, Any], numbers: dict[str, Any], stream: int) -> None:
    """The output is the queries."""
    queries = {"q_out": arguments.pop("out")}
    installed_library().attention_inputs(fill(_abi.AttentionInputsArgs, arguments | queries, **numbers), stream)


def attention_call(arguments: dict[str, Any], numbers: dict[str, Any], stream: int) -> None:
    """The workspace is torch's: it lives until the stream is past the launch."""
    library, args = installed_library(), fill(_abi.AttentionArgs, arguments, **numbers)
    device = arguments["q"].device
    multiprocessors = int(torch.cuda.get_device_properties(device).multi_processor_count)
    size = library.attention_workspace(args, multiprocessors)
    workspace = torch.empty(size, dtype=torch.uint8, device=device)
    library.attention(args, multiprocessors, workspace.data_ptr(), size, stream)


def draw_call(arguments: dict[str, Any], numbers: dict[str, Any], stream: int) -> None:
    """The workspace is torch's: it lives until the stream is past the launch."""
    library, args = installed_library(), fill(_abi.DrawArgs, arguments, **numbers)
    size = library.draw_workspace(args)
    workspace = torch.empty(size, dtype=torch.uint8, device=arguments["logits"].device)
    library.draw(args, workspace.data_ptr(), size, stream)


def sum_ranks_call(arguments: dict[str, Any], numbers: dict[str, Any], stream: int) -> None:
    """`inbox`: the addresses of all ranks' inboxes."""
    addresses = numbers.pop("inbox")
    inbox = (ctypes.c_void_p * _abi.MAX_RANKS)(*addresses)
    args = fill(_abi.SumRanksArgs, arguments, inbox=inbox, ranks=len(addresses), **numbers)
    installed_library().sum_ranks(args, stream)


def _output(signature: Signature, arguments: dict[str, Any]) -> Tensor | None:
    like = signature.like
    return None if like is None else torch.empty_like(arguments[like], memory_format=torch.contiguous_format)


def launcher(signature: Signature, call: Call) -> Callable[..., Tensor | None]:
    """What runs on CUDA tensors, its arguments in the schema's order."""
    names = signature.names

    def launch(*values: Any) -> Tensor | None:
        arguments = dict(zip(names, values, strict=True))
        numbers = {name: arguments.pop(name) for name in signature.number_names}
        out = _output(signature, arguments)
        arguments |= {name: aligned(arguments[name]) for name in WIDE_INPUTS if name in arguments}
        given = [name for name in CHANNEL_INPUTS if arguments.get(name) is not None]
        arguments |= {name: channels_last(arguments[name]) for name in given}
        stream = current_stream(next(value for value in arguments.values() if value is not None))
        call(arguments if out is None else {**arguments, "out": out}, numbers, stream)
        return out

    return launch


def _register(signature: Signature, call: Call) -> None:
    def refuse(*values: Any) -> Tensor | None:
        devices = sorted({v.device.type for v in values if isinstance(v, Tensor)})
        raise ContractError(f"replayssm::{signature.name}", "device", expected="CUDA tensors", got=", ".join(devices))

    operation = torch_library.custom_op(
        f"replayssm::{signature.name}",
        launcher(signature, call),
        mutates_args=[name.rstrip("?") for name in signature.state],
        schema=signature.schema,
        device_types="cuda",
    )
    operation.register_kernel("cpu", refuse)
    operation.register_fake(lambda *values: _output(signature, dict(zip(signature.names, values, strict=True))))


_register(UPDATE, update_call)
_register(DECAY_SKIP_UPDATE, decay_skip_call)
_register(PREFILL, _with_workspace(_abi.PrefillArgs, "prefill"))
_register(COMMIT, _without_workspace(_abi.CommitArgs, "commit"))
_register(CONVENTIONAL_COMMIT, _without_workspace(_abi.ConventionalCommitArgs, "conventional_commit"))
_register(CONVENTIONAL, _without_workspace(_abi.ConventionalArgs, "conventional_update"))
_register(CONV1D_UPDATE, _without_workspace(_abi.Conv1dArgs, "conv1d_update"))
_register(CONV1D_PREFILL, _without_workspace(_abi.Conv1dArgs, "conv1d_prefill"))
_register(GATED_RMS_NORM, _without_workspace(_abi.GatedRmsNormArgs, "gated_rms_norm"))
_register(SSM_INPUTS_UPDATE, ssm_inputs_call("ssm_inputs_update"))
_register(SSM_INPUTS_PREFILL, ssm_inputs_call("ssm_inputs_prefill"))
_register(RMS_NORM, _without_workspace(_abi.RmsNormArgs, "rms_norm"))
_register(PARTS_RMS_NORM, _without_workspace(_abi.RmsNormArgs, "rms_norm"))
_register(SUM_RANKS, sum_ranks_call)
_register(ACTIVATION, _without_workspace(_abi.ActivationArgs, "activation"))
_register(ATTENTION_INPUTS, attention_inputs_call)
_register(ATTENTION, attention_call)
_register(DRAW, draw_call)
_register(STEP_INPUTS, _without_workspace(_abi.StepInputsArgs, "step_inputs"))
_register(STEP_OUTCOME, _without_workspace(_abi.StepOutcomeArgs, "step_outcome"))
_register(PROMPT_LOOKUP, _without_workspace(_abi.PromptLookupArgs, "prompt_lookup"))
