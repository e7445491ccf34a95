"""`enqueue` on a GPU in every form beside the C ABI, bit for bit: narrow states, prompts, convolution, commit, padded
rows, rows without tokens, empty batches; each launched directly and as a replayed CUDA graph.

Oracle O4: the C ABI's own calls, which tests/native compares with the specification. Cursors differ from step to step,
so that a graph that kept a value of its capture would show.
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

    from tests.tensorrt.plugin_cases import PluginCase
    from tests.tensorrt.replay_layer import RecordedLayer, conv_fields, convolved

FP32, FP16, FP8, FP4 = StateFormat.FLOAT32, StateFormat.FLOAT16, StateFormat.FP8, StateFormat.NVFP4
NARROW = [
    (FP32, FP16), (FP32, FP8), (FP32, FP4), (FP16, None), (FP16, FP8), (FP16, FP4), (FP8, None), (FP8, FP4),
]  # fmt: skip
FROM_ZERO, FROM_CARRY, TO_CARRY = 1, 2, 4


def ints(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device="cuda")


@pytest.mark.parametrize("tokens", [1, 4])
@pytest.mark.parametrize(("recurrence", "read"), NARROW, ids=str)
@pytest.mark.parametrize("kind", SsmKind)
def test_steps_over_narrow_states(
    kind: SsmKind, recurrence: StateFormat, read: StateFormat | None, tokens: int, library: _abi.Library,
    gpu_host: Path, tmp_path: Path,
) -> None:  # fmt: skip
    """Rows that flush beside rows that do not; the cursors move between the steps."""
    config = ReplayConfig(window=8, max_step_tokens=tokens, recurrence=recurrence, read=read)
    layer = RecordedLayer(library, kind, config)
    for counts in ([tokens, tokens, 0, 1], [1, tokens, tokens, tokens], [tokens] * 4):
        layer.call([4, -1, 0, 3], counts, tokens)
        layer.cursors.h.copy_(ints([tokens, 3, 7, 0, 1 + tokens]))
        layer.cursors.origin[3] = 13 % config.ring_rows
        layer.cursors.position += tokens
    case, outputs, state = layer.case()
    case.check(gpu_host, tmp_path, outputs, state)


@pytest.mark.parametrize(("recurrence", "read"), [(FP32, None), (FP32, FP4), (FP16, None), (FP8, None)], ids=str)
@pytest.mark.parametrize("kind", SsmKind)
def test_prompt_chunks(
    kind: SsmKind, recurrence: StateFormat, read: StateFormat | None, library: _abi.Library, gpu_host: Path,
    tmp_path: Path,
) -> None:  # fmt: skip
    """A first chunk into the carry and its last, a whole prompt, one over pending records, padding, an empty row."""
    layer = RecordedLayer(library, kind, ReplayConfig(window=8, max_step_tokens=4, recurrence=recurrence, read=read))
    layer.call([0, 4, -1, 3], [70, 70, 70, 0], 70, flags=[FROM_ZERO | TO_CARRY, 0, 0, 0])
    layer.cursors.position.copy_(ints([70, 90, 123456, 31, 72]))
    layer.cursors.h[4] = layer.cursors.origin[4] = 0
    layer.call([0, 1, -1, 2], [33, 64, 7, 70], 70, flags=[FROM_CARRY, FROM_ZERO, 0, 0])
    case, outputs, state = layer.case()
    case.check(gpu_host, tmp_path, outputs, state)


@pytest.mark.parametrize(("rows", "tokens", "prompt"), [(0, 1, False), (3, 0, False), (0, 70, True), (2, 0, True)])
@pytest.mark.parametrize("kind", SsmKind)
def test_empty_steps_leave_every_state(
    kind: SsmKind, rows: int, tokens: int, prompt: bool, library: _abi.Library, gpu_host: Path, tmp_path: Path
) -> None:
    layer = RecordedLayer(library, kind, ReplayConfig(window=8, max_step_tokens=4))
    before = [tensor.clone() for tensor in layer.memory()]
    layer.call(list(range(rows)), [0] * rows, tokens, flags=[0] * rows if prompt else None)
    case, outputs, _ = layer.case()
    case.check(gpu_host, tmp_path, outputs, before)


@pytest.mark.parametrize("activation", ["bfloat16", "float16"])
@pytest.mark.parametrize("prompt", [False, True])
def test_the_convolution(prompt: bool, activation: str, library: _abi.Library, gpu_host: Path, tmp_path: Path) -> None:
    act: torch.dtype = getattr(torch, activation)
    channels, kernel, tokens, slots = 96, 4, 4, 5
    width, offset = (40, 16) if prompt else (tokens, 16)
    random = torch.Generator("cuda").manual_seed(1)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=random, device="cuda")

    window = normal(slots, kernel - 1 + tokens, channels).to(act)
    weight, bias, start = normal(channels, 1, kernel), normal(channels), window.clone()
    position, steps, outputs = ints([0, 3, 90, 31, 2]), [], []
    for counts in ([width, width, 0, 1], [1, width, width, width - 1]):
        x, slot, count = normal(4, width, offset + channels).to(act), ints([4, -1, 0, 3]), ints(counts)
        steps.append([x, slot, count, ints([0] * (1 + prompt)), position.clone(), weight, bias])
        tensors = {"x": x, "slot": slot, "num_tokens": count, "position": position}
        tensors |= {"weight": weight, "bias": bias, "window": window}
        outputs.append(convolved(library, tensors, offset, prompt=prompt))
        position += ints([counts[2], 0, 0, counts[3], counts[0]])
    case = PluginCase("CausalConv1dReplay", conv_fields(channels, offset, act), steps, [start], [(act, channels)])
    case.check(gpu_host, tmp_path, outputs, [window])


@pytest.mark.parametrize("phase", [1, 2], ids=["step", "prompt"])
@pytest.mark.parametrize(("rows", "tokens"), [(0, 1), (3, 0)])
def test_an_empty_step_moves_no_window_and_no_cursor(
    rows: int, tokens: int, phase: int, gpu_host: Path, tmp_path: Path
) -> None:
    slot, none, kind = ints([*range(rows)]), ints([0] * rows), ints([0] * phase)
    weight, bias, window = torch.ones(96, 1, 4), torch.ones(96), torch.ones(5, 7, 96).bfloat16()
    x, position = torch.ones(rows, tokens, 112).bfloat16(), ints([0, 3, 90, 31, 2])
    step, result = [x, slot, none, kind, position, weight, bias], (torch.bfloat16, 96)
    case = PluginCase("CausalConv1dReplay", conv_fields(96, 16), [step], [window], [result])
    case.check(gpu_host, tmp_path, [], [window])
    cursors = [ints([0, 3, 8, 5, 1]), ints([0, 3, 7, 8, 1]), position]
    step = [x, slot, none, none, kind]
    case = PluginCase("ReplayCommit", {"window": 8, "max_step_tokens": 4}, [step], cursors, [])
    case.check(gpu_host, tmp_path, [], cursors)


@pytest.mark.parametrize("prompt", [False, True])
def test_the_commit(prompt: bool, library: _abi.Library, gpu_host: Path, tmp_path: Path) -> None:
    """Rows that flushed and rows that did not, rejected tokens, padding; after a prompt all records are gone."""
    window, tokens, width = 8, 4, 40 if prompt else 4
    cursors = {"origin": ints([0, 3, 8, 5, 1]), "h": ints([0, 3, 7, 8, 1]), "position": ints([0, 90, 1234, 31, 2])}
    start, steps = [tensor.clone() for tensor in cursors.values()], []
    for counts, accepted in (([4, 4, 3, 0], [2, 4, 3, 0]), ([1, 4, 4, 4], [1, 0, 4, 0])):
        slot, count, kept = ints([4, -1, 2, 3]), ints(counts), ints(accepted)
        steps.append([torch.zeros(4, width, 16, dtype=torch.bfloat16), slot, count, kept, ints([0] * (1 + prompt))])
        views = {n: harness.view(t) for n, t in {**cursors, "slot": slot, "num_tokens": count}.items()}
        if prompt:
            library.prefill_commit(_abi.PrefillCommitArgs(max_tokens=width, **views), harness.Pool._stream())
        else:
            step = _abi.CommitArgs(window=window, ring_rows=window + tokens, accepted=harness.view(kept), **views)
            library.commit(step, harness.Pool._stream())
    assert any(not torch.equal(x, y) for x, y in zip(start, cursors.values(), strict=True))
    case = PluginCase("ReplayCommit", {"window": window, "max_step_tokens": tokens}, steps, start, [])
    case.check(gpu_host, tmp_path, [], list(cursors.values()))
