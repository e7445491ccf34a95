"""How long a bfloat16 product of a step's shape takes alone.

Products run in bursts of about a millisecond with pauses between them, so that the power cap does not lower the clock
as it does in a step. That makes their times short and a bound that rests on them one that no step is flattered by.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch.nn import functional

from trtllm_replayssm.bench.step.measure import time_bursts
from trtllm_replayssm.bench.step.products import Ceilings, ProductShape
from trtllm_replayssm.ops.large_products import LargeProducts
from trtllm_replayssm.runtime.session.capture import GraphPool

_BURST = 1e-3  # seconds of a burst, about
_BURSTS, _REST = 5, 8.0  # a timed burst and the untimed one before it: a fifth of the time is work
_MOST_LAUNCHES = 64  # of a burst
_COLD = 4  # times the L2: the weights that launches pass over before they return to the first

_Run = Callable[[int], object]  # launch number -> its product


def time_products(
    shapes: Iterable[ProductShape], ceilings: Ceilings, device: torch.device
) -> dict[ProductShape, float]:
    """Seconds of one product of each shape, by the quickest way that a session or torch has for it.

    One batch: each launch multiplies with another matrix, which is not in the L2. Several: all batches multiply with
    one matrix, so that not its bytes but the rows of a batch limit the rate. Takes the memory of the largest matrix,
    at least four times the L2, of the largest inputs and of the largest outputs.
    """
    wanted = list(dict.fromkeys(shapes))
    pool, large = GraphPool(device), LargeProducts.on(device)
    cached = torch.cuda.get_device_properties(device).L2_cache_size if device.type == "cuda" else 0
    elements = max([_COLD * cached // 2, *(shape.out * shape.inner for shape in wanted)])
    weights = torch.randn(elements, dtype=torch.bfloat16, device=device)
    found = {}
    for shape in wanted:
        launches = _launches(shape, ceilings)
        ways = _ways(shape, weights, large)
        found[shape] = min(_seconds(run, launches, pool, device) for run in ways)
    return found


def _launches(shape: ProductShape, ceilings: Ceilings) -> int:
    """So many that a burst takes no longer than it should, if the product reached the ceilings."""
    read = 2.0 * shape.out * shape.inner / ceilings.bandwidth
    longest = max(shape.operations / ceilings.products, read)
    return max(1, min(_MOST_LAUNCHES, int(_BURST / longest)))


def _ways(shape: ProductShape, weights: Tensor, large: LargeProducts | None) -> list[_Run]:
    batches, rows, out, inner = shape
    size = out * inner
    x = torch.randn((batches, rows, inner), dtype=torch.bfloat16, device=weights.device)
    if batches > 1:
        same = weights[:size].view(out, inner).t().expand(batches, inner, out)
        return [lambda _: torch.bmm(x, same)]
    count = min(_MOST_LAUNCHES, len(weights) // size)
    row, matrices = x[0], list(weights[: count * size].view(count, out, inner))
    ways: list[_Run] = [lambda i: functional.linear(row, matrices[i % count])]
    if large is not None and large.serve(row, matrices[0]):
        ways.append(lambda i: large.linear(row, matrices[i % count]))
    parts = 1 if large is None else large.parts_of(row, matrices[0])
    if large is not None and parts > 1:
        ways.append(lambda i: large.parts(row, matrices[i % count], parts))
    return ways


def _seconds(run: _Run, launches: int, pool: GraphPool, device: torch.device) -> float:
    def burst() -> None:
        for i in range(launches):
            run(i)

    replay = pool.captured(burst, warm_ups=1)
    return 1e-6 * time_bursts(replay, device, bursts=_BURSTS, rest=_REST) / launches
