"""The recurrences' `enqueue` on a GPU at further shapes beside the C ABI, bit for bit: batches that are dealt out by a
counter in the workspace, float16 activations, heads of 80, the heads of one of several ranks.

Oracle O4: the C ABI's own calls, which tests/native compares with the specification.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.native import harness
from tests.tensorrt import plugin_host
from trtllm_replayssm.config import ReplayConfig
from trtllm_replayssm.dtypes import StateFormat
from trtllm_replayssm.launches import UpdateKernel
from trtllm_replayssm.ops import _abi
from trtllm_replayssm.shapes import SsmKind

REASON = harness.unavailable() or plugin_host.unavailable()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(REASON is not None, reason=str(REASON))]

if REASON is None:
    import torch

    from tests.tensorrt.replay_layer import RecordedLayer

FP32, FP16, FP8, FP4 = StateFormat.FLOAT32, StateFormat.FLOAT16, StateFormat.FP8, StateFormat.NVFP4
FROM_ZERO, TO_CARRY = 1, 4  # of a prompt's rows


def steps(layer: RecordedLayer, rows: list[int], tokens: int) -> None:
    """Three steps whose rows turn round; lengths, and cursors between the steps, are uneven."""
    for turn in range(3):
        layer.call(rows[turn:] + rows[:turn], [(row + turn) % (tokens + 1) for row in range(len(rows))], tokens)
        layer.cursors.h.add_(turn + 1).remainder_(layer.config.window + 1)
        layer.cursors.origin.add_(5).remainder_(layer.config.ring_rows)
        layer.cursors.position.add_(tokens)


@pytest.mark.parametrize("tokens", [1, 4])
@pytest.mark.parametrize("kind", SsmKind)
def test_large_batches(kind: SsmKind, tokens: int, library: _abi.Library, gpu_host: Path, tmp_path: Path) -> None:
    """The plugin clears the counter in its workspace, which starts as garbage, also in every replay of a graph."""
    config = ReplayConfig(window=8, max_step_tokens=tokens)
    layer = RecordedLayer(library, kind, config, heads=8 if kind is SsmKind.GDN else 16, slots=50)
    steps(layer, [*range(49, 2, -1), -1], tokens)
    assert all(plan.kernel == UpdateKernel.STREAMED and plan.pieces > 0 for plan in layer.plans)
    case, outputs, state = layer.case()
    case.check(gpu_host, tmp_path, outputs, state)


@pytest.mark.parametrize("tokens", [1, 4])
@pytest.mark.parametrize(("recurrence", "read"), [(FP32, None), (FP32, FP4), (FP16, None), (FP8, None)], ids=str)
@pytest.mark.parametrize("kind", SsmKind)
def test_float16_activations(
    kind: SsmKind, recurrence: StateFormat, read: StateFormat | None, tokens: int, library: _abi.Library,
    gpu_host: Path, tmp_path: Path,
) -> None:  # fmt: skip
    config = ReplayConfig(window=8, max_step_tokens=tokens, recurrence=recurrence, read=read)
    layer = RecordedLayer(library, kind, config, act=torch.float16)
    steps(layer, [4, -1, 0, 3], tokens)
    case, outputs, state = layer.case()
    case.check(gpu_host, tmp_path, outputs, state)


@pytest.mark.parametrize("kind", SsmKind)
def test_float16_prompts(kind: SsmKind, library: _abi.Library, gpu_host: Path, tmp_path: Path) -> None:
    layer = RecordedLayer(library, kind, ReplayConfig(window=8, max_step_tokens=4), act=torch.float16)
    layer.call([1, -1, 2, 4], [33, 8, 70, 0], 70, flags=[FROM_ZERO, 0, FROM_ZERO | TO_CARRY, 0])
    case, outputs, state = layer.case()
    case.check(gpu_host, tmp_path, outputs, state)


@pytest.mark.parametrize("tokens", [1, 4])
@pytest.mark.parametrize(("recurrence", "read"), [(FP32, None), (FP32, FP8), (FP16, FP4)], ids=str)
def test_heads_of_80(
    recurrence: StateFormat, read: StateFormat | None, tokens: int, library: _abi.Library, gpu_host: Path,
    tmp_path: Path,
) -> None:  # fmt: skip
    """Those of Nemotron-3-Nano-4B."""
    config = ReplayConfig(window=8, max_step_tokens=tokens, recurrence=recurrence, read=read)
    layer = RecordedLayer(library, SsmKind.MAMBA2, config, head_dim=80)
    steps(layer, [4, -1, 0, 3], tokens)
    case, outputs, state = layer.case()
    case.check(gpu_host, tmp_path, outputs, state)


@pytest.mark.parametrize("kind", SsmKind)
def test_a_ranks_heads_have_roundings_of_their_own(
    kind: SsmKind, library: _abi.Library, gpu_host: Path, tmp_path: Path
) -> None:
    config = ReplayConfig(window=8, max_step_tokens=4, recurrence=FP16)
    layers = [RecordedLayer(library, kind, config, head_offset=heads) for heads in (0, 8)]
    for layer in layers:
        steps(layer, [4, -1, 0, 3], 4)
    first, second = (layer.state.checkpoint.data for layer in layers)
    assert not torch.equal(first, second), "no flush drew anything"
    case, outputs, state = layers[1].case()
    case.check(gpu_host, tmp_path, outputs, state)
