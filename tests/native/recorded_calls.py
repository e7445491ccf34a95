"""A pytest plugin: the native calls of the tests go into files, with their memory before and after (see calls.py).

REPLAYSSM_CALLS names the folder. Of a test's calls with the same sizes the first four and every sixteenth are kept,
since windows are of sixteen records: some flush. Calls that a graph collects, and those over more than MAX_BYTES, are
not; `left_out.jsonl` has a line for each of those sizes.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.native.calls import ALIGNMENT, WORKSPACE, Call, Pointer, places, pointers, ranges, save, snapshot
from tests.native.device_memory import Device, DriverError, Memory
from trtllm_replayssm.ops import _abi

FOLDER = "REPLAYSSM_CALLS"
LEFT_OUT = "left_out.jsonl"
FIRST, EVERY, LAST = 4, 16, 64
MAX_BYTES = 96 << 20
_NO_LAUNCH = ("_workspace", "_text", "_plan")
Native = Callable[..., None]


class Recorder:
    """Stands before the library's calls. open_memory: the memory of the tensors, once there is any."""

    def __init__(self, folder: Path, open_memory: Callable[[], Memory]) -> None:
        self._folder, self._open, self._memory = folder, open_memory, None
        self._seen: Counter[str] = Counter()
        self.test = ""

    def call(self, native: Native, library: Any, name: str, *arguments: Any) -> None:
        """Make the call `native(library, name, ...)`, and keep it."""
        if name.endswith(_NO_LAUNCH):
            native(library, name, *arguments)
            return
        memory = self._memory = self._memory or self._open()
        if memory.recording(arguments[-1].value or 0):
            native(library, name, *arguments)
            return
        args, found, sizes, workspace_bytes = _parts(arguments)
        key = _key(self.test, name, args, found, sizes)
        number = self._seen[key]
        self._seen[key] += 1
        if number >= FIRST and (number % EVERY != 0 or number > LAST):
            native(library, name, *arguments)
            return
        where = ranges(found)
        if sum(end - begin for begin, end, _ in where) > MAX_BYTES:
            native(library, name, *arguments)
            if number == 0:
                self._leave_out(name)
            return
        memory.wait()
        try:
            before = snapshot(memory, where)
        except DriverError:  # pointers that the library refuses
            native(library, name, *arguments)
            return
        native(library, name, *arguments)
        memory.wait()
        after = snapshot(memory, where)
        changed = tuple(None if np.array_equal(old, new) else new for old, new in zip(before, after, strict=True))
        leads = tuple(begin % ALIGNMENT for begin, _, _ in where)
        call = Call(
            test=self.test, name=name, kind=type(args).__name__, struct=bytes(args), sizes=sizes,
            workspace_bytes=workspace_bytes, places=places(found, where), leads=leads, before=tuple(before),
            after=changed,
        )  # fmt: skip
        save(call, self._folder / f"{key}.{number:02d}.npz")

    def _leave_out(self, name: str) -> None:
        with (self._folder / LEFT_OUT).open("a", encoding="utf-8") as lines:
            lines.write(json.dumps({"test": self.test, "name": name}) + "\n")

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """The calls are this test's from now on."""
        self.test = item.nodeid


def _parts(arguments: tuple[Any, ...]) -> tuple[ctypes.Structure, list[Pointer], tuple[int, ...], int | None]:
    """The struct, all pointers, the int32 behind it and the workspace's bytes of (byref(struct), int32..., workspace,
    bytes, stream).
    """
    args = arguments[0]._obj
    found = list(pointers(args))
    sizes = tuple(a.value for a in arguments if isinstance(a, ctypes.c_int32))
    if not isinstance(arguments[-2], ctypes.c_size_t):
        return args, found, sizes, None
    if arguments[-3].value:
        found.append(Pointer(WORKSPACE, -1, arguments[-3].value, arguments[-2].value))
    return args, found, sizes, arguments[-2].value


def _key(test: str, name: str, args: ctypes.Structure, found: list[Pointer], sizes: tuple[int, ...]) -> str:
    """The same for the same test and sizes: addresses count as far as they are aligned."""
    struct = bytearray(bytes(args))
    for pointer in found:
        if pointer.at >= 0:
            struct[pointer.at : pointer.at + 8] = (pointer.address % ALIGNMENT).to_bytes(8, "little")
    said = f"{test} {name} {sizes} {[(p.field, p.size) for p in found]}".encode()
    return hashlib.sha256(said + bytes(struct)).hexdigest()[:20]


def pytest_configure(config: pytest.Config) -> None:
    """Stand before the library for the whole run."""
    recorder = Recorder(Path(os.environ[FOLDER]), Device)
    native = _abi.Library._call

    def call(library: Any, name: str, *arguments: Any) -> None:
        recorder.call(native, library, name, *arguments)

    patch = pytest.MonkeyPatch()
    patch.setattr(_abi.Library, "_call", call)
    config.add_cleanup(patch.undo)
    config.pluginmanager.register(recorder)
