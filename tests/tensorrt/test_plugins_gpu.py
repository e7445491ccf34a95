"""`enqueue` on a GPU beside the specification: the plugin's bits equal the C ABI's, which the twin compares with it.

The twin (tests/native/twin.py) drives the library through the C ABI and compares outputs and states with the float64
specification after every step. Its inputs are recorded; the C++ host then replays them through the plugin.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.layer_shapes import ssm_shape
from tests.native import harness
from tests.native.twin import Twin, torch_module
from tests.tensorrt import plugin_host
from tests.tensorrt.plugin_cases import PluginCase
from trtllm_replayssm.config import ReplayConfig
from trtllm_replayssm.ops import _abi
from trtllm_replayssm.shapes import SsmKind, SsmShape

REASON = harness.unavailable() or plugin_host.unavailable()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(REASON is not None, reason=str(REASON))]

PLUGIN = {SsmKind.MAMBA2: "Mamba2Replay", SsmKind.GDN: "GatedDeltaNetReplay"}
CURSORS = ("origin", "h", "position")
# The plugin's channel ranges by the projection they lie in; names of the C ABI in the order of the plugin's inputs.
PROJECTIONS = {
    SsmKind.MAMBA2: [("value", "k", "q"), ("dt",)],
    SsmKind.GDN: [("q", "k", "value"), ("log_decay", "beta")],
}
OFFSETS = {"value": {SsmKind.MAMBA2: "x_offset", SsmKind.GDN: "v_offset"}}
WEIGHTS = {SsmKind.MAMBA2: ("a", "skip"), SsmKind.GDN: ()}
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


def fields(shape: SsmShape, config: ReplayConfig) -> dict[str, int | float]:
    """The plugin's fields: float32 state (code 1), bfloat16 activations (code 3)."""
    values: dict[str, int | float] = {
        "heads": shape.heads, "groups": shape.groups, "head_dim": shape.head_dim, "state_dim": shape.state_dim,
    }  # fmt: skip
    values |= {"window": config.window, "max_step_tokens": config.max_step_tokens, "recurrence": 1, "rounding": 1}
    values |= {"read": 0, "layer": 0, "head_offset": 0, "activation": 3}
    widths = {"value": shape.heads * shape.head_dim, "k": shape.groups * shape.state_dim}
    widths["q"] = widths["k"]
    for projection in PROJECTIONS[shape.kind]:
        start = 0
        for name in projection:
            values[OFFSETS.get(name, {}).get(shape.kind, f"{name}_offset")] = start
            start += widths.get(name, shape.heads)
    return values


def dense_inputs(kind: SsmKind, rows: dict[str, Any]) -> list[Any]:
    """The inputs of one step up to the state: each channel range gets its whole projection."""
    torch = torch_module()
    inputs = []
    for projection in PROJECTIONS[kind]:
        joined = torch.cat([rows[name].flatten(2) for name in projection], dim=-1)
        inputs += [joined] * len(projection)
    unused = torch.zeros_like(rows["slot"])
    inputs += [rows["slot"], rows["num_tokens"], unused, unused, unused[:1]]  # row_flags, carry_index, phase
    return inputs + [rows[name] for name in (*CURSORS, "seed", *WEIGHTS[kind])]


@pytest.mark.parametrize("tokens", [1, 4])
@pytest.mark.parametrize("kind", list(PLUGIN))
def test_the_plugin_writes_the_bits_of_the_native_library(
    kind: SsmKind, tokens: int, gpu_host: Path, tmp_path: Path
) -> None:
    torch = torch_module()
    shape = ssm_shape(kind, heads=8, groups=2, head_dim=64 if kind is SsmKind.MAMBA2 else 128, state_dim=128)
    config = ReplayConfig(window=8, max_step_tokens=tokens)
    twin = Twin(_abi.Library(harness.LIBRARY), shape, config, "bfloat16", slots=5)
    pool = RecordingPool(shape, config, 5, twin.dtype, twin.pool.native)
    twin.pool = pool
    for slot, origin in ((0, 0), (2, 6), (4, 3)):
        twin.admit(slot, origin)
    for step in range(20):
        counts = [tokens, tokens, 0 if step % 5 == 0 else 1, tokens]
        twin.step([4, -1, 0, 2], counts, [max(1, count - step % 3) if count else 0 for count in counts], tokens)
    carry = torch.zeros((1, shape.heads, shape.head_dim, shape.state_dim), device=pool.device)  # untouched by steps
    start = [*(pool.start[name] for name in STATE[kind]), carry]
    steps = [dense_inputs(kind, rows) for rows, _ in pool.steps]
    results = [(torch.bfloat16, shape.heads * shape.head_dim)]
    case = PluginCase(PLUGIN[kind], fields(shape, config), steps, start, results)
    outputs = [out for _, out in pool.steps]
    case.check(gpu_host, tmp_path, outputs, [*(pool.tensors[name] for name in STATE[kind]), carry])
