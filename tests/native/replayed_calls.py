"""Repeats recorded calls of the native library, a JSON line for each as it ends: what compute-sanitizer watches.

    compute-sanitizer --tool memcheck python -m tests.native.replayed_calls CALLS --tool memcheck --claims C --results R

Processes with the same --claims share the calls. A call's memory is laid out anew, and what it changed is compared, bit
for bit, with what it changed when it was recorded. For initcheck, what is only written is not laid out: reading it is
a finding. A process ends at a call that fails, which may have lost it the device, and when --seconds are over.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np

from tests.native import harness
from tests.native.calls import WORKSPACE, Call, load
from tests.native.claimed_tests import claim
from tests.native.device_memory import Device, DriverError, Memory
from trtllm_replayssm.errors import ReplaySSMError
from trtllm_replayssm.ops import _abi

ORDER = "order.txt"  # beside the calls: their names, a line each, as they are to be taken
MARK = "CALL "  # begins a line of the log: what follows is this call's
INITIALISED, KERNELS = "initcheck", "kernels"
NAMESPACE = "replayssm"
_OUTPUTS = {"out", "sum", "q_out", "decay_out", "beta_out", "recovered", "end", "emitted", "report"}  # never read
_OUTPUTS_OF = {
    "rssm_draw": {"tokens", "finite"}, "rssm_route": {"ids", "weights"}, "rssm_state_export": {"state"},
    "rssm_step_inputs": {"ids", "num_tokens", "row"},
}  # fmt: skip
_ZEROED = ("rssm_update", "rssm_decay_skip_update")  # their workspace means something; others' does not
Native = Callable[..., None]


def unread(call: Call, buffer: int) -> bool:
    """Whether the call must not read the buffer before it has written it."""
    fields = call.fields_of(buffer)
    if fields == {WORKSPACE}:
        return call.name not in _ZEROED
    return bool(fields) and fields <= _OUTPUTS | _OUTPUTS_OF.get(call.name, set())


def replay(call: Call, native: Native, memory: Memory, stream: int, *, bare: bool) -> list[str]:
    """The call once more: `field: bytes that differ` of each buffer that came out in another way; [] is right.

    native(name, byref(struct), ...): makes a call. bare: what the call must not read is left as it was allocated, and
    is not compared.
    """
    addresses = [
        memory.allocate(max(lead + values.size, 1)) for lead, values in zip(call.leads, call.before, strict=True)
    ]
    starts = [address + lead for address, lead in zip(addresses, call.leads, strict=True)]
    left = {buffer for buffer in range(len(starts)) if bare and unread(call, buffer)}
    try:
        for buffer, values in enumerate(call.before):
            if buffer not in left:
                memory.write(starts[buffer], values)
        memory.wait()
        native(call.name, *arguments(call, starts), ctypes.c_void_p(stream))
        memory.wait()
        compared = [buffer for buffer in range(len(starts)) if buffer not in left]
        sizes = [values.size for values in call.before]
        return [line for i in compared for line in difference(call, i, memory.read(starts[i], sizes[i]))]
    finally:
        for address in addresses:
            memory.free(address)


def arguments(call: Call, starts: Sequence[int]) -> list[Any]:
    """The call's arguments but for the stream, over buffers that start there."""
    struct = bytearray(call.struct)
    workspace: int | None = None
    for place in call.places:
        address = starts[place.buffer] + place.offset
        if place.at >= 0:
            struct[place.at : place.at + 8] = address.to_bytes(8, "little")
        else:
            workspace = address
    args = getattr(_abi, call.kind).from_buffer(struct)
    memory = [] if call.workspace_bytes is None else [ctypes.c_void_p(workspace), ctypes.c_size_t(call.workspace_bytes)]
    return [ctypes.byref(args), *map(ctypes.c_int32, call.sizes), *memory]


def difference(call: Call, buffer: int, values: Any) -> list[str]:
    """Says where the buffer is another than it was; workspaces may be anything."""
    fields, expected = call.fields_of(buffer), call.after[buffer]
    wrong = int(np.count_nonzero(values != (call.before[buffer] if expected is None else expected)))
    return [] if wrong == 0 or fields == {WORKSPACE} else [f"{', '.join(sorted(fields))}: {wrong} of {values.size}"]


def in_order(calls: Path) -> list[Path]:
    """The files as they are to be taken; any order where none is written."""
    order = calls / ORDER
    if not order.exists():
        return sorted(calls.glob("*.npz"))
    return [calls / f"{name}.npz" for name in order.read_text(encoding="utf-8").split()]


def profiled(names: list[str]) -> AbstractContextManager[Any]:
    """Adds the kernels of the library that run meanwhile."""
    import torch

    def take(profiler: Any) -> None:
        events = profiler.profiler.kineto_results.events()
        names.extend(sorted({event.name() for event in events if NAMESPACE in event.name()}))

    return torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], on_trace_ready=take)


def main(given: Sequence[str] | None = None) -> int:
    """0: all calls were taken, 3: a call failed, 4: the time was over."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("calls", type=Path, help="folder of the recorded calls")
    parser.add_argument("--tool", required=True, help="which tool watches; `kernels`: torch's profiler does")
    parser.add_argument("--claims", type=Path, required=True)
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=3600.0)
    options = parser.parse_args(given)
    until = time.monotonic() + options.seconds
    memory, library = Device(), _abi.Library(harness.LIBRARY)
    stream = memory.stream()
    with options.results.open("a", encoding="utf-8") as results:
        for path in in_order(options.calls):
            if time.monotonic() >= until:
                return 4
            if not claim(options.claims, path.stem):
                continue
            print(f"{MARK}{path.stem}", flush=True)
            began, call, names = time.monotonic(), load(path), list[str]()
            try:
                with profiled(names) if options.tool == KERNELS else nullcontext():
                    wrong = replay(call, library._call, memory, stream, bare=options.tool == INITIALISED)
                row = {"outcome": "differs" if wrong else "equal", "why": wrong}
            except (DriverError, ReplaySSMError) as error:
                row = {"outcome": "failed", "why": [str(error)]}
            took = {"seconds": round(time.monotonic() - began, 3)}
            head = {"call": path.stem, "test": call.test, "name": call.name}
            results.write(json.dumps({**head, **row, **took} | ({"kernels": names} if names else {})) + "\n")
            results.flush()
            if row["outcome"] == "failed":
                return 3
    return 0


if __name__ == "__main__":
    sys.exit(main())
