"""The native convolution over its rolling window: the specification, rollback, chunks, splits, alignment, graphs.

Oracles: spec/conv1d.py (float64) for values, bits for windows and for splits of the same tokens (see windows.py).
"""

from __future__ import annotations

import pytest

from tests.native import harness

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(harness.unavailable() is not None, reason=str(harness.unavailable()))]

if harness.unavailable() is None:
    import torch

    from tests.native.windows import Windows
    from trtllm_replayssm.ops import _abi


@pytest.mark.parametrize("act", ["bfloat16", "float16"])
@pytest.mark.parametrize("tokens", [1, 2, 4, 5, 16])
@pytest.mark.parametrize("kernel", [2, 3, 4, 5, 8])
def test_steps_with_rejected_tokens_follow_the_specification(
    library: _abi.Library, kernel: int, tokens: int, act: str
) -> None:
    windows = Windows(library, 72, kernel, act, max_tokens=tokens)
    for step in range(20):
        counts = [int(windows.rng.integers(0, tokens + 1)) for _ in range(4)]
        counts[step % 4] = tokens
        accepted = [int(windows.rng.integers(0, count + 1)) for count in counts]
        windows.step([3, -1, 0, 4], counts, accepted, tokens)


@pytest.mark.parametrize(("channels", "offset"), [(19, 8), (20, 1), (20, 2), (21, 3), (4, 4), (1, 0), (516, 8)])
def test_any_width_and_alignment(library: _abi.Library, channels: int, offset: int) -> None:
    windows = Windows(library, channels, 4, offset=offset, max_tokens=4)
    for _ in range(6):
        windows.step([1, 2], [4, 3], [2, 3], 4)
    windows.step([1, 2], [40, 7], [40, 7], 40, prompt=True)


@pytest.mark.parametrize("act", ["bfloat16", "float16"])
@pytest.mark.parametrize("kernel", [2, 4, 8])
def test_prompt_chunks_of_all_lengths_go_on_from_the_window(library: _abi.Library, kernel: int, act: str) -> None:
    """Lengths around the tile of 16 tokens and the ring; a decode step in between and after."""
    windows = Windows(library, 40, kernel, act, max_tokens=6)
    for length in (1, 2, 15, 16, 17, 31, 32, 33, 100, kernel - 1, windows.rows, windows.rows + 1, 3):
        counts = [length, max(length - 2, 0), 0, length]
        windows.step([2, 4, 1, -1], counts, counts, length, prompt=True)
        windows.step([2, 4, 1], [6, 1, 3], [3, 0, 1], 6)


def test_a_window_of_prompts_alone_needs_no_room_for_drafts(library: _abi.Library) -> None:
    """R = K - 1: every chunk overwrites taps that its own first tokens read."""
    windows = Windows(library, 24, 4, max_tokens=0)
    for length in (5, 1, 2, 3, 4, 50, 1, 1):
        windows.step([0, 3], [length, length], [length, length], length, prompt=True)


@pytest.mark.parametrize("kernel", [3, 4, 7])
def test_bits_do_not_depend_on_the_split(library: _abi.Library, kernel: int) -> None:
    whole, x = Windows(library, 136, kernel), None
    x = whole.tokens(1, 53)
    want = whole.run([1], [53], x, prompt=True).clone()
    whole.position[1] += 53
    for split in ([1] * 53, [16, 16, 16, 5], [2, 30, 1, 4, 16], [17, 3, 33]):
        parts = Windows(library, 136, kernel)
        parts.weight, parts.bias = whole.weight, whole.bias
        start = 0
        for size in split:
            piece = x[:, start : start + size]
            got = parts.run([1], [size], piece, prompt=size > 16 or size == 4)
            assert torch.equal(got, want[:, start : start + size]), (split, start)
            parts.position[1] += size
            start += size
        assert torch.equal(parts.live(1), whole.live(1))


@pytest.mark.parametrize("rows", [1, 300])
def test_production_width_at_both_ends_of_the_batch(library: _abi.Library, rows: int) -> None:
    windows = Windows(library, 10240, 4, slots=rows + 2, max_tokens=2)
    order = [int(slot) for slot in windows.rng.permutation(rows + 2)[:rows]]
    for _ in range(3):
        windows.step(order, [2] * rows, [1 + row % 2 for row in range(rows)], 2)


