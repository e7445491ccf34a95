"""A call of the native library with all memory that it may touch, before and after, in a file of its own.

Every buffer is exactly as long as the views into it reach, so that memcheck sees what a suballocated tensor hides.
Views that overlap share a buffer. An address keeps its distance from a multiple of 256.
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tests.native.device_memory import Bytes, Memory
from trtllm_replayssm.ops import _abi

ALIGNMENT = 256
WORKSPACE = "workspace"
_BITS = {
    _abi.Dtype.FLOAT32: 32, _abi.Dtype.FLOAT16: 16, _abi.Dtype.BFLOAT16: 16, _abi.Dtype.FLOAT8_E4M3: 8,
    _abi.Dtype.FLOAT4_E2M1: 4, _abi.Dtype.INT32: 32, _abi.Dtype.INT64: 64,
}  # fmt: skip


@dataclass(frozen=True)
class Pointer:
    """A pointer of a call's struct. at: its offset there, -1: it is the workspace's; host: not device memory."""

    field: str
    at: int
    address: int
    size: int
    host: bool = False


@dataclass(frozen=True)
class Place:
    """Where a pointer leads: into which buffer, how far behind its first byte."""

    field: str
    at: int
    buffer: int
    offset: int


@dataclass(frozen=True)
class Call:
    """name: the function; struct: its arguments, of class `kind`; sizes: the int32 behind them; workspace_bytes: None
    for a function that takes no workspace. leads: how far each buffer's first byte lies behind a multiple of 256.
    after: None: unchanged.
    """

    test: str
    name: str
    kind: str
    struct: bytes
    sizes: tuple[int, ...]
    workspace_bytes: int | None
    places: tuple[Place, ...]
    leads: tuple[int, ...]
    before: tuple[Bytes, ...]
    after: tuple[Bytes | None, ...]

    def fields_of(self, buffer: int) -> set[str]:
        """The last part of the names of all that point into it."""
        return {place.field.rpartition(".")[2] for place in self.places if place.buffer == buffer}


def view_bytes(view: _abi.Tensor) -> int:
    """From a view's first byte to behind its last."""
    sizes, steps = view.shape[: view.rank], view.stride[: view.rank]
    if 0 in sizes:
        return 0
    elements = 1 + sum((size - 1) * step for size, step in zip(sizes, steps, strict=True))
    return int((elements * _BITS[_abi.Dtype(view.dtype)] + 7) // 8)


def pointers(args: ctypes.Structure, base: int = 0, prefix: str = "") -> Iterator[Pointer]:
    """All that a struct of arguments points to; absent tensors not."""
    for name, kind in _fields(type(args)):
        at, value = base + getattr(type(args), name).offset, getattr(args, name)
        if kind is _abi.Tensor:
            if value.data:
                yield Pointer(prefix + name, at + _abi.Tensor.data.offset, value.data, view_bytes(value))
        elif issubclass(kind, ctypes.Structure):
            yield from pointers(value, at, f"{prefix}{name}.")
    if isinstance(args, _abi.SumRanksArgs):
        yield from _inboxes(args)


def _inboxes(args: _abi.SumRanksArgs) -> Iterator[Pointer]:
    size = 2 * args.ranks * args.capacity * args.x.shape[1] * 2  # [2, ranks, capacity, D] of two bytes
    for rank in range(args.ranks):
        yield Pointer("inbox", _abi.SumRanksArgs.inbox.offset + 8 * rank, args.inbox[rank], size)
    yield Pointer("gave_up", _abi.SumRanksArgs.gave_up.offset, args.gave_up, 4, host=True)


def _fields(struct: type[ctypes.Structure]) -> Iterator[tuple[str, Any]]:
    for kind in reversed(struct.__mro__):
        yield from ((field[0], field[1]) for field in vars(kind).get("_fields_", ()))


def ranges(found: Sequence[Pointer]) -> list[tuple[int, int, bool]]:
    """Begin, end and kind of the memory behind the pointers: what overlaps is one."""
    merged: list[tuple[int, int, bool]] = []
    for begin, end, host in sorted({(p.address, p.address + p.size, p.host) for p in found}):
        if merged and begin < merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]), host)
        else:
            merged.append((begin, end, host))
    return merged


def snapshot(memory: Memory, where: Sequence[tuple[int, int, bool]]) -> list[Bytes]:
    """What is in the ranges."""
    return [
        np.frombuffer(ctypes.string_at(begin, end - begin), np.uint8) if host else memory.read(begin, end - begin)
        for begin, end, host in where
    ]


def places(found: Sequence[Pointer], where: Sequence[tuple[int, int, bool]]) -> tuple[Place, ...]:
    """Of each pointer. An empty view may begin where another range ends: its own range comes last."""

    def place(pointer: Pointer) -> Place:
        end = pointer.address + pointer.size
        number = max(i for i, (b, e, _) in enumerate(where) if b <= pointer.address and end <= e)
        return Place(pointer.field, pointer.at, number, pointer.address - where[number][0])

    return tuple(place(pointer) for pointer in found)


def save(call: Call, path: Path) -> None:
    """Write the file; it is there as a whole or not at all."""
    head = {
        "test": call.test, "name": call.name, "kind": call.kind, "struct": call.struct.hex(), "sizes": call.sizes,
        "workspace_bytes": call.workspace_bytes, "leads": call.leads,
        "places": [asdict(place) for place in call.places],
    }  # fmt: skip
    arrays = {f"before{i}": values for i, values in enumerate(call.before)}
    arrays |= {f"after{i}": values for i, values in enumerate(call.after) if values is not None}
    written = path.with_suffix(".part")
    with written.open("wb") as file:
        np.savez(file, head=np.frombuffer(json.dumps(head).encode(), np.uint8), **arrays)
    written.rename(path)


def load(path: Path) -> Call:
    """Read it."""
    with np.load(path) as arrays:
        head = json.loads(arrays["head"].tobytes())
        count = len(head["leads"])
        before = tuple(arrays[f"before{i}"] for i in range(count))
        after = tuple(arrays.get(f"after{i}") for i in range(count))
    where = tuple(Place(**place) for place in head.pop("places"))
    struct, sizes, leads = bytes.fromhex(head.pop("struct")), tuple(head.pop("sizes")), tuple(head.pop("leads"))
    return Call(**head, struct=struct, sizes=sizes, places=where, leads=leads, before=before, after=after)
