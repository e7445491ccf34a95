"""Plugins one after the other on a GPU as in an engine, also as one CUDA graph, beside the same calls of the C ABI.

Oracle O4, bit for bit: the C ABI's own calls, which tests/native compares with the specification. The cursors move on
the device: a replay begins where the one before it left them, and nothing but its inputs is set in between.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.native import harness
from tests.tensorrt import plugin_host
from trtllm_replayssm.config import ReplayConfig
from trtllm_replayssm.dtypes import StateFormat
from trtllm_replayssm.ops import _abi
from trtllm_replayssm.shapes import SsmKind

REASON = harness.unavailable() or plugin_host.unavailable()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(REASON is not None, reason=str(REASON))]

if REASON is None:
    import torch
    from torch import Tensor

    from tests.tensorrt.plugin_cases import Call, PluginProgram
    from tests.tensorrt.replay_layer import SLOTS, RecordedLayer, conv_fields, convolved

FP32, FP16, FP4 = StateFormat.FLOAT32, StateFormat.FLOAT16, StateFormat.NVFP4
CURSORS, TOKENS, OFFSET, STEPS = ("origin", "h", "position"), 4, 16, 12
ROWS = ("slot", "num_tokens", "row_flags", "carry_index", "phase")
GIVEN = ("x", "rates", *ROWS, "accepted")


class WholeStep:
    """A layer's convolution, recurrence and commit, called in turn; what each step was given and gave."""

    def __init__(self, layer: RecordedLayer) -> None:
        self.layer = layer
        self.window = layer.normal(SLOTS, 3 + TOKENS, layer.channels).to(layer.act)
        self.weight, self.bias = 0.5 * layer.normal(layer.channels, 1, 4), layer.normal(layer.channels)
        self.steps: list[dict[str, Tensor]] = []
        self.start = {"weight": self.weight, "bias": self.bias, "a": layer.a, "skip": layer.skip}
        self.start |= {name: tensor.clone() for name, tensor in self.state().items()}
        self.start["seed"] = layer.cursors.seed

    def state(self) -> dict[str, Tensor]:
        """All that the plugins change."""
        layer = self.layer
        cursors = {name: getattr(layer.cursors, name) for name in CURSORS}
        return {"window": self.window, **{f"state {i}": t for i, t in enumerate(layer.memory())}, **cursors}

    def names(self) -> list[str]:
        """Of the recurrence's inputs up to its state."""
        rates = ["rates"] * (2 if self.layer.gdn else 1)
        weights = [] if self.layer.gdn else ["a", "skip"]
        return ["mixed"] * 3 + rates + [*ROWS, *CURSORS, "seed", *weights]

    def step(self, slots: list[int], counts: list[int], accepted: list[int]) -> None:
        layer, native = self.layer, self.layer.native
        given = {"slot": slots, "num_tokens": counts, "accepted": accepted}
        rows = {name: torch.tensor(values, dtype=torch.int32, device="cuda") for name, values in given.items()}
        x = layer.normal(len(slots), TOKENS, OFFSET + layer.channels).to(layer.act)
        parts = {"x": x, **rows, **self.state(), "weight": self.weight, "bias": self.bias}
        layer.call(slots, counts, TOKENS, mixed=convolved(native, parts, OFFSET, prompt=False))
        recorded = dict(zip(self.names(), layer.steps[-1], strict=True))
        self.steps.append({name: {"x": x, **recorded, **rows}[name] for name in GIVEN})
        views = {n: harness.view(t) for n, t in rows.items()}
        views |= {name: harness.view(getattr(layer.cursors, name)) for name in CURSORS}
        config = layer.config
        native.commit(
            _abi.CommitArgs(window=config.window, ring_rows=config.ring_rows, **views), harness.Pool._stream()
        )

    def program(self) -> PluginProgram:
        layer = self.layer
        state = [name for name in self.state() if name.startswith("state")]
        conv = ["x", "slot", "num_tokens", "phase", "position", "weight", "bias", "window"]
        commit = ["out", "slot", "num_tokens", "accepted", "phase", *CURSORS]
        case, _, _ = layer.case()
        limits: dict[str, int | float] = {"window": layer.config.window, "max_step_tokens": TOKENS}
        calls = [
            Call("CausalConv1dReplay", conv_fields(layer.channels, OFFSET), conv, ["window"], ["mixed"]),
            Call(case.plugin, case.fields, [*self.names(), *state], state, ["out"]),
            Call("ReplayCommit", limits, commit, [*CURSORS], []),
        ]
        rows = self.steps[0]["x"].shape[0]
        between = {
            "mixed": torch.empty(rows, TOKENS, layer.channels, dtype=layer.act),
            "out": torch.empty(rows, TOKENS, layer.shape.inner, dtype=layer.act),
        }
        return PluginProgram(calls, self.start, between, self.steps, ["out"], [*self.state()])


@pytest.mark.parametrize(("recurrence", "read"), [(FP32, None), (FP32, FP4), (FP16, None)], ids=str)
@pytest.mark.parametrize("kind", SsmKind)
def test_whole_steps_of_a_layer(
    kind: SsmKind, recurrence: StateFormat, read: StateFormat | None, library: _abi.Library, gpu_host: Path,
    tmp_path: Path,
) -> None:  # fmt: skip
    """Several windows: rows that move, drafts of uneven length, rejections, flushes, padding, rows without tokens."""
    config = ReplayConfig(window=8, max_step_tokens=TOKENS, recurrence=recurrence, read=read)
    whole = WholeStep(RecordedLayer(library, kind, config))
    for step in range(STEPS):
        slots = [(row + step) % SLOTS for row in range(3)]
        slots.insert(step % 4, -1)
        counts = [(step + 3 * row) % (TOKENS + 1) for row in range(4)]
        whole.step(slots, counts, [max(count - step % 3, min(count, 1)) for count in counts])
    moved = whole.start["position"] != whole.layer.cursors.position
    assert bool(moved.all())
    whole.program().check(gpu_host, tmp_path, whole.layer.outputs, [*whole.state().values()])