@pytest.mark.parametrize("rows", [2, 140])
@pytest.mark.parametrize("tokens", [1, 2])
@pytest.mark.parametrize("act", ["bfloat16", "float16"])
def test_steps_of_few_and_of_many_rows(library: _abi.Library, act: str, tokens: int, rows: int) -> None:
    """Of many rows a thread takes several."""
    windows = Windows(library, 4096, 4, act, slots=rows + 1, max_tokens=tokens)
    order = [int(slot) for slot in windows.rng.permutation(rows + 1)[:rows]]
    for accepted in (tokens, 1):
        windows.step(order, [tokens] * rows, [accepted] * rows, tokens)


def test_missing_bias_is_no_bias(library: _abi.Library) -> None:
    windows = Windows(library, 40, 4)
    windows.bias.zero_()
    x = windows.tokens(1, 5)
    want = windows.run([2], [5], x).clone()
    windows.window.fill_(float("nan"))
    out = torch.full((1, 5, 40), float("nan"), dtype=torch.bfloat16, device="cuda")
    one = torch.tensor([2, 5], dtype=torch.int32, device="cuda")
    on_device = x.cuda()
    args = windows.args(one[:1], one[1:], on_device, out)
    args.bias = _abi.Tensor()
    library.conv1d_update(args, harness.Pool._stream())
    assert torch.equal(out, want)


def test_programmatic_launch_gives_the_same_bits(library: _abi.Library) -> None:
    """Launches back to back, each reading what the one before wrote, the last rows first: a kernel that does not wait
    for its predecessor reads old windows."""
    rows, calls, results = 256, 8, []
    for flags in (0, _abi.CONV1D_PROGRAMMATIC_LAUNCH):
        windows = Windows(library, 4096, 4, slots=rows, max_tokens=4)
        counts = torch.full((rows,), 4, dtype=torch.int32, device="cuda")
        slots = [torch.arange(rows, dtype=torch.int32, device="cuda")]
        slots.append(slots[0].flip(0).contiguous())
        positions = [torch.full((rows,), 4 * call, dtype=torch.int32, device="cuda") for call in range(calls)]
        x = windows.tokens(rows, 4).cuda()
        outputs = [torch.full_like(x, float("nan")) for _ in range(calls)]
        for call in range(calls):
            windows.position = positions[call]
            args = windows.args(slots[call % 2], counts, x, outputs[call], flags=flags)
            library.conv1d_update(args, harness.Pool._stream())
        torch.cuda.synchronize()
        results.append([*outputs, windows.window])
    for want, got in zip(*results, strict=True):
        assert torch.equal(want.view(torch.int16), got.view(torch.int16))


def test_graph_replay_follows_positions_slots_and_counts(library: _abi.Library) -> None:
    eager, replayed = Windows(library, 264, 4, max_tokens=4), Windows(library, 264, 4, max_tokens=4)
    replayed.weight, replayed.bias = eager.weight, eager.bias
    x = torch.zeros(3, 4, 264, dtype=torch.bfloat16, device="cuda")
    out = torch.zeros_like(x)
    indices = torch.zeros(2, 3, dtype=torch.int32, device="cuda")
    indices[0] = -1  # capture and warm-up touch no state
    args = replayed.args(indices[0], indices[1], x, out)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        library.conv1d_update(args, harness.Pool._stream())
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        library.conv1d_update(args, harness.Pool._stream())
    for step in range(8):
        slots, counts = [step % 5, -1 if step % 3 else 4 - step % 4, (step + 2) % 5], [4, 2, step % 5]
        if len(set(slots)) < 3:
            slots[1] = -1
        fresh = eager.tokens(3, 4)
        want = eager.run(slots, counts, fresh)
        x.copy_(fresh)
        indices.copy_(torch.tensor([slots, counts], dtype=torch.int32))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, want), step
        for windows in (eager, replayed):
            for slot, count in zip(slots, counts, strict=True):
                if slot >= 0:
                    windows.position[slot] += count
    assert torch.equal(eager.window.nan_to_num(), replayed.window.nan_to_num())
