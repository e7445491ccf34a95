"""Kernels of other projects on the same shapes, timed the same way, where their package is installed.

An adapter imports the installed package only when it is asked to run; one that cannot be imported, or that refuses a
shape, says why and is left out. Inputs are random: these rows are times, not checks of somebody else's results.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch

from trtllm_replayssm.bench import peer_flashinfer, peer_fork, peer_vllm
from trtllm_replayssm.bench.cases import KernelCase, Operation
from trtllm_replayssm.bench.peer import Batches, Peer, Step
from trtllm_replayssm.bench.problem import COLD_BYTES
from trtllm_replayssm.bench.timing import Timing, time_cases

_LEAST_LAUNCHES = 4
_CHOICE_ROUNDS = 3  # replays of each launch choice, to find the fastest
PEERS = (*peer_vllm.PEERS, *peer_fork.PEERS, *peer_flashinfer.PEERS)


def run_peers(cases: Sequence[KernelCase], bandwidth: float, *, rounds: int) -> Iterator[dict[str, Any]]:
    """Rows like our own, one for each peer, case and way of accepting: times of its fastest variant, or the reason."""
    for case in cases:
        for peer in PEERS:
            if peer.serves(case):
                yield from _run(peer, case, bandwidth, rounds)
                torch.cuda.empty_cache()


def _run(peer: Peer, case: KernelCase, bandwidth: float, rounds: int) -> Iterator[dict[str, Any]]:
    row: dict[str, Any] = {
        "peer": peer.name, "version": _version(peer.package), "what": case.operation.value, "shape": case.shape_name,
        "B": case.rows, "T": case.tokens, "L": case.window, "recurrence": case.recurrence.value, "read": None,
        "programmatic": False, "settled": False,
    }  # fmt: skip
    kept = dict.fromkeys((case.tokens, 1) if case.operation is Operation.UPDATE else (case.tokens,))
    depths = sorted({h for accepted in kept for h in case.cycle(accepted)})
    batches = _batches(case)
    try:
        variant = _fastest(peer, case, batches)
        times = _by_depth(peer, case, batches, variant, depths, rounds)
    except Exception as error:  # any package may fail in its own way; the others still run
        yield {**row, "reason": f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"}
        return
    for accepted in kept:
        yield row | {"accepted": accepted, "variant": str(variant)} | _fields(case, accepted, times, bandwidth)


def _fields(case: KernelCase, accepted: int, times: dict[int, Timing], bandwidth: float) -> dict[str, Any]:
    cycle = case.cycle(accepted)

    def mean(values: list[float]) -> float:
        return sum(values) / len(values)

    median, low, high = (mean([getattr(times[h], part) for h in cycle]) for part in ("median", "low", "high"))
    moved = mean([float(case.floor_bytes(h)) for h in cycle])
    floor = moved / bandwidth * 1e6
    return {
        "us": round(median, 3), "us_quartiles": [round(low, 3), round(high, 3)],
        "GBs": round(moved / median * 1e-3, 1), "floor_us": round(floor, 2),
        "percent_of_floor": round(100 * floor / median, 1),
        "by_h": {str(h): round(times[h].median, 2) for h in sorted(set(cycle))},
    }  # fmt: skip


def _batches(case: KernelCase) -> Batches:
    """Slots of as many batches as keep the L2 cache cold; those of a batch in random order."""
    state_bytes = 4 * case.shape.heads * case.shape.head_dim * case.shape.state_dim
    rotations = max(1, -(-COLD_BYTES // (case.rows * state_bytes)))
    order = torch.randperm(case.rows, device="cuda").int() + 1
    return [order + rotation * case.rows for rotation in range(rotations)]


def _enqueue(step: Step, batches: Batches, depths: Sequence[int], launches: int) -> None:
    for launch in range(launches):
        step(launch % len(batches), depths[launch % len(depths)])


def _fastest(peer: Peer, case: KernelCase, batches: Batches) -> Any:
    """The variant that is quickest over a window in which every step keeps all tokens."""
    if len(peer.variants) == 1:
        return peer.variants[0]
    found, reasons = [], []
    for variant in peer.variants:
        try:
            found.append((_choice_time(peer, case, batches, variant), variant))
        except Exception as error:  # a choice that does not compile, or does not fit on the device
            reasons.append(error)
    if not found:
        raise reasons[0]
    return min(found, key=lambda pair: pair[0])[1]


def _choice_time(peer: Peer, case: KernelCase, batches: Batches, variant: Any) -> float:
    """Microseconds a launch; the variant's states are gone when this returns."""
    cycle = case.cycle(case.tokens)
    launches = len(cycle) * -(-max(len(batches), _LEAST_LAUNCHES) // len(cycle))
    with peer.chosen(variant):
        step = peer.make(case, batches, variant)
        [timing] = time_cases([(partial(_enqueue, step, batches, cycle, launches), launches)], _CHOICE_ROUNDS)
    return timing.median


def _by_depth(
    peer: Peer, case: KernelCase, batches: Batches, variant: Any, depths: Sequence[int], rounds: int
) -> dict[int, Timing]:
    launches = len(batches) * -(-_LEAST_LAUNCHES // len(batches))
    with peer.chosen(variant):
        step = peer.make(case, batches, variant)
        timed = [(partial(_enqueue, step, batches, (h,), launches), launches) for h in depths]
        return dict(zip(depths, time_cases(timed, rounds), strict=True))


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
