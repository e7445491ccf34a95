"""Launches of an update that are worth measuring: what the library accepts, ordered by what the traffic model says.

The model counts bytes, and how evenly a launch spreads them: it knows nothing of latencies, so it only decides what is
measured, never what is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product

from trtllm_replayssm.bench.cases import ACT_BYTES, KernelCase
from trtllm_replayssm.errors import ContractError
from trtllm_replayssm.launches import LaunchPlan, UpdateKernel, UpdateLaunch

MOST = 16  # launches that are measured beside the library's own
DRAWN_ROUNDS = (1, 2, 4)
PIECE_HEADS = (1, 2, 4)
SPARED = (16, 8)  # a sixteenth or an eighth of the multiprocessors left out

Planner = Callable[[UpdateLaunch | None], LaunchPlan]  # of the library; raises ContractError for what it refuses


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A launch to measure. launch: None: the library's choice.

    bytes: of a step with a half-full window, of all rows. waves: work of the busiest multiprocessor over the mean.
    """

    launch: UpdateLaunch | None
    plan: LaunchPlan
    bytes: int
    waves: float

    @property
    def cost(self) -> float:
        """What the model orders by: bytes that the busiest multiprocessor moves, times the multiprocessors."""
        return self.bytes * self.waves

    @property
    def name(self) -> str:
        """For people."""
        return "the library's choice" if self.launch is None else str(self.launch)


def candidates(case: KernelCase, planner: Planner, multiprocessors: int, most: int = MOST) -> list[Candidate]:
    """The library's choice first, then at most `most` others: each kernel as the library would launch it or on fewer
    multiprocessors, of which the model knows too little, then the rest, cheapest first. Requests that lead to the same
    launch are one.
    """
    found: dict[LaunchPlan, Candidate] = {}
    for launch in (None, *proposals(case, multiprocessors)):
        try:
            plan = planner(launch)
        except ContractError:  # no kernel for this, or a number that does not suit these sizes
            continue
        if plan not in found:
            found[plan] = Candidate(
                launch=launch, plan=plan, bytes=step_bytes(case, plan), waves=waves(case, plan, multiprocessors)
            )
    own, *others = found.values()
    sure = [c for c in others if c.launch is not None and len(c.launch.entry()) <= 2]
    rest = sorted((c for c in others if c not in sure), key=lambda c: c.cost)
    return [own, *(sure + rest)[:most]]


def proposals(case: KernelCase, multiprocessors: int) -> Iterator[UpdateLaunch]:
    """Requests that some library might accept for the case, kernels first."""
    for kernel in UpdateKernel:
        yield UpdateLaunch(kernel=kernel)
    per_group = case.shape.heads_per_group
    runs = [heads for heads in range(1, per_group + 1) if per_group % heads == 0]
    for run, piece, drawn in product(runs, PIECE_HEADS, DRAWN_ROUNDS):
        yield UpdateLaunch(kernel=UpdateKernel.STREAMED, run_heads=run, piece_heads=piece, drawn_rounds=drawn)
    for part in SPARED:
        fewer = multiprocessors - multiprocessors // part
        if fewer > 0:
            yield UpdateLaunch(kernel=UpdateKernel.STREAMED, multiprocessors=fewer)
    for heads, stages in product(range(1, per_group + 1), (1, 2)):
        yield UpdateLaunch(kernel=UpdateKernel.PARTS, piece_heads=heads, stages=stages)


def step_bytes(case: KernelCase, plan: LaunchPlan) -> int:
    """Bytes of a step with a half-full window: the floor, and the keys that several CTAs or runs of a group load again.

    Keys loaded again come from the L2 for the most part; they count in full.
    """
    pending = case.window // 2
    loads = plan.ctas
    if plan.kernel == UpdateKernel.STREAMED:
        loads = plan.workers * plan.rounds + plan.pieces
    again = max(0, loads - case.rows * case.shape.groups)
    return case.floor_bytes(pending) + again * (pending + 2 * case.tokens) * case.shape.state_dim * ACT_BYTES


def waves(case: KernelCase, plan: LaunchPlan, multiprocessors: int) -> float:
    """Work of the busiest multiprocessor over the mean of all: 1 where a launch spreads its work evenly.

    Streamed: a worker has its rounds, and of the pieces that are drawn its share rounded up to whole ones.
    """
    if plan.kernel != UpdateKernel.STREAMED:
        return -(-plan.ctas // multiprocessors) * multiprocessors / plan.ctas
    items = case.rows * case.shape.heads
    dealt = plan.rounds * plan.run_heads
    last = 1 if plan.single_heads else plan.piece_heads
    drawn = -(-(items - plan.workers * dealt) // (plan.workers * last)) * last
    workers = multiprocessors * max(1, plan.workers // plan.ctas)
    return (dealt + drawn) * workers / items
