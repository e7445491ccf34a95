"""Runs the cases of a step benchmark: one pool for each cache and step length, every batch over its first slots."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import torch

from trtllm_replayssm.bench.step.breakdown import profile_steps
from trtllm_replayssm.bench.step.cases import Schedule, StepCase
from trtllm_replayssm.bench.step.floor import StepFloor, slot_state_bytes, step_floor
from trtllm_replayssm.bench.step.largest import step_plan
from trtllm_replayssm.bench.step.loop import StepLoop, fill_caches
from trtllm_replayssm.bench.step.measure import StepTime, time_steps
from trtllm_replayssm.bench.step.model import StepModel
from trtllm_replayssm.bench.step.product_times import time_products
from trtllm_replayssm.bench.step.products import Ceilings, StepProduct, shape_bound, step_products
from trtllm_replayssm.runtime.session.torch_session import TorchSession
from trtllm_replayssm.weights.sizes import StepParameter, step_parameters


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """A measured case. bound_us: with every product at the rate of a large one (`StepFloor.bound`); shape_bound_us:
    with each at what its shape reaches (`shape_bound`). breakdown, kernels: microseconds a step, empty where no profile
    was asked for.

    planned_bytes: memory of the pool that it ran in, with the weights, by the planner; peak_bytes: as it was.
    """

    model: StepModel
    case: StepCase
    time: StepTime
    floor: StepFloor
    floor_us: float
    bound_us: float
    shape_bound_us: float
    state_bytes: int
    breakdown: dict[str, float]
    kernels: list[tuple[str, float]]
    planned_bytes: int
    peak_bytes: int

    def fields(self) -> dict[str, Any]:
        """The result as a JSON object without the machine."""
        case, replay, read = self.case, self.case.replay, self.case.replay.read
        us = self.time.median
        return {
            "what": "step", "model": self.model.geometry.name, "layers": self.model.layers, "cache": case.cache,
            "role": case.role, "B": case.rows, "T": case.tokens, "accepted": case.accepted, "L": replay.window,
            "recurrence": replay.recurrence.value, "read": None if read is None else read.value,
            "context": case.context, "us": round(us, 2),
            "us_quartiles": [round(self.time.low, 2), round(self.time.high, 2)],
            "tokens_per_s": round(case.rows * case.accepted / us * 1e6, 1), "floor_us": round(self.floor_us, 2),
            "percent_of_floor": round(100 * self.floor_us / us, 1), "bound_us": round(self.bound_us, 2),
            "percent_of_bound": round(100 * self.bound_us / us, 1), "shape_bound_us": round(self.shape_bound_us, 2),
            "percent_of_shape_bound": round(100 * self.shape_bound_us / us, 1),
            "floor_bytes": self.floor.fields(), "state_bytes_per_slot": self.state_bytes,
            "planned_bytes": self.planned_bytes, "peak_bytes": self.peak_bytes,
            "breakdown_us": {part: round(t, 2) for part, t in self.breakdown.items()},
            "kernels_us": {name[:120]: round(t, 2) for name, t in self.kernels[:16]},
        }  # fmt: skip


def with_shapes(model: StepModel, cases: Sequence[StepCase], ceilings: Ceilings) -> Ceilings:
    """`ceilings` with the times of all products of the cases' steps: measured once for both caches, and before there is
    a pool, for memory.
    """
    shapes = (product.shape for products in _products(model, cases).values() for product in products)
    return replace(ceilings, shapes=time_products(shapes, ceilings, model.device))


def product_fields(model: StepModel, cases: Sequence[StepCase], ceilings: Ceilings) -> dict[str, Any]:
    """The products of the cases' steps as a JSON object; of each how many a step of so many tokens, all rows', has."""
    found = [
        {"tokens": tokens, "count": count, **product.fields(ceilings)}
        for tokens, products in _products(model, cases).items() for product, count in products.items()
    ]  # fmt: skip
    return {"what": "products", "model": model.geometry.name, "layers": model.layers, "products": found}


def run_cases(
    model: StepModel, cases: Sequence[StepCase], schedule: Schedule, ceilings: Ceilings, *,
    profiled: Callable[[StepCase], bool],
) -> Iterator[StepResult]:  # fmt: skip
    """Results in order; cases that share a pool must follow one another."""
    for _, group in groupby(cases, key=lambda c: (c.cache, c.replay, c.role)):
        together = list(group)
        gc.collect()  # what the last pool held, before the next one is made
        if model.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        slots, depth = max(c.rows for c in together), max(schedule.last_position(c) for c in together)
        session = model.session(together[0], slots, depth)
        for slot in range(slots):
            session.allocate(slot)
        fill_caches(session)
        for case in together:
            yield _measure(model, session, case, schedule, ceilings, profile=profiled(case))
        del session


def _measure(
    model: StepModel, session: TorchSession, case: StepCase, schedule: Schedule, ceilings: Ceilings, *, profile: bool
) -> StepResult:
    slots = session.pool.slots
    loop = StepLoop(session, case)
    loop.begin(schedule.first_position(case))
    for _ in range(schedule.warm_up - 1):
        loop.run()
    time = time_steps(loop.run, block=schedule.block, rounds=schedule.rounds)
    parts, kernels = profile_steps(loop.run, schedule.block) if profile else ({}, [])
    loop.end()
    itemsize, tokens = model.activation.itemsize, case.rows * case.tokens
    parameters = _parameters(model, tokens)
    products = step_products(model.geometry, parameters, tokens)
    floor = step_floor(model.geometry, model.format_of, case, itemsize)
    return StepResult(
        model=model, case=case, time=time, floor=floor, floor_us=floor.total / ceilings.bandwidth * 1e6,
        bound_us=floor.bound(parameters, ceilings.bandwidth, ceilings.products) * 1e6,
        shape_bound_us=shape_bound(floor, products, ceilings) * 1e6,
        state_bytes=slot_state_bytes(model.geometry, case, model.activation), breakdown=parts, kernels=kernels,
        planned_bytes=step_plan(model, case, schedule).need(slots),
        peak_bytes=torch.cuda.max_memory_allocated() if model.device.type == "cuda" else 0,
    )  # fmt: skip


def _parameters(model: StepModel, tokens: int) -> list[StepParameter]:
    return step_parameters(model.geometry, model.format_of, model.activation.itemsize, tokens)


def _products(model: StepModel, cases: Sequence[StepCase]) -> dict[int, Counter[StepProduct]]:
    """By how many tokens the cases' steps have, all rows'."""
    return {
        tokens: step_products(model.geometry, _parameters(model, tokens), tokens)
        for tokens in sorted({case.rows * case.tokens for case in cases})
    }
