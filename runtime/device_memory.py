"""What the device of a replica has, and the memory plan of a replica on it."""

from __future__ import annotations

import logging

from trtllm_replayssm.config import PoolConfig, ReplayConfig
from trtllm_replayssm.runtime.capacity import free_host_bytes
from trtllm_replayssm.runtime.planner import LIBRARY_BYTES, MemoryPlan, plan_memory
from trtllm_replayssm.shapes import ModelGeometry

MAX_PLANNED_BATCH = 256  # rows of a step where nobody asks for a number: every size of step is recorded at start
_LOG = logging.getLogger(__name__)


def plan_replica(
    geometry: ModelGeometry, replay: ReplayConfig, pool: PoolConfig, *, device: str, weights: int, conventional: bool,
    prompt_tokens: int, fraction: float, prompts: int = 1, drawn_drafts: bool = False, contexts: int = 0,
) -> MemoryPlan | None:  # fmt: skip
    """The plan of a replica on a device as it is now; None where the device does not say what it has free.

    weights: bytes that loading the model will take there. prompts, drawn_drafts, contexts: see `plan_memory`. Raises
    ConfigError for a device that is not there.
    """
    free = free_host_bytes() if device == "cpu" else free_device_bytes(device)
    if free is None:
        return None
    return plan_memory(
        geometry, replay, pool, memory=free, weights=weights, contexts=contexts, conventional=conventional,
        prompt_tokens=prompt_tokens, prompts=prompts, fraction=fraction,
        reserve=0 if device == "cpu" else LIBRARY_BYTES, drawn_drafts=drawn_drafts,
    )  # fmt: skip


def planned_batch(plan: MemoryPlan, most: int | None = None) -> int:
    """Rows, which are slots, where nobody asks for a number: what fits, at most 256 and `most`, at least one."""
    return max(min(plan.slots, MAX_PLANNED_BATCH, MAX_PLANNED_BATCH if most is None else most), 1)


def require_plan(plan: MemoryPlan, slots: int) -> None:
    """Log the plan; raise ConfigError when so many slots do not fit."""
    for line in plan.lines():
        _LOG.info("memory: %s", line)
    plan.require(slots)


def free_device_bytes(device: str) -> int:
    """Bytes free on a GPU now. Raises ConfigError without one."""
    import torch

    from trtllm_replayssm.runtime.session.device import usable_device

    return int(torch.cuda.mem_get_info(usable_device(device))[0])
