"""The native operations as torch custom operations `replayssm::*`, so that torch.compile and torch.export see them.

Thin: a view per tensor, one call of the C ABI on torch's current stream. Names, shapes, dtypes and meaning of the
arguments are those of the structs in plugins/include/replayssm; states, rings, cursors and workspaces are changed in
place, an output is new. Arguments are given by name; absent tensors are None. Errors are the package's, raised before
anything is launched.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trtllm_replayssm.errors import ContractError
from trtllm_replayssm.ops import _abi
from trtllm_replayssm.ops.library import installed_library
from trtllm_replayssm.ops.views import aligned, current_stream, view

WIDE_INPUTS = ("value", "k", "q")  # read 16 bytes at a time
_CONTEXT = "slot num_tokens"
_TOKENS = "value k q dt? a? skip? log_decay? beta?"


@dataclass(frozen=True)
class Signature:
    """Arguments of one operation by name: integers, tensors that are read, tensors that are written. `?`: nullable.

    like: the input whose shape and type the output has; None: the operation has no output.
    """

    name: str
    integers: tuple[str, ...]
    inputs: tuple[str, ...]
    state: tuple[str, ...]
    like: str | None

    @staticmethod
    def of(name: str, integers: str, inputs: str, state: str, like: str | None) -> Signature:
        """From names separated by blanks."""
        return Signature(name, tuple(integers.split()), tuple(inputs.split()), tuple(state.split()), like)

    @property
    def names(self) -> list[str]:
        """All arguments in order."""
        return [name.rstrip("?") for name in (*self.integers, *self.inputs, *self.state)]

    @property
    def schema(self) -> str:
        """The operation's schema without its name."""
        parts = [f"int {name}" for name in self.integers]
        parts += [f"Tensor{'?' * name.endswith('?')} {name.rstrip('?')}" for name in self.inputs]
        parts += [f"Tensor(s{i}!){'?' * name.endswith('?')} {name.rstrip('?')}" for i, name in enumerate(self.state)]
        return f"({', '.join(parts)}) -> {'()' if self.like is None else 'Tensor'}"


UPDATE = Signature.of(
    "update",
    "kind window layer head_offset flags",
    f"{_CONTEXT} origin h position? seed? {_TOKENS}",
    "checkpoint checkpoint_scale? read? read_scale? read_head_scale? "
    "ring_value ring_k ring_dt ring_key_factor? ring_v? ring_beta? workspace",
    like="value",
)
COMMIT = Signature.of("commit", "window ring_rows", f"{_CONTEXT} accepted", "origin h position", like=None)
CONVENTIONAL = Signature.of("conventional_update", "kind flags", f"{_CONTEXT} entry? {_TOKENS}", "state", like="value")


def fill(struct: type[Any], tensors: dict[str, Tensor | None], **integers: int) -> Any:
    """An args struct of the ABI with tensors and integers by the header's names."""
    return struct(**{name: view(tensor) for name, tensor in tensors.items()}, **integers)


def _update(arguments: dict[str, Any], integers: dict[str, int], stream: int) -> None:
    workspace: Tensor = arguments.pop("workspace")
    args = fill(_abi.UpdateArgs, arguments, **integers)
    installed_library().update(args, workspace.data_ptr(), workspace.numel(), stream)


def _commit(arguments: dict[str, Any], integers: dict[str, int], stream: int) -> None:
    installed_library().commit(fill(_abi.CommitArgs, arguments, **integers), stream)


def _conventional(arguments: dict[str, Any], integers: dict[str, int], stream: int) -> None:
    installed_library().conventional_update(fill(_abi.ConventionalArgs, arguments, **integers), stream)


def _register(signature: Signature, call: Callable[[dict[str, Any], dict[str, int], int], None]) -> None:
    names, like = signature.names, signature.like

    def output(arguments: dict[str, Any]) -> Tensor | None:
        return None if like is None else torch.empty_like(arguments[like], memory_format=torch.contiguous_format)

    def launch(*values: Any) -> Tensor | None:
        arguments = dict(zip(names, values, strict=True))
        integers = {name: arguments.pop(name) for name in signature.integers}
        out = output(arguments)
        arguments |= {name: aligned(arguments[name]) for name in WIDE_INPUTS if name in arguments}
        call(arguments if out is None else {**arguments, "out": out}, integers, current_stream(arguments["slot"]))
        return out

    def refuse(*values: Any) -> Tensor | None:
        devices = sorted({v.device.type for v in values if isinstance(v, Tensor)})
        raise ContractError(f"replayssm::{signature.name}", "device", expected="CUDA tensors", got=", ".join(devices))

    mutated = [name.rstrip("?") for name in signature.state]
    operation = torch.library.custom_op(
        f"replayssm::{signature.name}", launch, mutates_args=mutated, schema=signature.schema, device_types="cuda"
    )
    operation.register_kernel("cpu", refuse)
    operation.register_fake(lambda *values: output(dict(zip(names, values, strict=True))))


_register(UPDATE, _update)
_register(COMMIT, _commit)
_register(CONVENTIONAL, _conventional)
