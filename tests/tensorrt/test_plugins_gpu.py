"""`enqueue` on a GPU beside the specification: the plugin's bits equal the C ABI's, which the twin compares with it.

The twin (tests/native/twin.py) drives the library through the C ABI and compares outputs and states with the float64
specification after every step. Its inputs are recorded; the C++ host then replays them through the plugin.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import pytest

from tests.native import harness
from tests.native.twin import Twin, torch_module
from tests.tensorrt import plugin_host
from trtllm_replayssm.config import ReplayConfig
from trtllm_replayssm.ops import _abi
from trtllm_replayssm.shapes import SsmKind

REASON = harness.unavailable() or plugin_host.unavailable()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(REASON is not None, reason=str(REASON))]

PLUGIN = {SsmKind.MAMBA2: "Mamba2Replay", SsmKind.GDN: "GatedDeltaNetReplay"}
CURSORS = ("origin", "h", "position")
ROWS = {
    SsmKind.MAMBA2: ("value", "k", "q", "dt", "a", "skip"),
    SsmKind.GDN: ("value", "k", "q", "log_decay", "beta"),
}
STATE = {
    SsmKind.MAMBA2: ("checkpoint", "ring_value", "ring_k", "ring_dt"),
    SsmKind.GDN: ("checkpoint", "ring_value", "ring_k", "ring_dt", "ring_key_factor"),
}


class RecordingPool(harness.Pool):
    """A pool that keeps what every update read and what it answered."""

    start: dict[str, Any]
    steps: list[tuple[dict[str, Any], Any]]

    def update(self, rows: dict[str, Any], out: Any, flags: int = 0) -> None:
        torch = torch_module()
        if not hasattr(self, "steps"):
            self.start, self.steps = {name: t.clone() for name, t in self.tensors.items()}, []
        seed = torch.zeros(self.slots, dtype=torch.int64, device=self.device)
        read = {**rows, **{name: self.tensors[name] for name in CURSORS}, "seed": seed}
        kept = {name: t.clone().contiguous() for name, t in read.items()}
        super().update(rows, out, flags)
        self.steps.append((kept, out.clone()))


def raw(tensor: Any) -> bytes:
    torch = torch_module()
    return bytes(tensor.contiguous().cpu().view(torch.uint8).numpy().tobytes())


def type_code(tensor: Any) -> int:
    """nvinfer1::DataType of a tensor."""
    torch = torch_module()
    codes = {torch.float32: 0, torch.float16: 1, torch.int32: 3, torch.bfloat16: 7, torch.int64: 8}
    return codes[tensor.dtype]


def text(value: str) -> bytes:
    return struct.pack("<i", len(value)) + value.encode()


def write_case(path: Path, kind: SsmKind, config: ReplayConfig, act: str, pool: RecordingPool) -> None:
    """The file that tests/tensorrt/host/device.cpp reads."""
    numbers = {"window": config.window, "max_step_tokens": config.max_step_tokens, "layer": 0, "head_offset": 0}
    words = {"activation": act, "recurrence": "float32", "read": "none"}
    out = struct.pack("<i", len(numbers) + len(words))
    for name, number in numbers.items():
        out += text(name) + struct.pack("<ii", 0, number)
    for name, word in words.items():
        out += text(name) + struct.pack("<i", 1) + text(word)
    first = pool.steps[0][0]
    dense = ["slot", "num_tokens", *CURSORS, "seed", *ROWS[kind]]
    tensors = [(first[name], 0) for name in dense] + [(pool.start[name], 1) for name in STATE[kind]]
    out += struct.pack("<i", len(tensors))
    for tensor, in_place in tensors:
        out += struct.pack(f"<iii{tensor.dim()}q", type_code(tensor), in_place, tensor.dim(), *tensor.shape)
    out += struct.pack("<ii", 6, len(pool.steps))
    out += b"".join(raw(pool.start[name]) for name in STATE[kind])
    out += b"".join(raw(rows[name]) for rows, _ in pool.steps for name in dense)
    path.write_bytes(out)


@pytest.mark.parametrize("tokens", [1, 4])
@pytest.mark.parametrize("kind", list(PLUGIN))
def test_the_plugin_writes_the_bits_of_the_native_library(kind: SsmKind, tokens: int, tmp_path: Path) -> None:
    version = plugin_host.headers()[0]
    host = plugin_host.build(tmp_path, version)
    shape = harness.ssm_shape(kind, heads=8, groups=2, head_dim=64 if kind is SsmKind.MAMBA2 else 128, state_dim=128)
    config = ReplayConfig(window=8, max_step_tokens=tokens)
    twin = Twin(_abi.Library(harness.LIBRARY), shape, config, "bfloat16", slots=5)
    pool = RecordingPool(shape, config, 5, twin.dtype, twin.pool.native)
    twin.pool = pool
    for slot, origin in ((0, 0), (2, 6), (4, 3)):
        twin.admit(slot, origin)
    for step in range(20):
        counts = [tokens, tokens, 0 if step % 5 == 0 else 1, tokens]
        twin.step([4, -1, 0, 2], counts, [max(1, count - step % 3) if count else 0 for count in counts], tokens)
    case = tmp_path / "case"
    write_case(case, kind, config, "bfloat16", pool)
    lean = plugin_host.lean_libraries(version.major)
    plugin_host.run(host, "--run", PLUGIN[kind], str(case), *map(str, lean[:1]))
    written = Path(f"{case}.out").read_bytes()
    expected = b"".join(raw(out) for _, out in pool.steps) + b"".join(raw(pool.tensors[name]) for name in STATE[kind])
    assert len(written) == len(expected)
    assert written == expected
