"""A slot's state in host memory: taken on preemption, for a file or for the prefix cache; valid for any slot of an
equal pool. Keys and values may start at a later position, when earlier snapshots hold the ones before it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from trtllm_replayssm.errors import ContractError

KV = "kv "  # what names of keys and values begin with
CARRY = "carry "
HIDDEN = "hidden"
RawArray = tuple[str, tuple[int, ...], bytes]


@dataclass(frozen=True)
class Snapshot:
    """position: committed tokens absorbed; signature: of the pool; tensors: named rows of the slot, on the host.

    carry: unrounded float32 states of a prompt in progress, by layer; empty otherwise, and then `tensors` has the
    checkpoints and rings. first: first position of the keys and values. hidden: [1, hidden] final hidden state of the
    last position, for a drafting head. has_state: False when only keys and values are left.
    """

    position: int
    signature: str
    tensors: dict[str, Tensor]
    carry: dict[int, Tensor]
    first: int = 0
    hidden: Tensor | None = None
    has_state: bool = True

    @property
    def nbytes(self) -> int:
        """Host memory the tensors occupy."""
        return sum(t.numel() * t.element_size() for t in self.named().values())

    def kv_only(self) -> Snapshot:
        """Its keys and values without its state."""
        kv = {name: tensor for name, tensor in self.tensors.items() if name.startswith(KV)}
        return replace(self, tensors=kv, carry={}, hidden=None, has_state=False)

    def arrays(self) -> dict[str, RawArray]:
        """Every tensor as (torch's name of its type, shape, elements row by row), by a name of its own."""
        return {
            name: (_type_name(t), tuple(t.shape), t.contiguous().flatten().view(torch.uint8).numpy().tobytes())
            for name, t in self.named().items()
        }

    def named(self) -> dict[str, Tensor]:
        """Every tensor by a name of its own."""
        named = self.tensors | {f"{CARRY}{layer}": state for layer, state in self.carry.items()}
        return named if self.hidden is None else named | {HIDDEN: self.hidden}


def from_arrays(position: int, signature: str, arrays: Mapping[str, RawArray]) -> Snapshot:
    """A whole snapshot from `Snapshot.arrays`; nothing of it is compared with a pool here."""
    named = {name: _tensor(name, array) for name, array in arrays.items()}
    carry = {int(n.removeprefix(CARRY)): t for n, t in named.items() if n.startswith(CARRY)}
    rows = {name: t for name, t in named.items() if name != HIDDEN and not name.startswith(CARRY)}
    return Snapshot(position, signature, rows, carry, hidden=named.get(HIDDEN))


def require_chain(snapshot: Snapshot, before: Sequence[Snapshot]) -> None:
    """Raise ContractError unless the snapshot has state and the chain's keys and values cover 0..position.

    Parts may overlap; the later one counts.
    """
    if not snapshot.has_state:
        raise ContractError("restore", "snapshot", expected="one with its state", got="keys and values alone")
    covered = 0
    for part in (*before, snapshot):
        if part.first > covered or part.signature != snapshot.signature:
            raise ContractError(
                "restore", "before", expected=f"snapshots of one pool, the next from position {covered} or before",
                got=f"one from position {part.first} of {part.signature}",
            )  # fmt: skip
        covered = part.position


def require_like(named: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Raise ContractError unless both have the same names, shapes and types."""
    for name in sorted(named.keys() | expected.keys()):
        ours, theirs = expected.get(name), named.get(name)
        if ours is None or theirs is None or ours.shape != theirs.shape or ours.dtype is not theirs.dtype:
            raise ContractError("load_snapshot", name, expected=_words(ours), got=_words(theirs))


def _tensor(name: str, array: RawArray) -> Tensor:
    kind, shape, data = array
    dtype = getattr(torch, kind, None)
    if not isinstance(dtype, torch.dtype) or math.prod(shape) * dtype.itemsize != len(data):
        raise ContractError("load_snapshot", name, expected="elements of a torch type", got=f"{kind} {list(shape)}")
    if not data:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(data), dtype=dtype).reshape(shape)


def _type_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _words(tensor: Tensor | None) -> str:
    return "nothing" if tensor is None else f"{_type_name(tensor)} {list(tensor.shape)}"
